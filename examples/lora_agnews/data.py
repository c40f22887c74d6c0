"""The sources of the articles: a folder with the original CSV, the hub, or a corpus generated here.

The corpus is written from templates, so that the experiment runs without a download. Each of its articles has
a main topic. Only some of its words come from that topic; the others come from words that two topics share,
or from any topic. A classifier has to weigh evidence; none is perfect.
"""

import csv
import html
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ..common.command import SetupError
from .config import CLASSES

HUB_NAME = "fancyzhx/ag_news"
CORPUS_SEED = 2004
# With fewer words of its own topic, the small model learns the commonest class of a task and no topics; then
# there is nothing that a projection could keep.
OWN = 0.55  # probability that a part of a sentence takes its words from the article's topic
SHARED = 0.33  # ... from words that a second topic also uses; otherwise from any topic
WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Articles:
    """Texts (title and description in one line) and their classes; their source, and why it was chosen."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    source: str
    reason: str


def load(folder: Path | None = None, rows_per_class: Sequence[int] | None = None) -> Articles:
    """Return the articles of the first available source; if a folder is named, only that folder is tried.

    The folder is that of the option --data, or else ``$AGNEWS_DIR``. The last source is a generated corpus of
    `rows_per_class` articles; without `rows_per_class` there is none.
    """
    origin = "--data"
    if folder is None and (named := os.environ.get("AGNEWS_DIR")):
        folder, origin = Path(named), "the environment variable AGNEWS_DIR"
    if folder is not None:
        if not folder.is_dir():
            raise SetupError(f"{folder}: no such folder, named by {origin}")
        rows = read_csv(folder / "train.csv")
        return Articles(*rows, "AG News, train.csv", f"in {folder}, named by {origin}")
    try:
        rows = read_hub()
    except SetupError as error:
        if rows_per_class is None:
            raise SetupError(f"{error}; set AGNEWS_DIR to a folder with AG News' train.csv") from None
        generated = generate(rows_per_class)
        return Articles(*generated, "built-in generated news corpus", f"no data folder is named, and {error}")
    return Articles(*rows, f"AG News, {HUB_NAME} through datasets", "no data folder is named")


def read_csv(path: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Read AG News in its original form: rows ``"label","title","description"``, labels 1 to 4, no header."""
    expected = "a label from 1 to 4, a title and a description expected"
    texts, labels, line = [], [], 1
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            for row in rows:
                if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                    raise SetupError(f"{path}, line {line}: {expected}, found {row}")
                texts.append(tidy(f"{row[1].strip()}. {row[2]}"))
                labels.append(int(row[0]) - 1)
                line = rows.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise SetupError(f"{path}, line {line}: {error}") from None
    return tuple(texts), tuple(labels)


def read_hub() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Read the train split of AG News from the hub, or from the local cache of an earlier download."""
    reason = unreachable_hub()
    try:
        import datasets  # only now: at its import it reads whether the hub can be used

        datasets.disable_progress_bars()
        rows = datasets.load_dataset(HUB_NAME, split="train")
    except Exception as error:
        reason = reason or f"loading it failed: {error}".splitlines()[0]
        raise SetupError(f"{HUB_NAME} is not available: {reason}") from error
    return tuple(tidy(text) for text in rows["text"]), tuple(int(label) for label in rows["label"])


def unreachable_hub() -> str:
    """Return why the Hugging Face hub cannot be used, or an empty string if it answers.

    After a failure, libraries are told not to ask again: their retries take minutes.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
    except urllib.error.HTTPError:  # the hub answers
        return ""
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True  # if the library has already been imported
        return f"the hub cannot be reached ({getattr(error, 'reason', error)})"
    return ""


def tidy(text: str) -> str:
    r"""Remove the remains of HTML from a text of AG News.

    Examples
    --------
    >>> tidy(r"Britain #39;s  quot;record quot; \$5 deal\was &lt;b&gt;signed&lt;/b&gt; at AT amp;T")
    'Britain\'s "record" $5 deal was signed at AT&T'
    """
    text = re.sub(r" ?&?(#\d+|quot|amp|lt|gt|nbsp);", r"&\1;", text)
    text = html.unescape(html.unescape(text))
    text = re.sub(r"<[^<>]*>", " ", text)
    text = text.replace("\\$", "$").replace("\\", " ")
    return " ".join(text.split())


def generate(rows_per_class: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Write articles, all different, in the given number for each class; return shuffled texts and labels."""
    random = Random(CORPUS_SEED)
    articles: dict[str, int] = {}
    for label, wanted in enumerate(rows_per_class):
        full = len(articles) + wanted
        while len(articles) < full:
            templates = random.choice(WORDS["titles"]), random.choice(WORDS["bodies"])
            text = " ".join(_fill(template, CLASSES[label], random) for template in templates)
            articles.setdefault(text, label)
    order = list(articles.items())
    random.shuffle(order)
    return tuple(text for text, _ in order), tuple(label for _, label in order)


def _fill(template: str, topic: str, random: Random) -> str:
    words = {role: random.choice(_draw(topic, random)[role]) for role in ("who", "did", "what", "more")}
    words |= {role: random.choice(WORDS[role]) for role in ("city", "day", "aside")}
    sentences = template.format(number=random.randint(2, 90), **words).rstrip(".").split(". ")
    return ". ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences) + "."


def _draw(topic: str, random: Random) -> dict[str, list[str]]:
    """Draw the word lists for a part of a sentence."""
    draw = random.random()
    if draw < OWN:
        return WORDS["topics"][topic]
    if draw < OWN + SHARED:
        return random.choice([shared for shared in WORDS["shared"] if topic in shared["topics"]])
    return random.choice(list(WORDS["topics"].values()))
