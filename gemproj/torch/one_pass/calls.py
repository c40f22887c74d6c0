"""What the modules that own parameters were called with, and where in the graph their outputs are."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves


class NotPossible(RuntimeError):
    """The gradients cannot be taken in one pass; the message says why."""


@dataclass
class Call:
    """One call of a module that owns parameters.

    Attributes
    ----------
    module : Module
        What was called.
    arguments, spec : list, TreeSpec
        With what, flattened; tensors are detached, and share memory with those of the model.
    versions : list of int
        How often each tensor among the arguments had been changed in place.
    inputs, outputs : list of GradientEdge
        Tensors that went in and that came out, where they require a gradient.
    owned : dict
        Position of each parameter by its name within the module.
    autocast : dtype or None
        What autocast cast to.
    """

    module: nn.Module
    arguments: list[Any]
    spec: TreeSpec
    versions: list[int]
    inputs: list[GradientEdge]
    outputs: list[GradientEdge]
    owned: dict[str, int]
    autocast: torch.dtype | None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [x for x in self.arguments if isinstance(x, Tensor)]


def owners(model: nn.Module, parameters: Sequence[Tensor]) -> dict[nn.Module, dict[str, int]]:
    """Return the modules whose calls have to be recorded, and what each of them owns.

    A module that owns a parameter itself and has children that do, as attention with a projection of
    its own, counts as one with all that is below it.
    """
    position = {id(p): j for j, p in enumerate(parameters)}
    found: dict[nn.Module, dict[str, int]] = {}
    closed: set[nn.Module] = set()

    def visit(module: nn.Module, name: str) -> None:
        if module in found:
            return
        if module in closed:
            raise NotPossible(f"module {name} is part of one that owns parameters, and of another one.")
        own = {key for key, p in module._parameters.items() if p is not None and id(p) in position}
        if not own:
            for key, child in module.named_children():
                visit(child, f"{name}.{key}" if name else key)
            return
        everything = {
            key: position[id(p)]
            for key, p in module.named_parameters(remove_duplicate=False)
            if id(p) in position
        }
        if set(everything) != own:
            if module is model:
                raise NotPossible(f"the model itself, not one of its modules, owns {', '.join(sorted(own))}.")
            closed.update(m for m in module.modules() if m is not module)
        found[module] = everything

    visit(model, "")
    for module in found:
        if module in closed:
            raise NotPossible(f"a {type(module).__name__} is part of two modules that own parameters.")
    return found


@contextmanager
def recorded(owned: Mapping[nn.Module, dict[str, int]], total: int) -> Iterator[list[Call]]:
    """Record the calls of these modules, on batches of `total` examples, while the context is open."""
    calls: list[Call] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        # Positions, one row for all examples: give each its own, so that their gradients stay apart.
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].shape[:1] == (1,) and total > 1:
            return (args[0].expand(total, *args[0].shape[1:]),)
        return None

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        outputs = [get_gradient_edge(y) for y in tensors_of(output) if y.requires_grad]
        if not outputs:
            return
        arguments, spec = tree_flatten((args, kwargs))
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        inputs = [get_gradient_edge(x) for x in tensors if x.requires_grad]
        arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        device = tensors[0].device.type if tensors else "cpu"
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        versions = [x._version for x in tensors]
        calls.append(Call(module, arguments, spec, versions, inputs, outputs, owned[module], cast))

    with ExitStack() as stack:
        for module in owned:
            # First of all hooks after the call: another one may return something else.
            hook = module.register_forward_hook(after, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_pre_hook(before).remove)
        yield calls


def audit(loss: Tensor, calls: Sequence[Call], model: nn.Module, parameters: Sequence[Tensor]) -> list[bool]:
    """Return for each parameter whether the loss depends on it.

    The graph is walked twice: around the calls, where no parameter may be, and inside of them, from outputs
    to inputs, where only their own may be.

    Raises
    ------
    NotPossible
        If the loss depends on a parameter otherwise than through calls of a module that owns it.
    """
    position = {id(p): j for j, p in enumerate(parameters)}
    maker = {_key(edge): call for call in calls for edge in call.outputs}
    used: dict[int, Call] = {}
    seen: set[Node] = set()
    edges = [get_gradient_edge(loss)]
    while edges:
        stopped, leaves = _walk(edges, maker, seen)
        for leaf in leaves:
            if id(leaf) in position:
                raise NotPossible(f"{_name(leaf, model)} is used outside of the forward of its module.")
        behind = {id(maker[key]): maker[key] for key in stopped}
        edges = [edge for key, call in behind.items() if key not in used for edge in call.inputs]
        used |= behind
    reached = [False] * len(parameters)
    for call in used.values():
        _, leaves = _walk(call.outputs, {_key(edge) for edge in call.inputs}, set())
        for leaf in leaves:
            j = position.get(id(leaf))
            if j is not None and j not in call.owned.values():
                raise NotPossible(f"{_name(leaf, model)} is used in the forward of another module.")
            if j is not None:
                reached[j] = True
    return reached


def _walk(
    edges: Iterable[GradientEdge], stops: Container[tuple[Node, int]], seen: set[Node]
) -> tuple[set[tuple[Node, int]], list[Tensor]]:
    """Follow the graph from these edges; return at which stops it ended, and the leaf tensors it met."""
    stopped, leaves = set(), []
    stack = [_key(edge) for edge in edges]
    while stack:
        node, output = stack.pop()
        if (node, output) in stops:
            stopped.add((node, output))
        elif node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            stack += [(below, number) for below, number in node.next_functions if below is not None]
    return stopped, leaves


def _key(edge: GradientEdge) -> tuple[Node, int]:
    return edge.node, edge.output_nr


def _name(parameter: Tensor, model: nn.Module) -> str:
    return next((name for name, p in model.named_parameters() if p is parameter), "a parameter")


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors of a nesting of dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return [tree]
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
