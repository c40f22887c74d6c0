"""Texts that a language model writes itself, to keep what it says without anybody's data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemproj._checks import check_count, check_number

# A text is of use from so many new tokens on, and if at least this share of its tokens are different ones.
_SHORTEST, _DIFFERENT = 8, 0.2
# The model may write this many times the wanted number; if fewer are of use, it is refused.
_PATIENCE = 3
# Tokens are sampled from the likeliest ones with this probability together.
_NUCLEUS = 0.95
_MARK = "\u241f"  # stands for the content of a message, to find where it begins in a chat template


def write_references(
    model: Any,
    tokenizer: Any,
    n: int = 256,
    *,
    tokens: int = 128,
    temperature: float = 1.0,
    batch: int = 16,
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> list[dict[str, list[int]]]:
    """Let a model write texts, as examples whose outputs `gemproj.torch.Keeper` keeps.

    A chat model writes both sides of a conversation in its own template: first what a user may ask (as in
    Magpie, Xu et al., 2024), then its answer. A base model writes from its first token on; an encoder-decoder
    first writes an input, then the output for it. The mode of the model and torch's random state are
    restored.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
        Any model with ``generate``.
    tokenizer : transformers.PreTrainedTokenizerBase
    n : int, default 256
        Number of texts.
    tokens : int, default 128
        Largest number of tokens of each message.
    temperature : float, default 1
        Temperature of sampling, from the likeliest tokens with 95 % of the probability.
    batch : int, default 16
        Number of texts that are written at a time.
    seed : int, default 0
    cache : path, optional
        Folder in which texts are looked up and stored, by model, tokenizer and settings.
    progress : bool, default True
        Whether to show a progress bar, if tqdm is installed.

    Returns
    -------
    list of dict
        ``input_ids`` of each text; for an encoder-decoder also ``labels``.

    Raises
    ------
    ValueError
        If most of the texts are empty, repeated, or repeat themselves, which says how many.
    """
    for value, name in ((n, "n"), (tokens, "tokens"), (batch, "batch")):
        check_count(value, name, 1)
    check_number(temperature, "temperature", 0.0, strict=True)
    if not callable(getattr(model, "generate", None)):
        raise TypeError(f"model must have a method generate; found {type(model).__name__}.")
    settings = {"n": n, "tokens": tokens, "temperature": temperature, "batch": batch, "seed": seed}
    file = None if cache is None else Path(cache) / f"references-{_key(model, tokenizer, settings)}.json"
    if file is not None and file.is_file():
        found: list[dict[str, list[int]]] = json.loads(file.read_text())
        return found
    writer = _Writer(model, tokenizer, tokens, temperature)
    found, seen, tried = [], set[tuple[int, ...]](), 0
    with _sampling(model, seed), _bar(n, progress) as advance:
        while len(found) < n and tried < _PATIENCE * n:
            for one in writer.texts(min(batch, n)):
                tried += 1
                new = tuple(one["labels" if "labels" in one else "input_ids"])
                if new in seen or len(new) < _SHORTEST or len(set(new)) < _DIFFERENT * len(new):
                    continue
                seen.add(new)
                found.append(one)
            advance(min(len(found), n))
    if len(found) < n:
        raise ValueError(
            f"Only {len(found)} of {tried} texts that the model wrote are of use; the others are empty, "
            "repeated, or repeat themselves. Pass texts of your own."
        )
    found = found[:n]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return found


class _Writer:
    """Samples texts from a model, in the way that fits it."""

    def __init__(self, model: Any, tokenizer: Any, tokens: int, temperature: float) -> None:
        self._model, self._tokenizer, self._tokens = model, tokenizer, tokens
        self._device = next(model.parameters()).device
        ends = getattr(model.generation_config, "eos_token_id", None)
        self._ends = [
            e for e in (ends if isinstance(ends, list) else [ends, tokenizer.eos_token_id]) if e is not None
        ]
        known = (tokenizer.pad_token_id, *self._ends, 0)
        self._pad = next(token for token in known if token is not None)
        # The least likely tokens, 5 % in all, are cut: small models derail on them.
        self._options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": _NUCLEUS}
        self._options |= {"max_new_tokens": tokens, "pad_token_id": self._pad, "use_cache": True}

    def texts(self, n: int) -> list[dict[str, list[int]]]:
        """Return n new texts."""
        if getattr(self._model.config, "is_encoder_decoder", False):
            inputs = self._written([self._first()] * n)
            inputs = [one if one else self._first() for one in inputs]
            outputs = self._written(inputs)
            return [{"input_ids": a, "labels": b} for a, b in zip(inputs, outputs, strict=True)]
        if not getattr(self._tokenizer, "chat_template", None):
            first = self._first()
            return [{"input_ids": first + new} for new in self._written([first] * n)]
        asked = [self._said(new) for new in self._written([self._before_user()] * n)]
        prompts = [self._prompt(text) for text in asked if text]
        answers = self._written(prompts) if prompts else []
        return [{"input_ids": a + b if b else []} for a, b in zip(prompts, answers, strict=True)]

    def _written(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the new tokens after each prompt, up to and with the first token that ends a text."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self._pad)
        mask = torch.zeros_like(ids)
        for row, marks, prompt in zip(ids, mask, prompts, strict=True):  # padded on the left
            row[longest - len(prompt) :] = torch.tensor(prompt)
            marks[longest - len(prompt) :] = 1
        out: Tensor = self._model.generate(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device), **self._options
        )
        encoder = getattr(self._model.config, "is_encoder_decoder", False)
        return [self._ended(row) for row in out[:, 1 if encoder else longest :].tolist()]

    def _ended(self, row: list[int]) -> list[int]:
        stop = next((k + 1 for k, token in enumerate(row) if token in self._ends), len(row))
        return row[:stop]

    def _first(self) -> list[int]:
        """Return the token with which texts begin."""
        known = (self._tokenizer.bos_token_id, *self._ends, self._pad)
        return [next(token for token in known if token is not None)]

    def _before_user(self) -> list[int]:
        """Return the template up to where the content of a user's message begins."""
        text = self._tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
        return self._ids(text.partition(_MARK)[0])

    def _prompt(self, content: str) -> list[int]:
        messages = [{"role": "user", "content": content}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _said(self, new: list[int]) -> str:
        return str(self._tokenizer.decode(new, skip_special_tokens=True)).strip()


@contextmanager
def _sampling(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Set evaluation mode and a seed; restore modes and random state."""
    training = [module for module in model.modules() if module.training]
    with torch.random.fork_rng(), torch.no_grad():
        try:
            model.eval()
            torch.manual_seed(seed)
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def _bar(n: int, wanted: bool) -> Iterator[Any]:
    """Yield a function that shows how many of n texts are written."""
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        wanted = False
    if not wanted:
        yield lambda done: None
        return
    with tqdm(total=n, desc="references", unit="text") as bar:
        yield lambda done: bar.update(done - bar.n)


def _key(model: Any, tokenizer: Any, settings: dict[str, Any]) -> str:
    """Return a key of a model (of the ends of each parameter), a tokenizer and settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(repr((getattr(tokenizer, "chat_template", None), len(tokenizer))).encode())
    for name, p in model.named_parameters():
        flat = p.detach().reshape(-1)
        ends = torch.cat([flat[:16], flat[-16:]]).float().cpu()
        digest.update(name.encode() + ends.numpy().tobytes())
    return digest.hexdigest()[:16]
