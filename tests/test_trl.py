"""The supervised fine-tuning of TRL's documentation, with a promise in three added lines."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402
from frameworks import QUIET  # noqa: E402
from models import flat, language_model, tokenizer  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from gemproj.integrations.transformers import GEMCallback  # noqa: E402
from gemproj.torch import Promise  # noqa: E402
from gemproj.torch.losses import Distillation  # noqa: E402

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


def loss_on(model, dataset):
    model.eval()
    losses = []
    for text in dataset["text"]:
        ids = TOKENIZER(text, return_tensors="pt").input_ids
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss)
    return float(torch.stack(losses).mean())


@pytest.mark.filterwarnings("ignore")  # of TRL, which wants flash attention for packed rows
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True, "packing_strategy": "wrapped"},
        {"packing": True},
        {"padding_free": True, "max_length": None},
    ],
    ids=["padded to the longest", "packed", "packed without padding", "without padding"],
)
@pytest.mark.parametrize(
    "promise", [Promise(weight=1.0, examples=8), Promise(Distillation(top=5), examples=8)]
)
def test_a_script_of_the_documentation_keeps_a_promise(options, promise, tmp_path):
    first, second = texts(WORDS[:7]), texts([*WORDS[6::-1], *WORDS[7:]])
    one_row = 1 if options == {"packing": True} else None  # of several texts
    model, gem = language_model(), GEMCallback(promise, microbatch=one_row)  # 1
    trainer = fine_tune(model, first, tmp_path, [gem], **options)  # 2
    gem.end_task(trainer.get_train_dataloader(), "first")  # 3
    forgetful, start = language_model(), flat(model)
    forgetful.load_state_dict(model.state_dict())  # a deep copy would call the forward pass of the first one
    fine_tune(model, second, tmp_path, [gem], **options)
    fine_tune(forgetful, second, tmp_path, **options)
    (line,) = gem.report()
    assert line.name == "first"
    assert line.steps > 0
    assert line.would_break > 0
    assert not torch.equal(flat(model), start)
    assert loss_on(model, first) < loss_on(forgetful, first) - 0.01
