"""One step of training: rows of G, the projected gradient, the optimizer's own step, the projected step.

::

    G <- gradients of the losses of the kept sets       Training.look
    g <- argmin |x - g|   subject to  G x >= h          project_gradient, in the hook before the step
    s <- the optimizer's own step from g
    s <- argmin |x - s|_W subject to  G x >= h          _finish, in the hook after it; W is Adam's metric

The step s is the weights before it minus those after it, so losses fall along s, as they do along g. With
``on="step"`` the gradient is not projected, with ``on="gradient"`` the step is only measured. The projected
gradient is clipped, if asked.

For the step s of an optimizer, a promise with a tolerance requires ``G s >= repair * (loss - bound)``, the
discrete form of a control barrier condition. To first order, this gives
``loss' - bound <= (1 - repair) (loss - bound)``. A loss above its bound returns to the bound geometrically,
and a loss below its bound may rise towards it. For the gradient h is divided by the learning rate.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gemproj._arrays import from_numpy, namespace, on_host, to_numpy, wide_dtype
from gemproj._bounds import Options, check_accepted
from gemproj._combine import combine_into, warn_if_missed
from gemproj._dual import solve_unread
from gemproj._gram import measure
from gemproj._problem import Problem, check_problem
from gemproj._solution import DualSolution
from gemproj._tspace import Gram
from gemproj._warn import warn
from gemproj.methods import GEM2017, AnyMethod, as_method
from gemproj.torch.data import is_kind
from gemproj.torch.promise import Promise, rounding_of, unit_of
from gemproj.torch.rows import Rows
from gemproj.torch.vector import ParameterVector, local, mesh_of

On = Literal["gradient", "step", "both"]

# The code of the wrapper of every optimizer's step, which calls the hooks.
_STEP: Any = torch.optim.Optimizer.profile_hook_step(print).__code__
# Optimizers whose state is computed from weights that a projection would replace.
_UNFIT = {
    "LBFGS": "it uses differences of gradients between weights that it has set itself",
    "ASGD": "it averages weights that it has set itself",
    "ScheduleFree": "it averages weights that it has set itself",
}
# The owner of hooks is told by its name, because notebooks may load modules twice.
_NAME = f"{__name__}.ProjectedStep"
# A correction may have so many times the length of a step. Otherwise losses return to their bounds by a part
# of the way, at least by this part, or not at all.
_LONGEST, _LEAST_PART = 3.0, 2.0**-8
# A gradient is zero up to rounding if its norm is at most this many eps times that of another gradient.
_NOISE = 16.0


@dataclass(frozen=True)
class Terms:
    """The numbers of the promises about the rows, each an array (t,), or None if no promise has it.

    Arrays are NumPy's on the CPU, and tensors on a device. A row whose promise lacks a number has weight 0,
    an infinite penalty, a NaN tolerance. `compared` says which losses compare outputs with stored outputs, so
    that they begin at zero; such a loss has a tolerance.
    """

    weight: Any = None
    penalty: Any = None
    equal: Any = None
    tolerance: Any = None
    repair: Any = None
    compared: Any = None
    unit: Any = None  # the size of losses for their rounding, see `unit_of`

    @classmethod
    def of(cls, promises: Sequence[Promise], device: torch.device) -> Terms:
        """Return the terms of the promises about the rows, in their order."""

        def array(values: list[Any], lacking: Any) -> Any:
            if all(value is None for value in values):
                return None
            found = np.array([lacking if value is None else value for value in values])
            return found if on_host(device) else from_numpy(found, torch, device)

        return cls(
            array([p.weight or None for p in promises], 0.0),
            array([p.penalty for p in promises], math.inf),
            array([p.equal or None for p in promises], False),
            array([p.allowed for p in promises], math.nan),
            array([p.repair for p in promises], 1.0),
            array([(not p.equal and hasattr(p.loss, "outputs")) or None for p in promises], False),
            array([unit_of(p.allowed) for p in promises], 1.0),
        )

    def excess(self, rows: Rows) -> Tensor | None:
        """Return losses minus their bounds, shape (t,), NaN without a bound; None if no row has a bound."""
        if self.tolerance is None:
            return None
        return rows.losses - rows.stored - torch.as_tensor(self.tolerance)

    def right_hand_side(self, rows: Rows, gram: Gram, rate: float, unit: float, adaptive: bool) -> Any:
        """Return h for a vector with these inner products; None if h is zero.

        A step of `rate` times the vector is taken, so losses fall by `rate` times its products with the rows.
        A gradient times `unit` has the unit of the vector. `adaptive` says that the optimizer will scale its
        entries one by one.
        """
        excess: Any = self.excess(rows)
        losses: Any = rows.losses
        if excess is None:
            return None
        excess, xp = excess + rows.unsure, namespace(gram.b)
        if not isinstance(gram.b, Tensor):
            excess, losses = to_numpy(excess), to_numpy(losses)
        eps, none = torch.finfo(rows.vector.dtype).eps, xp.isnan(self.tolerance)
        none = none | ((excess > 0.0) & (excess <= rounding_of(losses, rows.vector.dtype, self.unit)))
        excess = xp.where(none, xp.zeros_like(excess), excess)
        norms, size = xp.sqrt(xp.linalg.diagonal(gram.K)), xp.sqrt(gram.gg)
        # An h above |g_k| |s| would need a step longer than s, and a much longer step near a minimum of a
        # loss, where the row vanishes. Where the units of a gradient change, a fraction of it.
        most = (self.repair if adaptive else 1.0) * norms * size
        # A learning rate may be zero, as in the first step of a warmup.
        h = xp.minimum(self.repair * excess / max(rate, 1e-30), most)
        if self.compared is None:
            return h
        # A divergence from outputs that were just stored is zero up to rounding, and so is its gradient. If
        # the row of such a loss is below the rounding error of g, a low h makes the row inactive.
        zero = abs(losses) <= rounding_of(losses, rows.vector.dtype)
        near = self.compared & zero & (unit * norms <= _NOISE * eps * size)
        return xp.where(near, -norms * size, h)


def check_promise(promise: Promise, method: AnyMethod, on: On) -> None:
    """Raise if `on` is invalid, or if the method cannot use an option of the promise or project steps."""
    if on not in get_args(On):
        raise ValueError(f"on must be one of {', '.join(map(repr, get_args(On)))}; found {on!r}.")
    found = as_method(method)
    given = {
        ("weight", "margin"): promise.weight > 0.0,
        ("penalty", "penalty"): promise.penalty is not None,
        ("equal", "equality"): promise.equal,
        ("tolerance", "h"): promise.allowed is not None,
    }
    check_accepted(found, [names for names in given if given[names]])
    if on != "gradient" and isinstance(found, GEM2017):
        raise ValueError(
            f"{found!r} is made for gradients, in their units; use on='gradient', or another method "
            "for steps."
        )


class ProjectedStep:
    """The hooks in one optimizer, between which a step is projected.

    Before the step: compute the rows, copy the parameters, project the gradient and clip it. After the step:
    project the difference of the parameters. `training` gives the rows, and takes the statistics.
    """

    def __init__(self, training: Any, optimizer: Any) -> None:
        self._training, self.optimizer = training, optimizer
        self.check(training.keeper.on)
        self.max_norm: float | None = None  # to which the next gradient is clipped after its projection
        self.norm: Tensor | None = None  # the last one before clipping
        self.early = False  # whether a framework calls `begin` before it clips, in place of the hook
        self._clipped: Any = 1.0  # the factor by which clipping multiplied the gradient
        # Of the step between the hooks: its rows, None if it is left alone; the group of each parameter, or
        # None, and whether it moves; the solution for the gradient; and the seconds so far.
        self._rows: Rows | None = None
        self._groups: list[Any] = []
        self._moving: list[bool] = []
        self._solution: DualSolution | None = None
        self._seconds = 0.0
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._finish),
        ]
        # A fused optimizer would divide by the loss scale within its step. This way the scaler divides before
        # the step, as for any other optimizer, and takes no step after an overflow.
        self._unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._unscales:
            optimizer._step_supports_amp_scaling = False

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._unscales:
            self.optimizer._step_supports_amp_scaling = True

    def use(self, vector: ParameterVector) -> None:
        """Begin to project the steps of these parameters."""
        self._vector = vector

    def check(self, on: On) -> None:
        """Raise if steps of the optimizer cannot be projected, as far as this is known before a step."""
        kind = type(self.optimizer)
        name = kind.__name__
        if not hasattr(self.optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer with hooks; found {kind.__module__}.{name}. If "
                "it wraps another one, pass the inner one, or for Accelerate use "
                "gemproj.integrations.accelerate.Keeper."
            )
        for hook in self.optimizer._optimizer_step_pre_hooks.values():
            if is_kind(getattr(hook, "__self__", None), _NAME):
                raise ValueError(
                    "A keeper is attached to this optimizer already, and both would project. Call remove() "
                    "on it, or gemproj.torch.detach(optimizer) if it is lost; one keeper can keep many sets."
                )
        if any(group.get("maximize") for group in self.optimizer.param_groups):
            raise ValueError(
                f"{name} with maximize=True steps along its gradient, and constraints are for steps against "
                "it. Minimise the negative loss instead."
            )
        unfit = _UNFIT.get("ScheduleFree" if "ScheduleFree" in name else name)
        if on != "gradient" and unfit and self._training.keeper.project:
            raise ValueError(f"The steps of {name} cannot be projected: {unfit}. Use on='gradient'.")
        groups = self.optimizer.param_groups
        if self._training.keeper.project and any(group.get("max_iter", 1) > 1 for group in groups):
            raise ValueError(
                f"{name} takes up to max_iter steps in one, which are not projected singly. Use max_iter=1."
            )

    @torch.compiler.disable
    @torch.no_grad()
    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Before the step: compute the rows, and project the gradient, if need be after a closure made it."""
        if self.early or is_within(optimizer):
            return None
        closure = next((a for a in [*args, *kwargs.values()] if callable(a)), None)
        if closure is None:
            self.begin()
            return None
        self._look()

        def projecting() -> Any:
            loss = closure()
            self.project_gradient()
            return loss

        swap = {id(closure): projecting}
        return tuple(swap.get(id(a), a) for a in args), {k: swap.get(id(a), a) for k, a in kwargs.items()}

    @torch.compiler.disable
    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step in which the framework clips the gradient after its projection."""
        self._look()
        self.project_gradient()

    def _look(self) -> None:
        """Get the rows, and copy the parameters."""
        start = time.perf_counter()
        self._rows, self._moving = None, []
        if self._training.keeper.project:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    if not p.requires_grad:  # an optimizer moves what has a gradient, also if it is frozen
                        p.grad = None
        self._rows = self._training.look(self)
        if self._rows is not None:
            torch._foreach_copy_(self._vector.before.parts, self._vector.local())
        self._seconds = time.perf_counter() - start

    @torch.compiler.disable
    @torch.no_grad()
    def project_gradient(self) -> None:
        """Project the gradient, and clip it."""
        start, rows, training, vector = time.perf_counter(), self._rows, self._training, self._vector
        keeper, self._solution = training.keeper, None
        if rows is not None:
            groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
            self._groups = [groups.get(id(p)) for p in vector.parameters]
        if len(training.rows) and any(p.grad is not None for p in vector.parameters):
            try:
                held = [False] if rows is None else self._rated()
                # A projection of the gradient would tell, but not of columns that it leaves out.
                if keeper.on == "step" or not all(held):
                    self._check_finite(rows)
                if rows is not None and keeper.on != "step":
                    if not any(held):  # as in the first step of a warmup
                        held = [group is not None for group in self._groups]
                    self._solution, changed = self._solve("gradient", rows, vector.read_gradient(), held)
                    if changed:
                        vector.write_gradient([a and b for a, b in zip(rows.reached, held, strict=True)])
            except ValueError as error:
                if keeper.project:
                    self._refuse(error)
        self._clip()
        if rows is not None:
            self._moving = self._moves()
        self._seconds += time.perf_counter() - start

    @torch.compiler.disable
    @torch.no_grad()
    def _finish(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After the step: project it, and measure it."""
        if is_within(optimizer):
            return
        rows, self._rows, self.max_norm = self._rows, None, None
        if rows is None or not self._moving:  # left alone, or a closure was not called
            return
        start, training, vector, solution = time.perf_counter(), self._training, self._vector, None
        step = vector.read_step()
        if training.keeper.on != "gradient":
            try:
                solution, changed = self._solve("step", rows, step, self._moving, self._metric(rows))
            except ValueError as error:
                if training.keeper.project:
                    vector.assign(vector.before.parts)
                    self._refuse(error, step)
                return
            except BaseException:  # also Ctrl-C
                vector.assign(vector.before.parts)
                raise
            if changed:
                vector.take_step()
                step = vector.read_step()
        square, products = rows.products(step)
        seconds = self._seconds + time.perf_counter() - start
        training.note(self._solution, solution, square, products, seconds)

    def _moves(self) -> list[bool]:
        """Return which parameters have a gradient and a learning rate that is not zero."""
        pairs = zip(self._vector.parameters, self._rated(), strict=True)
        return [p.grad is not None and rated for p, rated in pairs]

    def _rated(self) -> list[bool]:
        """Return which parameters have a learning rate that is not zero."""
        still = {id(group) for group in self.optimizer.param_groups if _is_zero(group.get("lr"))}
        return [group is not None and id(group) not in still for group in self._groups]

    def _solve(
        self, kind: str, rows: Rows, v: Tensor, moving: list[bool], weights: Tensor | None = None
    ) -> tuple[DualSolution, bool]:
        """Project a gradient or a step v in place; return the solution and whether v changed.

        Only columns of moving parameters are used. All local columns are updated, but only one process counts
        a replicated column in the Gram matrix. `weights` are those of Adam's metric.
        """
        training, keeper, vector = self._training, self._training.keeper, rows.vector
        topology, columns, owned = vector.topology, vector.columns, vector.owned
        if not all(moving):
            chosen = [j for j, moves in enumerate(moving) if moves]
            columns, owned = vector.slices(chosen), vector.slices(chosen, owned=True)
        with topology.measurement(len(rows)):
            here = _problem(rows, v, weights, columns)
            mine = here if owned == columns else _problem(rows, v, weights, owned)
            measured = measure(mine)
        measured = topology.sum_gram(measured)
        if weights is None and all(moving):  # a condition that is the same on all processes
            K = measured.gram.K
            rows.norms = torch.as_tensor(namespace(K).linalg.diagonal(K) ** 0.5, device=v.device)
        options = self._options(kind, rows, measured.gram, weights)
        h, part, start = options.h, 1.0, training.warm_start(kind, rows.names)
        while True:
            try:
                sol = solve_unread(measured, options, start)
                if part == 0.0 or not _is_long(sol, measured.gram, options.h, options.margin):
                    break
                part = 0.5 * part if part > _LEAST_PART else 0.0
            except ValueError as error:
                if h is None or part == 0.0 or "infeasible" not in str(error):
                    raise
                part = 0.0  # no step of any length takes all losses to their bounds: none may rise then
            options = replace(options, h=namespace(h).minimum(h, part * abs(h)))
        if part < 1.0:
            above = [repr(name) for name, more in zip(rows.names, h.tolist(), strict=True) if more > 0]
            done = "takes them a part of the way" if part else "raises none of them"
            warn(
                f"Not all losses above their bounds ({', '.join(above[:5])}) can fall in one step, "
                f"because their gradients oppose each other. This step {done}."
            )
        warn_if_missed(sol)
        keeper._warm[kind] = rows.names, sol.multipliers
        # On a device, reading the multipliers would synchronise, so x is always written.
        changed = keeper.project and (vector.device.type != "cpu" or bool(sol.multipliers.any()))
        if changed:
            combine_into(here, sol, here.vector)
        return sol, changed

    def _options(self, kind: str, rows: Rows, gram: Gram, weights: Tensor | None) -> Options:
        """Return the options of a projection: the numbers of the promises, in units of its vector."""
        keeper, terms, penalty = self._training.keeper, self._training.terms, self._training.terms.penalty
        # With on="both" the gradient takes the weights in full, and the step what is left of penalties.
        full, rate, unit, scale = kind == "gradient" or keeper.on == "step", 1.0, 1.0, 1.0
        if kind == "gradient":
            rate = 1.0 if terms.tolerance is None else self.learning_rate()
        else:
            # Adam's metric has the unit of a gradient divided by a step.
            weighs = full and terms.weight is not None
            if weights is None and (weighs or penalty is not None or terms.compared is not None):
                unit = self.learning_rate()
            scale = unit * (float(self._clipped) if on_host(rows.G.device) else self._clipped)
        if penalty is not None and not full and self._solution is not None and keeper.project:
            used: Any = self._solution.multipliers  # by the projection of the gradient
            used = abs(torch.as_tensor(used, device=rows.G.device) if isinstance(penalty, Tensor) else used)
            penalty = (penalty - used) * (penalty > used)
        adaptive = kind == "gradient" and not isinstance(self.optimizer, torch.optim.SGD)
        return Options(
            keeper.method,
            h=terms.right_hand_side(rows, gram, rate, unit, adaptive),
            margin=terms.weight * scale if full and terms.weight is not None else 0.0,
            penalty=None if penalty is None else penalty * scale,
            equality=False if terms.equal is None else terms.equal,
        )

    def _metric(self, rows: Rows) -> Tensor | None:
        """Return the weights of Adam's metric, ``(sqrt(v_hat) + eps) / lr``; for others see `_of_rates`.

        Adam's step minimises a quadratic model with this metric. Here v_hat is at least the square of the
        largest value of the entry in the rows. Without this minimum, v_hat is zero for entries without a
        gradient of the new loss, and a multiplier of 1 would move them by ``lr / eps`` times the row. With
        the minimum, a multiplier of 1 moves an entry by at most the learning rate, as Adam does.
        """
        # There, each process has the moments of some parameters.
        if type(self.optimizer).__name__ == "ZeroRedundancyOptimizer":
            return None
        vector, states, found, (w, shares) = self._vector, self.optimizer.state, [], self._vector.weights
        for p, shape, part, group, moves in zip(
            vector.parameters, vector.shapes, shares, self._groups, self._moving, strict=True
        ):
            if not moves:
                continue
            state = states.get(p, {})
            second = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
            count = state.get("step", group.get("step"))  # some optimizers count in the group
            if second is None or count is None or not group.keys() >= {"betas", "eps"}:
                return self._of_rates()
            if (second := local(second)).shape != shape:  # GaLore has moments of projected gradients
                return self._of_rates()
            if type(second) is not Tensor:  # optimizers of torchao keep moments in 4 or 8 bits
                second = second.dequantize()
            found.append((part, second, group["betas"][1], count, group["eps"], group["lr"]))
        # On a CPU, a norm over the first dimension takes a hundred times as long.
        torch.maximum(rows.G.amax(0), rows.G.amin(0).neg_(), out=w)
        if found:
            parts, seconds, betas, counts, eps, rates = map(list, zip(*found, strict=True))
            counts, rates = _numbers(counts, w.device), _numbers(rates, w.device)
            # All parameters at once: six operations for each would take longer than the optimizer's step.
            # As in Adam, roots are divided, because a quotient of squares may overflow.
            roots: Any = torch._foreach_sqrt(seconds)
            torch._foreach_div_(roots, [(1 - b**n) ** 0.5 for b, n in zip(betas, counts, strict=True)])
            roots = [a if (a.dtype, a.device) == (w.dtype, w.device) else a.to(w) for a in roots]
            torch._foreach_maximum_(parts, roots)
            torch._foreach_add_(parts, eps)
            torch._foreach_div_(parts, rates)
        return w

    def _of_rates(self) -> Tensor | None:
        """Return the weights ``1 / lr`` of SGD's metric; None if all parameters have the same rate.

        A step of SGD minimises a linear model with this metric. Without it, a correction would move
        parameters with a small rate as far as others. A rate on a device, which is not read, counts as equal.
        """
        moving = zip(self._vector.weights.parts, self._groups, self._moving, strict=True)
        found = [(part, group.get("lr")) for part, group, moves in moving if moves]
        if any(rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu") for _, rate in found):
            return None
        if len({float(rate) for _, rate in found}) < 2:
            return None
        for part, rate in found:
            part.fill_(min(1.0 / float(rate), torch.finfo(part.dtype).max))
        return self._vector.weights.whole

    def learning_rate(self) -> float:
        """Return the largest learning rate."""
        rates = [group["lr"] for group in self.optimizer.param_groups if group.get("lr") is not None]
        if not rates:
            raise ValueError(
                f"{type(self.optimizer).__name__} has no learning rate to convert a weight, a penalty or a "
                "tolerance between units of gradients and of its steps; use an optimizer that has one."
            )
        return max(map(float, rates))

    def _clip(self) -> None:
        """Clip the gradient after weighted rows were added, as in replay."""
        self._clipped = 1.0
        if (most := self.max_norm) is None:
            return
        held = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        # In the order of the model, in which others clip: the order decides the last digit of the norm.
        own = [held.pop(id(p)) for p in self._training.model.parameters() if id(p) in held]
        parameters = own + list(held.values())
        self.norm = total_norm(parameters)
        for some in _by_mesh(parameters):
            clip_grads_with_norm_(some, most, self.norm)
        self.clips(most, self.norm)

    def clips(self, most: float, norm: Tensor) -> None:
        """Note that a gradient of this norm is clipped: weights and penalties of a step are scaled alike."""
        self._clipped = (most / (norm + 1e-6)).clamp(max=1.0)  # the factor of torch

    def _check_finite(self, rows: Rows | None) -> None:
        """Raise on all processes unless gradient and rows are finite; on a device, that would synchronise."""
        vector = self._vector
        if vector.device.type != "cpu":
            return
        checked = vector.parameters
        if self._training.scales:  # then the part of another optimizer that overflows is skipped
            checked = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [local(p.grad) for p in checked if p.grad is not None]
        # A sum takes a tenth of the time; it may overflow.
        wrong = not all(bool(g.sum().isfinite()) or bool(g.isfinite().all()) for g in gradients)
        norms = torch.zeros(0, dtype=torch.float64)
        if rows is not None:
            norms = rows.lengths() if rows.norms is None else rows.norms
            if not vector.topology.collective:
                rows.norms = norms
        flags = torch.cat([torch.tensor([wrong]), ~norms.isfinite()]).to(norms.dtype)
        found = vector.topology.sum_shards(flags).nonzero().flatten().tolist()
        if found:
            what = "G is not finite: row {}." if found[0] else "The gradient is not finite."
            raise ValueError(what.format(found[0] - 1))

    def _refuse(self, error: ValueError, step: Tensor | None = None) -> NoReturn:
        """Raise an error that names the parameter whose gradient or step is wrong, or the sets of rows."""
        training, vector, said, self.max_norm = self._training, self._vector, str(error), None
        if "row" in said and training.rows.names:
            named = ", row ".join(f"{k} is of {name!r}" for k, name in enumerate(training.rows.names[:20]))
            said += f" Row {named}."
            said += "" if training.terms.tolerance is None else " h comes from their tolerances."
        held = zip(vector.names, vector.parameters, strict=True)
        gradients = ((name, local(p.grad)) for name, p in held if p.grad is not None)
        parts = gradients if step is None else zip(vector.names, vector.split(step), strict=True)
        wrong = next((name for name, part in parts if not part.isfinite().all()), None)
        if step is not None:
            why = f"Here g is the step: {said}"
            if wrong is not None:
                why = f"It is not finite in {wrong}: lower its learning rate, or keep weights in float32."
            said = (
                f"A step of {type(self.optimizer).__name__} could not be projected and was undone, but not "
                f"in the optimizer's state. {why}"
            )
        elif wrong is not None:
            said = (
                f"The gradient of {wrong} is not finite, so this step was not taken; weights and the "
                "optimizer's state are as before. Leave out this batch, or lower the learning rate."
            )
        training.drop()
        raise ValueError(said) from error


def _problem(rows: Rows, v: Tensor, weights: Tensor | None, columns: list[slice]) -> Problem:
    """Return the problem of projecting v in some columns."""
    given = [[a[..., at] for at in columns] for a in (rows.G, v, weights) if a is not None]
    # Arrays are checked in a quarter of the time of lists.
    return check_problem(*(blocks[0] if len(columns) == 1 else blocks for blocks in given))


def _is_long(sol: Any, gram: Gram, h: Any, margin: Any) -> bool:
    """Return whether bounds ask for a step much longer than the optimizer's, in which rows are no gradients.

    One row asks for at most twice the length. Rows that oppose each other may ask for any length. On a device
    this is not known.
    """
    lam, K = sol.multipliers, gram.K
    if not isinstance(h, np.ndarray) or not (h > 0.0).any():
        return False
    least = np.broadcast_to(margin, lam.shape)
    longest = gram.gg**0.5 + float(least @ K @ least) ** 0.5
    return bool(float(lam @ K @ lam) ** 0.5 > _LONGEST * longest)


def detach(optimizer: Any) -> None:
    """Detach every keeper from an optimizer, even if no variable refers to it any more.

    An optimizer keeps attached objects alive, for example objects from an earlier run of a notebook cell. The
    optimizer may be prepared by Accelerate.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper; ZeRO's has an adapter with hooks
        optimizer = getattr(optimizer, "_gemproj", None) or optimizer.optimizer
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        owner: Any = getattr(hook, "__self__", None)
        if is_kind(owner, _NAME):
            owner.remove()


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients, which may be on several devices and meshes."""
    norms: list[Any] = [get_total_norm([p.grad for p in some]) for some in _by_mesh(parameters)]
    return get_total_norm([norm if mesh_of(norm) is None else norm.full_tensor() for norm in norms])


def _by_mesh(parameters: Iterable[Tensor]) -> Iterable[list[Any]]:
    """Return the parameters with a gradient by its mesh, because torch takes those of one mesh together."""
    found: dict[Any, list[Any]] = {}
    for p in parameters:
        if p.grad is not None:
            found.setdefault(mesh_of(p.grad), []).append(p)
    return found.values()


def is_within(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the hooks run in an inner step of the optimizer; only the outer step is projected.

    In torch, the ``step`` of each class calls the hooks, so hooks run twice if a subclass calls its parent's
    ``step``. Running steps are counted on the call stack, because a failed step calls no hook at its end.
    """
    frame, steps = sys._getframe(), 0
    while frame.f_back is not None and steps < 2:
        frame = frame.f_back
        steps += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
    return steps == 2


def _is_zero(rate: Any) -> bool:
    """Return whether a learning rate is zero; False if reading it would synchronise a device."""
    return (not isinstance(rate, Tensor) or rate.device.type == "cpu") and bool(rate == 0)


def _numbers(values: list[Any], device: torch.device) -> list[Any]:
    """Return numbers in full precision, as tensors if reading one of them would synchronise a device."""
    if {value.device.type for value in values if isinstance(value, Tensor)} <= {"cpu"}:
        return list(map(float, values))
    wide = wide_dtype(torch, device)
    return [
        value.to(device, wide) if isinstance(value, Tensor) else torch.full((), value, device=device)
        for value in values
    ]
