"""A keeper as a plugin of Avalanche's strategies: GEM, A-GEM, and other promises about the criterion."""

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

from gemproj._checks import check_count
from gemproj.torch.keeper import KeeperBase
from gemproj.torch.losses import model_loss
from gemproj.torch.processes import everyone
from gemproj.torch.promise import Promise


class KeeperPlugin(KeeperBase, SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """A plugin that keeps patterns of each experience, with a promise that later experiences keep.

    ::

        KeeperPlugin(Promise(weight=0.5, examples=None), limit=256, on="gradient")              # GEM
        KeeperPlugin(Promise(examples=64), limit=256, name="past", method="agem", on="gradient")  # A-GEM

    In place of Avalanche's `GEMPlugin` and `AGEMPlugin`. The weight is GEM's memory strength, and applies at
    every step; there is no ridge. ``method=GEM2017(strength)`` gives the numbers of Avalanche's GEM, up to
    rounding: that method has a ridge of 1e-3, and its strength applies only if a constraint is violated.
    Further differences: rows are computed in evaluation mode; the projection also moves parameters that only
    past experiences use, such as their heads; it takes place in ``optimizer.step()``, after other plugins
    have changed the gradient.

    Parameters
    ----------
    promise : Promise, optional
        The promise about each experience, without a loss: that is the criterion of the strategy, on batches
        ``[x, y, ..., task labels]``. As it is a mean, a tolerance needs ``microbatch=1``.
    limit : int, optional
        Number of patterns to keep per experience, chosen at random; by default all.
    name : hashable, optional
        Name of one set that grows with every experience, as in A-GEM. By default each experience is a set.
    **options
        `on`, `method`, `look`, `project` and `microbatch` of `gemproj.torch.Keeper`.
    """

    def __init__(
        self, promise: Promise | None = None, *, limit: int | None = None, name: Any = None, **options: Any
    ) -> None:
        if limit is not None:
            check_count(limit, "limit", 1)
        if promise is not None and promise.loss is not model_loss:
            raise ValueError(
                f"promise must have no loss here, which is the strategy's criterion; found {promise.loss!r}. "
                "For another one call gemproj.torch.Keeper in a plugin of your own."
            )
        SupervisedPlugin.__init__(self)
        KeeperBase.__init__(self, Promise() if promise is None else promise, **options)
        self._limit, self._name = limit, name

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Attach to the model and its optimizer, which the strategy has adapted to the experience."""

        def loss(model: Any, batch: Any) -> Tensor:
            x, y, *_, task = batch
            return strategy._criterion(avalanche_forward(model, x, task), y)

        self.promise = replace(self.promise, loss=loss)
        for kept in self.sets.values():
            kept.promise = self.promise
        self._attach(strategy.model, strategy.optimizer, group=everyone())

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Keep some patterns of the experience."""
        patterns = strategy.experience.dataset
        drawn = list(range(n := len(patterns)))
        if self._limit is not None and self._limit < n:
            drawn = torch.randperm(n, generator=self._random, device="cpu")[: self._limit].tolist()
        name = strategy.clock.train_exp_counter if self._name is None else self._name
        # As a batch, because a plugin is pickled, and a collate function may not be.
        self.keep([list(patterns.collate_fn([patterns[i] for i in drawn]))], name=name)
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling, without the loss; each experience makes its own loss."""
        promise = replace(self.promise, loss=model_loss)
        sets = {name: replace(kept, promise=promise) for name, kept in self.sets.items()}
        return super().__getstate__() | {"promise": promise, "sets": sets}
