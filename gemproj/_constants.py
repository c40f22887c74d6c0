"""Thresholds and budgets of the algorithm, shared by all backends."""

EPS = 2.0**-52

# A pivot is 1 - cos^2 of the angle between a row and the span of the free rows. Below this value, in units of
# rounding (1e-14 in float64), the row counts as a combination of the free rows. An optimal active set
# without it exists (Caratheodory).
DEPENDENT = 45.0
# Rounding error of a slack, in units of 1 + |lam|_1 for rows of norm one. A constraint counts as violated if
# its slack is below minus this error.
ROUNDING = 4e-15
# A dependent row violated by more than this, in the same units, is exchanged for a free row. A dependent row
# with a smaller violation is skipped.
EXCHANGE = 1e-7
# Limit of b - h, relative to the largest |b_i| or positive h_i over the norm of the row: a constraint with a
# larger slack is never active. On the CPU the exact method starts with the limit REACH, and multiplies it by
# WIDER if the solution depends on the limit.
LOOSE, REACH, WIDER = 1e7, 8.0, 1e3
# Largest natural residual of an optimal solution of the normalised problem, in units of rounding: 1e-9 in
# float64.
OPTIMAL_WITHIN = 4e6
# A row counts as nearly active if its slack is below this, in units of 1 + |lam|_1. Weights of a dependent
# row in the free rows count as zero below this.
NEAR_ZERO = 1e-9
# K is too ill-conditioned if the smallest eigenvalue of the normalised Gram matrix of the active rows is
# below this: x is then off by 1e-16 / 1e-4 or more.
RESOLVED = 1e-4
# The same limit for small problems, where reading G again takes little time. And the limit for K from float32
# sums, which is accurate to 1e-8: this limit applies to the smallest eigenvalue for all rows.
TRUST_SMALL, TRUST_NARROW = 1e-2, 1e-3
# Maximum number of elements of G and g in a small problem.
SMALL = 1 << 17
# Error of x over |g| above which the status is UNRESOLVED even for a solution from coordinates of the rows.
HOPELESS = 1e-7
# If a cheap lower bound of the smallest eigenvalue is above this, the eigenvalue itself is not computed.
CLOSE = 0.05
# Pivots per row after which the search uses the least-index rule, which cannot cycle. The search stops after
# PATIENCE times as many pivots.
BUDGET, PATIENCE = 6, 2
# Maximum number of searches per problem, each from a fresh tableau, because tableau updates add rounding.
SEARCHES = 3
# Maximum number of active sets for enumeration: 2^8 for 8 rows; with upper bounds 3^5 for 5 rows.
MOST_SETS = 256
# Above this number of rows, FISTA supplies the first active set.
MOST_ROWS = 168
# Smallest angle between rows that coordinates from G resolve, and that coordinates from K resolve. The angle
# for K is larger, because K holds squares.
ROWS_RESOLVE, GRAM_RESOLVES = 3e-14, 1e-7
# Singular values of unit columns count as zero below this, relative to the largest singular value.
CUTOFF = 64.0 * EPS
# Maximum number of entries of t x t matrices that are allocated at a time for a batch, to bound memory.
SLAB = 1 << 20
# The products of this many columns are summed in float32, twice as fast; the sum is added to a float64 sum.
CHUNK = 512
# Minimum number of columns for float32 sums. In compiled loops, float64 products of up to FEW_ROWS rows take
# no longer than reading memory, so float32 sums are used for more rows only.
LARGE, FEW_ROWS = 1 << 17, 8
# Relative rounding error of the entries of the Gram matrix. In float64 sums the worst case, identical
# columns, gives 50 EPS. Float32 sums of a chunk are vectorised loops with at least 4 partial sums.
WIDE_ROUNDING = 128 * EPS
NARROW_ROUNDING = WIDE_ROUNDING + CHUNK / 4 * 2.0**-24
# Range of squared norms for which no product overflows or underflows: in float64, and in float32.
WIDE_RANGE = (1e-280, 1e280)
NARROW_RANGE = (1e-24, 1e30)
# KKT residual above which `project` warns of an answer that is not optimal.
MISSED = 1e-5
# Penalty of an equality, times the norm of its row over the size of the problem, above which the multiplier
# may lose digits: the lower bound is minus the penalty and is subtracted.
LARGE_PENALTY = 1e5
# h counts as infeasible if every feasible x is longer than this factor times the size of the problem: no x of
# useful length exists. The factor with coordinates from the rows, and the factor with K.
FAR, FAR_BY_GRAM = 1e6, 1e3
# Rows with h_i / |g_i| below minus this factor times the largest h_i / |g_i| are left out of the search for
# contradicting rows. The factors are tried in this order.
LOOSE_ROWS = (10.0, 1e4, 1e8)
# Ridge on the diagonal of the normalised K in the test of infeasibility on a device: for K from float64 sums,
# and for K from float32 sums.
RIDGE, NARROW_RIDGE = 1e-10, 1e-5
