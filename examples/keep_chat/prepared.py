"""All texts of a form, written and encoded once: what is kept, what is measured, and what is learned."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gemproj.torch import write_references
from gemproj.torch.losses import Distillation

from ..common.origin import digest
from ..lora_agnews import data
from . import model as chat
from .model import Example
from .texts import QUESTION, TASK, Chat, Skill, lines_of


@dataclass(frozen=True)
class Form:
    """The size of all runs; by default for two cores of a laptop."""

    layers: int = 6  # upper layers that are trained; 0 for all
    steps: int = 40
    batch: int = 4  # new texts in a step
    rate: float = 5e-4  # of AdamW, for adapters
    drawn: int = 4  # kept texts in a step
    kept: int = 96
    apart: int = 48  # texts that no training sees
    own: int = 160  # texts for the skill in capitals, a quarter of them for its test
    tests: int = 96  # of the other skills
    words: int = 48  # tokens of each message that the model writes
    reference: int = 64  # tokens of a text that is kept or measured
    longest: int = 80  # tokens of a new text
    characters: int = 80  # of an article


FORMS = {
    "laptop": Form(),
    "long": Form(steps=300),
    "sixteen": Form(steps=300, batch=16, drawn=16),  # kept texts in a step, and new ones
    "many": Form(kept=512),
    "whole": Form(drawn=16, reference=128),  # whole texts are kept, and as many in a step as by default
    "gpu": Form(0, 100, 16, 3e-4, 16, 512, 128, 640, 400, 96, 224, 256, 400),
    "tiny": Form(1, 3, 2, 1e-3, 2, 6, 4, 8, 4, 12, 40, 48, 40),
}


@dataclass(frozen=True)
class Prepared:
    """All texts of a form, as tokens or as inputs of the upper layers."""

    kept: list[Example]
    apart: list[Example]
    train: dict[str, list[Example]]
    test: dict[str, list[Example]]
    labels: dict[str, list[int]]  # first tokens of the possible answers
    questions: list[tuple[str, list[Example]]]  # task, and the answers of a question, the right one first


OUTPUTS = Distillation()  # of 64 words


@lru_cache(maxsize=1)
def read(file: Path) -> Prepared:
    """Return the prepared texts."""
    return Prepared(**torch.load(file, weights_only=False))


@dataclass(frozen=True)
class Texts:
    """What all texts are made of: a form, a chat model, articles, and the lines of two files."""

    form: str
    model: str
    skills: Sequence[str]
    news: data.Articles | None
    instructions: list[dict[str, Any]]
    abilities: list[dict[str, Any]]

    @classmethod
    def read(cls, form: str, model: str, skills: Sequence[str], files: Mapping[str, Path | None]) -> "Texts":
        """Read what the skills need, and "abilities"; `files` names the folder "data", and two files."""
        news = data.load(files["data"]) if "news" in skills else None
        tasks = lines_of(files["instructions"], "--instructions", TASK) if "sequence" in skills else []
        questions = lines_of(files["abilities"], "--abilities", QUESTION) if files["abilities"] else []
        return cls(form, model, skills, news, tasks, questions)

    def file(self, cache: Path) -> Path:
        """Return the file of all texts, which may not exist; its name is a hash of all that decides them."""
        news = (self.news.texts, self.news.labels) if self.news else ()
        weights = sorted(Path(self.model).glob("*.safetensors"))  # in whatever folder they are
        how = asdict(FORMS[self.form]), "" if weights else self.model, self.skills
        return cache / f"keep-chat-{digest([*how, news, self.instructions, self.abilities], *weights)}.pt"

    def prepare(self, device: str, file: Path) -> None:
        """Write and encode all texts."""
        form = FORMS[self.form]
        model, tokenizer = chat.load(self.model, device)
        writer, learned, layers = Chat(tokenizer, form.longest), form.steps * form.batch, form.layers
        cut = chat.upper(model, layers) if layers else model

        def encoded(examples: list[Example]) -> list[Example]:
            return chat.below(model, layers, examples) if layers else examples

        def of_pairs(pairs: list[tuple[str, str]]) -> list[Example]:
            return encoded([writer.answered(*pair) for pair in pairs])

        # What has been read may be too little: that is found before texts are written.
        found: dict[str, Skill] = {}
        if self.news:
            found["news"] = writer.news(self.news, learned, form.tests, form.characters)
        if self.instructions:
            found["sequence"] = writer.sequence(self.instructions, learned, form.tests)
        questions = writer.questions(self.abilities)
        n, own = form.kept + form.apart, form.own * ("capitals" in self.skills)
        written = write_references(model, tokenizer, n + own, tokens=form.words, batch=64, cache=file.parent)
        random.Random(0).shuffle(written)
        tokens = [torch.tensor(one["input_ids"]) for one in written]
        if own:
            pairs = [pair for one in tokens[n:] if (pair := writer.parted(one[: form.longest].tolist()))]
            found["capitals"] = writer.capitals(pairs, len(pairs) // 4)
        references = [dict.fromkeys(("input_ids", "labels"), one[: form.reference]) for one in tokens[:n]]
        if layers:
            chat.check_upper(model, cut, layers, references[0])
        kept = encoded(references)
        content = Prepared(
            kept=kept[: form.kept],
            apart=kept[form.kept :],
            train={name: of_pairs(skill.train) for name, skill in found.items()},
            test={name: of_pairs(skill.test) for name, skill in found.items()},
            labels={
                name: [writer.tokens(label)[0] for label in skill.labels] for name, skill in found.items()
            },
            questions=[(task, of_pairs(pairs)) for task, pairs in questions],
        )
        draft = file.with_suffix(".draft")
        torch.save(vars(content), draft)
        draft.replace(file)
