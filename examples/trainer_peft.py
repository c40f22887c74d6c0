"""A Trainer with LoRA adapters, without and with a keeper: ``python -m examples.trainer_peft``.

Each of three tasks has two classes, which differ in their words; the model chooses among all six. The model
is a tiny GPT-2, made from a configuration: nothing is downloaded.
"""

import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer, TrainingArguments

from gemproj.integrations.transformers import KeeperCallback
from gemproj.torch import Promise

from .common.toy import compare

TASKS, CLASSES, WORDS, LENGTH = 3, 6, 8, 12
VOCABULARY = 1 + CLASSES * WORDS  # 0 is padding


def write(task: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Write texts of a task's two classes: half of the words are of the class, the others of any class."""
    generator = torch.Generator().manual_seed(100 * task + seed)
    texts = []
    for label in torch.randint(2 * task, 2 * task + 2, (count,), generator=generator).tolist():
        own = torch.randint(1 + WORDS * label, 1 + WORDS * (label + 1), (LENGTH,), generator=generator)
        any_word = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        chosen = torch.rand(LENGTH, generator=generator) < 0.5
        texts.append({"input_ids": torch.where(chosen, own, any_word), "labels": label})
    return texts


def build() -> torch.nn.Module:
    """Return a tiny GPT-2 with adapters, the same one in every call; its head and embeddings are trained."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    tokens = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 0)
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, **tokens, num_labels=CLASSES))
    layers = {"target_modules": ["c_attn", "c_fc"], "modules_to_save": ["wte"]}
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, fan_in_fan_out=True, **layers))


@torch.no_grad()
def accuracy(model: torch.nn.Module, task: int) -> float:
    """Return the accuracy on unseen texts of a task, among all six classes."""
    texts = write(task, 200, seed=1)
    model.eval()
    told = model(input_ids=torch.stack([text["input_ids"] for text in texts])).logits.argmax(1)
    return float((told == torch.tensor([text["labels"] for text in texts])).float().mean())


def learn(kept: bool, steps: int = 100) -> list[float]:
    """Learn one task after the other; return the accuracy on each of them at the end."""
    model, keeper = build(), KeeperCallback(promise=Promise(examples=None)) if kept else None
    options: dict[str, Any] = {"max_steps": steps, "warmup_steps": steps // 10, "learning_rate": 5e-3}
    options |= {"per_device_train_batch_size": 16, "use_cpu": True, "disable_tqdm": True}
    options |= {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        for task in range(TASKS):
            arguments, data = TrainingArguments(folder, **options), write(task, 400, seed=0)
            callbacks = [keeper] if keeper else []
            trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
            trainer.train()
            if keeper:
                keeper.keep(trainer.get_train_dataloader(), limit=40)
    return [accuracy(model, task) for task in range(TASKS)]


if __name__ == "__main__":
    compare(learn)
