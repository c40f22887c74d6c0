"""Numbers that all forms of the exact method share: portable, compiled and on devices.

They are for rows of norm one and a linear term of size one.
"""

from __future__ import annotations

EPS = 2.0**-52
# A pivot is 1 - cos^2 of the angle between a row and the span of the rows before it. Below this, in units
# of rounding (1e-14 in float64), a row is a combination of the others, and some optimal active set does
# without it (Caratheodory).
DEPENDENT = 45.0
# Rounding of a slack, in units of the sizes of its summands: a constraint is violated only beyond.
ROUNDING = 4e-15
# Violation, in units of the sizes of its summands, from which a dependent row is exchanged for another one.
# Without right-hand sides no dependent row is violated by more than the root of `DEPENDENT`.
EXCHANGE = 1e-7
# The residual that counts as optimal, in units of rounding: about 1e-9.
OPTIMAL_WITHIN = 4e6
# Slacks below this, in units of the sizes of their summands, and coefficients below this are near zero.
NEAR_ZERO = 1e-9
# Pivots per row until rows are chosen by their index, which cannot cycle, and how often as many until the
# search gives up.
BUDGET, PATIENCE = 6, 2
# Searches in a row, each from a fresh tableau, because updates add rounding.
SEARCHES = 3
