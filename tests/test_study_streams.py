"""The streams of the study: what is the same for a seed, what differs between tasks, and what is refused."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("mnist1d")

import torch

from examples.common.command import SetupError
from examples.lora_agnews import data, small
from examples.study.streams import KINDS, digits, load, prepare

SMALL = {"tasks": 3, "rows": 60, "hidden": 8}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that all tests share: what is kept there is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def options(cache):
    """Return the options of a small stream of each kind."""
    pytest.importorskip("peft")
    texts, labels = data.generate([80] * 4)
    news, own = cache / "train.csv", [cache / "first.csv", cache / "second.jsonl"]
    title, rest = [text.split(". ", 1)[0] for text in texts], [text.split(". ", 1)[1] for text in texts]
    rows = zip(labels, title, rest, strict=True)
    news.write_text("".join(f'"{label + 1}","{a}","{b}"\n' for label, a, b in rows), encoding="utf-8")
    rows = [{"text": text, "label": f"topic {label}"} for text, label in zip(texts, labels, strict=True)]
    lines = [f'{row["label"]},{k},"{row["text"]}"\n' for k, row in enumerate(rows[:40])]
    own[0].write_text("label,number,text\n" + "".join(lines), encoding="utf-8-sig")  # as spreadsheets do
    own[1].write_text("".join(json.dumps(row) + "\n" for row in rows[40:100]), encoding="utf-8")
    kept = {"cache": str(cache)}
    return {
        "permuted": SMALL,
        "rotated": SMALL,
        "split": SMALL | {"tasks": 5},
        "mnist1d": SMALL | kept,
        "agnews": {"tasks": 3, "preset": "mini", "data_folder": str(cache)} | kept,
        "files": {"paths": [str(path) for path in own], "preset": "mini"} | kept,
    }


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def rows_of(batch):
    """Return the rows of a batch as a set."""
    return {tuple(row.flatten().tolist()) for row in next(iter(batch.values()))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_decides_everything_and_draws_from_its_own_generators(kind, options):
    before = generators()
    assert prepare(kind, **options[kind]) == load(kind, 3, **options[kind]).hashes
    streams = [load(kind, seed, **options[kind]) for seed in (3, 3, 4)]
    assert generators() == before
    first, again, other = (
        [tensor for task in s.tasks for part in (task.train, task.test) for tensor in part.values()]
        + list(s.model.parameters())
        for s in streams
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.shape == b.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_have_one_shape_and_unseen_test_rows_and_differ(kind, options):
    stream = load(kind, 0, **options[kind])
    assert len({task.name for task in stream.tasks}) == len(stream.tasks) == options[kind].get("tasks", 2)
    logits = stream.logits(stream.model, stream.tasks[0].train)
    for task in stream.tasks:
        assert not rows_of(task.train) & rows_of(task.test)
        for part in (task.train, task.test):
            assert part["labels"].dtype == torch.int64
            assert int(part["labels"].max()) < logits.shape[1]
            assert {len(tensor) for tensor in part.values()} == {len(part["labels"])}
            assert [tensor.shape[1:] for tensor in part.values()] == [
                tensor.shape[1:] for tensor in stream.tasks[0].test.values()
            ]
    assert rows_of(stream.tasks[0].test) != rows_of(stream.tasks[1].test)
    assert logits.requires_grad
    assert stream.model.training


@pytest.mark.parametrize("kind", ["permuted", "rotated", "split", "mnist1d"])
def test_features_are_scaled_and_the_rows_as_many_as_asked_for(kind, options):
    stream = load(kind, 0, **options[kind])
    x = torch.cat([task.train["x"] for task in stream.tasks])
    assert x.dtype == torch.float32
    assert len(x) == len(stream.tasks) * 60
    assert abs(float(x.mean())) < 0.2
    assert abs(float(x.std()) - 1) < 0.2


def test_permutations_keep_the_values_and_rotations_turn_further_from_task_to_task():
    permuted, rotated = (getattr(digits, kind)(0, 10, 5, 4).tasks for kind in ("permuted", "rotated"))
    for task in permuted:
        assert torch.equal(task.test["x"].sort(dim=1).values, permuted[0].test["x"].sort(dim=1).values)
    x, _ = digits._pictures()
    right_angles = [torch.from_numpy(digits._scale(np.rot90(x[1], k, axes=(1, 2)))) for k in range(3)]
    for task, nearest in ((0, 0), (4, 1), (5, 1), (9, 2)):  # below 18, around 90, above 162 degrees
        distances = [float((rotated[task].test["x"] - right).abs().mean()) for right in right_angles]
        assert distances.index(min(distances)) == nearest


def test_split_deals_every_class_out_once():
    for seed in (0, 1):
        tasks = digits.split(seed, hidden=4).tasks
        classes = [sorted(set(task.train["labels"].tolist())) for task in tasks]
        assert sorted(label for mine in classes for label in mine) == list(range(10))
        assert classes == [sorted(set(task.test["labels"].tolist())) for task in tasks]


def test_files_are_the_tasks_in_their_order_and_test_files_are_kept_apart(options, monkeypatch):
    paths = options["files"]["paths"]
    stream = load("files", 5, **options["files"])
    folder = stream.model.get_base_model().name_or_path
    assert [task.name for task in stream.tasks] == ["first", "second"]
    assert [len(task.train["labels"]) for task in stream.tasks] == [32, 48]
    both = options["files"] | {"paths": paths, "tests": [paths[1], paths[1]]}
    with pytest.raises(SetupError, match=r"second\.jsonl: 0 different texts to train on and 60 to test on"):
        load("files", 5, **both)
    # Other texts to train on would make another model, which is nothing that is looked at here.
    monkeypatch.setattr(small, "cached", lambda *given: Path(folder))
    swapped = load("files", 5, **options["files"] | {"tests": paths[::-1]})
    assert [len(task.test["labels"]) for task in swapped.tasks] == [60, 40]
    assert swapped.model.get_base_model().num_labels == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text;label\nx;y\n", "line 1: name the columns text and label; found text;label"),
        ("a.csv", "text,label\nx,y\nx\n", "line 3: 2 fields expected as in line 1, 1 found"),
        ("a.csv", "text,label\n ,y\n", "line 2: text must be a string that is not empty"),
        ("a.csv", "", "line 1: the file is empty"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "x"\n', "line 2: no JSON: "),
        (
            "a.jsonl",
            '\n{"text": "x", "class": 1}\n',
            "line 2: the keys text and label are needed; found text, c",
        ),
        ("a.jsonl", "[1]\n", "line 1: the keys text and label are needed; found list"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1.5}\n',
            "line 1: label must be a string or an integer, found 1.5",
        ),
        (
            "a.jsonl",
            '{"text": "x", "label": true}\n',
            "line 1: label must be a string or an integer, found True",
        ),
        ("a.jsonl", '{"text": "x", "label": 1}\n', "1 different texts to train on and 0 to test on"),
        ("a.txt", "", "the name must end in .csv or .jsonl"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SetupError, match=rf"a\.\w+(, |: ){re.escape(message)}"):
        load("files", 0, paths=[str(path)] * 2)


def no_hub():
    raise SetupError("no network")


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("mnist", {}, "no stream 'mnist'; choose from permuted, rotated"),
        ("split", {"classes": 2}, "'classes'; its options are tasks: 'int' = 5, rows"),
        ("split", {"tasks": 3}, "tasks must divide the 10 classes, got 3"),
        ("permuted", {"rows": 0}, "rows must be at least 1, got 0"),
        ("rotated", {"tasks": -1}, "tasks must be at least 1, got -1"),
        ("agnews", {"preset": "huge"}, "no preset 'huge'; choose from quick"),
        ("agnews", {"lr": 0.1}, "unknown options ['lr']; choose from rows"),
        ("agnews", {}, "no network; set AGNEWS_DIR to a folder with AG News' train.csv"),
        ("agnews", {"data_folder": "nowhere"}, "nowhere: no such folder, named by data_folder"),
        ("files", {"paths": ["a.csv"]}, "paths must name at least 2 files"),
        ("files", {"paths": ["a.csv"] * 2, "tests": ["b.csv"]}, "tests must name a file for each of the 2"),
        (
            "files",
            {"paths": ["a.csv"] * 2},
            "a.csv: no such file (columns text and label are expected there)",
        ),
        ("files", {"paths": ["a.jsonl"] * 2}, "a.jsonl: no such file"),
    ],
)
def test_what_cannot_be_built_is_said(kind, given, message, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.delenv("AGNEWS_DIR", raising=False)
    monkeypatch.setattr(data, "read_hub", no_hub)
    with pytest.raises(SetupError, match=re.escape(message)):
        load(kind, 0, **given)
