"""The rows of G: gradients of losses, from losses at hand or from the examples of kept sets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from gemproj._arrays import wide_dtype
from gemproj._warn import warn
from gemproj.torch.data import is_kind
from gemproj.torch.memory import Draw
from gemproj.torch.promise import call_loss
from gemproj.torch.vector import ParameterVector, mesh_of, refuse_reentrant

_CPU = torch.device("cpu")
# Number of entries up to which a buffer is restored after a pass; larger ones are tables, which stay.
_MOVING = 1 << 20
# Of transformers 4 and 5.
_CONFIGS = [f"transformers.configuration_utils.{name}" for name in ("PretrainedConfig", "PreTrainedConfig")]


def rows(losses: Iterable[Tensor], parameters: Iterable[Tensor], *, flat: bool = False) -> Any:
    """Return the gradients of losses as the rows of G, for `gemproj.project`.

    The losses may come from one forward pass or from many; their graphs are kept, so ``backward()`` still
    works. ``.grad`` is not changed. With a generator, only one graph at a time need be in memory. Rows are
    constants; for rows with derivatives use `torch.func.jacrev`.

    Parameters
    ----------
    losses : iterable of scalar tensors
        The t losses.
    parameters : iterable of tensors
        The parameters, which require gradients. A row is zero where its loss does not depend on a parameter.
    flat : bool, default False
        Whether to return one matrix of shape (t, d), with the parameters flattened one after the other.

    Returns
    -------
    list of tensors of shapes ``(t, *shape)``, or one tensor of shape (t, d)
        One block per parameter, in the order of the parameters; or one matrix.

    Examples
    --------
    Two losses of one forward pass, one of which does not depend on the bias:

    >>> import torch
    >>> from gemproj import project
    >>> from gemproj.torch import rows
    >>> layer = torch.nn.Linear(2, 1)
    >>> parameters = list(layer.parameters())
    >>> losses = [layer(torch.ones(1, 2)).sum(), layer.weight.square().sum()]
    >>> G = rows(losses, parameters)
    >>> [tuple(block.shape) for block in G]
    [(2, 1, 2), (2, 1)]
    >>> (-sum(losses)).backward()
    >>> gradient = [p.grad for p in parameters]
    >>> x = project(G, gradient, out=gradient)
    """
    if isinstance(losses, Tensor) and losses.ndim == 0:
        raise TypeError("losses must be an iterable of scalars; found one tensor: pass [loss].")
    if isinstance(parameters, torch.nn.Module):
        raise TypeError(f"parameters must be tensors; found {type(parameters).__name__}: pass .parameters().")
    held = list(parameters)
    if not held:
        raise ValueError("parameters holds no parameter; an iterator can be read only once.")
    for k, p in enumerate(held):
        if not isinstance(p, Tensor):
            raise TypeError(f"parameters must be tensors; parameter {k} is {type(p).__name__}.")
        if not p.requires_grad:
            raise ValueError(
                f"parameters must require a gradient; parameter {k}, of shape {tuple(p.shape)}, does not. "
                "Pass [p for p in model.parameters() if p.requires_grad]."
            )
    found, reached = list[list[Tensor]](), False
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = type(loss).__name__
            if isinstance(loss, Tensor):
                kind = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            raise ValueError(f"losses must be scalars that require a gradient; loss {len(found)} is {kind}.")
        gradients = torch.autograd.grad(loss.reshape(()), held, retain_graph=True, allow_unused=True)
        reached = reached or any(g is not None for g in gradients)
        if any(g is None for g in gradients):
            refuse_reentrant(loss)
        found.append(
            [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(held, gradients, strict=True)]
        )
        del loss  # with its graph, before the next one is made
    if not found:
        raise ValueError("losses holds no loss; an iterator can be read only once.")
    if not reached:
        raise ValueError(
            "losses depend on none of the parameters. Pass the parameters themselves, not views or copies of "
            "them: project takes lists of any shapes."
        )
    if flat:
        return torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in found])
    return [torch.stack(block) for block in zip(*found, strict=True)]


class Rows:
    """The rows of G, shape (t, d), in one buffer that all steps share, with the losses of the rows."""

    found: Tensor  # while rows are computed: the loss of each row so far
    scale: float  # the factor of losses in backward passes

    def __init__(self, vector: ParameterVector) -> None:
        self.vector = vector
        # Its first rows are those of G.
        self.buffer = torch.empty((0, vector.d), dtype=vector.dtype, device=vector.device)
        # By row, of the passes of its last look: weight, indices and losses of the examples.
        self.values: dict[int, list[tuple[float, list[int], Tensor]]] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}  # cached results of `parts`
        self._none = torch.empty(0, dtype=wide_dtype(torch, vector.device), device=vector.device)
        self.names: list[Any] = []  # of the set of each row
        self.norms: Tensor | None = None
        self.reached: list[bool] = []  # the parameters, by the loss of any row
        # The loss of each row, (t,) in float64, now and when its examples were kept.
        self.losses = self.stored = self._none
        self.unsure: Any = 0.0  # by how much each loss may be larger, if it is modelled
        self.ages: list[int] = []  # steps since each row was computed

    def __len__(self) -> int:
        return len(self.names)

    @property
    def G(self) -> Tensor:
        """A view of G, shape (t, d)."""
        return self.buffer[: len(self)]

    def clear(self) -> None:
        """Drop all rows, but keep the buffer."""
        self.names, self.norms = [], None

    def fill(
        self,
        model: torch.nn.Module,
        draws: Sequence[Draw],
        names: Sequence[Any],
        *,
        microbatch: int | None = None,
        scale: float = 1.0,
        joint: Any = None,
    ) -> None:
        """Compute the gradients of the mean losses on the drawn examples, averaged over all processes.

        `names` are those of all rows; if the draws are of some of them, the others stay. An error drops all
        rows. Losses are multiplied by `scale` for the backward passes. `joint` may compute several rows in
        one pass.
        """
        topology, t = self.vector.topology, len(names)
        at, sizes = [draw.k for draw in draws], [len(draw.at) for draw in draws]
        self.clear()
        if not draws:
            return
        totals, most = topology.plan([*sizes, *(len(draw.kept) for draw in draws)])
        for k, draw in enumerate(draws):
            draw.total, draw.most = totals[k], most[k]
            # A process with few examples draws as many as one with many; these stand for fewer.
            draw.weight = topology.weight(len(draw.kept), totals[len(draws) + k])
        if t > len(self.buffer):  # free the old buffer before allocating a larger one
            self.buffer, self._views = self.buffer.new_empty((0, self.vector.d)), {}
            self.buffer = self.buffer.new_empty((t, self.vector.d))
        self.scale, self.found = scale, self._none.new_zeros(t)
        if whole := len(draws) == t:
            self.losses = self.stored = self.found
            self.reached, self.ages = [False] * len(self.vector.parameters), [0] * t
        none: list[Tensor | None] = [None] * len(self.vector.parameters)

        def alone(draw: Draw) -> None:
            self.found[draw.k], self.values[draw.k] = 0.0, []
            parts = passes(draw.at, microbatch, draw.most)
            for j, (some, count) in enumerate(parts):
                batch, outputs = draw.kept.fetch(some, self.vector.device)
                values = call_loss(draw.loss, model, batch, len(some), outputs)
                loss = values.mean()
                if not loss.requires_grad:
                    warn(
                        f"The loss of {draw.kept.title} depends on no trainable parameter now, so its row "
                        "is zero: right if those are frozen, wrong if the loss runs under torch.no_grad()."
                    )
                weight = draw.weight * count / len(draw.at)
                found = self.vector.gradients(loss * (weight * scale)) if loss.requires_grad else none
                reached = self.vector.gather(found, self.parts(draw.k), add=j > 0)
                self.note(draw.k, reached, self.found[draw.k : draw.k + 1] + weight * loss.detach())
                self.values[draw.k].append((weight, some, values.detach()))
            if not parts:
                self.buffer[draw.k].zero_()

        with topology.passes(), evaluating(model, self.vector.device, topology.collective):
            left = draws
            if joint is not None:
                left = joint.fill(self, model, draws, alone, microbatch or 2**62)
            for draw in left:
                alone(draw)
        # Rows of several processes are summed; those of earlier steps are sums already.
        for part in [self.buffer[:t]] if whole else [self.buffer[k] for k in at]:
            if scale != 1.0:
                part.div_(scale)
            self.reached = topology.reduce(part, self.reached)
        stored = self.found.new_tensor([draw.stored() for draw in draws])
        due = torch.tensor(at, device=self.found.device)
        now = topology.sum_values(torch.stack([self.found[due], stored]))
        self.losses, self.stored = torch.stack([self.losses, self.stored]).index_copy(1, due, now)
        self.unsure = 0.0 if whole else (self.unsure + torch.zeros_like(self.losses)).index_fill(0, due, 0.0)
        self.ages = [0 if k in at else age for k, age in enumerate(self.ages)]
        self.names = list(names)  # last, so that an interrupt leaves no rows

    def note(self, k: int, reached: Iterable[int], losses: Tensor) -> None:
        """Record losses of rows k, k + 1, ..., which depend on the parameters with indices `reached`."""
        self.found[k : k + len(losses)] = losses
        for j in reached:
            self.reached[j] = True

    def squares(self, draws: Sequence[Draw]) -> Tensor:
        """Return the mean square of the rises of the drawn examples from their stored losses, shape (t,)."""
        parts = [(draw, *part) for draw in draws for part in self.values[draw.k]]
        rises = [values.to(self._none).reshape(-1).expand(len(some)) for _, _, some, values in parts]
        stored = [draw.kept.losses[some].to(self._none) for draw, _, some, _ in parts]
        weights = [weight / len(some) for _, weight, some, _ in parts for _ in some]
        at = [draw.k for draw, _, some, _ in parts for _ in some]
        found = (torch.cat([self._none, *rises]) - torch.cat([self._none, *stored])) ** 2
        sums = self._none.new_zeros(len(self)).index_add(
            0, torch.tensor(at, dtype=torch.int64, device=found.device), found * found.new_tensor(weights)
        )
        return self.vector.topology.sum_values(sums)

    def parts(self, k: int, t: int = 0) -> list[Tensor]:
        """Return writable views of row k, one per parameter; with t, of t rows from k on, (t, *shape)."""
        if (k, t) not in self._views:
            self._views[k, t] = self.vector.split(self.buffer[k : k + t] if t else self.buffer[k])
        return self._views[k, t]

    def lengths(self, at: slice = slice(None)) -> Tensor:
        """Return the norms of the rows in some columns."""
        # Norms of float32 numbers in float64 would take much longer.
        kind = torch.promote_types(self.buffer.dtype, torch.float32)
        return torch.linalg.vector_norm(self.G[:, at], dim=1, dtype=kind).to(self._none.dtype)

    def products(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared norm of a step and its products with the rows, summed over processes."""
        topology, wide = self.vector.topology, self._none.dtype
        kind = torch.promote_types(step.dtype, torch.float32)
        sums: list[Any] = [0.0, 0.0, 0.0]
        with torch.autocast(step.device.type, enabled=False):
            for at in self.vector.owned:
                G, part = self.G[:, at], step[at]
                square = torch.linalg.vector_norm(part, dtype=kind).to(wide) ** 2
                found = [square.reshape(1), (G @ part).to(wide)]
                if self.norms is None:
                    found.append(self.lengths(at) ** 2)
                sums = [a + b for a, b in zip(sums, found, strict=False)]
        if topology.collective:
            sums = list(topology.sum_shards(torch.cat(sums)).split([*map(len, sums)]))
        if self.norms is None:
            self.norms = sums[2].sqrt()
        return sums[0], sums[1]


def passes(at: list[int], size: int | None, most: int) -> list[tuple[list[int], int]]:
    """Return the examples, `size` at a time, with their number as weight.

    All processes make as many passes as the process with `most` examples; a process with fewer examples
    repeats its first examples with weight zero.
    """
    if size is None or most <= size:
        return [(at, len(at))] if at else []
    parts = [at[start : start + size] for start in range(0, most, size)]
    return [(part, len(part)) if part else (at[:size], 0) for part in parts]


def unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, DistributedDataParallel | None]:
    """Return the module for computing gradients, and its DistributedDataParallel wrapper or None.

    The forward pass of the wrapper would expect a backward pass that reduces ``.grad``, and that of a module
    of Lightning Fabric one by ``fabric.backward``.
    """
    model = getattr(model, "_forward_module", model)  # unwraps a module of Fabric
    inner = getattr(model, "_orig_mod", model)  # unwraps torch.compile
    return (inner.module, inner) if isinstance(inner, DistributedDataParallel) else (model, None)


def check_spread(modules: Sequence[torch.nn.Module]) -> None:
    """Raise if the modules of a model are distributed over processes in an unsupported way."""
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise ValueError(
            "model has a part that is wrapped in DistributedDataParallel, which does not show the processes "
            "of the whole model. Wrap the whole model, and pass the wrapped model."
        )
    if not (dist.is_available() and dist.is_initialized()):
        return
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
        raise ValueError(
            "model is wrapped in FullyShardedDataParallel (FSDP1), whose flat buffers hide the parameters. "
            "Shard it with fully_shard of torch.distributed.fsdp (FSDP2)."
        )
    states = [module._get_fsdp_state() for module in modules if hasattr(module, "_get_fsdp_state")]  # type: ignore[operator]
    parts = [vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group] for state in states]
    if any(getattr(part, "gradient_divide_factor", None) is not None for some in parts for part in some):
        raise ValueError(
            "model has a gradient divide factor, which would change rows, too. Do not call "
            "set_gradient_divide_factor; divide the loss instead."
        )
    held = [p for module in modules for p in module._parameters.values() if p is not None]
    trained = {mesh_of(p) is not None for p in held if p.requires_grad}
    if trained == {False} and any(mesh_of(p) is not None for p in held):
        raise ValueError(
            "model has trainable parameters that are not sharded, such as adapters, and sharded frozen "
            "parameters. Add adapters before sharding the model, so that they are sharded, too."
        )


def reshard(model: torch.nn.Module) -> None:
    """Reshard the parameters, which FSDP leaves gathered after an evaluation."""
    for module in model.modules():
        if callable(getattr(module, "reshard", None)):
            module.reshard()  # type: ignore[operator]


@contextmanager
def evaluating(model: torch.nn.Module, device: torch.device, collective: bool = False) -> Iterator[None]:
    """Set evaluation mode; at the end restore modes, buffers, random state and, if collective, ``.grad``.

    Gradient checkpointing in layers of transformers stays active. Recurrent layers stay in training mode,
    without dropout, because cuDNN has no gradients for them in evaluation mode. Attention takes the same way
    with and without gradients, which the fast path of torch does not. Raise if a pass changes a weight in
    place, as far as autograd knows of it.
    """
    modules = [*model.modules()]
    changes = _changes(modules)
    if collective:
        reshard(model)
        changes += [(p, "grad", None) for p in model.parameters() if p.requires_grad]
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    held = _tensors(module._buffers for module in modules)
    moving = (b for b in held if b.layout == torch.strided and not b.is_nested and b.numel() <= _MOVING)
    buffers = [(b, b._version, b.clone()) for b in moving]
    # Embeddings may limit the norm of the rows that they look up.
    limited = {id(p) for one in modules if vars(one).get("max_norm") for p in one._parameters.values()}
    weights = [] if collective else _tensors(module._parameters for module in modules)
    versions = [(p, p._version) for p in weights if id(p) not in limited]
    fast = torch.backends.mha.get_fastpath_enabled()
    with forked(device), torch.enable_grad():
        try:
            _set(changes)
            torch.backends.mha.set_fastpath_enabled(False)
            yield
            if moved := [p for p, version in versions if p._version != version]:
                name = next((name for name, p in model.named_parameters() if p is moved[0]), "a weight")
                raise ValueError(
                    f"model changes {name} in place in its forward pass in evaluation mode, as RWKV does "
                    "with rescale_every > 0: rows would be those of other weights. Switch that off."
                )
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            if collective:
                reshard(model)
            _set(reversed(before))
            with torch.no_grad():
                for b, version, value in buffers:
                    # Fused observers count no version; on a device, comparing values would synchronise.
                    if b._version != version or (b.device.type == "cpu" and not _equal(b, value)):
                        (b if b.shape == value.shape else b.resize_(value.shape)).copy_(value)


def _tensors(held: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    """Return the parameters or buffers of modules that count their changes, and have entries already."""
    every = (a for some in held for a in some.values() if a is not None and not is_lazy(a))
    return [a for a in every if not a.is_inference()]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors are equal, also where they are NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()))


@contextmanager
def forked(device: torch.device = _CPU) -> Iterator[None]:
    """Restore the random states of Python and NumPy, and those of torch for the CPU and one device."""
    # Each CUDA or XPU device has its own generator; the generator of MPS cannot be restored.
    own = device.type in ("cuda", "xpu")
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng([device] if own else [], device_type=device.type if own else "cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def seed(k: int, device: torch.device) -> None:
    """Seed the generators of torch whose states `forked` restores."""
    torch.default_generator.manual_seed(k)
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(k)


def _set(values: Iterable[tuple[Any, str, Any]]) -> None:
    """Set attributes that have another value, because setting one of a module takes long."""
    for thing, name, value in values:
        if getattr(thing, name) is not value:
            setattr(thing, name, value)


def _changes(modules: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Return the attributes and values to set for evaluation mode with gradient checkpointing."""
    changes: list[tuple[Any, str, Any]] = []
    for module in modules:
        checkpoints = module.training and module.__dict__.get("gradient_checkpointing", False)
        changes.append((module, "training", False))  # also where it is, because a loss may change the mode
        if isinstance(module, torch.nn.RNNBase):
            changes += [(module, "training", True), (module, "dropout", 0.0)]
        if checkpoints and is_kind(module, "transformers.modeling_layers.GradientCheckpointingLayer"):
            changes.append((module, "training", True))
            changes.append((module, "_gradient_checkpointing_func", partial(_checkpoint, module)))
        # With a cache of transformers, packed texts attend to each other, and checkpoints recompute with the
        # cache of the first pass.
        config = module.__dict__.get("config")
        if getattr(config, "use_cache", False) and is_kind(config, *_CONFIGS):
            changes.append((config, "use_cache", False))
    return changes


def _checkpoint(layer: torch.nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """Checkpoint a layer; run its forward pass and its recomputation in evaluation mode.

    At other times the layer is in training mode, because transformers checkpoints only in training mode.
    """

    def evaluated(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(evaluated, *args, use_reentrant=False)
