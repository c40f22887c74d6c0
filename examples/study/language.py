"""Two languages of the same 32 words, how a small model learns one, and how it keeps the other.

The two previous words determine the words that may follow; half of these rules are the same in both
languages. No loss can be below 1.208 nats, the entropy of both.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from examples.common.memory import seed_draws
from gemproj.torch import Keeper, Promise
from gemproj.torch.losses import CrossEntropy, Distillation

WORDS, GROUPS, LENGTH = 32, 4, 24
CHANCES = torch.tensor([0.5, 0.25, 0.15, 0.1])  # of the four words that may follow
REFERENCE, BATCH = 48, 16


def rules(seed: int) -> list[Tensor]:
    """Return the words that may follow in X and in Y, by the group of the word before last and the last."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(2, GROUPS, WORDS, WORDS, generator=generator).argsort(-1)[..., : len(CHANCES)]
    return [x, torch.where(torch.rand(GROUPS, WORDS, 1, generator=generator) < 0.5, x, y)]


def write(rule: Tensor, language: int, n: int, seed: int) -> Tensor:
    """Write sequences: a token for the language, two random words, and words that follow by the rules."""
    generator = torch.Generator().manual_seed(seed)
    text = [torch.full((n,), WORDS + language), *torch.randint(WORDS, (2, n), generator=generator)]
    for draws in torch.multinomial(CHANCES, n * (LENGTH - 3), True, generator=generator).view(-1, n):
        text.append(rule[text[-2] % GROUPS, text[-1], draws])
    return torch.stack(text, 1)


def network() -> GPT2LMHeadModel:
    """Return a GPT-2 of one layer."""
    shape: Any = {"vocab_size": WORDS + 2, "n_positions": LENGTH, "n_embd": 64, "n_layer": 1, "n_head": 4}
    shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None, use_cache=False))


def logits(model: nn.Module, text: Tensor) -> Tensor:
    """Return the logits of all words but the first two, which follow no rule."""
    return model(input_ids=text[:, :-1]).logits[:, 2:, :WORDS]


TEXT = CrossEntropy(logits, labels=lambda text: text[:, 3:])
KL = Distillation(logits)


def learn(
    model: nn.Module,
    text: Tensor,
    steps: int,
    seed: int,
    rate: float,
    kind: str = "plain",
    loss: Any = None,
    value: float | None = None,
    reference: Any = None,
) -> None:
    """Train a model on a text; keep the reference by "replay" with a weight, or by a promise about a loss."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, fused=True)
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / steps, 1 - step / steps)
    )
    if kind == "replay":
        said, stored = KL.outputs(model, reference), drawn(len(reference), seed)
    elif loss:
        keeper = Keeper(model, optimizer, Promise(loss, examples=BATCH, tolerance=value))
        seed_draws(keeper, seed)
        keeper.keep([reference])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        total = TEXT(model, text[torch.randint(len(text), (BATCH,), generator=generator)]).mean()
        if kind == "replay":
            at = next(stored)
            outputs = [said[at]] if loss is KL else []
            total = total + value * loss(model, reference[at], *outputs).mean()
        total.backward()
        optimizer.step()
        plan.step()


def drawn(n: int, seed: int) -> Iterator[Tensor]:
    """Yield indices of n texts, a batch at a time: none is drawn again before all have been drawn."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(n, generator=generator).split(BATCH)


def texts_of(seed: int, reference: int = REFERENCE) -> dict[str, Tensor]:
    """Write texts for pretraining and fine-tuning, `reference` stored ones, and test texts of X and Y."""
    x, y = rules(seed)
    sizes = {"pretrain": (x, 0, 8192), "reference": (x, 0, reference), "x": (x, 0, 512)}
    sizes |= {"tune": (y, 1, 4096), "y": (y, 1, 512)}
    return {name: write(*size, 10 * seed + k) for k, (name, size) in enumerate(sizes.items())}


@torch.no_grad()
def losses(model: nn.Module, texts: Mapping[str, Tensor], said: Tensor) -> dict[str, float]:
    """Return the losses on X, on Y and on the reference, and the KL from the stored outputs of the latter."""
    found = {name: float(TEXT(model, texts[name]).mean()) for name in ("x", "y", "reference")}
    return found | {"kl": max(0.0, float(KL(model, texts["reference"], said).mean()))}
