"""A backbone of GPT-2 medium's shape with random weights: the paper's architecture where no weights are.

Its accuracies mean nothing. Time, memory and d are those of the real one.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast, PreTrainedTokenizerFast

from examples.common import command
from examples.common.command import SetupError
from examples.lora_agnews import backbone, data, small

VOCABULARY, CONTEXT, HEAD = 50_257, 1_024, 64  # GPT-2's: tokens, positions, width of an attention head
SEED = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the model and its tokenizer; return the exit status, see `command.finish`."""
    parser = ArgumentParser("python -m examples.study.random_backbone", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write it: then --backbone FOLDER takes it")
    parser.add_argument("--layers", type=int, default=24, help="default 24")
    parser.add_argument("--width", type=int, default=1_024, help=f"a multiple of {HEAD}, default 1024")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder with vocab.json and merges.txt of GPT-2; without it, a vocabulary of the same size is "
        "learned from the articles, if they have that many different parts",
    )
    given = parser.parse_args(arguments)
    if given.layers < 1 or given.width < HEAD or given.width % HEAD:
        parser.error(f"--layers must be at least 1 and --width a multiple of {HEAD}")

    def job() -> None:
        backbone.quiet()
        if given.tokenizer:
            tokenizer = gpt2_tokenizer(given.tokenizer)
        else:
            texts = data.load(None, "--data", [1_000] * 4).texts
            tokenizer = small.train_tokenizer(texts, VOCABULARY)
        model = random_model(given.layers, given.width, tokenizer)
        model.save_pretrained(given.folder)
        tokenizer.save_pretrained(given.folder)
        print(f"{model.num_parameters():,} random weights and {len(tokenizer):,} tokens in {given.folder}")

    return command.finish(job, Console(stderr=True))


def gpt2_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return GPT-2's own tokenizer, read from its two files."""
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise SetupError(f"--tokenizer {folder} holds no {name}")
    return GPT2TokenizerFast.from_pretrained(folder)


def random_model(layers: int, width: int, tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Return a GPT-2 as it is before it has learned anything."""
    shape = GPT2Config(
        vocab_size=max(VOCABULARY, len(tokenizer)),
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=layers,
        n_head=width // HEAD,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return GPT2LMHeadModel(shape)


if __name__ == "__main__":
    sys.exit(main())
