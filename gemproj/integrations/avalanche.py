"""GEM and A-GEM as plugins of Avalanche's strategies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

try:
    from avalanche.models import avalanche_forward
    from avalanche.training.plugins import SupervisedPlugin
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.avalanche needs Avalanche: pip install '.[avalanche]' in a checkout of gemproj."
    ) from error

import torch
from torch import Tensor

from gemproj._checks import check_count, check_number
from gemproj.methods import AnyMethod
from gemproj.torch import EpisodicMemory
from gemproj.torch.changes import On
from gemproj.torch.distributed import everyone
from gemproj.torch.gem import Keeper
from gemproj.torch.keywords import suggesting
from gemproj.torch.losses import model_loss


class _Plugin(Keeper, SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """Base of GEM and A-GEM: a memory that is filled after each experience."""

    def __init__(self, patterns_per_experience: int, seed: int, **options: Any) -> None:
        check_count(patterns_per_experience, "patterns_per_experience", 1)
        SupervisedPlugin.__init__(self)
        Keeper.__init__(self, memory=EpisodicMemory(patterns_per_experience, seed=seed), **options)
        self._random = torch.Generator().manual_seed(seed)

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Attach to the model and its optimizer, which the strategy has adapted to the experience."""

        def loss(model: Any, batch: Any) -> Tensor:
            x, y, *_, task = batch
            return strategy._criterion(avalanche_forward(model, x, task), y)

        self.promise = replace(self.promise, loss=loss)
        self._attach(strategy.model, strategy.optimizer, process_group=everyone())

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Store some patterns of the experience."""
        self.remove()
        patterns = strategy.experience.dataset
        drawn = torch.randperm(len(patterns), generator=self._random)[: self.memory.per_task]
        batch = patterns.collate_fn([patterns[i] for i in drawn.tolist()])
        self.memory.add(list(batch), strategy.clock.train_exp_counter)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling, without the loss; each experience makes its own loss."""
        return super().__getstate__() | {"promise": replace(self.promise, loss=model_loss)}


class GEMPlugin(_Plugin, supports_distributed=True):  # type: ignore[call-arg]
    """GEM: one constraint for each earlier experience, and the exact projection.

    Replaces Avalanche's plugin of the same name. `memory_strength` is a margin that applies at every step,
    and there is no ridge. ``method=GEM2017(memory_strength)`` gives the numbers of Avalanche's plugin, up to
    rounding: this method has a ridge of 1e-3, and its strength applies only if a constraint is violated.
    Further differences:

    - Patterns are drawn with the plugin's own random generator.
    - Constraint gradients are computed in evaluation mode.
    - The projection also moves parameters that only past tasks use, such as their heads.
    - The projection takes place in ``optimizer.step()``, after other plugins have changed the gradient.

    Parameters
    ----------
    patterns_per_experience : int
        Number of patterns to store per experience; batches are lists ``[x, y, ..., task labels]``.
    memory_strength : float, default 0
        Lower bound of the multipliers, the margin of `gemproj.solve_dual`.
    seed : int, default 0
        Seed for the choice of patterns.
    examples, method, on, every, project, microbatch
        See `gemproj.torch.GEM`, also for the attributes; ``plugin.promise = Promise(penalty=1.0)`` sets a
        penalty.
    """

    @suggesting
    def __init__(
        self,
        patterns_per_experience: int,
        memory_strength: float = 0.0,
        *,
        seed: int = 0,
        examples: int | None = None,
        method: AnyMethod = "exact",
        on: On = "gradient",
        every: int = 1,
        project: bool = True,
        microbatch: int | None = None,
    ) -> None:
        check_number(memory_strength, "memory_strength", 0.0)
        super().__init__(
            patterns_per_experience, seed, examples=examples, weight=memory_strength, method=method, on=on,
            every=every, project=project, microbatch=microbatch,
        )  # fmt: skip


class AGEMPlugin(_Plugin, supports_distributed=True):  # type: ignore[call-arg]
    """A-GEM: one constraint, on a random sample from the memories of all experiences.

    Replaces Avalanche's plugin of the same name. The sample is drawn without replacement from the union of
    all experiences' patterns, as published. The other differences are those of `GEMPlugin`.

    Parameters
    ----------
    sample_size : int
        Number of patterns in the sample, from all experiences together.
    patterns_per_experience, seed, on, every, project, microbatch
        See `GEMPlugin`.
    """

    @suggesting
    def __init__(
        self,
        patterns_per_experience: int,
        sample_size: int,
        *,
        seed: int = 0,
        on: On = "gradient",
        every: int = 1,
        project: bool = True,
        microbatch: int | None = None,
    ) -> None:
        check_count(sample_size, "sample_size", 1)
        super().__init__(
            patterns_per_experience, seed, per="all", examples=sample_size, on=on, every=every,
            project=project, microbatch=microbatch,
        )  # fmt: skip
