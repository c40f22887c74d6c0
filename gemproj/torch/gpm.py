"""Gradient projection memory: no change of a weight where past inputs of its layer lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gemproj.methods._method import check_number
from gemproj.torch.hooks import before_steps
from gemproj.torch.inputs import LinearMap, linear_maps, second_moments


class SubspaceProjector:
    """Projects gradients of linear maps onto what is orthogonal to their past inputs (GPM).

    Saha, Garg and Roy (ICLR 2021). A map W keeps what it does to an input x if ``dW x = 0``. So each map
    has an orthonormal basis M of the directions that hold most of the energy of its past inputs, and
    ``dW <- dW - dW M M'``: the projection of every row of dW with equalities, `gemproj.Equality` with
    the rows of M'. Linear and Conv2d are covered, and Conv1D of transformers; the inputs of a
    convolution are its patches.

    Parameters
    ----------
    model : torch.nn.Module
    threshold : float, default 0.95
        Share of the energy (sum of squares) of a task's inputs that its subspace holds, at most 1.
        The paper takes 0.95 to 0.99 and raises it from task to task: the attribute may be changed.
    modules : iterable of torch.nn.Module, optional
        The layers to protect. By default all whose weight requires a gradient.
    bias : bool, default False
        Whether to treat biases as weights of an input that is always one. GPM has networks without
        biases; by default theirs are left alone, and move the outputs of past tasks.

    Notes
    -----
    Other parameters (embeddings, norms) are left alone too. What is projected is the gradient: SGD,
    also with momentum while the basis does not grow, steps along it; Adam and weight decay do not.

    Directions whose singular value is below about 1e-7 of the largest one are rounding and not kept: a
    second-moment matrix per map takes the place of the inputs, so memory does not grow with examples.
    All positions count, padding too. Maps that share a weight share a basis. A layer whose weight is used
    without calling the layer (those inside `torch.nn.MultiheadAttention`) is not seen; the repr tells.

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

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 0.95,
        modules: Iterable[nn.Module] | None = None,
        *,
        bias: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}.")
        self.model, self.threshold = model, threshold
        self._check_threshold()
        self._maps = linear_maps(model, modules, bias)
        self._bases = {name: _empty_basis(one) for name, one in self._maps.items()}

    def __repr__(self) -> str:
        ranks = ", ".join(f"{name!r}: {M.shape[1]} of {M.shape[0]}" for name, M in self._bases.items())
        return f"SubspaceProjector(threshold={self.threshold}, directions={{{ranks}}})"

    @property
    def bases(self) -> dict[str, Tensor]:
        """The basis of each map by the name of its module, (inputs, directions), orthonormal columns."""
        return dict(self._bases)

    def remember(self, batches: Iterable[Any], forward: Callable[[Any], Any] | None = None) -> None:
        """Add what the inputs of each map span on these batches, at the end of a task.

        The paper's rule: the fewest singular vectors of what the present basis does not cover, so that
        the basis then holds a share `threshold` of the energy. Runs in eval mode without gradients;
        modes and torch's random state are as before afterwards. After an error nothing is remembered.

        Parameters
        ----------
        batches : iterable
            Batches of examples of the task; a few hundred examples are usual.
        forward : callable, optional
            Called with each batch to run the model; by default ``model(batch)``.
        """
        self._check_threshold()
        moments = second_moments(self.model, self._maps.values(), batches, forward or self.model)
        if not moments:
            raise ValueError("batches reached none of the modules: there is nothing to remember.")
        for name, C in moments.items():
            if not bool(torch.isfinite(C).all()):
                raise ValueError(f"The inputs of module {name!r} hold NaN or infinity, or overflow.")
        self._bases |= {name: grow(self._bases[name], C, self.threshold) for name, C in moments.items()}

    @torch.no_grad()
    @torch.compiler.disable
    def project_(self) -> None:
        """Take out of the ``.grad`` of every map, in place, what acts on its past inputs."""
        for name, one in self._maps.items():
            M, gradient = self._bases[name], one.gradient()
            if gradient is None or not M.shape[1]:
                continue
            with torch.autocast(M.device.type, enabled=False):
                step = (gradient.to(M.dtype) @ M) @ M.mT
            one.subtract_(step.to(gradient.dtype))

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Project before every ``optimizer.step()`` from now on, and after every call of a closure.

        Returns
        -------
        handle
            Call ``handle.remove()`` to detach.
        """
        return before_steps(optimizer, lambda _: self.project_())

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the bases: tensors by name, which ``torch.load(..., weights_only=True)`` takes."""
        return {
            "threshold": self.threshold,
            "bases": {name: M.clone() for name, M in self._bases.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the devices of the weights.

        Raises
        ------
        ValueError
            For the state of something else, or of the projector of another model.
        """
        lacking = {"threshold", "bases"} - state.keys()
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not of a SubspaceProjector.")
        given = state["bases"]
        sizes = {name: one.size for name, one in self._maps.items()}
        found = {name: M.shape[0] for name, M in given.items()}
        if found != sizes:
            odd = sorted(n for n in sizes.keys() | found.keys() if sizes.get(n) != found.get(n))
            raise ValueError(
                f"state belongs to another model, or to other options: modules {', '.join(odd)} differ."
            )
        self.threshold = state["threshold"]
        self._bases = {name: given[name].to(M, copy=True) for name, M in self._bases.items()}

    def _check_threshold(self) -> None:
        check_number(self.threshold, "threshold", 0.0, strict=True)
        if self.threshold > 1.0:
            raise ValueError(f"threshold must be at most 1, all of the energy; found {self.threshold}.")


def grow(M: Tensor, C: Tensor, threshold: float) -> Tensor:
    """Return M with the directions added that it lacks to hold a share `threshold` of the energy of C.

    Parameters
    ----------
    M : tensor, shape (n, k)
        Orthonormal columns.
    C : tensor, shape (n, n)
        Sum of ``x x'`` over inputs x; its trace is their energy.
    """
    n, energy, wide = len(C), torch.trace(C), M.to(C.dtype)
    outside = C - wide @ (wide.mT @ C)
    outside = outside - (outside @ wide) @ wide.mT
    values, vectors = torch.linalg.eigh((outside + outside.mT) / 2.0)
    # Smallest first, so sums are what is lost by leaving out so many; below the cutoff it is all rounding.
    values = torch.where(values > n * torch.finfo(C.dtype).eps * energy, values, torch.zeros_like(values))
    left_out = int((values.cumsum(0) <= (1.0 - threshold) * energy).sum())
    left_out = max(left_out, M.shape[1])  # there are no more than n directions
    added = vectors[:, left_out:].flip(1)
    for _ in range(2):  # eigenvectors of small values lean towards the basis by rounding
        added = torch.linalg.qr(added - wide @ (wide.mT @ added))[0]
    return torch.cat([M, added.to(M.dtype)], dim=1)


def _empty_basis(one: LinearMap) -> Tensor:
    narrow = one.weight.dtype not in (torch.float32, torch.float64)
    dtype = torch.float32 if narrow else one.weight.dtype
    return torch.empty(one.size, 0, dtype=dtype, device=one.weight.device)
