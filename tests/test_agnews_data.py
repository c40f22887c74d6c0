"""Where articles come from, what happens when they do not, and how they are dealt out."""

import re
import urllib.error
import urllib.request

import pytest

from examples.common.command import SetupError
from examples.lora_agnews import data, stream

TEXTS = tuple(f"article {label} {k}" for label in range(4) for k in range(100))
LABELS = tuple(label for label in range(4) for _ in range(100))


@pytest.fixture
def folder(tmp_path):
    def write(content):
        (tmp_path / "train.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


def test_csv_in_the_original_format(folder):
    content = '"3","Oil up","Prices rose, a ""lot"" \\$2"\n"1","Vote","In\\Iraq #39;s north"\n'
    articles = data.load(folder(content), "--data", [1] * 4)
    assert articles.texts == ('Oil up. Prices rose, a "lot" $2', "Vote. In Iraq's north")
    assert articles.labels == (2, 0)
    assert "--data" in articles.reason


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ('"1","a","b"\n"2","only a title"\n', 2, "3 fields"),
        ('"1","a","b"\n"5","a","b"\n', 2, "'5'"),
        ('"label","title","description"\n"1","a","b"\n', 1, "'label'"),
        ('"1","two\nlines","b"\n"0","a","b"\n', 3, "'0'"),
        ('"1","a","b"\n"2","a","b" oops\n', 2, "expected"),
        ('"1","a","b"\n"2","",""\n', 2, "empty"),
        (b'"1","a","b"\n"2","a","\xff\xfe"\n', 1, "invalid"),
        ("", 1, "empty"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(folder, content, line, message):
    with pytest.raises(SetupError, match=rf"train\.csv, line {line}: .*{re.escape(message)}"):
        data.load(folder(content), "--data", [1] * 4)


def test_a_named_folder_is_never_replaced_by_something_else(tmp_path, monkeypatch):
    monkeypatch.setenv("AGNEWS_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(
        SetupError, match=r"nowhere: no such folder, named by the environment variable AGNEWS_DIR"
    ):
        data.load(None, "--data", [1] * 4)
    with pytest.raises(SetupError, match=r"elsewhere: no such folder, named by --data"):
        data.load(tmp_path / "elsewhere", "--data", [1] * 4)
    with pytest.raises(SetupError, match=r"train\.csv: no such file"):
        data.load(tmp_path, "--data", [1] * 4)


def test_tidy_leaves_plain_text_alone():
    assert data.tidy("a plain; sentence & no more") == "a plain; sentence & no more"


def test_without_a_hub_a_corpus_is_generated_and_the_reason_told(monkeypatch):
    pytest.importorskip("huggingface_hub")

    def refused(*args, **kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(urllib.request, "urlopen", refused)
    assert "cannot be reached (no route)" in data.unreachable_hub()
    assert data.unreachable_hub() == "HF_HUB_OFFLINE is set"  # nobody asks again
    monkeypatch.setattr(data, "HUB_NAME", "gemproj-tests/not-in-any-cache")
    monkeypatch.delenv("AGNEWS_DIR", raising=False)
    articles = data.load(None, "--data", [3, 2, 2, 2])
    assert "generated" in articles.source
    assert "not available: HF_HUB_OFFLINE is set" in articles.reason
    assert [articles.labels.count(label) for label in range(4)] == [3, 2, 2, 2]


def test_the_corpus_is_reproducible_and_has_no_doubles():
    texts, labels = data.generate([400, 300, 200, 100])
    assert (texts, labels) == data.generate([400, 300, 200, 100])
    assert len(set(texts)) == 1_000
    assert [labels.count(label) for label in range(4)] == [400, 300, 200, 100]


def test_experiences_have_their_priors_and_no_row_is_used_twice():
    # Every article comes twice.
    experiences = stream.build(TEXTS * 2, LABELS * 2, experiences=5, rows=50, dominant_share=0.7)
    assert experiences == stream.build(TEXTS * 2, LABELS * 2, experiences=5, rows=50, dominant_share=0.7)
    used = []
    for k, experience in enumerate(experiences):
        assert (len(experience.train.texts), len(experience.test.texts)) == (40, 10)
        texts = experience.train.texts + experience.test.texts
        labels = experience.train.labels + experience.test.labels
        assert all(text.split()[1] == str(label) for text, label in zip(texts, labels, strict=True))
        assert sorted(labels.count(label) for label in range(4)) == [5, 5, 5, 35]
        assert labels.count(k % 4) == 35
        used += texts
    assert len(used) == len(set(used)) == 5 * 50


@pytest.mark.parametrize(("rows", "share"), [(7, 0.1), (40, 0.33), (101, 0.9)])
def test_rows_needed_add_up(rows, share):
    assert [sum(counts) for counts in stream.rows_needed(4, rows, share)] == [rows] * 4


def test_the_order_depends_on_the_seed_only():
    orders = [tuple(stream.order(3, seed)) for seed in (0, 2, 5, 7, 11)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len(set(orders)) > 1
    assert stream.order(3, 2) == list(orders[1])


def test_too_few_rows_say_how_many_of_each_class():
    with pytest.raises(SetupError, match=r"World 110 needed, 100 found; .*; Sci/Tech 30 needed, 100 found"):
        stream.build(TEXTS, LABELS, experiences=3, rows=120, dominant_share=0.75)
