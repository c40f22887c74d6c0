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
from gemproj._problem import Problem, blocks_of, check_problem
from gemproj._solution import DualSolution
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
    given = G, g, method, h, margin, penalty, equality, metric, warm_start, out
    torch = None if type(g) is np.ndarray else sys.modules.get("torch")
    if torch is None:
        return _project(*given)
    if torch.compiler.is_compiling():
        from gemproj._autograd import outside_of_graphs, project_by_operator

        exact = isinstance(method, Exact) or (isinstance(method, str) and method.lower() == "exact")
        if exact and isinstance(blocks_of(g)[0], torch.Tensor):
            return project_by_operator(True, False, *given)
        return outside_of_graphs(_project_tensors, torch, *given)
    if "torch._dynamo" in sys.modules:
        # torch may run this function uncompiled and still compile each function that it calls.
        from gemproj._autograd import outside_of_graphs

        return outside_of_graphs(_project_tensors, torch, *given)
    return _project_tensors(torch, *given)


def solved(
    G: Blocks, g: Blocks, method: AnyMethod, h: Any, margin: Any, penalty: Any, equality: Any,
    metric: Blocks | None, warm_start: Array | None, out: Blocks | None = None, *,
    derived: bool = False,
) -> tuple[Problem, DualSolution, list[Array]]:  # fmt: skip
    """Return the problem, its solution and the blocks of x; `derived` refuses what has no derivative."""
    options = check_options(method, h=h, margin=margin, penalty=penalty, equality=equality)
    problem = check_problem(G, g, metric)
    x = blocks_for_x(problem, out)
    start = None if warm_start is None else check_multipliers(warm_start, "warm_start", *problem.like)
    if derived:
        refuse_derivative(options.method, out)
    sol = solve(measure(problem), options, start)
    warn_if_missed(sol)
    combine_into(problem, sol, x)
    return problem, sol, x


def refuse_derivative(method: Any, out: Blocks | None) -> None:
    """Raise for a method without a derivative, and for `out`."""
    if not isinstance(method, Exact):
        raise ValueError(
            f"Only method 'exact' supports gradients and torch.func; method is {method!r}. Detach the "
            "arguments, or use method='exact'."
        )
    if out is not None:
        raise ValueError(
            "out cannot be written under torch.func, or while an argument requires a gradient; detach it."
        )


def _project(*given: Any) -> Any:
    problem, _, x = solved(*given)
    return as_asked(problem, x, given[-1])


def _project_tensors(torch: Any, *given: Any) -> Any:
    """Return x for the arguments of `project`, which may be tensors, outside of compiled graphs."""
    G, g, _, h, margin, penalty, equality, metric, warm_start, _ = given
    if not isinstance(next(iter(blocks_of(g)), None), torch.Tensor):
        return _project(*given)
    smooth = _tensors(torch, G, g, metric, h, margin, penalty)
    without = any(_lacks_values(torch, a) for a in smooth + _tensors(torch, equality, warm_start))
    if without or torch.jit.is_tracing() or _is_recording():
        from gemproj._autograd import project_by_operator

        return project_by_operator(torch.jit.is_tracing(), without, *given)
    derived = torch.is_grad_enabled() and any(a.requires_grad for a in smooth)
    # Outside of a level of forward-mode differentiation, `unpack_dual` returns its argument.
    unpack = torch.autograd.forward_ad.unpack_dual
    if not derived and unpack(smooth[0]).primal is not smooth[0]:
        derived = any(unpack(a).tangent is not None for a in smooth)
    if not derived:
        return _project(*given)
    from gemproj._autograd import differentiable

    problem, sol, x = solved(*given, derived=True)
    return as_asked(problem, differentiable(problem, sol, x, G, g, metric, h, margin, penalty, equality))


def _tensors(torch: Any, *given: Any) -> list[Any]:
    """Return the tensors among the arguments of `project`."""
    some = [a for a in given if a is not None and type(a) is not float and type(a) is not bool]
    return [a for blocks in some for a in blocks_of(blocks) if isinstance(a, torch.Tensor)]


def _lacks_values(torch: Any, a: Any) -> bool:
    """Return whether a dense tensor has no memory: torch.func has wrapped it, or it is fake."""
    if type(a) is not torch.Tensor and type(a) is not torch.nn.Parameter:
        return hasattr(a, "fake_mode")
    try:
        lacks = not a.data_ptr() and a.numel() > 0
    except RuntimeError:
        lacks = True
    return lacks and a.layout is torch.strided and not a.is_meta


def _is_recording() -> bool:
    """Return whether `make_fx` is recording the operations on tensors."""
    mode = getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "get_proxy_mode", None)
    return mode is not None and mode() is not None
