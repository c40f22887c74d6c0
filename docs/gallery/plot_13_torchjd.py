"""
TorchJD with an exact projector
===============================

TorchJD's UPGrad turns several losses into one step that raises none of them. Its own projector treats small
gradients as zero, and adds a ridge. ``ConeProjector`` does neither: its answer does not depend on the
scale.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torchjd.aggregation import UPGrad

from gemproj.integrations.torchjd import ConeProjector

torch.manual_seed(0)
scales = 10.0 ** np.linspace(-4, 0, 25)
# Eight problems of three losses each; the gradient of the third is a fifth as long as that of the second, and
# nearly opposes it.
problems = [torch.randn(3, 50) - 0.8 * torch.randn(3, 50).flip(0) for _ in range(8)]
problems = [J * torch.tensor([[1.0], [1.0], [0.02]]) - 0.2 * J.roll(1, 0) for J in problems]


def worst(aggregator, scale):
    """The smallest cosine of the step with a gradient: negative if the step raises a loss."""
    found = []
    for J in problems:
        x = aggregator(scale * J / J.norm())
        found.append((J @ x / J.norm(dim=1) / x.norm()).min().item())
    return min(found)


own = [worst(UPGrad(), scale) for scale in scales]
exact = [worst(UPGrad(projector=ConeProjector()), scale) for scale in scales]

# %%
# The worst of eight problems at each scale.
figure, axes = plt.subplots()
axes.semilogx(scales, own, "s-", ms=4, color="C1", label="UPGrad()")
axes.semilogx(scales, exact, "o-", ms=4, color="C0", label="UPGrad(projector=ConeProjector())")
axes.axhline(0, color="C4", lw=1)
axes.set(xlabel="norm of the Jacobian", ylabel="worst cosine of step and gradient")
axes.legend()
figure.set_label("Worst cosine over the norm of the Jacobian: zero or more with ConeProjector at every scale")
plt.show()
