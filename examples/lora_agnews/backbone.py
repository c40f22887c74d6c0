"""The model: a frozen GPT-2, low-rank adapters, and a linear head on the last token."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer, GPT2ForSequenceClassification, PreTrainedTokenizerBase
from transformers.utils import logging

from .config import CLASSES, SetupError
from .data import hub_is_unreachable
from .stream import Split

LORA = {
    "r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["c_attn", "c_proj"],  # c_proj: the one of the attention and the one of the MLP
    "modules_to_save": ["score"],
    "fan_in_fan_out": True,  # GPT-2 stores its weights transposed
}


def locate(name: str) -> Path:
    """Return the folder of a backbone, a local one or a snapshot of a model on the hub.

    Raises
    ------
    SetupError
        If there is neither; the message says what was tried.
    """
    if Path(name).is_dir():
        folder = Path(name)
    else:
        from huggingface_hub import snapshot_download

        unreachable = hub_is_unreachable()
        patterns = ["config.json", "model.safetensors", "*token*", "vocab.json", "merges.txt"]
        try:
            folder = Path(
                snapshot_download(name, allow_patterns=patterns, local_files_only=bool(unreachable))
            )
        except Exception as error:
            reason = unreachable or str(error).splitlines()[0]
            raise SetupError(
                f"backbone {name!r} is no local folder, and no model that could be loaded from the hub: "
                f"{reason}; --backbone small needs no download"
            ) from error
    if not (folder / "config.json").is_file():
        raise SetupError(f"backbone {folder} holds no config.json: it was not written by save_pretrained")
    return folder


def load(folder: Path, seed: int, dropout: bool = True) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Load a backbone and give it adapters and a head; only those require gradients.

    Parameters
    ----------
    folder : Path
        What `locate` or `small.prepare` returned.
    seed : int
        Seeds torch for good: the head and the adapters, and after them every dropout mask of the run.
    dropout : bool
        Whether there are such masks.
    """
    quiet()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(seed)
    model = GPT2ForSequenceClassification.from_pretrained(
        folder, num_labels=len(CLASSES), dtype=torch.float32
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, **LORA))
    if not dropout:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return model, tokenizer


def encode(
    split: Split, tokenizer: PreTrainedTokenizerBase, max_length: int, device: torch.device
) -> dict[str, Tensor]:
    """Return a split as one batch of tensors, padded to one length everywhere: memories can mix."""
    tokens = tokenizer(
        list(split.texts), truncation=True, max_length=max_length, padding="max_length", return_tensors="pt"
    )
    return {
        "input_ids": tokens["input_ids"].to(device),
        "attention_mask": tokens["attention_mask"].to(device),
        "labels": torch.tensor(split.labels, device=device),
    }


def quiet() -> None:
    """Silence reports that are no news: the head is new on purpose, and loading takes no time."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
