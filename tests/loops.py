"""Keepers and steps of training loops that the tests share, and what is seen of weights and gradients."""

import io
from dataclasses import fields

import torch
from models import loss, perceptron, rival

from gemproj.torch import Keeper, Promise


def whole(tensor):
    """Return a tensor, gathered if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(tensors):
    """Join tensors, or the parameters of a model, to one vector of float64."""
    tensors = tensors.parameters() if isinstance(tensors, torch.nn.Module) else tensors
    return torch.cat([whole(t.detach()).double().reshape(-1) for t in tensors])


def assert_same_weights(model, other, tolerance=1e-9):
    """Compare weights; the tolerance is relative to the largest, as small ones are known no better."""
    found, expected = flat(model), flat(other)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def sgd(parameters, rate=0.1, **options):
    return torch.optim.SGD(parameters, lr=rate, **options)


FIELDS = {field.name for field in fields(Promise)}


def protect(model, optimizer, loss=loss, **options):
    """Return a keeper with these options, those of its promise among them; by default GEM, on all examples."""
    own = {"examples": None} | {name: options.pop(name) for name in FIELDS & options.keys()}
    promise = loss if isinstance(loss, Promise) else Promise(loss, **own)
    return Keeper(model, optimizer, promise, **{"on": "gradient"} | options)


def begin(loss=loss, tasks=(), *, model=None, make=sgd, **options):
    """Return a model, its optimizer, and a keeper of tasks with these options; of several, names may be given."""
    model = perceptron() if model is None else model
    optimizer = make(model.parameters())
    keeper = protect(model, optimizer, loss, **options)
    for name, one in tasks.items() if isinstance(tasks, dict) else enumerate(tasks):
        keeper.keep([one], name=name)
    return model, optimizer, keeper


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def gradient(model):
    """Return the gradient as a vector; entries of parameters that have none are left out."""
    return flat(p.grad for p in trainable(model) if p.grad is not None)


def moved(model, step):
    """Take a step; return by how much it has lowered the trainable parameters."""
    before = flat(trainable(model))
    step()
    return before - flat(trainable(model))


def take(model, optimizer, batch):
    """Train on a batch; return its gradient, and the step as it is seen from outside."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    return gradient(model), moved(model, optimizer.step)


def unlearn(model, optimizer, batch, steps):
    """Train on a task that contradicts the batch."""
    for _ in range(steps):
        take(model, optimizer, rival(batch))


def through_a_file(state):
    """Return a state as it comes back from a file."""
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=True)


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
            v = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
            v_hat = v / (1 - group["betas"][1] ** float(state["step"]))
            root = torch.maximum(v_hat.sqrt().reshape(-1), least[len(parts)])
            parts.append((root + group["eps"]) / float(group["lr"]))
    return torch.cat(parts)
