"""The model: a frozen GPT-2, low-rank adapters, and a linear head on the last token."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoTokenizer, GPT2ForSequenceClassification, PreTrainedTokenizerBase
from transformers.utils import logging

from . import hub
from .config import CLASSES, SetupError

LORA = {
    "r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["c_attn", "c_proj"],  # c_proj: the one of the attention and the one of the MLP
    "modules_to_save": ["score"],
    "fan_in_fan_out": True,  # GPT-2 stores its weights transposed
}


class BackboneError(SetupError):
    """There is no usable model under the given name."""


def locate(name: str) -> Path:
    """Return the folder of a backbone, a local one or a snapshot of a model on the hub.

    Raises
    ------
    BackboneError
        If there is neither; the message says what was tried.
    """
    if Path(name).is_dir():
        folder = Path(name)
    else:
        from huggingface_hub import snapshot_download

        unreachable = hub.offline()
        patterns = ["config.json", "model.safetensors", "*token*", "vocab.json", "merges.txt"]
        try:
            folder = Path(
                snapshot_download(name, allow_patterns=patterns, local_files_only=bool(unreachable))
            )
        except Exception as error:
            reason = unreachable or str(error).splitlines()[0]
            raise BackboneError(
                f"backbone {name!r} is no local folder, and no model that could be loaded from the hub: "
                f"{reason}; --backbone small needs no download"
            ) from error
    if not (folder / "config.json").is_file():
        raise BackboneError(f"backbone {folder} holds no config.json: it was not written by save_pretrained")
    return folder


def fingerprint(folder: Path) -> str:
    """Return a short hash of every file of a model's folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def quiet() -> None:
    """Silence reports that are no news: the head is new on purpose, and loading takes no time."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")


def load(folder: Path, seed: int, dropout: bool = True) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Load a backbone and give it adapters and a head.

    Parameters
    ----------
    folder : Path
        What `locate` or `pretrain.prepare` returned.
    seed : int
        Seeds torch for good: the head and the adapters, and after them every dropout mask of the run.
    dropout : bool
        Whether there are such masks.

    Returns
    -------
    model : PeftModel
        Only adapters and head require gradients.
    tokenizer : PreTrainedTokenizerBase
        Has a padding token, on the right.
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
