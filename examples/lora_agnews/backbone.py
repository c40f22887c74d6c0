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
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ..common import smollm2
from ..common.command import SetupError, cache_folder
from .config import CLASSES, Config
from .data import unreachable_hub
from .stream import Split

LORA = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "modules_to_save": ["score"]}
# Adapted: all layers of the attention, and the last one of the MLP. In GPT-2, c_proj is the last one of both.
GPT2_LAYERS = ["c_attn", "c_proj"]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
# Models whose last layers alone, on stored inputs, say what the whole model says.
CUT = ("llama", "mistral", "qwen3", "smollm3")


def locate(name: str, cache: Path | None = None) -> Path:
    """Return the folder of a backbone: a local one, SmolLM2's in a cache, or a snapshot from the hub."""
    if name == "smollm2":
        return smollm2.folder(cache or cache_folder())
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
                f"{reason or str(error).splitlines()[0]}; --backbone small needs no download, and "
                "smollm2 comes from PyPI"
            ) from error
    if not (folder / "config.json").is_file():
        raise SetupError(f"backbone {folder} holds no config.json: it was not written by save_pretrained")
    return folder


def check(folder: Path, config: Config) -> None:
    """Raise `SetupError` if a backbone has too few positions, or cannot be cut."""
    shape = AutoConfig.from_pretrained(folder)
    positions = shape.max_position_embeddings
    if config.max_length > positions:
        raise SetupError(
            f"max_length must be at most {positions}, the positions of backbone {folder}, "
            f"got {config.max_length}"
        )
    if config.last_layers < shape.num_hidden_layers and shape.model_type not in CUT:
        raise SetupError(
            f"last_layers must be at least {shape.num_hidden_layers}, all that backbone {folder} has, got "
            f"{config.last_layers}: only {', '.join(CUT)} can be cut, and this is {shape.model_type}"
        )


def load(folder: Path, seed: int, config: Config) -> PeftModel:
    """Load a backbone and add adapters and a head for the classes; only these require gradients.

    This seeds torch's generator, which draws the head, the adapters, and all dropout masks of the run.
    """
    quiet()
    torch.manual_seed(seed)
    shape = _shape(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=shape, dtype=torch.float32)
    model.config.pad_token_id = _tokenizer(folder).pad_token_id
    model = _adapted(_cut(model, config))
    if not config.dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def trained(folder: Path, config: Config) -> int:
    """Return the number d of parameters that require gradients, without loading weights."""
    quiet()
    with torch.device("meta"):
        model = _adapted(_cut(AutoModelForSequenceClassification.from_config(_shape(folder)), config))
    return model.get_nb_trainable_parameters()[0]


@lru_cache(maxsize=64)  # a worker has many runs of the same tasks
def encode(split: Split, folder: Path, config: Config) -> dict[str, Tensor]:
    """Return a split as one batch of tensors, all padded to one length, so that memories can mix them."""
    is_cut = _shape(folder).num_hidden_layers > config.last_layers
    tokens = _tokenizer(folder)(
        list(split.texts),
        truncation=True,
        max_length=config.max_length,
        padding="max_length",
        padding_side="left" if is_cut else "right",  # without tokens the head takes the last position
        return_tensors="pt",
    )
    batch = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    if is_cut:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        batch = _below(folder, batch, config)
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


def _cut(model: Any, config: Config) -> Any:
    """Leave a model the layers that are trained, whose inputs are stored, as ``inputs_embeds``."""
    if model.config.num_hidden_layers > config.last_layers:
        model.model.layers = model.model.layers[-config.last_layers :]
    return model


@torch.no_grad()
def _below(folder: Path, batch: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Replace the tokens of a batch by the inputs of the layers that are trained."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).to(config.device)
    model.layers, model.norm = model.layers[: -config.last_layers], nn.Identity()
    some = zip(*(values.to(config.device).split(64) for values in batch.values()), strict=True)
    hidden = [model(**dict(zip(batch, part, strict=True))).last_hidden_state for part in some]
    return {"inputs_embeds": torch.cat(hidden)} | {name: batch[name] for name in batch if name != "input_ids"}


def _trim(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the columns that are padding in every row."""
    width, left = int(batch["attention_mask"].sum(dim=1).max()), "inputs_embeds" in batch
    columns = slice(-width, None) if left else slice(width)
    return {name: values if name == "labels" else values[:, columns] for name, values in batch.items()}
