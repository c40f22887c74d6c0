"""User functions as methods: ``(K, b, warm_start) -> multipliers`` on arrays of the user's library."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gemproj._arrays import Array, detach, device_of, namespace, on_host, to_numpy
from gemproj._checks import shape
from gemproj.methods._method import Outcome, Status


def call(
    method: Callable[..., Array], K: Array, b: Array, start: Array | None, to_caller: Callable[[Array], Array]
) -> Outcome:
    """Return the outcome of a user function, called with copies of K and b, because it may work in place."""
    xp = namespace(b)
    K = xp.broadcast_to(K, (*b.shape, b.shape[-1]))
    like = to_caller(b + 0.0)
    lam = method(to_caller(K + 0.0), like, None if start is None else to_caller(start + 0.0))
    if not isinstance(lam, type(like)) or tuple(lam.shape) != tuple(like.shape):
        found = f"{type(lam).__name__} of shape {shape(lam)}" if hasattr(lam, "shape") else repr(lam)
        raise ValueError(
            f"method {method!r} must return multipliers of the type and shape of b, "
            f"{type(like).__name__} {shape(like)}; found {found}."
        )
    lam = namespace(like).astype(detach(lam), like.dtype, copy=False)
    if on_host(device_of(like)):
        lam = to_numpy(lam)
        if not np.isfinite(lam).all():
            raise ValueError(f"method {method!r} returned multipliers that are not finite: {lam}.")
    return Outcome(lam, 0, int(Status.APPROXIMATE))
