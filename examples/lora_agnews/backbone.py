"""The model: a frozen causal model with low-rank adapters and a head on the last token; its batches."""

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ..common.command import SetupError
from .config import CLASSES, Config
from .data import unreachable_hub
from .stream import Split

LORA = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "modules_to_save": ["score"]}
# Adapted: all layers of the attention, and the last one of the MLP. In GPT-2, c_proj is the last one of both.
GPT2_LAYERS = ["c_attn", "c_proj"]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def locate(name: str) -> Path:
    """Return the folder of a backbone: a local one, or a snapshot of a model on the hub."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        reason = unreachable_hub()
        wanted = ["config.json", "model.safetensors", "*token*", "vocab.json", "merges.txt"]
        try:
            folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=bool(reason)))
        except Exception as error:
            raise SetupError(
                f"backbone {name!r} is no local folder, and no model that could be loaded from the hub: "
                f"{reason or str(error).splitlines()[0]}; --backbone small needs no download"
            ) from error
    if not (folder / "config.json").is_file():
        raise SetupError(f"backbone {folder} holds no config.json: it was not written by save_pretrained")
    return folder


def check(folder: Path, max_length: int) -> None:
    """Raise `SetupError` if a backbone has too few positions."""
    positions = AutoConfig.from_pretrained(folder).max_position_embeddings
    if max_length > positions:
        raise SetupError(
            f"max_length must be at most {positions}, the positions of backbone {folder}, got {max_length}"
        )


def load(folder: Path, seed: int, dropout: bool = True) -> PeftModel:
    """Load a backbone and add adapters and a head for the classes; only these require gradients.

    This seeds torch's generator, which draws the head, the adapters, and all dropout masks of the run.
    """
    quiet()
    torch.manual_seed(seed)
    shape = _shape(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=shape, dtype=torch.float32)
    model.config.pad_token_id = _tokenizer(folder).pad_token_id
    model = _adapted(model)
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def trained(folder: Path) -> int:
    """Return the number d of parameters that require gradients, without loading weights."""
    quiet()
    with torch.device("meta"):
        model = _adapted(AutoModelForSequenceClassification.from_config(_shape(folder)))
    return model.get_nb_trainable_parameters()[0]


@lru_cache(maxsize=64)  # a worker has many runs of the same tasks
def encode(split: Split, folder: Path, config: Config) -> dict[str, Tensor]:
    """Return a split as one batch of tensors, all padded to one length, so that memories can mix them."""
    tokens = _tokenizer(folder)(
        list(split.texts),
        truncation=True,
        max_length=config.max_length,
        padding="max_length",
        return_tensors="pt",
    )
    batch = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.tensor(split.labels)
    return {name: values.to(config.device) for name, values in batch.items()}


def batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy on a batch."""
    return model(**_trim(batch)).loss


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of a batch, (n, classes)."""
    inputs = {name: values for name, values in _trim(batch).items() if name != "labels"}
    return model(**inputs).logits


def quiet() -> None:
    """Silence expected warnings about the new head, and progress bars of loading."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _shape(folder: Path) -> Any:
    shape = AutoConfig.from_pretrained(folder, num_labels=len(CLASSES))
    if getattr(shape, "activation_function", None) == "gelu_new":
        # The same function as one operation, which takes less time and memory than a dozen.
        shape.activation_function = "gelu_pytorch_tanh"
    return shape


def _adapted(model: Any) -> PeftModel:
    transposed = model.config.model_type == "gpt2"  # how GPT-2 stores its weights
    layers = GPT2_LAYERS if transposed else LAYERS
    config = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=layers, fan_in_fan_out=transposed, **LORA)
    return get_peft_model(model, config)


def _trim(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the columns that are padding in every row."""
    width = int(batch["attention_mask"].sum(dim=1).max())
    return {name: values if name == "labels" else values[:, :width] for name, values in batch.items()}
