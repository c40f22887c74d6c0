"""MEGA: weigh the present gradient against the mean of the past ones by their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import array_api_compat

from gemproj._array import Array, detach, device_of, namespace, on_host
from gemproj.methods._method import Method, Outcome, Status, check_number, inverse

# Units of rounding within which rows count as cancelling, and angles as pi.
_LOST = 64.0


@dataclass(frozen=True)
class _MEGA(Method):
    """What both schemes share: the two losses of a step."""

    loss: float | Array | None = None
    reference_loss: float | Array | None = None

    accepts: ClassVar[frozenset[str]] = frozenset({"gg"})
    repeatable: ClassVar[bool] = False  # losses are arrays that change from step to step

    def __post_init__(self) -> None:
        for name in ("loss", "reference_loss"):
            object.__setattr__(self, name, _read(getattr(self, name), name))

    def _losses(self, b: Array) -> tuple[Array, Array]:
        """Return both losses as arrays like the problems of b, without waiting for a device."""
        if self.loss is None or self.reference_loss is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} needs the two losses of this step: method={name}(loss=..., reference_loss=...), the "
                "loss of the current batch and the loss on the memory, which the rows of G are gradients of. "
                "With a GradientProjector: project_(loss)."
            )
        device, like = device_of(b), b[..., 0]
        xp = namespace(b)

        def spread(loss: float | Array) -> Array:
            if isinstance(loss, float) or on_host(device):
                return xp.full_like(like, float(loss))
            return xp.zeros_like(like) + xp.astype(loss, b.dtype)

        return spread(self.loss), spread(self.reference_loss)


@dataclass(frozen=True)
class MEGA1(_MEGA):
    """MEGA-I (Guo et al., NeurIPS 2020): add the mean row, weighted by the ratio of the losses.

    ``x = g + (reference_loss / loss) r`` with r the mean of the rows of G, and ``x = r`` once the
    current loss is not above `sensitivity`. This is no projection but a loss balance: it moves g
    whether a row is violated or not, promises no sign of ``G @ x``, and depends on the scale of the
    rows. It has multipliers, with ``x = keep * g + G.T @ lam``, but no certificates.

    Parameters
    ----------
    loss, reference_loss : float or array of shape ()
        The loss of the current batch, and the loss on the memory: at least 0. An array on a device
        is not waited for (nor checked).
    sensitivity : float, default 1e-3
        The loss below which the current batch counts as learned. Absolute, as published.

    Notes
    -----
    Without rows, x is g.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import MEGA1, project
    >>> G, g = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([-3.0, 1.0])
    >>> project(G, g, method=MEGA1(loss=0.5, reference_loss=1.0))
    array([-2.,  2.])
    """

    sensitivity: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.sensitivity, "sensitivity", 0.0)

    def solve(self, K, b, warm_start=None, upper=None, gg=None):  # noqa: D102
        if not b.shape[-1]:
            return Outcome(b * 0.0, 0, int(Status.APPROXIMATE), None, _ones(b))
        xp = namespace(b)
        loss, reference = self._losses(b)
        one = xp.ones_like(loss)
        learning = loss > self.sensitivity
        weight = xp.where(learning, reference / xp.where(learning, loss, one), one)
        return _mixture(b, xp.where(learning, one, one * 0.0), weight)


@dataclass(frozen=True)
class MEGA2(_MEGA):
    """MEGA-II (Guo et al., NeurIPS 2020): rotate g towards the mean row, as far as the losses say.

    With a the angle between g and r, the mean of the rows of G, x has the length of g and lies in
    their plane at an angle from g of ``clip(atan2(l_ref sin a, l + l_ref cos a), 0, pi/2)``. That is
    the direction of ``l g/|g| + l_ref r/|r|``, or, where this is more than a right angle away from
    g, the direction at a right angle to g on the side of r. This is no projection but a loss balance:
    it moves g whether a row is violated or not and promises no sign of ``G @ x``. It has multipliers,
    with ``x = keep * g + G.T @ lam``, but no certificates.

    Parameters
    ----------
    loss, reference_loss : float or array of shape ()
        The loss l of the current batch, and the loss l_ref on the memory: at least 0. An array on a
        device is not waited for (nor checked).

    Notes
    -----
    x is g where g or r is zero (r also: where rows cancel to rounding), where both losses are zero,
    and without rows. Where r is opposite to g, to the rounding of K, there is no plane: x is g if the
    current loss is at least as large, else 0, as there is nothing at a right angle.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import MEGA2, project
    >>> G, g = np.array([[0.0, 5.0]]), np.array([1.0, 0.0])
    >>> project(G, g, method=MEGA2(loss=0.3, reference_loss=0.4)).round(3)
    array([0.6, 0.8])
    """

    def solve(self, K, b, warm_start=None, upper=None, gg=None):  # noqa: D102
        if not b.shape[-1]:
            return Outcome(b * 0.0, 0, int(Status.APPROXIMATE), None, _ones(b))
        if gg is None:
            raise TypeError("MEGA2 needs gg, the squared norm of g: solve(K, b, gg=gg), or use `project`.")
        xp, t = namespace(b), b.shape[-1]
        loss, reference = self._losses(b)
        larger = xp.maximum(loss, reference)
        larger = xp.where(larger > 0, larger, xp.ones_like(larger))
        loss, reference = loss / larger, reference / larger

        def root(a: Array) -> Array:
            return xp.sqrt(xp.maximum(a, xp.zeros_like(a)))

        noise = _LOST * float(xp.finfo(b.dtype).eps)
        rr, size = xp.sum(K, axis=(-2, -1)), root(gg)
        rr = xp.where(rr > noise * xp.sum(xp.abs(K), axis=(-2, -1)), rr, xp.zeros_like(rr)) / t**2
        per_mean = inverse(root(rr))
        cosine = xp.clip(xp.mean(b, axis=-1) * per_mean * inverse(size), -1.0, 1.0)
        squared = 1.0 - cosine * cosine
        sine = xp.where(squared > noise, root(squared), xp.zeros_like(squared))

        # The sum of both directions, each weighted by its loss; its length is one by the hypotenuse.
        forth = loss + reference * cosine
        opposite = (sine == 0) & (cosine < 0)
        away = forth < 0
        per_length = inverse(root(forth * forth + xp.square(reference * sine)))
        zero, per_sine = xp.zeros_like(sine), inverse(sine)
        keep = xp.where(away, -cosine * per_sine, loss * per_length)
        turn = xp.where(away, per_sine, reference * per_length)
        still = (rr <= 0) | (size <= 0) | (per_length <= 0) | (opposite & ~away)
        keep = xp.where(still, xp.ones_like(keep), xp.where(opposite, zero, keep))
        turn = xp.where(still | opposite, zero, turn)
        return _mixture(b, keep, turn * size * per_mean)


def _mixture(b: Array, keep: Array, weight: Array) -> Outcome:
    """Return ``x = keep g + weight r`` with r the mean row."""
    xp = namespace(b)
    lam = xp.zeros_like(b) + weight[..., None] / b.shape[-1]
    return Outcome(lam, 0, int(Status.APPROXIMATE), None, keep)


def _ones(b: Array) -> Array:
    return namespace(b).sum(b, axis=-1) + 1.0


def _read(loss: Any, name: str) -> float | Array | None:
    """Check a loss where that waits for nothing, and make it a number there."""
    if loss is None:
        return None
    if array_api_compat.is_array_api_obj(loss) and getattr(loss, "shape", None) is not None:
        if tuple(loss.shape):
            raise ValueError(f"{name} must be a number or an array of shape (); found {tuple(loss.shape)}.")
        loss = detach(loss)
        if not on_host(device_of(loss)):
            return loss
        loss = float(loss)
    check_number(loss, name, 0.0)
    return float(loss)
