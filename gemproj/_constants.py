"""Thresholds of several stages; those of the search are in `gemproj._search`."""

EPS = 2.0**-52
# Relative rounding error of the entries of the Gram matrix; the worst case, identical columns, gives 50 EPS.
WIDE_ROUNDING = 128 * EPS
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
# Smallest angles between rows that the error bound takes for resolved, in coordinates from G and from K: a
# little more than those of the search.
ROWS_RESOLVE, GRAM_RESOLVES = 3e-14, 1e-7
