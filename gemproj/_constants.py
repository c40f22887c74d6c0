"""The numbers of the algorithm, for every implementation of it."""

EPS = 2.0**-52

# A pivot is 1 - cos^2 of the angle between a row and the span of the rows before it. Below this, in
# units of rounding (1e-14 in float64), a row is a combination of the others, and some optimal active
# set does without it (Caratheodory).
DEPENDENT = 45.0
# Rounding of a slack, in units of 1 + |lam|_1 (rows of norm one): beyond it a constraint is violated.
ROUNDING = 4e-15
# A dependent row violated by more than this is exchanged for a free one; below, it is left out.
EXCHANGE = 1e-7
# Slacks beyond this many times the largest demand or product with g are alike: no constraint. On the CPU the
# exact method starts at REACH and goes on to WIDER times as many where x reaches that far.
LOOSE, REACH, WIDER = 1e7, 8.0, 1e3
# The natural residual of the normalised problem that counts as optimal, in units of rounding: 1e-9.
OPTIMAL_WITHIN = 4e6
# A slack below this, in units of 1 + |lam|_1, may be zero: the row takes part in what x is. And weights of
# rows in a null direction below this are rounding.
NEAR_ZERO = 1e-9
# Smallest eigenvalue of the normalised Gram matrix of active rows below which K has lost too many
# digits: x is then off by 1e-16 / 1e-4 or more.
RESOLVED = 1e-4
# That of all rows or of small problems, which lose no time by reading G again; and where products were summed
# in float32, so that K is good to 1e-8.
TRUST_SMALL, TRUST_NARROW = 1e-2, 1e-3
# Elements of G and g in a small problem.
SMALL = 1 << 17
# The error of x over |g| that even coordinates of the rows cannot avoid, from which the status tells of it.
HOPELESS = 1e-7
# A cheap lower bound of that eigenvalue is enough above this; below it the eigenvalue itself is computed.
CLOSE = 0.05
# Pivots per row before the least-index rule, which cannot cycle; the search ends at twice as many.
BUDGET, PATIENCE = 6, 2
# Searches in a row, each from a fresh tableau, because updates add rounding.
SEARCHES = 3
# Active sets that enumeration tries: 2^8, or 3^5 with upper bounds.
MOST_SETS = 256
# Rows from which a first-order method guesses the active set.
MOST_ROWS = 168
# The angle down to which coordinates of the rows tell them apart, and coordinates from K, which has squares.
ROWS_RESOLVE, GRAM_RESOLVES = 3e-14, 1e-7
# Singular values of unit columns below this, relative to the largest one, are zero.
CUTOFF = 64.0 * EPS
# Entries of t x t matrices that a batch makes at a time: memory stays bounded whatever its size.
SLAB = 1 << 20
# Columns whose products may be summed in float32, which is twice as fast, before sums go on in float64.
CHUNK = 512
# Columns of a problem from which that pays, and rows up to which products hide behind memory in float64, too.
LARGE, FEW_ROWS = 1 << 17, 8
# Relative rounding of Gram matrix entries: sums in float64, where columns that are all alike make 50 units
# of it; and sums of chunks in float32, of which vectorised loops keep at least 4 partial sums.
WIDE_ROUNDING = 128 * EPS
NARROW_ROUNDING = WIDE_ROUNDING + CHUNK / 4 * 2.0**-24
# Squared norms within which no product leaves the range of float64, and of float32.
WIDE_RANGE = (1e-280, 1e280)
NARROW_RANGE = (1e-24, 1e30)
# Residual beyond which an answer that is not optimal is never returned in silence.
MISSED = 1e-5
# Penalties of equalities, times the norm of their row and over the size of the problem, that may take digits.
LARGE_PENALTY = 1e5
# A contradiction is certain if no x is shorter than so many times the problem, by the rows and by K.
FAR, FAR_BY_GRAM = 1e6, 1e3
# Singular values that count as zero there: small ones first, since larger ones mix with them.
NULL: tuple[float, ...] = (1e-11, 1e-9)
# Rows that ask for less than minus so many times the largest demand are left out of it at first.
LOOSE_ROWS = (10.0, 1e4, 1e8)
# What is added to the diagonal of K for that on a device; and in float32.
RIDGE, NARROW_RIDGE = 1e-10, 1e-5
