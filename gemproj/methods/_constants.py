"""The constants of the exact method, the same in every backend; eps is the rounding unit of the dtype."""

# A pivot is 1 - cos^2 of the angle between a row and the span of the free rows. Below this, in units of
# eps, the row is numerically dependent on them, and some optimal active set does without it (Caratheodory).
DEPENDENT = 45.0
# Rounding of a slack s, in units of the sizes of its summands: beyond it a constraint is violated.
ROUNDING = 4e-15
# The residual of the normalised problem that is optimal, in units of eps: about 1e-9.
OPTIMAL_WITHIN = 4e6
# A slack that counts as zero when the rows are collected whose independence decides the status.
NEAR_ZERO = 1e-9
# The violation from which a dependent row is exchanged for a free one instead of being barred.
EXCHANGE = 1e-7
# Pivots per row before the search takes the first violated row, which cannot cycle; it ends at twice that.
BUDGET = 6
# Rows up to which all active sets are tried: 2^8 of them, or 3^5 with an upper bound.
MOST_SETS = 256
# Rows up to which the active-set search needs no start from a first-order method.
MOST_ROWS = 168
# Below this smallest eigenvalue of the cosines K has lost too many digits: x is off by 1e-16 / 1e-4 or more.
RESOLVED = 1e-4
