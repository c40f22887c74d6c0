"""Constraint gradients: rows that share a pass, and rows with a pass each.

    python -m asv_benchmarks.reports.constraints [--out FOLDER]

Both ways take turns, and the least time of each counts. Memory is the growth of the peak of the process.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from asv_benchmarks.benchmarks.peaks import status
from asv_benchmarks.benchmarks.timing import Call, in_turn
from asv_benchmarks.reports.gpu.rows import HEAD, LABELS, WAYS, WORDS, Case, draw, loss, perceptron
from asv_benchmarks.reports.machine import describe
from asv_benchmarks.reports.tables import Table, digits, markdown
from gemproj.torch.losses import CrossEntropy

TEXT = 48  # tokens
# By model: examples of a row, and the number of rows.
CASES = {
    "MLP 784-100-100-10": [(10, 2), (10, 10), (10, 20), (100, 10)],
    "GPT-2 of 2 layers of 128, LoRA": [(1, 48), (1, 160), (2, 10), (4, 10), (4, 20), (8, 10), (16, 10)],
    "GPT-2 of 2 layers of 128, all weights": [(1, 48), (4, 10), (16, 10)],
    "GPT-2 of 6 layers of 384, LoRA": [(1, 10), (4, 10)],
}


def make(name: str) -> nn.Module:
    """Return a model of this name."""
    if name.startswith("MLP"):
        return perceptron()
    n, width = (6, 384) if "384" in name else (2, 128)
    return gpt2("ForSequenceClassification", n, width, n if "LoRA" in name else None)


def gpt2(head: str, layers: int, width: int, adapted: int | None) -> nn.Module:
    """Return a GPT-2 with random weights; all of them are trained, or adapters of the last layers."""
    import transformers
    from peft import LoraConfig, get_peft_model

    sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 32, "n_positions": TEXT}
    tokens = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **tokens, num_labels=LABELS, use_cache=False)
    model = getattr(transformers, f"GPT2{head}")(config)
    if adapted is None:
        return model
    lora = LoraConfig(
        r=8,
        target_modules=["c_attn", "c_proj"],
        layers_to_transform=list(range(layers - adapted, layers)),
        fan_in_fan_out=True,
        task_type="SEQ_CLS" if "Classification" in head else "CAUSAL_LM",
    )
    return get_peft_model(model, lora)


def measure(name: str, n: int, t: int, seconds: float) -> tuple[list[float], list[float]]:
    """Return the least seconds of each way, and the growth of memory in bytes."""
    torch.manual_seed(0)
    batches = [draw(name.startswith("MLP"), TEXT, n) for _ in range(t)]
    case = Case(make(name), batches)
    torch.autograd.grad(loss(case.model, batches[0]).sum(), case.rows[True].vector.parameters)
    before, grown = status("VmHWM"), []
    for shared in (False, True):  # the way that takes more memory is the last
        case.run(shared)
        case.run(shared)
        grown.append(status("VmHWM") - before)
    taken = in_turn({shared: Call(partial(case.run, shared)) for shared in (False, True)}, seconds)
    return [min(times) for times in taken.values()], grown


def hidden_states(layers: int, width: int, trained: int, n: int, t: int, seconds: float) -> list[str]:
    """Return a row of the table of stored tokens and stored hidden states."""
    first, model = layers - trained, gpt2("LMHeadModel", layers, width, trained).eval()
    inner: Any = model.base_model
    whole = inner.model

    def upper(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = batch["hidden"]
        for layer in whole.transformer.h[first:]:
            found = layer(hidden)
            hidden = found[0] if isinstance(found, tuple) else found
        return whole.lm_head(whole.transformer.ln_f(hidden))

    tokens, hidden = [], []
    for _ in range(t):
        ids = torch.randint(1, WORDS, (n, TEXT))
        with torch.no_grad():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states[first]
        tokens.append({"input_ids": ids, "labels": ids})
        hidden.append({"hidden": states, "labels": ids})

    def computed(batches: list[Any], loss: CrossEntropy) -> tuple[float, torch.Tensor]:
        case = Case(model, batches, loss)
        [times] = in_turn({"": Call(partial(case.run, True))}, seconds).values()
        return min(times), case.rows[True].G

    slow, G = computed(tokens, CrossEntropy(shift=True))
    fast, H = computed(hidden, CrossEntropy(upper, shift=True))
    apart = float(((G - H).norm(dim=1) / G.norm(dim=1)).max())
    return [
        f"{layers} layers of {width}, the last {trained} trained",
        *(digits(1e3 * taken) for taken in (slow, fast)),
        digits(slow / fast),
        f"{apart:.0e}",
        digits(sum(part.nbytes for batch in hidden for part in batch.values()) / 1e6),
    ]


def main(out: Path | None = None, seconds: float = 2.0) -> None:
    """Print the tables, or write them to a folder."""
    spawned = multiprocessing.get_context("spawn")
    text, short = [describe(), ""], Table("", ["", *WAYS, "ratio"])
    for threads in sorted({1, torch.get_num_threads()}):
        for name, cases in CASES.items():
            table = Table(f"{name}; {threads} thread(s); milliseconds", HEAD)
            for n, t in cases:
                # In a new process, whose memory holds nothing else.
                with ProcessPoolExecutor(1, spawned, torch.set_num_threads, (threads,)) as pool:
                    (apart, shared), peaks = pool.submit(measure, name, n, t, seconds).result()
                cells = [digits(1e3 * apart), digits(1e3 * shared), digits(apart / shared)]
                table.rows.append([str(n), str(t), *cells, *(digits(b / 1e6, 2) for b in peaks)])
                if threads > 1 and ((n, t) == (10, 10) or "2 layers of 128, LoRA" in name):
                    short.rows.append([f"{name}: {t} rows of {n} example{'s' * (n > 1)}", *cells])
            text.append(str(table))
    head = ["GPT-2", "from tokens", "from hidden states", "ratio", "difference of a row", "MB stored"]
    trunk = Table(
        f"4 rows of 8 examples of {TEXT} tokens; {torch.get_num_threads()} threads; milliseconds", head
    )
    trunk.rows += [hidden_states(*shape, 8, 4, seconds) for shape in ((6, 128, 2), (12, 768, 4))]
    texts = {
        "constraints-cpu.md": "\n".join(text),
        "constraints-summary.md": "\n".join(markdown(short.head, short.rows)),
        "cached-trunk.md": f"{text[0]}\n\n{trunk}",
    }
    for name, content in texts.items():
        print(content) if out is None else (out / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
