"""TRL: the supervised fine-tuning of its documentation in one added argument, and preferences and rewards."""

import json

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from frameworks import QUIET
from loops import flat
from models import language_model, tokenizer
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from gemproj.integrations.texts import TEXT, Examples
from gemproj.integrations.transformers import KeeperCallback
from gemproj.torch import Promise
from gemproj.torch.losses import Distillation, model_loss

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "mat", "road", "and", "then", "up", "down", "red", "blue"]
TOKENIZER = tokenizer(WORDS)


def texts(words, n=24):
    """Texts of 3 to 9 words, each followed by one of its own."""
    follows = dict(zip(words, [*words[1:], words[0]], strict=True))
    found = []
    for k in range(n):
        text = [words[k % len(words)]]
        while len(text) < 3 + k % 7:
            text.append(follows[text[-1]])
        found.append({"text": " ".join(text)})
    return Dataset.from_list(found)


def fine_tune(model, dataset, folder, callbacks=(), **options):
    config = {"per_device_train_batch_size": 8, "num_train_epochs": 6, "learning_rate": 3e-3}
    config |= QUIET | {"max_length": 12, "bf16": False}
    arguments = SFTConfig(str(folder), gradient_checkpointing=False, **(config | options))
    trainer = SFTTrainer(
        model, args=arguments, train_dataset=dataset, processing_class=TOKENIZER, callbacks=list(callbacks)
    )
    trainer.train()
    return trainer


@torch.no_grad()
def loss_on(model, batches):
    return float(torch.stack([model_loss(model, batch) for batch in batches]).mean())


@torch.no_grad()
def drift(model, before, batches):
    """Return the mean divergence of two models, over all tokens."""
    loss = Distillation()
    return float(torch.cat([loss(model, batch, loss.outputs(before, batch)) for batch in batches]).mean())


BATCHES = {
    "padded to the longest": {},
    "packed": {"packing": True, "packing_strategy": "wrapped"},
    "packed without padding": {"packing": True},
    "without padding": {"padding_free": True, "max_length": None},
}
REPLAYED = Promise(weight=1.0, examples=8)
DISTILLED = Promise(Distillation(top=10), tolerance=0.001, examples=8)


@pytest.mark.filterwarnings("ignore")  # of TRL, which wants flash attention for packed rows
@pytest.mark.parametrize(
    ("promise", "name"), [(REPLAYED, "packed without padding"), *((DISTILLED, name) for name in BATCHES)]
)
def test_a_script_of_the_documentation_keeps_a_promise(promise, name, tmp_path):
    options = BATCHES[name]
    first, second = texts(WORDS[:7]), texts([*WORDS[6::-1], *WORDS[7:]])
    one_row = 1 if options == {"packing": True} else None  # of several texts
    model, keeper = language_model(), KeeperCallback(promise=promise, microbatch=one_row)
    trainer = fine_tune(model, first, tmp_path, [keeper], **options)
    keeper.keep(trainer.get_train_dataloader(), name="first")
    batches = list(trainer.get_train_dataloader())
    (before, forgetful), start = (language_model(), language_model()), flat(model)
    for other in (before, forgetful):
        other.load_state_dict(model.state_dict())  # a deep copy would call the forward pass of the first one
    fine_tune(model, second, tmp_path, [keeper], **options)
    fine_tune(forgetful, second, tmp_path, **options)
    line = keeper.report()["first"]
    assert line.steps > 0
    assert line.would_break > 0
    assert not torch.equal(flat(model), start)
    if promise is REPLAYED:
        assert loss_on(model.eval(), batches) < loss_on(forgetful.eval(), batches) - 0.01
    else:
        now, without = (drift(one.eval(), before.eval(), batches) for one in (model, forgetful))
        assert now < 0.0015
        assert without > 2 * now


TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ROWS = {
    "text": {"prompt": "the cat", "completion": " sat on"},
    "one text": {"text": "the cat sat"},
    "merged at the border": {"prompt": "the ca", "completion": "t sat<end>"},
    "empty": {"prompt": "", "completion": "the cat"},
    "conversation": {"prompt": TALK[:1], "completion": TALK[1:]},
    "tools": {"messages": TALK, "tools": json.dumps([TOOL]), "chat_template_kwargs": {"thinks": True}},
    "masks": {"input_ids": [2, 3, 4, 5], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]},
}
TEMPLATE = (
    "{% if tools %}{{ 'mat road ' }}{% endif %}{% if thinks %}{{ 'up ' }}{% endif %}{% for m in messages %}"
    "{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("name", "only"),
    [*((name, None) for name in ROWS if name != "tools"), ("text", False), ("tools", False), ("masks", True)],
)
def test_labels_are_those_of_trl(name, only, tmp_path):
    tokens, model = tokenizer([*WORDS, "user", "assistant"]), language_model()
    tokens.chat_template = TEMPLATE
    arguments = SFTConfig(str(tmp_path), **QUIET, max_length=12, bf16=False, completion_only_loss=only)
    rows = Dataset.from_list([ROWS[name]] * 2)
    trainer = SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokens)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    made = Examples(model, tokens, arguments, None).of(rows)[0][0][TEXT]
    assert made == {key: batch[key][0].tolist() for key in made}


def test_of_a_conversation_the_last_answer_has_labels(tmp_path):
    """Else a refusal could become less likely while its prompt, which is longer, becomes likelier."""
    tokens = tokenizer([*WORDS, "user", "assistant"])
    tokens.chat_template = TEMPLATE
    make = Examples(language_model(), tokens, SFTConfig(str(tmp_path), **QUIET, bf16=False), None)
    rows = [TALK, {"messages": TALK}, {"chosen": TALK}, ROWS["conversation"]]
    first, *others = [make.of([row])[0][0][TEXT] for row in rows]
    assert 0 < first["labels"].count(-100) < len(first["labels"])
    assert all(one == first for one in others)
    for unanswered in (TALK[:1], TALK[1:]):
        one = make.of([unanswered])[0][0][TEXT]
        assert one["labels"] == one["input_ids"]


def test_tools_are_for_templates(tmp_path):
    made, _ = Examples(language_model(), tokenizer(WORDS), SFTConfig(str(tmp_path), **QUIET), None).of(
        [{"text": "the cat", "tools": "which no template reads"}]
    )
    assert len(made[0][TEXT]["input_ids"]) == 3  # and the end


def words(start, n):
    return " ".join(WORDS[(3 * start + k) % len(WORDS)] for k in range(n))


PROMPTS = {"prompt": [words(k, 3) for k in range(24)]}
GOOD, BAD = ([" " + words(k + shift, 3) for k in range(24)] for shift in (1, 5))
SAMPLING = {"num_generations": 2, "max_completion_length": 4}
PREFERENCES = {
    "DPO": ({"chosen": GOOD, "rejected": BAD}, {"max_length": 12}),
    "KTO": ({"completion": GOOD, "label": [k % 2 == 0 for k in range(24)]}, {"max_length": 12}),
    "GRPO": ({}, SAMPLING),
}


def lengths(completions, **others):
    """Reward long completions."""
    return [float(len(text)) for text in completions]


@pytest.mark.filterwarnings("ignore")  # of TRL, about features that are new there
@pytest.mark.parametrize("name", PREFERENCES)
def test_a_promise_about_general_texts_holds_while_preferences_are_learned(name, tmp_path):
    trl = pytest.importorskip("trl")
    data, config = PREFERENCES[name]
    general = [words(k, 5) for k in range(16)]
    tokens = [{"input_ids": TOKENIZER(text).input_ids} for text in general]
    language_model().save_pretrained(tmp_path)  # a reference model is loaded from there
    config |= QUIET | {"per_device_train_batch_size": 4, "max_steps": 10, "learning_rate": 2e-2}
    losses = []
    for project in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        keeper = KeeperCallback(
            tokens if project else general, Promise(Distillation(), tolerance=0.01), project=project
        )
        config |= {"bf16": False, "gradient_checkpointing": False}
        arguments = getattr(trl, f"{name}Config")(str(tmp_path / "out"), **config)
        rewards = {"reward_funcs": lengths} if config.keys() >= SAMPLING.keys() else {}
        getattr(trl, f"{name}Trainer")(
            model, args=arguments, train_dataset=Dataset.from_dict(PROMPTS | data),
            processing_class=TOKENIZER, callbacks=[keeper], **rewards,
        ).train()  # fmt: skip
        assert keeper.report()["kept"].steps == 10
        losses.append(keeper.report()["kept"].now)
    without, kept = losses
    assert kept < 0.015 < without
