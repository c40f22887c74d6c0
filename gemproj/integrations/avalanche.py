"""GEM and A-GEM as plugins of Avalanche's strategies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

try:
    from avalanche.models import avalanche_forward
    from avalanche.training.plugins import SupervisedPlugin
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.avalanche needs Avalanche: pip install 'gemproj[avalanche]'."
    ) from error

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gemproj.methods import GEM2017, AnyMethod
from gemproj.methods._method import check_count
from gemproj.torch import EpisodicMemory, GradientProjector
from gemproj.torch.applied import Metric, On
from gemproj.torch.attached import Attached


class _Plugin(SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """What GEM and A-GEM share: a memory that is filled after each experience, an attached projector."""

    def __init__(
        self, patterns_per_experience: int, seed: int, recall: dict[str, Any], projector: dict[str, Any]
    ) -> None:
        super().__init__()
        check_count(patterns_per_experience, "patterns_per_experience", 1)
        self.memory = EpisodicMemory(patterns_per_experience, seed=seed)
        self.projector: GradientProjector | None = None
        self._random = torch.Generator().manual_seed(seed)
        self._recall, self._options = recall, projector
        self._attached: Attached | None = None

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Begin a task: by now the model and its optimizer are adapted to the experience."""
        self._detach()
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        group = torch.distributed.group.WORLD if several else None
        self.projector = GradientProjector(strategy.model.parameters(), group=group, **self._options)
        self._attached = self.projector.attach(strategy.optimizer)

    def before_training_iteration(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Compute the constraints of the step."""
        assert self.projector is not None

        def loss(model: Any, batch: Any) -> Tensor:
            x, y, *_, task = tree_map(lambda leaf: leaf.to(strategy.device), batch)
            return strategy._criterion(avalanche_forward(model, x, task), y)

        self.projector.recall(strategy.model, self._batches(), loss, **self._recall)

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Remember some patterns of the experience."""
        self._detach()
        patterns = strategy.experience.dataset
        drawn = torch.randperm(len(patterns), generator=self._random)[: self.memory.per_task]
        batch = patterns.collate_fn([patterns[i] for i in drawn.tolist()])
        self.memory.add(list(batch), strategy.clock.train_exp_counter)

    def _batches(self) -> Iterator[Any]:
        raise NotImplementedError

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.remove()
        self._attached = None


class GEMPlugin(_Plugin, supports_distributed=True):  # type: ignore[call-arg]
    """GEM: one constraint for each experience before, and the exact projection.

    Takes the place of Avalanche's plugin of this name. With ``method="gem2017"`` it gives the same numbers,
    to rounding: a ridge of 1e-3, and `memory_strength` as a lower bound that is in force only where a
    constraint is violated. By default there is no ridge, and `memory_strength` is the margin, in force at
    every step. Further differences:

    - An experience's patterns are drawn by a random state of the plugin's own.
    - Constraints are about the model in eval mode, unless `training`.
    - Parameters that only the past reaches, such as the heads of past tasks, move with the projection too.
    - It takes place in ``optimizer.step()``, after what other plugins do to the gradient.

    Parameters
    ----------
    patterns_per_experience : int
        How many patterns of each experience are remembered: a random choice of them.
    memory_strength : float, default 0
        Lower bound of the multipliers, the margin of `gemproj.solve_dual`.
    method, penalty, on, metric, interval
        As in `gemproj.torch.GradientProjector`.
    microbatch, training
        As in `gemproj.torch.GradientProjector.recall`.
    seed : int, default 0
        Of the choice of patterns.

    Attributes
    ----------
    memory : EpisodicMemory
        Lists ``[x, y, ..., task labels]``, by number of the experience.
    projector : GradientProjector or None
        That of the present or last experience; ``projector.last`` tells what a step did.
    """

    def __init__(
        self,
        patterns_per_experience: int,
        memory_strength: float = 0.0,
        *,
        method: AnyMethod = "exact",
        penalty: float | None = None,
        on: On = "gradient",
        metric: Metric = "euclidean",
        interval: int = 1,
        microbatch: int | None = None,
        training: bool = False,
        seed: int = 0,
    ) -> None:
        bounds: dict[str, Any] = {"margin": memory_strength}
        if method == "gem2017":
            method, bounds = GEM2017(memory_strength), {}
        super().__init__(
            patterns_per_experience,
            seed,
            {"microbatch": microbatch, "training": training},
            bounds | {"method": method, "penalty": penalty, "on": on, "metric": metric, "interval": interval},
        )

    def _batches(self) -> Iterator[Any]:
        return self.memory.batches()


class AGEMPlugin(_Plugin, supports_distributed=True):  # type: ignore[call-arg]
    """A-GEM: one constraint, on a random sample from the memories of all experiences.

    Takes the place of Avalanche's plugin of this name. The sample is drawn without replacement from the
    patterns of all experiences together, as published; otherwise it differs as `GEMPlugin` does.

    Parameters
    ----------
    patterns_per_experience : int
        How many patterns of each experience are remembered: a random choice of them.
    sample_size : int
        How many of them, of all experiences together, make a constraint.
    on, metric, interval
        As in `gemproj.torch.GradientProjector`.
    microbatch, training
        As in `gemproj.torch.GradientProjector.recall`.
    seed : int, default 0
        Of the choice of patterns and of the samples.

    Attributes
    ----------
    memory, projector
        As in `GEMPlugin`.
    """

    def __init__(
        self,
        patterns_per_experience: int,
        sample_size: int,
        *,
        on: On = "gradient",
        metric: Metric = "euclidean",
        interval: int = 1,
        microbatch: int | None = None,
        training: bool = False,
        seed: int = 0,
    ) -> None:
        check_count(sample_size, "sample_size", 1)
        self.sample_size = sample_size
        super().__init__(
            patterns_per_experience,
            seed,
            {"microbatch": microbatch, "training": training},
            {"on": on, "metric": metric, "interval": interval},
        )

    def _batches(self) -> Iterator[Any]:
        if len(self.memory):
            yield self.memory.sample(self.sample_size)
