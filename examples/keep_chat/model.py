"""The chat model: its adapters, and its upper layers alone."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common import smollm2
from ..common.command import SetupError

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Example = dict[str, Tensor]


def locate(name: str, cache: Path) -> str:
    """Return what transformers loads: a folder, or a name on the hub; "smollm2" also comes from PyPI."""
    if name != "smollm2":
        if not Path(name).is_dir() and name.count("/") != 1:
            raise SetupError(f"model {name!r} is no folder, and no name on the hub such as {smollm2.NAME}")
        return name
    return str(smollm2.folder(cache))


def load(where: str, device: str) -> tuple[Any, Any]:
    """Return a chat model in float32 and its tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).to(device)
    except (OSError, ValueError) as error:
        raise SetupError(f"model {where!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    if not tokenizer.chat_template:
        raise SetupError(f"model {where!r} has no chat template: a chat model is needed")
    model.config.use_cache = False
    return model.eval(), tokenizer


def upper(model: Any, layers: int) -> Any:
    """Return the model's last layers and head as a model of their own, which takes ``inputs_embeds``.

    What stands below the first trained layer is a constant of each text. The inputs of the upper layers can
    be stored once, and a step passes through these layers only.
    """
    cut = copy.deepcopy(model)
    cut.model.layers = cut.model.layers[-layers:]
    cut.config.num_hidden_layers = layers
    return cut


@torch.no_grad()
def below(model: Any, layers: int, examples: Sequence[Example]) -> list[Example]:
    """Replace the tokens of texts by the inputs of the last `layers` layers."""
    found = []
    for one in examples:
        tokens = one["input_ids"][None].to(model.device)
        hidden = model(tokens, output_hidden_states=True, logits_to_keep=1).hidden_states[-layers - 1][0]
        rest = {name: value for name, value in one.items() if name != "input_ids"}
        found.append({"inputs_embeds": hidden.cpu(), **rest})
    return found


@torch.no_grad()
def check_upper(model: Any, cut: Any, layers: int, example: Example) -> None:
    """Raise if the upper layers alone do not say what the whole model says."""
    whole = model(example["input_ids"][None].to(model.device)).logits
    hidden = below(model, layers, [example])[0]["inputs_embeds"]
    apart = float((cut(inputs_embeds=hidden[None].to(model.device)).logits - whole).abs().max())
    if apart > 1e-3 * float(whole.abs().max()):
        raise SetupError(
            f"the last layers of {type(model).__name__} cannot run alone; with --form gpu all are trained"
        )


def adapted(model: Any, adapters: str) -> Any:
    """Return the model with what is trained: "lora", "osf" (orthogonal to the large weights) or "all"."""
    if adapters == "all":
        return model
    if adapters == "osf":
        from peft import OSFConfig  # in new versions only

        return get_peft_model(model, OSFConfig(target_modules=LAYERS))
    return get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=LAYERS)
    )


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Make a batch of texts of different lengths, padded on the left."""

    def padded(rows: list[Tensor], empty: int = 0) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=empty, padding_side="left")

    batch = {
        name: padded([one[name] for one in examples], -100 if name == "labels" else 0) for name in examples[0]
    }
    mask = padded([torch.ones_like(one["labels"]) for one in examples])
    return batch | {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def answer_losses(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of every labelled token, and which position has a label, (n, positions) each.

    Texts are padded on the left, so the answers are at the end, and only their logits are computed.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch["labels"]
    start = max(1, int((labels != -100).any(0).nonzero()[0]))  # nothing predicts the first token
    logits = model(**inputs, logits_to_keep=labels.shape[1] - start + 1).logits[:, :-1].float()
    labels = labels[:, start:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses, labels != -100
