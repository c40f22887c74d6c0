"""What is special to the Trainer: its data, logs, clipping and checkpoints, adapters, checkpointed layers.

What holds in every framework is in test_frameworks.py.
"""

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from frameworks import CLIP, QUIET, BreakingOff, Transformers, batches
from loops import flat, sgd
from models import adapted, language_model, tokenizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.data import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding
from transformers.trainer_utils import default_compute_objective

from gemproj.integrations.texts import TEXT, Examples
from gemproj.integrations.transformers import KeeperCallback, _place
from gemproj.torch import Keeper, Promise
from gemproj.torch.losses import Distillation

pytestmark = pytest.mark.usefixtures("fresh_state")


class Watching(TrainerCallback):
    """Keeps what other callbacks see: a reporting callback, as `report_to` adds it."""

    def __init__(self, keeper):
        self.keeper, self.logs, self.steps, self.norms = keeper, [], [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.norms.append(args.max_grad_norm)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.norms.append(args.max_grad_norm)
        self.steps.append(self.keeper.last)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_logs_hold_means_over_the_steps_since_the_last(tmp_path):
    driver = Transformers(tmp_path)
    for k in range(2):
        driver.keep(batches(k)[:1])
    with pytest.raises(ConnectionError):
        driver.train(BreakingOff(batches(2)), logging_steps=9)  # whose step is in no log
    early, late = Watching(driver.keeper), Watching(driver.keeper)
    trainer = driver.trainer(batches(2, 12), late, eval_strategy="steps", eval_steps=4, logging_steps=4)
    trainer.callback_handler.callbacks.insert(0, early)
    trainer.train()
    assert trainer.callback_handler.callbacks[0] is driver.keeper
    assert trainer.callback_handler.callbacks.count(driver.keeper) == 1
    assert len(late.steps) == 6
    assert sum(p.num_violated for p in late.steps[:4]) > 0
    names = {"violations": "num_violated", "active": "num_active", "cosine": "cosine", "seconds": "seconds"}
    for history in (early.logs, late.logs, trainer.state.log_history):
        first, last = (next(log for log in history if key in log) for key in ("loss", "train_loss"))
        for log, part in ((first, late.steps[:4]), (last, late.steps[4:])):
            means = {name: sum(getattr(p, key) for p in part) / len(part) for name, key in names.items()}
            means["worst_cosine"] = min(p.worst_cosine for p in part)
            assert {name: log[f"keep/{name}"] for name in means} == pytest.approx(means)
        assert first["grad_norm"] > CLIP
        assert "grad_norm" not in last
        assert not any(key.startswith("keep/") for log in history if "eval_loss" in log for key in log)


@pytest.mark.parametrize(
    ("skipped", "optim"), [(0, "adamw_torch"), (1, "adamw_torch_fused"), (2, "adamw_torch")]
)
def test_a_step_that_the_scaler_skips_is_not_in_the_logs(skipped, optim, tmp_path):
    driver, data = Transformers(tmp_path, precision="fp16"), batches(1, dtype=torch.float32)
    driver.keep(batches(0, dtype=torch.float32))
    data[2 * skipped]["x"][0] = float("inf")
    logs = driver.train(data, optim=optim)
    assert ["keep/cosine" in log for log in logs] == [step != skipped for step in range(3)]
    norms = [log.get("grad_norm", float("nan")) for log in logs]
    assert [norm == norm for norm in norms] == [step != skipped for step in range(3)]


def test_the_trainer_does_not_clip_and_loses_no_option(tmp_path):
    class Failing(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            raise ConnectionError

    driver = Transformers(tmp_path)
    watching = Watching(driver.keeper)
    driver.keep(batches(0))
    driver.train(batches(1), watching, save=True)
    args, saved = driver.now.args, torch.load(tmp_path / "checkpoint-3/training_args.bin", weights_only=False)
    assert watching.norms == [0.0, CLIP] * 3
    assert args.max_grad_norm == saved.max_grad_norm == CLIP
    for again in (driver.keeper, KeeperCallback(promise=Promise())):
        with pytest.raises(ConnectionError):
            driver.train(batches(1), Failing())
        broken = driver.now.args
        assert broken.max_grad_norm == 0.0
        for found in (broken, copy.deepcopy(broken), pickle.loads(pickle.dumps(broken))):
            Trainer(driver.model, found, callbacks=[again])  # a new one, also with a new callback
            assert type(found.max_grad_norm) is float
            assert found.max_grad_norm == CLIP


def test_a_training_that_stops_within_a_step_saves_the_norm(tmp_path):
    class Stopping(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            control.should_training_stop = control.should_save = state.global_step == 1

    driver = Transformers(tmp_path)
    driver.train(batches(1), Stopping())
    saved = torch.load(tmp_path / "checkpoint-1/training_args.bin", weights_only=False)
    assert [type(args.max_grad_norm) for args in (driver.now.args, saved)] == [float, float]


@pytest.mark.parametrize("named", [3, 6, None])
def test_a_checkpoint_elsewhere_is_that_of_the_training(named, tmp_path):
    """Whatever the arguments say, and whatever other run was saved in the folder of this one."""
    folders = [tmp_path / name for name in ("whole", "resumed", "resumed")]
    whole, other, resumed = (Transformers(folder, Promise(examples=3)) for folder in folders)
    for driver, k in ((whole, 0), (other, 1), (resumed, 0)):
        driver.keep(batches(k)[:1])
    for driver in (whole, other):
        driver.train(batches(1), save=True, epochs=2)
    changes = {"resume_from_checkpoint": str(whole.folder / f"checkpoint-{named}")} if named else {}
    trainer = resumed.trainer(batches(1), num_train_epochs=2, **changes)
    folder = whole.folder / "checkpoint-3"
    trainer.train(resume_from_checkpoint=str(folder))
    assert torch.equal(flat(resumed.model), flat(whole.model))
    (folder / "keeper.pt").rename(folder / "keeper_rank0.pt")
    with pytest.raises(FileNotFoundError, match="with the same number of processes"):
        resumed.keeper._find(SimpleNamespace(resume_from_checkpoint=str(folder)), 3)
    (folder / "keeper_rank0.pt").unlink()
    with pytest.raises(ValueError, match=r"resumes at step 3, .* or with save_only_model, begin a training"):
        trainer.train(resume_from_checkpoint=str(folder))


def test_a_state_is_written_beside_an_optimizers_state_only(tmp_path):
    """Not beside a model alone, nor in a search, which has folders of its own."""
    driver = Transformers(tmp_path)
    driver.keep(batches(0)[:1])
    driver.train(batches(1), save=True)
    args, state = driver.now.args, driver.now.state
    for where, name in ((args, "save_only_model"), (state, "is_hyper_param_search"), (args, "other")):
        for file in tmp_path.glob("*/keeper*"):
            file.unlink()
        setattr(where, name, True)
        driver.keeper.on_save(args, state, None)
        assert len([*tmp_path.glob("*/keeper*")]) == (name == "other")
        setattr(where, name, False)


def test_steps_out_of_sight_are_reported(tmp_path):
    class Elsewhere(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            driver.keeper.remove()

    driver = Transformers(tmp_path)
    with pytest.raises(RuntimeError, match=r"optim=.* are not taken by optimizer"):
        driver.train(batches(0), Elsewhere())


# --- what is kept -------------------------------------------------------------------------------

WORDS = ["red", "green", "blue", "black", "white"]


def texts(n=12):
    return [" ".join(WORDS[(k + j) % 5] for j in range(2 + k % 4)) for k in range(n)]


def kept_by(data, folder, promise=None, model=None, resume=None, **options):
    """Fine-tune a tiny language model for some steps while data are kept; return the callback and the Trainer."""
    keeper = KeeperCallback(data, promise, **options)
    trainer = fine_tuning(language_model() if model is None else model, keeper, folder)
    trainer.train(resume_from_checkpoint=resume)
    return keeper, trainer


def fine_tuning(model, keeper, folder, collate=DataCollatorForSeq2Seq):
    words, options = tokenizer(WORDS), {"max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    tokens = [words(text)["input_ids"] for text in texts(8)[::-1]]
    new = [{"input_ids": ids, "labels": ids} for ids in tokens]
    if collate is DataCollatorWithPadding:  # of a classifier
        new = [{"input_ids": ids, "label": k % 2} for k, ids in enumerate(tokens)]
    options = QUIET | options | {"per_device_train_batch_size": 4, "learning_rate": 0.01}
    return Trainer(
        model, TrainingArguments(str(folder), **options), train_dataset=new, data_collator=collate(words),
        processing_class=words, callbacks=[keeper],
    )  # fmt: skip


class Once(torch.utils.data.IterableDataset):
    """A stream that can be read once."""

    def __init__(self, data):
        self.left = iter(data)

    def __iter__(self):
        return self.left


def forms():
    """Return the same texts as all forms in which they may be kept."""
    datasets, words = pytest.importorskip("datasets"), tokenizer(WORDS)
    plain = texts()
    tokens = [{"input_ids": words(text)["input_ids"], "extra": 1} for text in plain]
    rows = datasets.Dataset.from_dict({"text": plain, "other": plain})
    talks = [[{"role": "user", "content": text}] for text in plain]
    halves = [{"prompt": text[:3], "completion": text[3:]} for text in plain]
    chosen = [{"prompt": text[:3], "chosen": text[3:], "rejected": " red"} for text in plain]
    judged = [one | {"label": k % 2} for k, one in enumerate(halves)]
    labelled = [dict.fromkeys(("input_ids", "labels"), one["input_ids"]) for one in tokens]
    loader = DataLoader(labelled, 4, collate_fn=DataCollatorForSeq2Seq(words))
    return {
        "texts": plain, "column": rows["text"], "dataset": rows, "conversations": talks,
        "stream": rows.to_iterable_dataset(),
        "messages": [{"messages": one} for one in talks], "halves": halves, "loader": loader,
        "preferences": chosen, "prompts": [{"prompt": text} for text in plain], "judged": judged,
        "rated": [{"text": text, "label": 1, "labels": [0, 1]} for text in plain],
        "tokenised": tokens, "tokenised dataset": datasets.Dataset.from_list(labelled),
        "tokenised stream": datasets.Dataset.from_list(labelled).to_iterable_dataset(),
        "tokens read once": Once(tokens),
        "stream for the collator": Once([one | {"token_type_ids": [0] * len(one["input_ids"])} for one in labelled]),
    }  # fmt: skip


def test_texts_examples_and_loaders_are_kept_alike(tmp_path):
    found = {}
    for name, data in forms().items():
        told = pytest.warns(UserWarning, match="prompts only: .* Add a column completion")
        with told if name == "prompts" else nullcontext():
            keeper, trainer = kept_by(data, tmp_path / name)
        assert len(keeper.sets["kept"]) == 12
        assert keeper.report()["kept"].steps == 4
        found[name] = flat(trainer.model)
    expected = found.pop("texts")
    assert not torch.equal(expected, flat(language_model()))
    for name, weights in found.items():
        assert torch.equal(weights, expected), name


def test_texts_resume_and_are_cut_and_those_that_are_no_list_are_refused(tmp_path):
    data = [*texts(), "red " * 16]
    for promise in (None, Promise()):
        with pytest.warns(UserWarning, match="2 of 15 examples of 'kept' have no label"):
            keeper, _ = kept_by(["", "  ", *data], tmp_path / "short", promise)
    keeper.keep(texts(5), name="later")  # when training has ended
    whole, trainer = kept_by(data[:-1], tmp_path, limit=7)
    (one,) = whole.sets.values()
    assert len(one) == 7
    again, resumed = kept_by(None, tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert torch.equal(flat(resumed.model), flat(trainer.model))
    assert again.report()["kept"].steps == whole.report()["kept"].steps == 4
    with pytest.raises(ValueError, match="waits for a training: resume one from the checkpoint"):
        KeeperCallback(data).load_state_dict(torch.load(tmp_path / "checkpoint-2" / "keeper.pt"))
    with pytest.warns(UserWarning, match="examples of 'kept' that are in the checkpoint; the other ones"):
        kept_by(data[:-1][::-1], tmp_path, limit=7, resume=str(tmp_path / "checkpoint-2"))
    for wrong, text in (
        ("red", "one text"),
        ([{"role": "user", "content": "red"}], "one conversation"),
        ((text for text in data), r"found a generator. Pass list\(texts\)"),
        ({"a": DataLoader(data)}, r"Call keep\(one, name=...\) for each"),
        (0.02, "Pass promise=0.02"),
        (Promise(), r"Pass promise=Promise\("),
    ):
        with pytest.raises(TypeError, match=text):
            kept_by(wrong, tmp_path / "wrong")


def test_messages_with_other_keys_are_refused():
    words = tokenizer(WORDS)
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    made, asked = examples(language_model(), words), {"role": "user", "content": "red"}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "red"}}]}
    assert made.of([[asked, call]])[0][0][TEXT]["input_ids"] == [2]
    for keys in ({"role": "user", "contents": "red"}, {"from": "human", "value": "red"}):
        with pytest.raises(ValueError, match=f"must have role and content; found {', '.join(keys)}"):
            made.of([{"messages": [asked, keys]}])[0][0]


def examples(model, words, loader=None, max_length=None, removes=True, **more):
    """Return what makes examples for a Trainer with these arguments."""
    args = SimpleNamespace(max_length=max_length, label_names=None, remove_unused_columns=removes, **more)
    return Examples(model, words, args, loader)


def test_texts_end_with_special_tokens_and_templates_write_their_own():
    """Both are cut to what the training or the model allows, whichever is said."""
    processors = pytest.importorskip("tokenizers").processors
    words, model = tokenizer(WORDS), language_model()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", 1)]
    )
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    talk = [{"role": "user", "content": "red green blue"}]
    for most, allowed, ended, plain in (
        (99, None, [2, 3, 4, 1], [2, 3, 4]),
        (3, None, [2, 3, 1], [2, 3, 4]),
        (99, 2, [2, 1], [2, 3]),
    ):
        words.model_max_length = most
        cut = pytest.warns(UserWarning, match="Texts that are longer than")
        with cut if len(ended) < 4 else nullcontext():
            made = [examples(model, words, None, allowed).of([one])[0][0] for one in ("red green blue", talk)]
        assert [one[TEXT]["input_ids"] for one in made] == [ended, plain]


def test_texts_of_pandas_and_those_of_another_column():
    pandas, plain = pytest.importorskip("pandas"), texts()
    made = examples(language_model(), tokenizer(WORDS), max_length=2, dataset_text_field="said")
    frame = pandas.DataFrame({"said": plain, "prompt": "red"}, index=range(3, 15))
    with pytest.warns(UserWarning, match="longer than 2 tokens"):
        expected, *found = (list(made.of(data)[0]) for data in (plain, frame, frame["said"]))
    assert found == [expected, expected]


@pytest.mark.parametrize(("kind", "most"), [("gpt2", 16), ("roberta", 14), ("gpt2 with a prompt", 12)])
def test_texts_end_where_the_model_has_no_more_positions(kind, most):
    name, _, prompt = kind.partition(" ")
    model = language_model(name, **({"pad_token_id": 1, "is_decoder": True} if name == "roberta" else {}))
    if prompt:
        peft = pytest.importorskip("peft")
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = peft.get_peft_model(model, config)
    with pytest.warns(UserWarning, match=f"longer than {most} tokens .* takes no longer ones"):
        one = examples(model, tokenizer(WORDS), max_length=99).of(["red " * 40])[0][0]
    ids = one[TEXT]["input_ids"]
    assert len(ids) == most
    model(torch.tensor([ids]))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.tensor([[*ids, 2]]))


def test_an_encoder_decoder_reads_one_text_and_says_another():
    made = examples(language_model("bart", **SMALL["bart"]), tokenizer(WORDS))
    expected = {"input_ids": [2, 3], "labels": [4]}
    for one in ({"prompt": "red green", "completion": "blue"}, expected | {"attention_mask": [1, 1]}):
        data, collate = made.of([one])
        batch = collate(data)
        assert {name: batch[name][0].tolist() for name in expected} == expected
    for wrong in ("red", {"text": "red"}, {"prompt": "red"}, {"input_ids": [2]}):
        with pytest.raises(ValueError, match="so data needs what it reads and what it says"):
            made.of([wrong])[0][0]


class Stream(torch.utils.data.IterableDataset):
    """Batches without a length."""

    def __iter__(self):
        for _ in range(3):
            yield {"input_ids": (ids := torch.randint(2, 7, (4, 5))), "labels": ids}


def test_streams_are_kept_and_examples_that_the_collator_does_not_take_are_named(tmp_path):
    assert len(kept_by(DataLoader(Stream(), batch_size=None), tmp_path, limit=8)[0].sets["kept"]) == 8
    with pytest.raises(TypeError, match="batch_size=None if they are batches"):
        kept_by(Stream(), tmp_path)
    # A generator of batches, of which one is looked at.
    assert len(kept_by((batch for batch in Stream()), tmp_path)[0].sets["kept"]) == 12
    for asked in ({"instruction": "red", "output": " blue"}, {"sentence": "red", "label": 1}):
        told = f"makes no batch of examples with {', '.join(asked)}: .* Pass .* prompt and completion, chosen"
        with pytest.raises(ValueError, match=told):
            kept_by([asked] * 4, tmp_path)


class Many(torch.utils.data.Dataset):
    """Twelve texts, and others beyond them."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 12

    def __getitem__(self, k):
        self.read.append(k)
        assert len(self.read) < 40
        return texts()[k % 12]


def test_of_a_data_set_of_texts_those_are_read_that_are_kept(tmp_path):
    for limit, most in ((None, 13), (4, 5)):
        data = Many()
        assert len(kept_by(data, tmp_path, limit=limit)[0].sets["kept"]) == (limit or 12)
        assert len(data.read) == most  # the first one twice


@pytest.mark.parametrize("name", ["input_features", "input_values", "image", "images", "audio", "videos"])
def test_texts_with_pictures_or_sounds_are_left_to_the_collator(name):
    made, text = examples(language_model(), tokenizer(WORDS), DataLoader([0], collate_fn=list)), texts(1)[0]
    for one in ({"text": text}, {"messages": [{"role": "user", "content": text}]}):
        rows = [one | {name: [0.5], "labels": [2]}]
        data, collate = made.of(rows)
        assert collate(list(data)) == rows


def test_pairs_of_a_data_set_are_left_to_the_collator():
    pairs = torch.utils.data.TensorDataset(torch.arange(3), torch.arange(3))
    data, collate = examples(language_model(), None, DataLoader([0], collate_fn=list)).of(pairs)
    assert collate([data[1]]) == [pairs[1]]
    loader = DataLoader([0], collate_fn=DataCollatorForSeq2Seq(tokenizer(WORDS)))
    odd = examples(language_model(), None, loader)
    with pytest.raises(ValueError, match="makes no batch of examples with tuple"):
        odd.of(pairs)[1]([pairs[1]])
    batches = [{"x": torch.ones(2, n)} for n in (3, 4)]
    unlike = examples(language_model(), None, DataLoader([0], collate_fn=torch.utils.data.default_collate))
    with pytest.raises(ValueError, match="makes no batch of examples with x: RuntimeError"):
        unlike(batches)


@pytest.mark.parametrize("metric", ["eval_loss", "keep/kept/held_out"])
def test_held_out_losses_are_those_of_the_best_model_if_it_is_loaded(metric, tmp_path):
    keeper = KeeperCallback(texts(), hold_out=0.5)
    trainer = fine_tuning(language_model(), keeper, tmp_path)
    trainer.eval_dataset = trainer.train_dataset
    best = {"load_best_model_at_end": True, "greater_is_better": metric == "eval_loss"}
    best |= {"metric_for_best_model": metric, "eval_strategy": "steps", "eval_steps": 2}
    for name, value in best.items():
        setattr(trainer.args, name, value)
    said, logs = trainer.train().metrics, trainer.state.log_history
    assert trainer.state.best_model_checkpoint.endswith("-2")
    names = [f"keep/kept/{name}" for name in ("held_out", "held_out_low", "held_out_high")]
    assert said["keep/kept/bound"] == keeper.report()["kept"].held_bound
    found = [[log[name] for name in names] for log in (said, *logs) if names[0] in log]
    last, *before, end = found
    assert tuple(last) == tuple(end) == keeper.report()["kept"].held_out
    assert last == before[0] != before[1]


def test_only_the_model_that_is_kept_is_measured_and_an_interval_of_one_example_is_not_logged(tmp_path):
    keeper, trainer = kept_by(texts(), tmp_path, hold_out=0.1)
    other = fine_tuning(language_model(seed=1), keeper, tmp_path)
    own, others = (one.evaluate(trainer.train_dataset) for one in (trainer, other))
    assert {key for key in own if key.startswith("keep/")} == {"keep/kept/held_out", "keep/kept/bound"}
    assert not any(key.startswith("keep/") for key in others)


def test_a_metric_of_which_less_is_better_is_not_taken_for_another():
    for name in ("keep/kept/held_out", "eval_keep/kept/held_out"):
        args = TrainingArguments(**QUIET, metric_for_best_model=name)
        with pytest.raises(ValueError, match=r"Set greater_is_better=False"):
            KeeperCallback(texts()).on_train_begin(args, None, None)


def test_a_search_optimises_the_same_with_a_keeper(tmp_path):
    _, trainer = kept_by(texts(), tmp_path, hold_out=0.5)
    for searches in (False, True):
        trainer.state.is_hyper_param_search = searches
        metrics = trainer.evaluate(trainer.train_dataset)
        assert "keep/kept/held_out" in trainer.state.log_history[-1]
        assert (default_compute_objective(metrics) == metrics["eval_loss"]) == searches


def test_columns_that_the_model_does_not_take_are_left_out_as_in_training():
    """Also of a model with adapters, whose forward pass takes anything."""
    model, loader = adapted(language_model(), target_modules=["q_proj"]), DataLoader([0], collate_fn=list)
    for removes, left in ((True, {"input_ids", "labels"}), (False, {"input_ids", "extra"})):
        data, _ = examples(model, None, loader, removes=removes).of([{"input_ids": [2, 3], "extra": 1}])
        assert data[0].get(TEXT, data[0]).keys() == left
    data, _ = examples(model, None, loader).of([{"input_ids": [2, 3], "completion_mask": [0, 1]}])
    assert data[0][TEXT]["labels"] == [-100, 3]  # without an option of TRL, too
    odd = [{"input_ids": [2, 3]}, {"input_ids": [2, 3], "labels": [-100, 3]}]
    for data, text in (
        (odd, "input_ids in the first one, and input_ids, labels in another one"),
        (odd[::-1], "labels"),
    ):
        with pytest.raises(ValueError, match=f"the same columns in all examples; found .*{text}"):
            list(examples(model, None, loader).of(data)[0])


@pytest.fixture
def writes(monkeypatch):
    """Have models write texts that are always the same; return a function that has them write others."""

    def replace(some=None):
        def written(model, words, n, **options):
            return some or [{"input_ids": [2 + k % 5, 3, 4]} for k in range(n)]

        monkeypatch.setattr("gemproj.integrations.transformers.write_references", written)

    replace()
    return replace


@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_references_resume_with_labels_of_their_own(kind, tmp_path, writes):
    """Not with those of the collator of the Trainer."""
    written = [{"input_ids": [2 + k % 5, 3, 4][: 2 + k % 2]} for k in range(10)]
    if kind == "bart":
        written = [one | {"labels": one["input_ids"][::-1] * 2} for one in written]
    writes(written)

    def language(words):
        collate = DataCollatorForLanguageModeling(words, mlm=False)
        return lambda examples: collate([{"input_ids": one["input_ids"]} for one in examples])

    found = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        keeper = KeeperCallback(promise=0.02 if kind == "bart" else None)
        trainer = fine_tuning(language_model(kind, **SMALL[kind]), keeper, tmp_path, language)
        trainer.train(resume_from_checkpoint=resume)
        found.append(flat(trainer.model))
        assert keeper.report()["references"].steps == 4
    assert torch.equal(*found)
    assert keeper.sets["references"].promise.allowed == (0.02 if kind == "bart" else 0.05)
    batch, _ = keeper.sets["references"].fetch([0], None)
    assert (batch["labels"].shape == batch["input_ids"].shape) == (kind == "llama")


@pytest.mark.usefixtures("writes")
def test_options_of_the_texts_that_the_model_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("gemproj.integrations.transformers._place", lambda: (0, 128))
    for options, sizes in (
        ({"name": "said", "limit": 8, "hold_out": 0.25}, {"said": (6, 2)}),
        ({}, {"references": (4, 1)}),
        ({"name": None}, {"references": (4, 1)}),
    ):
        keeper = kept_by(None, tmp_path, **options)[0]
        assert {name: (len(kept), len(kept.held)) for name, kept in keeper.sets.items()} == sizes


@pytest.mark.usefixtures("writes")
def test_texts_are_written_once_beside_other_sets_if_their_promise_compares_outputs(tmp_path):
    model, other = language_model(), language_model(seed=1)
    for promise, expected in ((None, [1, "references"]), (Promise(weight=0.5), [1])):
        keeper = KeeperCallback(promise=promise, limit=8)
        keeper.keep(texts(), name=1)
        for _ in range(2):  # the second training has the model of the first one
            fine_tuning(model, keeper, tmp_path).train()
            assert list(keeper.sets) == expected
        assert keeper.report()[1].steps == 8
    with pytest.warns(UserWarning, match="The examples of 1 were kept with another model"):
        fine_tuning(other, keeper, tmp_path).train()


def test_processes_of_tensor_parallelism_have_the_same_data(monkeypatch):
    mesh = SimpleNamespace(non_data_parallel_size=2)
    state = SimpleNamespace(process_index=5, num_processes=8, parallelism_config=mesh)
    monkeypatch.setattr("gemproj.integrations.transformers.AcceleratorState", lambda: state)
    assert _place() == (2, 4)


def test_a_classifier_keeps_what_it_says_about_texts(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.AutoConfig.for_model("bert", vocab_size=8, **sizes)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    keeper = KeeperCallback(texts(), Promise(Distillation(), tolerance=0.01))
    fine_tuning(model, keeper, tmp_path, DataCollatorWithPadding).train()
    assert keeper.report()["kept"].steps == 4
    hears = language_model()
    hears.main_input_name = "input_features"
    for one, collate in ((model, DataCollatorWithPadding), (hears, DataCollatorForSeq2Seq)):
        silent = KeeperCallback(promise=Promise(Distillation()))  # these models write no texts
        with pytest.warns(UserWarning, match="0 sets kept"):
            fine_tuning(one, silent, tmp_path, collate).train()


def test_adapters_of_a_checkpoint_are_not_new_ones(tmp_path):
    """They have learned what is apart from what the model says without them."""
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = adapted(language_model(), target_modules=["q_proj"])
        told = nullcontext() if resume else pytest.warns(UserWarning, match="model says with its adapters")
        with told:
            kept_by(texts(), tmp_path, 1e-6, model, resume)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded")
def test_a_model_that_is_dispatched_to_devices_trains(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = language_model()
    places = dict.fromkeys(("embed_tokens", "layers", "norm", "rotary_emb"), "cpu")
    places = {f"model.{name}": place for name, place in places.items()}
    model = accelerate.dispatch_model(model, places | {"lm_head": "cpu"}, force_hooks=True)
    assert len(model.hf_device_map) == 5
    keeper, trainer = kept_by(texts(), tmp_path, model=model)
    assert keeper.report()["kept"].steps == 4
    assert torch.equal(flat(trainer.model), flat(kept_by(texts(), tmp_path)[1].model))


# --- layers that are checkpointed ---------------------------------------------------------------

# Bart draws masks in its layers themselves and leaves layers out; Mamba writes a cache in evaluation mode.
BART = {"d_model": 8, "dropout": 0.5} | {
    f"{part}_{name}": n
    for part in ("encoder", "decoder")
    for name, n in (("layers", 3), ("attention_heads", 2), ("ffn_dim", 16), ("layerdrop", 0.5))
}
SMALL = {"llama": {}, "bart": BART | {"dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}}
CHECKPOINTED = {"gpt2 lora": {"n_layer": 3}, "bart": BART, "mamba": {"num_hidden_layers": 3, "state_size": 4}}
CHECKPOINTED["llama"] = {"num_hidden_layers": 3, "attention_dropout": 0.5}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_layers_are_checkpointed_in_evaluation_mode_too(name, reentrant):
    pytest.importorskip("transformers.modeling_layers")
    model = language_model(name.partition(" ")[0], **CHECKPOINTED[name]).train()
    if name.endswith("lora"):
        model = adapted(model, lora_dropout=0.5, fan_in_fan_out=True)
    ids = torch.randint(1, 20, (4, 12))
    optimizer = sgd([p for p in model.parameters() if p.requires_grad], rate=0.0)
    keeper = Keeper(model, optimizer)
    keeper.keep([{"input_ids": ids, "labels": ids}])
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        before = {m: dict(m.__dict__) for m in model.modules()}
        saved = []

        def pack(tensor, saved=saved):
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            optimizer.step()
        assert all(m.__dict__ == kept for m, kept in before.items())
        assert model.config.use_cache
        found.append((keeper.rows.G.clone(), sum(saved)))
    (rows, whole), (same, less) = found
    torch.testing.assert_close(same, rows)
    assert 2.5 * less < whole
