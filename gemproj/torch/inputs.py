"""The inputs of linear maps: what each row of a weight matrix is multiplied by, and their second moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gemproj._array import wide_dtype

_ROWS = 1 << 13  # inputs that are converted to float64 at a time


class LinearMap:
    """One weight, seen as a matrix with a row per output, and the modules that multiply by it.

    Parameters
    ----------
    name : str
        Of the first module that has the weight.
    module : Linear, Conv1D or Conv2d
    bias : bool
        Whether the bias is another column of the matrix, for an input that is always one.
    """

    def __init__(self, name: str, module: Any, bias: bool) -> None:
        self.name, self.modules = name, [module]
        self.weight, self.bias = module.weight, None
        if bias and _trains(module, "bias"):
            self.bias = module.bias
        self.transposed = _is_conv1d(module)
        self.size = self.weight.shape[0] if self.transposed else self.weight[0].numel()
        self.size += self.bias is not None

    def gradient(self) -> Tensor | None:
        """Return the gradient as a matrix (outputs, size); None where there is none."""
        grad = self.weight.grad
        if grad is None or self.bias is None:
            return None if grad is None else self._matrix(grad)
        column = torch.zeros_like(self.bias) if self.bias.grad is None else self.bias.grad
        return torch.cat([self._matrix(grad), column[:, None]], dim=1)

    def subtract_(self, step: Tensor) -> None:
        """Subtract a matrix (outputs, size) from the gradient in place."""
        if self.bias is not None:
            if self.bias.grad is not None:
                self.bias.grad -= step[:, -1]
            step = step[:, :-1]
        self.weight.grad -= step.mT if self.transposed else step.reshape(self.weight.shape)

    def inputs(self, module: Any, x: Tensor) -> Tensor:
        """Return what the rows of the matrix are multiplied by when `module` is called with x, (n, size)."""
        if isinstance(module, nn.Conv2d):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
            x = x if x.ndim == 4 else x[None]
            patches = nn.functional.unfold(
                x, module.kernel_size, dilation=module.dilation, stride=module.stride
            )
            # With groups, the patches of all groups together: a bit more than each group needs.
            width = self.weight[0].numel()
            x = patches.reshape(len(x), -1, width, patches.shape[-1]).transpose(-1, -2)
        x = x.reshape(-1, x.shape[-1])
        return x if self.bias is None else torch.cat([x, torch.ones_like(x[:, :1])], dim=1)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.mT if self.transposed else weight.reshape(len(weight), -1)


def linear_maps(model: nn.Module, modules: Iterable[nn.Module] | None, bias: bool) -> dict[str, LinearMap]:
    """Return the trainable linear maps of a model by name, those of `modules` only if given.

    Raises
    ------
    TypeError, ValueError
        For modules that are none of the model's, not linear, or frozen, and if nothing is left.
    """
    names = {module: name for name, module in model.named_modules()}
    if modules is None:
        chosen = [m for m in names if is_linear(m) and _trains(m, "weight")]
    else:
        chosen = list(modules)
        for m in chosen:
            if not isinstance(m, nn.Module) or not is_linear(m):
                found = type(m).__name__
                raise TypeError(f"modules must be Linear, Conv1D or Conv2d modules; found {found}.")
            if m not in names or not _trains(m, "weight"):
                problem = "is frozen" if m in names else "is not part of the model"
                raise ValueError(f"modules must be trainable modules of the model; {m} {problem}.")
    if not chosen:
        raise ValueError("model has no Linear, Conv1D or Conv2d whose weight requires a gradient.")
    maps: dict[int, LinearMap] = {}
    for m in chosen:
        known = maps.get(id(m.weight))
        if known is None:
            maps[id(m.weight)] = LinearMap(names[m], m, bias)
        elif m not in known.modules:
            known.modules.append(m)
    return {one.name: one for one in maps.values()}


def second_moments(
    model: nn.Module, maps: Iterable[LinearMap], batches: Iterable[Any], forward: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """Return the sum of ``x x'`` over all inputs x of each map, (size, size) in float64.

    Nothing else is kept of a batch. Maps that no forward pass reaches are left out.
    """
    moments: dict[str, Tensor] = {}

    def collect(one: LinearMap) -> Callable[..., None]:
        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"Module {one.name!r} must be called with a tensor; found {type(x).__name__}. "
                    "Pass forward, such as lambda batch: model(batch['x'])."
                )
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                rows, device = one.inputs(module, x.detach()), one.weight.device
                wide = wide_dtype(torch, device)
                total = moments.setdefault(
                    one.name, torch.zeros(one.size, one.size, dtype=wide, device=device)
                )
                for part in rows.split(_ROWS):
                    part = part.to(wide)
                    total.addmm_(part.mT, part)

        return before_forward

    with ExitStack() as hooks, _as_found(model):
        for one in maps:
            for module in one.modules:
                handle = module.register_forward_pre_hook(collect(one), with_kwargs=True)
                hooks.callback(handle.remove)
        for batch in batches:
            forward(batch)
    return moments


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; bring back modes and random state afterwards, whatever happens."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module multiplies its input by its weight."""
    return isinstance(module, (nn.Linear, nn.Conv2d)) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    # Of transformers, which need not be installed: a Linear whose weight is transposed.
    return any(
        c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__
    )


def _trains(module: nn.Module, name: str) -> bool:
    parameter = getattr(module, name, None)
    return isinstance(parameter, nn.Parameter) and parameter.requires_grad
