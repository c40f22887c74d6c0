"""Time of the gradients of all past tasks: task by task, in one pass, and in two other ways.

python -m benchmarks.constraints --out docs/results/constraints-cpu.md
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, TaskType, get_peft_model
from rich.console import Console
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2ForSequenceClassification

from benchmarks.machine import describe, installed
from benchmarks.memory import peak_memory
from benchmarks.tables import Table, digits
from benchmarks.timing import Call, in_turn
from examples.lora_agnews import backbone
from gemproj.torch.constraints import ConstraintRows
from gemproj.torch.layout import Layout
from gemproj.torch.one_pass import concatenate, one_pass

Batch = dict[str, Tensor]
Losses = Callable[[Any, Batch], Tensor]  # one per example

NOTE = (
    "Milliseconds for the gradients of all t tasks, the least of 5 to 15 rounds in which the ways take "
    "turns; in brackets, how many times faster than task by task. At the largest t: memory is the peak "
    "beyond what was there before, error the largest distance of a row from that in float64, relative to "
    "its norm."
)


def perceptron() -> nn.Module:
    """Return the network that GEM was published with: two hidden layers on the pixels of a digit."""
    sizes = [nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]
    return nn.Sequential(*sizes)


def adapted_gpt2(width: int = 128) -> nn.Module:
    """Return the small GPT-2 of examples/lora_agnews with adapters and head; all weights are random."""
    config = GPT2Config(
        vocab_size=4000,
        n_positions=64,
        n_embd=width,
        n_layer=2,
        n_head=width // 32,
        activation_function="gelu_pytorch_tanh",
        num_labels=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    adapters = LoraConfig(task_type=TaskType.SEQ_CLS, **backbone.LORA)
    model = get_peft_model(GPT2ForSequenceClassification(config), adapters)
    with torch.no_grad():  # one half of an adapter starts at zero, and the other half's gradient with it
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.02)
    return model.eval()


def digit_batch(n: int) -> Batch:
    """Return images and labels."""
    return {"x": torch.randn(n, 784), "labels": torch.randint(10, (n,))}


def article_batch(n: int, length: int = 48) -> Batch:
    """Return tokens, some of them padding, and labels."""
    ids = torch.randint(2, 4000, (n, length))
    ids[: n // 2, -5:] = 0
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.randint(4, (n,))}


def digit_losses(model: Any, batch: Batch) -> Tensor:
    """Return the loss of each image."""
    return cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def article_losses(model: Any, batch: Batch) -> Tensor:
    """Return the loss of each article."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return cross_entropy(logits, batch["labels"], reduction="none")


class Problem:
    """A model, the memories of t tasks, and the rows that their gradients are written to."""

    def __init__(self, model: nn.Module, losses: Losses, batches: list[Batch]) -> None:
        self.model, self.losses, self.batches = model, losses, batches
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.rows = ConstraintRows(Layout(self.parameters))
        dtype = self.parameters[0].dtype
        self.matrix = torch.zeros(len(batches), self.rows.layout.d, dtype=dtype)
        columns = self.matrix.split([p.numel() for p in self.parameters], dim=1)
        self.out = [part.unflatten(1, p.shape) for part, p in zip(columns, self.parameters, strict=True)]

    def by_task(self) -> Tensor:
        """Pass forward and backward over one task after the other."""
        self.rows.fill(self.losses(self.model, batch).mean() for batch in self.batches)
        return self.rows.matrix

    def in_one_pass(self) -> Tensor:
        """Pass over all examples forward and backward, and sum by task."""
        one_pass(self.model, self.losses, self.batches, self.parameters, self.out)
        return self.matrix

    def one_forward(self) -> Tensor:
        """Pass over all examples forward, and for each task backward."""
        batch, counts = concatenate(self.batches)
        losses = [part.mean() for part in self.losses(self.model, batch).split(counts)]
        for k, loss in enumerate(losses):
            found = torch.autograd.grad(loss, self.parameters, retain_graph=k + 1 < len(losses))
            for out, gradient in zip(self.out, found, strict=True):
                out[k] = gradient
        return self.matrix

    def mapped(self) -> Tensor:
        """Vectorise one gradient over the tasks."""
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

        def loss(values: dict[str, Tensor], batch: Batch) -> Tensor:
            def call(*args: Any, **kwargs: Any) -> Any:
                return functional_call(self.model, values, args, kwargs)

            return self.losses(call, batch).mean()

        stacked = {key: torch.stack([batch[key] for batch in self.batches]) for key in self.batches[0]}
        found = vmap(grad(loss), in_dims=(None, 0))(trained, stacked)
        for out, gradient in zip(self.out, found.values(), strict=True):
            out.copy_(gradient)
        return self.matrix


WAYS: dict[str, Callable[[Problem], Tensor]] = {
    "task by task": Problem.by_task,
    "one pass": Problem.in_one_pass,
    "one forward, t backward": Problem.one_forward,
    "vmap of grad (torch.func)": Problem.mapped,
}


def table(
    title: str,
    model: nn.Module,
    losses: Losses,
    draw: Callable[[int], Batch],
    n: int,
    ts: list[int],
    s: float,
) -> Table:
    """Measure one model with n examples per task, each way for about s seconds."""
    result = Table(title, ["", *(f"t = {t}" for t in ts), "memory\nMB", "error"], [[way] for way in WAYS])
    for t in ts:
        problem = Problem(model, losses, [draw(n) for _ in range(t)])
        calls = {}
        for way, take in WAYS.items():
            try:
                take(problem)
                calls[way] = Call(partial(take, problem))
            except RuntimeError:  # a model that looks at its numbers cannot be vectorised
                continue
        times = {way: min(values) for way, values in in_turn(calls, s).items()}
        for line in result.rows:
            mine = times.get(line[0])
            line.append(f"{digits(1e3 * mine)} ({times['task by task'] / mine:.2f})" if mine else "fails")
    wide = [{k: x.double() if x.is_floating_point() else x for k, x in b.items()} for b in problem.batches]
    exact = Problem(copy.deepcopy(model).double(), losses, wide).by_task()
    for line in result.rows:
        if line[0] in calls:
            memory = peak_memory(calls[line[0]].run)
            error = (WAYS[line[0]](problem) - exact).norm(dim=1) / exact.norm(dim=1)
            line += ["?" if memory is None else digits(memory / 1e6, 2), f"{float(error.max()):.0e}"]
        else:
            line += ["", ""]
    return result


def main(
    t: Annotated[str, typer.Option(help="Numbers of tasks, separated by commas.")] = "2,5,10",
    n: Annotated[str, typer.Option(help="Numbers of examples per task.")] = "10,100",
    threads: Annotated[str, typer.Option(help="Numbers of threads.")] = "1,4",
    seconds: Annotated[float, typer.Option(help="A way is repeated for so long: 5 to 15 rounds.")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
) -> None:
    """Time the gradients of all past tasks."""
    backbone.quiet()
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    intro = f"{describe()} {installed('transformers')}, {installed('peft')}.\n\n{NOTE}\n"
    console.print(intro)
    torch.manual_seed(0)
    models = {
        "MLP 784-100-100-10": (perceptron(), digit_losses, digit_batch),
        "GPT-2 with LoRA, 2 layers of 128, 48 tokens": (adapted_gpt2(), article_losses, article_batch),
    }
    tables = []
    for count in map(int, threads.split(",")):
        torch.set_num_threads(count)
        for name, model in models.items():
            for examples in map(int, n.split(",")):
                title = f"{name}; {examples} examples per task; {count} thread{'s' * (count > 1)}"
                tables.append(table(title, *model, examples, [int(part) for part in t.split(",")], seconds))
                console.print(tables[-1].rich())
    if out:
        out.write_text("\n".join([intro, *(each.markdown() for each in tables)]))


if __name__ == "__main__":
    typer.run(main)
