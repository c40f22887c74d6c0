"""What is kept, what is learned, and questions: texts in the model's own chat template."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..common.command import SetupError
from ..lora_agnews import data
from ..lora_agnews.config import CLASSES
from .model import Example


@dataclass
class Choice:
    """A question with several answers, the first of which is right."""

    prompt: str
    answers: Sequence[str]
    task: str


@dataclass
class Skill:
    """Something new: pairs of a prompt and an answer to learn from, and others to test with.

    `labels` are the possible answers if the skill is a classification.
    """

    train: list[tuple[str, str]]
    test: list[tuple[str, str]]
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

    def news(self, folder: Path | None, n: int, tests: int, characters: int) -> Skill:
        """Return articles to be assigned to a section of a newspaper."""
        articles = data.load(folder, "--data", [(n + tests) // 4 + 1] * 4)
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

    def sequence(self, file: Path | None, n: int, tests: int, tasks: int = 5) -> Skill:
        """Return the first tasks of a file of instructions, one after the other.

        Each line of the file is a JSON object with ``task``, ``input`` and ``targets``.
        """
        if file is None:
            raise SetupError("the skill 'sequence' needs --instructions FILE")
        by_task: dict[str, list[tuple[str, str]]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            pair = self.prompt(one["input"]), one["targets"][0] + self._end
            if len(self.tokens(pair[0])) < self._longest:
                by_task.setdefault(one["task"], []).append(pair)
        chosen = [pairs for pairs in by_task.values() if len(pairs) >= (n + tests) // tasks][:tasks]
        if len(chosen) < tasks:
            raise SetupError(f"{file} has {len(chosen)} tasks with {(n + tests) // tasks} short examples")
        train, test = n // tasks, tests // tasks
        return Skill(
            [pair for pairs in chosen for pair in pairs[test : test + train]],
            [pair for pairs in chosen for pair in pairs[:test]],
        )

    def questions(self, file: Path, most: int = 40) -> list[Choice]:
        """Return the questions of a file of abilities, at most so many of a task.

        Each line of the file is a JSON object with ``task``, ``prefix``, ``input``, ``choices`` and
        ``answers``.
        """
        found: dict[str, list[Choice]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            others = [answer for answer in one["choices"] if answer not in one["answers"]]
            ask = self.prompt(one["prefix"] + one["input"])
            found.setdefault(one["task"], []).append(Choice(ask, [one["answers"][0], *others], one["task"]))
        return [choice for choices in found.values() for choice in choices[:most]]
