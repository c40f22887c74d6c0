"""What is kept, what is learned, and questions: texts in the model's own chat template."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..common.command import SetupError
from ..lora_agnews.config import CLASSES
from ..lora_agnews.data import Articles
from .model import Example

Pairs = list[tuple[str, str]]  # of a prompt and an answer
TASK = {"task": str, "input": str, "targets": list}
QUESTION = {"task": str, "prefix": str, "input": str, "choices": list, "answers": list}


def lines_of(file: Path | None, option: str, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one in each line; raise unless all have these fields."""
    if file is None:
        raise SetupError(f"{option} FILE is needed: JSON with {', '.join(fields)} in each line")
    found: list[dict[str, Any]] = []
    try:
        for line in file.read_text(encoding="utf-8").rstrip().split("\n"):
            one = json.loads(line)
            for name, kind in fields.items():
                if not isinstance(one[name], kind) or (kind is list and {*map(type, one[name])} != {str}):
                    raise TypeError(f"{name} is {one[name]!r}")
            found.append(one)
    except (ValueError, KeyError, TypeError) as error:
        expected = f"JSON with {', '.join(fields)} expected"
        raise SetupError(f"{file}, line {len(found) + 1}: {expected}, found {error!r}") from None
    return found


@dataclass
class Skill:
    """Something new: pairs of a prompt and an answer to learn from, and others to test with.

    `labels` are the possible answers if the skill is a classification.
    """

    train: Pairs
    test: Pairs
    labels: Sequence[str] = field(default_factory=list)


class Chat:
    """Writes texts in the template of a chat model."""

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self._tokenizer, self._longest = tokenizer, longest
        self._end = tokenizer.eos_token

    def prompt(self, question: str) -> str:
        """Return a question in the template, up to where the answer begins."""
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text in the template."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def answered(self, prompt: str, answer: str) -> Example:
        """Return the tokens of a prompt and its answer, with labels for the answer."""
        asked, said = self.tokens(prompt), self.tokens(answer)
        asked = asked[-(self._longest - min(len(said), self._longest // 2)) :]
        said = said[: self._longest - len(asked)]
        labels = [-100] * len(asked) + said
        return {"input_ids": torch.tensor(asked + said), "labels": torch.tensor(labels)}

    def parted(self, text: Sequence[int]) -> tuple[str, str] | None:
        """Return prompt and answer of a conversation that the model wrote; None if it has no answer."""
        begin = self.prompt("?").rpartition("?")[2]  # what stands between a question and its answer
        prompt, found, answer = self._tokenizer.decode(text).rpartition(begin)
        answer = answer.replace(self._end, "").strip()
        return (prompt + begin, answer) if found and answer else None

    def news(self, articles: Articles, n: int, tests: int, characters: int) -> Skill:
        """Return articles to be assigned to a section of a newspaper."""
        if len(articles.texts) < n + tests:
            raise SetupError(f"{len(articles.texts)} articles {articles.reason}: {n + tests} are needed")
        order = random.Random(0).sample(range(len(articles.texts)), n + tests)
        ask = f"Which section is this news from: {', '.join(CLASSES[:-1])} or {CLASSES[-1]}?\n\n"
        pairs = [
            (self.prompt(ask + articles.texts[i][:characters]), CLASSES[articles.labels[i]] + self._end)
            for i in order
        ]
        return Skill(pairs[tests:], pairs[:tests], CLASSES)

    def capitals(self, conversations: Sequence[tuple[str, str]], tests: int) -> Skill:
        """Return the model's own conversations with answers in capital letters: a conflicting format."""
        pairs = [(prompt, answer.upper() + self._end) for prompt, answer in conversations]
        return Skill(pairs[tests:], pairs[:tests])

    def sequence(self, lines: Sequence[dict[str, Any]], n: int, tests: int, tasks: int = 5) -> Skill:
        """Return the first tasks of a file of instructions, one after the other; no prompt occurs twice."""
        by_task: dict[str, dict[str, str]] = {}
        for one in lines:
            prompt = self.prompt(one["input"])
            if len(self.tokens(prompt)) < self._longest:
                by_task.setdefault(one["task"], {}).setdefault(prompt, one["targets"][0] + self._end)
        train, test = n // tasks, max(1, tests // tasks)
        chosen = [[*pairs.items()] for pairs in by_task.values() if len(pairs) >= train + test][:tasks]
        if len(chosen) < tasks:
            raise SetupError(
                f"--instructions has {len(chosen)} tasks with {train + test} short examples, not {tasks}"
            )
        return Skill(
            [pair for pairs in chosen for pair in pairs[test : test + train]],
            [pair for pairs in chosen for pair in pairs[:test]],
        )

    def questions(self, lines: Sequence[dict[str, Any]], most: int = 40) -> list[tuple[str, Pairs]]:
        """Return questions, at most so many of a task: the task, and all answers, the right one first."""
        found: dict[str, list[Pairs]] = {}
        for one in lines:
            others = [answer for answer in one["choices"] if answer not in one["answers"]]
            ask = self.prompt(one["prefix"] + one["input"])
            pairs = [(ask, answer) for answer in (one["answers"][0], *others)]
            found.setdefault(one["task"], []).append(pairs)
        return [(task, pairs) for task, questions in found.items() for pairs in questions[:most]]
