"""Thresholds of several stages; those of the search are in `gemproj._search`."""

EPS = 2.0**-52
# Range of squared norms for which no product overflows or underflows.
WIDE_RANGE = (1e-280, 1e280)
# Distances of an active row from the span of the others below which G is read again. The error of x is then
# 1e-16 over the square of this, or more. In small problems reading G again takes little time.
RESOLVED, TRUST_SMALL = 1e-2, 1e-1
# Maximum number of elements of G and g in a small problem.
SMALL = 1 << 17
# A pivot is the squared distance of a row from a span. Below this, in units of rounding, it counts as zero;
# in the kernels and array operations that solve few rows on a device.
DEPENDENT = 45.0
