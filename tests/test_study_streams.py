"""The streams: test rows are unseen, a seed decides everything, and bad data are refused."""

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mnist1d", reason="needs the extra examples")

import torch

from examples.common.command import SetupError
from examples.lora_agnews import data, small, stream
from examples.lora_agnews.config import MINI
from examples.study.streams import KINDS, load, text

SMALL = {"tasks": 3, "rows": 60, "hidden": 8}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Return the options of a small stream of each kind; what they keep is made once."""
    cache = tmp_path_factory.mktemp("cache")
    texts, labels = data.generate([80] * 4)
    rows = [(label + 1, *text.split(". ", 1)) for text, label in zip(texts, labels, strict=True)]
    (cache / "train.csv").write_text("".join('"{}","{}","{}"\n'.format(*row) for row in rows), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("AGNEWS_DIR", str(cache))
        patch.setattr(text, "QUICK", replace(MINI, max_length=48))  # beginnings of articles may be equal
        yield {
            **dict.fromkeys(("permuted", "rotated"), SMALL),
            "split": SMALL | {"tasks": 5},
            "mnist1d": SMALL,
            "agnews": {"tasks": 3},
        }


def at_once(command, **_):
    """Pretrain in this process: that another one does it is tested with the experiment on AG News."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)
        small.pretrain(*map(Path, command[-2:]))


def rows_of(batch):
    """Return the rows of a batch as a set."""
    return {tuple(row.flatten().tolist()) for row in next(iter(batch.values()))}


@pytest.mark.parametrize("kind", KINDS)
def test_test_rows_are_unseen_and_a_seed_decides_everything(kind, options, one_thread, monkeypatch):
    monkeypatch.setattr(small, "subprocess", SimpleNamespace(run=at_once, DEVNULL=None))
    streams = [load(kind, seed, **options[kind]) for seed in (3, 3, 4)]
    first, again, other = (
        [tensor for task in s.tasks for part in (task.train, task.test) for tensor in part.values()]
        + list(s.model.parameters())
        for s in streams
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.shape == b.shape)
    assert streams[0].hashes == streams[2].hashes
    tasks = streams[0].tasks
    assert len(tasks) == options[kind]["tasks"]
    for task in tasks:
        assert not rows_of(task.train) & rows_of(task.test)
    assert rows_of(tasks[0].test) != rows_of(tasks[1].test)
    assert int(tasks[0].train["labels"].max()) < streams[0].logits(streams[0].model, tasks[0].train).shape[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"1","a","b"\n"2","only a title"\n', "line 2: .*only a title"),
        (b'"1","two\nlines","b"\n"0","a","b"\n', "line 3: .*'0'"),
        (b'"1","a","b"\n"2","a","\xff\xfe"\n', "line 1: .*invalid"),
    ],
)
def test_malformed_data_are_named_with_their_line(content, message, tmp_path):
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(SetupError, match=rf"train.csv, {message}"):
        data.load(tmp_path)


def test_the_corpus_as_published_or_generated(monkeypatch, tmp_path):
    """Without a hub the corpus is generated, without doubles, and the reason told."""
    content = '"3","Oil up","Prices rose, a ""lot"" \\$2"\n"1","Vote","In\\Iraq #39;s north"\n'
    (tmp_path / "train.csv").write_text(content)
    articles = data.load(tmp_path, [1] * 4)
    assert articles.texts == ('Oil up. Prices rose, a "lot" $2', "Vote. In Iraq's north")
    assert articles.labels == (2, 0)
    monkeypatch.setattr(data, "HUB_NAME", "gemproj-tests/not-in-any-cache")
    monkeypatch.delenv("AGNEWS_DIR", raising=False)
    articles = data.load(None, [400, 300, 200, 100])
    assert "not available: HF_HUB_OFFLINE is set" in articles.reason
    assert len(set(articles.texts)) == 1_000
    assert [articles.labels.count(label) for label in range(4)] == [400, 300, 200, 100]


def test_articles_are_dealt_out_with_their_priors_and_used_once():
    texts, labels = zip(*((f"article {c} {k}", c) for c in range(4) for k in range(100)), strict=True)
    used = []
    shape = replace(MINI, experiences=5, rows=50, dominant_share=0.7)
    for k, one in enumerate(stream.build(texts * 2, labels * 2, shape)):
        assert (len(one.train.texts), len(one.test.texts)) == (40, 10)
        mine = one.train.labels + one.test.labels
        assert [mine.count(label) for label in range(4)] == [35 if c == k % 4 else 5 for c in range(4)]
        used += zip(one.train.texts + one.test.texts, mine, strict=True)
    assert all(text.split()[1] == str(label) for text, label in used)
    assert len(used) == len(set(used)) == 5 * 50
    with pytest.raises(SetupError, match=r"World 110 needed, 100 found; .*; Sci/Tech 30 needed, 100 found"):
        stream.build(texts, labels, replace(MINI, experiences=3, rows=120, dominant_share=0.75))
