"""Where articles come from, and what happens when they do not."""

import re
import socket
import sys
import threading
import time

import pytest

pytest.importorskip("sklearn")

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from examples.lora_agnews import corpus, data, hub
from examples.lora_agnews.data import DataError


@pytest.fixture
def folder(tmp_path):
    def write(content):
        (tmp_path / "train.csv").write_text(content, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def hub_settings(monkeypatch):
    """Let a test find the hub out of reach without later tests knowing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "HF_HUB_OFFLINE", False)
    hub.offline.cache_clear()
    yield monkeypatch
    hub.offline.cache_clear()


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
        ("", 1, "empty"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(folder, content, line, message):
    with pytest.raises(DataError, match=rf"train\.csv, line {line}: .*{re.escape(message)}"):
        data.load(folder(content), "--data", [1] * 4)


def test_bytes_that_are_no_text_are_an_error_too(tmp_path):
    (tmp_path / "train.csv").write_bytes(b'"1","a","b"\n"2","a","\xff\xfe"\n')
    with pytest.raises(DataError, match=r"train\.csv, line 1"):
        data.read_csv(tmp_path / "train.csv")


def test_a_named_folder_is_never_replaced_by_something_else(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such folder, named by AGNEWS_DIR"):
        data.load(tmp_path / "nowhere", "AGNEWS_DIR", [1] * 4)
    with pytest.raises(DataError, match=r"train\.csv: no such file"):
        data.load(tmp_path, "--data", [1] * 4)


@pytest.mark.parametrize(
    ("scarred", "clean"),
    [
        ("Britain #39;s deal", "Britain's deal"),
        ("a  quot;record quot; year", 'a "record" year'),
        ("AT amp;T", "AT&T"),
        (r"about \$5\billion", "about $5 billion"),
        ("&lt;b&gt;bold&lt;/b&gt; move", "bold move"),
        ("  many   spaces ", "many spaces"),
        ("a plain; sentence & no more", "a plain; sentence & no more"),
    ],
)
def test_tidy(scarred, clean):
    assert data.tidy(scarred) == clean


def test_a_silent_name_server_is_noticed_in_time(hub_settings):
    released = threading.Event()

    def silent(*args, **kwargs):
        released.wait(20)
        raise OSError("released")

    hub_settings.setattr(socket, "getaddrinfo", silent)
    hub_settings.setattr(hub, "DEADLINE", 1.5)
    start = time.perf_counter()
    reason = hub.offline()
    released.set()
    assert "did not answer" in reason
    assert 1.4 < time.perf_counter() - start < 4


def test_without_a_hub_the_corpus_is_generated_within_seconds(hub_settings):
    pytest.importorskip("datasets")

    def refused(*args, **kwargs):
        raise OSError("no route")

    hub_settings.setattr(socket, "getaddrinfo", refused)
    hub_settings.setattr(data, "HUB_NAME", "gemproj-tests/not-in-any-cache")
    start = time.perf_counter()
    articles = data.load(None, "", [3, 2, 2, 2])
    assert time.perf_counter() - start < 15  # importing datasets included; its retries alone take longer
    assert "generated" in articles.source
    assert "cannot be reached" in articles.reason
    assert [articles.labels.count(label) for label in range(4)] == [3, 2, 2, 2]


def test_offline_by_wish_asks_nobody(hub_settings):
    hub_settings.setenv("HF_HUB_OFFLINE", "1")
    hub_settings.setattr(hub, "_ask", lambda: pytest.fail("asked the hub"))
    assert hub.offline() == "HF_HUB_OFFLINE is set"


def test_the_corpus_is_reproducible_and_has_no_doubles():
    texts, labels = corpus.generate([400, 300, 200, 100])
    assert (texts, labels) == corpus.generate([400, 300, 200, 100])
    assert texts != corpus.generate([400, 300, 200, 100], seed=1)[0]
    assert len(set(texts)) == 1_000
    assert [labels.count(label) for label in range(4)] == [400, 300, 200, 100]


def test_the_corpus_can_be_learned_but_not_perfectly():
    texts, labels = corpus.generate([500] * 4)
    features = TfidfVectorizer().fit_transform(texts)
    accuracy = (
        LogisticRegression(C=3, max_iter=500)
        .fit(features[:1500], labels[:1500])
        .score(features[1500:], labels[1500:])
    )
    assert 0.8 < accuracy < 0.98
