"""Thresholds and budgets of the algorithm, shared by all backends."""

EPS = 2.0**-52

# A pivot is sin^2 of the angle between a row and the span of the free rows. A row with a pivot below this
# value, in units of rounding (1e-14 in float64), counts as a combination of the free rows. An optimal active
# set without such rows exists (Caratheodory).
DEPENDENT = 45.0
# Rounding error of a slack, in units of 1 + |lam|_1 for rows of norm one. A constraint counts as violated if
# its slack is below minus this error.
ROUNDING = 4e-15
# A dependent row violated by more than this, in the same units, is exchanged for a free row. A dependent row
# with a smaller violation is skipped.
EXCHANGE = 1e-7
# Limit on b - h, relative to the largest |b_i| / |g_i| or positive h_i / |g_i|. Constraints with a larger
# slack are never active. On the CPU, the exact method starts with the limit REACH and multiplies the limit by
# WIDER if the solution depends on it.
LOOSE, REACH, WIDER = 1e7, 8.0, 1e3
# Largest natural residual of an optimal solution of the normalised problem, in units of rounding: 1e-9 in
# float64.
OPTIMAL_WITHIN = 4e6
# A row counts as nearly active if its slack is below this, in units of 1 + |lam|_1. Smaller weights of a
# dependent row in the free rows count as zero.
NEAR_ZERO = 1e-9
# K is too ill-conditioned if the smallest eigenvalue of the normalised Gram matrix of the active rows is
# below this. The error of x is then 1e-16 / 1e-4 or more.
RESOLVED = 1e-4
# This limit for small problems, in which reading G again takes little time.
TRUST_SMALL = 1e-2
# Maximum number of elements of G and g in a small problem.
SMALL = 1 << 17
# Error of x / size of the problem above which the status is UNRESOLVED even with coordinates of the rows.
HOPELESS = 1e-7
# If a cheap lower bound on the smallest eigenvalue is above this, the eigenvalue itself is not computed.
CLOSE = 0.05
# Pivots per row after which the search uses the least-index rule, which cannot cycle. The search stops after
# PATIENCE times as many pivots.
BUDGET, PATIENCE = 6, 2
# Maximum number of searches per problem, each from a fresh tableau, because tableau updates add rounding.
SEARCHES = 3
# Maximum number of active sets for enumeration: 2^8 for 8 rows; with upper bounds 3^5 for 5 rows.
MOST_SETS = 256
# Above this number of rows, FISTA supplies the initial active set.
MOST_ROWS = 168
# Smallest angles between rows that coordinates from G and coordinates from K resolve. The angle for K is
# larger, because forming K squares the condition number.
ROWS_RESOLVE, GRAM_RESOLVES = 3e-14, 1e-7
# Singular values of unit columns count as zero below this, relative to the largest singular value.
CUTOFF = 64.0 * EPS
# Memory limit: maximum number of entries of the t x t matrices allocated at once for a batch.
SLAB = 1 << 20
# Relative rounding error of the entries of the Gram matrix. The worst case, identical columns, gives 50 EPS.
WIDE_ROUNDING = 128 * EPS
# Range of squared norms for which no product overflows or underflows.
WIDE_RANGE = (1e-280, 1e280)
# KKT residual above which `project` warns that its result is not optimal.
MISSED = 1e-5
# Penalty of an equality, times row norm / size of the problem, above which the multiplier may lose digits:
# its lower bound, which is minus the penalty, is subtracted.
LARGE_PENALTY = 1e5
# h counts as infeasible if every feasible x is longer than this factor times the size of the problem: FAR for
# coordinates from the rows, FAR_BY_GRAM for K. Such an x would be useless.
FAR, FAR_BY_GRAM = 1e6, 1e3
# Rows with h_i / |g_i| below minus this factor times the largest h_i / |g_i| are left out of the search for
# contradicting rows. The factors are tried in this order.
LOOSE_ROWS = (10.0, 1e4, 1e8)
# Ridge on the diagonal of the normalised K in the infeasibility test on a device, for K from float64 sums and
# for K from float32 sums, on devices without float64.
RIDGE, NARROW_RIDGE = 1e-10, 1e-5
