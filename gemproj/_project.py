"""`project`: the three stages in one call."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gemproj._arrays import Array, Blocks
from gemproj._bounds import check_options
from gemproj._checks import check_multipliers
from gemproj._combine import as_asked, blocks_for_x, combine_into, warn_if_missed
from gemproj._dual import solve
from gemproj._gram import measure
from gemproj._problem import blocks_of, check_problem
from gemproj.methods import AnyMethod, Exact


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
        Arrays for x; ``out=g`` projects in place and allocates nothing of size d. `out` must not share
        memory with G. It may share memory with g only if it is g.

    Returns
    -------
    array or blocks
        x, with the library, device, dtype and shape of `g`: `out`, or new arrays that share no memory with g.
        For blocks, x is a list, tuple or dict, like g.

    Warns
    -----
    RuntimeWarning
        On the CPU, if the result of method "exact" violates the optimality conditions by more than 1e-5 of
        the size of the problem. (If h counts as infeasible, an error is raised: see `solve_dual`.)

    Notes
    -----
    x is rounded to the dtype of g. If h or a margin is large, x may overflow in this dtype.

    For torch tensors and method "exact", the projection is one torch operator. Autograd and `torch.func`
    differentiate it once with respect to G, g, metric, h, margin and penalty, by implicit differentiation on
    the active set. `torch.func.vmap` maps over problems, and `torch.compile` traces it without a graph
    break. Other methods break the graph, and have no derivative.

    Examples
    --------
    The first entry of g would raise the loss of an earlier task; the projection removes it:

    >>> import numpy as np
    >>> from gemproj import project
    >>> project(np.array([[1.0, 0.0]]), np.array([-3.0, 1.0]))
    array([0., 1.])

    Blocks, one per parameter of a model:

    >>> G = [np.ones((1, 2, 2)), np.ones((1, 3))]
    >>> x = project(G, [np.zeros((2, 2)), np.array([-7.0, 0.0, 0.0])])
    >>> x[0].tolist(), x[1].tolist()
    ([[1.0, 1.0], [1.0, 1.0]], [-6.0, 1.0, 1.0])
    """
    torch = None if type(g) is np.ndarray else sys.modules.get("torch")
    if torch is not None:
        given = (method, h, margin, penalty, equality, metric, warm_start, out)
        compiling = torch.compiler.is_compiling()
        # torch may run this function uncompiled and still compile each function that it calls; there,
        # `is_compiling` would be true. In this case compilation is switched off for the projection.
        if not compiling and _are_calls_compiled():
            return _outside_of_graphs(G, g, given)
        if _are_tensors(torch, g) and (compiling or _needs_operator(torch, G, g, metric, h, margin, penalty)):
            exact = isinstance(method, Exact) or (isinstance(method, str) and method.lower() == "exact")
            if compiling and not exact:
                return _outside_of_graphs(G, g, given)
            from gemproj._operator import project_operator

            return project_operator(G, g, *given)
    options = check_options(method, h=h, margin=margin, penalty=penalty, equality=equality)
    problem = check_problem(G, g, metric)
    x = blocks_for_x(problem, out)
    start = None if warm_start is None else check_multipliers(warm_start, "warm_start", *problem.like)
    sol = solve(measure(problem), options, start)
    warn_if_missed(sol)
    combine_into(problem, sol, x)
    return as_asked(problem, x, out)


def _outside_of_graphs(G: Blocks, g: Blocks, given: tuple[Any, ...]) -> Any:
    """Return ``project(G, g, *given)``, without `torch.compile`."""
    from gemproj._operator import outside_of_graphs

    names = ("method", "h", "margin", "penalty", "equality", "metric", "warm_start", "out")
    return outside_of_graphs(project, G, g, **dict(zip(names, given, strict=True)))


def _are_calls_compiled() -> bool:
    """Return whether `torch.compile` compiles functions that this uncompiled code calls."""
    dynamo = sys.modules.get("torch._C._dynamo.eval_frame")
    active = getattr(dynamo, "get_eval_frame_callback", None)  # there is no public function
    return active is not None and active() not in (None, False)


def _are_tensors(torch: Any, g: Blocks) -> bool:
    """Return whether g is a tensor, or blocks of tensors."""
    return isinstance(g, torch.Tensor) or any(isinstance(a, torch.Tensor) for a in blocks_of(g)[:1])


def _needs_operator(torch: Any, *given: Any) -> bool:
    """Return whether autograd, tracing or a torch.func transform is active for these arguments."""
    # Under torch.func, tensors wrap other tensors and have no memory. Under FakeTensorMode, tensors have no
    # values. Under make_fx, operations are recorded.
    modes = torch._C._TorchDispatchModeKey
    if (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
    ):
        return True
    if torch.is_grad_enabled():
        for arg in given:
            if arg is not None and type(arg) is not float:
                for a in blocks_of(arg):
                    if getattr(a, "requires_grad", False):
                        return True
    return False
