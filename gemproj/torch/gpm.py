"""Gradient projection memory: weight changes are orthogonal to past inputs of their layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gemproj._arrays import wide_dtype
from gemproj.methods._method import check_number
from gemproj.torch.constraint_gradients import check_whole, preserved_state
from gemproj.torch.optimizer_step import before_steps

_ROWS = 1 << 13  # inputs that are converted to float64 at a time


class SubspaceProjector:
    """Projects gradients of linear layers onto the complement of their past inputs (GPM).

    Saha, Garg and Roy (ICLR 2021). A weight W keeps what it does to an input x if ``dW x = 0``. So each has
    an orthonormal basis M of the directions with most of the energy of its past inputs, and
    ``dW <- dW - dW M M'``. Linear and Conv2d are covered, and Conv1D of transformers; the inputs of a
    convolution are its patches. Other parameters are left alone; the paper's networks have no biases.

    Parameters
    ----------
    model : torch.nn.Module
        All layers whose weight requires a gradient are protected.
    threshold : float, default 0.95
        Share of the energy (sum of squares) of a task's inputs in its subspace, at most 1. The paper takes
        0.95 to 0.99 and raises it from task to task: the attribute may be changed.

    Notes
    -----
    SGD steps along the projected gradient, also with momentum while the basis does not grow; Adam and weight
    decay do not. A weight that is used without calling its layer (as by `torch.nn.MultiheadAttention`) is
    not seen; the repr tells.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch import SubspaceProjector
    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> projector = SubspaceProjector(model, threshold=1.0)
    >>> projector.remember([torch.tensor([[2.0, 0.0, 0.0]])])
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> projector.project_()
    >>> model.weight.grad.abs()
    tensor([[0., 1., 1.]])
    """

    def __init__(self, model: nn.Module, threshold: float = 0.95) -> None:
        check_whole(model)
        self.model, self.threshold = model, threshold
        self._check_threshold()
        shared: dict[int, list[tuple[str, Any]]] = {}  # modules that share a weight share a basis
        for name, m in model.named_modules():
            if _trains(m):
                shared.setdefault(id(m.weight), []).append((name, m))
        if not shared:
            raise ValueError("model has no Linear, Conv1D or Conv2d whose weight requires a gradient.")
        self._layers = {named[0][0]: [m for _, m in named] for named in shared.values()}
        self._bases: dict[str, Tensor] = {}
        for name, (m, *_) in self._layers.items():
            W = _rows(m, m.weight)
            self._bases[name] = W.new_empty(W.shape[1], 0, dtype=torch.promote_types(W.dtype, torch.float32))

    def __repr__(self) -> str:
        ranks = ", ".join(f"{name!r}: {M.shape[1]} of {M.shape[0]}" for name, M in self._bases.items())
        return f"SubspaceProjector(threshold={self.threshold}, directions={{{ranks}}})"

    @property
    def bases(self) -> dict[str, Tensor]:
        """The basis of each weight by the name of its module, (inputs, directions), orthonormal columns."""
        return dict(self._bases)

    def remember(self, batches: Iterable[Any], forward: Callable[[Any], Any] | None = None) -> None:
        """Add the subspace of the inputs of each layer on these batches, at the end of a task.

        The paper's rule: the fewest singular vectors of what the basis does not cover, so that it then holds
        a share `threshold` of the energy. A few hundred examples are usual; `forward` is called with each
        batch to run the model, by default ``model(batch)``. Runs in evaluation mode; module modes and random
        state are restored. After an error nothing is remembered.
        """
        self._check_threshold()  # it may have been changed
        moments: dict[str, Tensor] = {}
        device = next(iter(self._bases.values())).device
        with preserved_state(self.model, device), torch.no_grad(), ExitStack() as hooks:
            for name, modules in self._layers.items():
                for m in modules:
                    hook = m.register_forward_pre_hook(_collector(name, moments), with_kwargs=True)
                    hooks.callback(hook.remove)
            for batch in batches:
                (forward or self.model)(batch)
        if not moments:
            raise ValueError("batches reached none of the modules: there is nothing to remember.")
        for name, C in moments.items():
            if not bool(torch.isfinite(C).all()):
                raise ValueError(f"The inputs of module {name!r} hold NaN or infinity, or overflow.")
        self._bases |= {name: grow(self._bases[name], C, self.threshold) for name, C in moments.items()}

    @torch.no_grad()
    @torch.compiler.disable
    def project_(self) -> None:
        """Remove from the ``.grad`` of every weight, in place, what acts on its past inputs."""
        for name, (m, *_) in self._layers.items():
            M, grad = self._bases[name], m.weight.grad
            if grad is not None and M.shape[1]:
                dW = _rows(m, grad)
                with torch.autocast(M.device.type, enabled=False):
                    removed = ((dW.to(M.dtype) @ M) @ M.mT).to(grad.dtype)
                grad -= removed.mT if _transposed(m) else removed.reshape(grad.shape)

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Project in every ``optimizer.step()``; call ``remove()`` of what is returned to detach."""
        return before_steps(optimizer, self.project_)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the bases: tensors by name, which ``torch.load(..., weights_only=True)`` takes."""
        return {"threshold": self.threshold, "bases": {name: M.clone() for name, M in self._bases.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the devices of the weights."""
        lacking = {"threshold", "bases"} - state.keys()
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not of a SubspaceProjector.")
        found, sizes = ({n: len(M) for n, M in bases.items()} for bases in (state["bases"], self._bases))
        if found != sizes:
            raise ValueError(f"state belongs to another model: inputs {found}, but {sizes} here.")
        self.threshold = state["threshold"]
        self._bases = {name: state["bases"][name].to(M, copy=True) for name, M in self._bases.items()}

    def _check_threshold(self) -> None:
        check_number(self.threshold, "threshold", 0.0, strict=True)
        if self.threshold > 1.0:
            raise ValueError(f"threshold must be at most 1, all of the energy; found {self.threshold}.")


def grow(M: Tensor, C: Tensor, threshold: float) -> Tensor:
    """Extend a basis M (n, k) to a share `threshold` of the energy of C (n, n), the sum of ``x x'``."""
    n, energy, wide = len(C), torch.trace(C), M.to(C.dtype)
    outside = C - wide @ (wide.mT @ C)
    outside = outside - (outside @ wide) @ wide.mT
    values, vectors = torch.linalg.eigh((outside + outside.mT) / 2.0)
    # Smallest first, so cumulative sums are the energy that is left out; below the cutoff it is rounding.
    values = torch.where(values > n * torch.finfo(C.dtype).eps * energy, values, torch.zeros_like(values))
    left_out = int((values.cumsum(0) <= (1.0 - threshold) * energy).sum())
    added = vectors[:, max(left_out, M.shape[1]) :].flip(1)  # there are no more than n directions
    for _ in range(2):  # eigenvectors of small values lean towards the basis by rounding
        added = torch.linalg.qr(added - wide @ (wide.mT @ added))[0]
    return torch.cat([M, added.to(M.dtype)], dim=1)


def patches(module: Any, x: Tensor) -> Tensor:
    """Return the vectors (n, size) that a layer multiplies the rows of its weight by, when called with x."""
    if isinstance(module, nn.Conv2d):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        x = x if x.ndim == 4 else x[None]
        x = nn.functional.unfold(x, module.kernel_size, dilation=module.dilation, stride=module.stride)
        # With groups, the patches of all groups together: a bit more than each group needs.
        x = x.reshape(len(x), -1, module.weight[0].numel(), x.shape[-1]).transpose(-1, -2)
    return x.reshape(-1, x.shape[-1])


def _collector(name: str, moments: dict[str, Tensor]) -> Callable[..., None]:
    """Return a forward hook that adds ``x x'`` over the inputs x of a module to ``moments[name]``."""

    def collect(module: Any, args: Any, kwargs: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(x, Tensor):
            found = f"Module {name!r} must be called with a tensor; found {type(x).__name__}."
            raise TypeError(found + " Pass forward, such as lambda batch: model(batch['x']).")
        with torch.autocast(x.device.type, enabled=False):
            for part in patches(module, x).split(_ROWS):
                part = part.to(wide_dtype(torch, x.device))
                moments[name] = part.mT @ part + moments.get(name, 0.0)

    return collect


def _trains(module: Any) -> bool:
    """Return whether a module multiplies its input by a weight that requires a gradient."""
    linear = isinstance(module, (nn.Linear, nn.Conv2d)) or _transposed(module)
    return linear and isinstance(module.weight, nn.Parameter) and module.weight.requires_grad


def _transposed(module: Any) -> bool:
    # Conv1D of transformers, which need not be installed: a Linear whose weight is transposed.
    return any(c.__name__ == "Conv1D" and c.__module__[:13] == "transformers." for c in type(module).__mro__)


def _rows(module: Any, weight: Tensor) -> Tensor:
    """Return the weight of a module, or its gradient, as a matrix with a row per output."""
    return weight.mT if _transposed(module) else weight.reshape(len(weight), -1)
