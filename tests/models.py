"""Tiny models, batches and loops that the tests of training share."""

import torch
from torch.nn.functional import cross_entropy


def perceptron(dtype=torch.float64, seed=0):
    """Make a network of 6 inputs, 8 hidden units and 3 classes, the same every time."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def task(seed, n=12, dtype=torch.float64):
    """Draw a batch of a task: points, labelled by the largest of their first three coordinates."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), x[:, :3].argmax(1)


def rival(batch, shift=1):
    """Give the same points other labels: learning them raises the loss of the batch."""
    return batch[0], (batch[1] + shift) % 3


def loss(model, batch):
    """Return the mean loss of a batch, a pair or a mapping."""
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch[:2]
    return cross_entropy(model(x), y)


def flat(tensors):
    """Join tensors, or the parameters of a model, to one vector of float64."""
    tensors = tensors.parameters() if isinstance(tensors, torch.nn.Module) else tensors
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


def assert_same_weights(model, other, tolerance=1e-9):
    """Compare weights; the tolerance is relative to the largest, as small ones are known no better."""
    found, expected = flat(model), flat(other)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def rows(model, tasks, loss=loss):
    """Return the gradient of the loss of each task as a row."""
    return torch.stack([flat(torch.autograd.grad(loss(model, one), trainable(model))) for one in tasks])


def cosines(G, step):
    return (G @ step) / (G.norm(dim=1) * step.norm())


def adam_weights(model, optimizer, G):
    """Adam's metric from its published formula; its second moment is no less than those of the constraints."""
    least = G.abs().amax(0).split([p.numel() for p in model.parameters()])
    parts = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            v = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
            v_hat = v / (1 - group["betas"][1] ** float(state["step"]))
            root = torch.maximum(v_hat.sqrt().reshape(-1), least[len(parts)])
            parts.append((root + group["eps"]) / float(group["lr"]))
    return torch.cat(parts)
