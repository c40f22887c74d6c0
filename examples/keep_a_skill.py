"""Fine-tune a language model for Y and keep X."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gemproj.torch import GEM, EpisodicMemory
from gemproj.torch.losses import CrossEntropy, Distillation

WORDS, CLASSES, LENGTH, WIDTH = 32, 8, 32, 64
SHARED = 0.5
CHANCES = torch.tensor([0.5, 0.25, 0.15, 0.1])
REFERENCE, ROWS = 48, 16


def rules(seed):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randint(WORDS, (2, CLASSES, WORDS, len(CHANCES)), generator=g)
    same = torch.rand(CLASSES, WORDS, 1, generator=g) < SHARED
    return {"X": x, "Y": torch.where(same, x, y)}


def write(rule, tag, n, seed):
    g = torch.Generator().manual_seed(seed)
    first = torch.randint(WORDS, (n, 2), generator=g)
    text = [torch.full((n,), WORDS + tag), *first.unbind(1)]
    chosen = torch.multinomial(CHANCES, n * (LENGTH - 3), replacement=True, generator=g).view(-1, n)
    for one in chosen:
        text.append(rule[text[-2] % CLASSES, text[-1], one])
    return torch.stack(text, 1)


class GPT(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(WORDS + 2, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH - 1))

    def forward(self, x):
        n = x.shape[1]
        return self.head(self.blocks(self.embed(x) + self.place[:n], mask=self.mask[:n, :n], is_causal=True))


def logits(model, text):
    """Return what the model says comes next, for every position but the first two."""
    return model(text[:, :-1])[:, 2:]


TEXT = CrossEntropy(logits, labels=lambda text: text[:, 3:])
SAID = Distillation(logits)


@torch.no_grad()
def mean(loss, model, text, *said):
    return float(loss(model, text, *said).mean())


@dataclass(frozen=True)
class Method:
    name: str
    keep: Any = None
    weight: float = 0.0
    gem: Any = None
    lr: float = 3e-3


def pretrain(text, seed, steps=1000, lr=3e-3):
    torch.manual_seed(seed)
    model = GPT()
    train(model, text, steps, lr, seed)
    return model


def train(model, text, steps, lr, seed, extra=None, optimizer=None, log=None):
    g = torch.Generator().manual_seed(seed)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss = TEXT(model, text[torch.randint(len(text), (ROWS,), generator=g)]).mean()
        if extra:
            loss = loss + extra()
        loss.backward()
        optimizer.step()
        plan.step()
        if log:
            log(step)


def finetune(method, start, y, reference, steps, seed, log=None):
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=method.lr, weight_decay=0.01)
    extra = None
    begin = time.perf_counter()
    gem = None
    if method.gem is not None:
        gem = GEM(model, optimizer, method.keep, REFERENCE, rows=ROWS, on="both", **method.gem)
        gem.end_task([reference])
    elif method.keep is not None:
        memory = EpisodicMemory(REFERENCE)
        said = SAID.outputs(model, reference) if method.keep is SAID else None
        memory.add(reference, "X", outputs=said)
        def extra():
            (stored,) = memory.batches(n=ROWS)
            if said is None:
                return method.weight * TEXT(model, stored).mean()
            return method.weight * SAID(model, stored.batch, stored.outputs).mean()
    train(model, y, steps, method.lr, seed, extra, optimizer, log=(lambda s: log(s, model, gem)) if log else None)
    return model, time.perf_counter() - begin
