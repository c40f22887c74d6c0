"""`project`: the three stages in one call."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from gemproj._arrays import Array, Blocks, is_recording
from gemproj._checks import STRENGTHS
from gemproj._combine import combined, warn_if_missed
from gemproj._dual import measured_for, solve_unread
from gemproj._problem import blocks_of
from gemproj.methods import AnyMethod, Exact

_requires_grad = attrgetter("requires_grad")
_SCALARS = {type(None), bool, float}


def project(
    G: Blocks,
    g: Blocks,
    *,
    method: AnyMethod = "exact",
    h: Array | None = None,
    margin: float | Array = 0.0,
    penalty: float | Array | None = None,
    equality: bool | Array = False,
    metric: Blocks | None = None,
    warm_start: Array | None = None,
    out: Blocks | None = None,
    **unknown: NoReturn,
) -> Any:
    """Return the projection of g onto ``{x : G @ x >= h}``; h = 0 is Gradient Episodic Memory.

    The result is ``argmin_x 1/2 |x - g|^2 subject to G @ x >= h``. Row i of G is the gradient of the loss
    of an earlier task. To first order, a step along -x raises none of these losses.

    Parameters
    ----------
    G : array, shape (..., t, d), or blocks
        Constraint gradients as rows; leading dimensions are independent problems. Or one problem in
        blocks: a sequence or mapping of arrays ``G[k]`` of shape ``(t, *shape_k)``, and `g` likewise.
    g : array, shape (..., d), or blocks
        The proposed gradient. Leading dimensions of G and g are broadcast; for many gradients (m, d) and
        one G (t, d), K is computed once.
    method, h, margin, penalty, equality, metric, warm_start
        As in `solve_dual`.
    out : array or blocks, like `g`, optional
        Arrays for x; ``out=g`` projects in place and, if G and g are contiguous, allocates nothing of size d.
        `out` must not share memory with G. It may share memory with g only if it is g.

    Returns
    -------
    array or blocks
        x, with the library, device, dtype and shape of `g`: `out`, or new arrays that share no memory with g.
        For blocks, x is a list, tuple or dict, like g.

    Warns
    -----
    RuntimeWarning
        If the result of method "exact" violates the optimality conditions by more than 1e-5 of the size of
        the problem. (If h counts as infeasible, an error is raised: see `solve_dual`.) On a device, only if
        it is read: with more than 8 rows, a penalty or an equality.

    Notes
    -----
    x is rounded to the dtype of g. If h or a margin is large, x may overflow in this dtype.

    For torch tensors and method "exact", autograd and `torch.func` differentiate x with respect to G, g,
    metric, h, margin and penalty, in reverse and in forward mode, by Newton's method on the active set. First
    and second derivatives are exact; third derivatives are not. `torch.func.vmap` maps over problems, and
    `torch.compile` traces the projection without a graph break. Other methods break the graph, and have no
    derivative.

    Examples
    --------
    The first entry of g would raise the loss of an earlier task; the projection removes it:

    >>> import numpy as np
    >>> from gemproj import project
    >>> project(np.array([[1.0, 0.0]]), np.array([-3.0, 1.0]))
    array([0., 1.])

    Blocks, one per parameter of a model:

    >>> G = [np.ones((1, 2, 1)), np.ones((1, 2))]
    >>> x = project(G, [np.zeros((2, 1)), np.array([-4.0, 0.0])])
    >>> x[0].tolist(), x[1].tolist()
    ([[1.0], [1.0]], [-3.0, 1.0])
    """
    if unknown:
        hint = "; GEM's memory strength is margin=" if unknown.keys() & STRENGTHS else ""
        raise TypeError(f"project got an unexpected keyword argument {min(unknown)!r}{hint}.")
    arrays = G, g, metric, h, margin, penalty, equality, warm_start
    torch = None if type(g) is np.ndarray else sys.modules.get("torch")
    if torch is not None and (route := _route(torch, method, arrays)):
        from gemproj._autograd import project_tensors

        return project_tensors(route, project, method, out, arrays)
    problem, asked = measured_for(method, arrays)
    sol = solve_unread(*asked)
    warn_if_missed(sol)
    return combined(problem, sol, out, G)


def _route(torch: Any, method: Any, arrays: tuple[Any, ...]) -> str:
    """Return how to project tensors; "" without derivatives and tracing."""
    Tensor, (G, g, *_) = torch.Tensor, arrays
    found = type(g) is Tensor or isinstance(next(iter(blocks_of(g)), None), Tensor)
    exact = type(method) is Exact or (isinstance(method, str) and method.lower() == "exact")
    if torch.compiler.is_compiling():  # also if torch runs `project` uncompiled, and compiles this function
        return "traced" if exact and found else "uncompiled"
    if not found:
        return ""
    tensors = [a for a in arrays if type(a) not in _SCALARS]
    if len(tensors) > 2 or type(G) is not Tensor or type(g) is not Tensor:
        tensors = [b for a in tensors for b in blocks_of(a) if isinstance(b, Tensor)]
    if any(_lacks_values(torch, a) for a in tensors):
        return "transformed"
    if torch.jit.is_tracing():
        return "traced" if exact else "recorded"
    if torch.overrides.has_torch_function(tensors) and is_recording():
        return "recorded"
    smooth = tensors[:-1] if isinstance(arrays[-1], Tensor) else tensors  # not the warm start
    if torch.is_grad_enabled() and any(map(_requires_grad, smooth)):
        return "recorded"
    # Outside of a level of forward-mode differentiation, `unpack_dual` returns its argument.
    unpack = torch.autograd.forward_ad.unpack_dual
    forward = unpack(smooth[0]).primal is not smooth[0]
    return "recorded" if forward and any(unpack(a).tangent is not None for a in smooth) else ""


def _lacks_values(torch: Any, a: Any) -> bool:
    """Return whether a dense tensor has no memory: `torch.func` has wrapped it, or it is fake."""
    if type(a) is not torch.Tensor and type(a) is not torch.nn.Parameter:
        return hasattr(a, "fake_mode")
    try:
        return not a.data_ptr() and a.numel() > 0 and not a.is_meta
    except RuntimeError:
        return not (a.is_sparse or a.is_sparse_csr)
