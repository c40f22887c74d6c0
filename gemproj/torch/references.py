"""Texts that a language model writes itself, to keep what it says without anybody's data."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

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
        Whether to show a progress bar.

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
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # which transformers needs

    settings = {"n": n, "tokens": tokens, "temperature": temperature, "batch": batch, "seed": seed}
    file = None if cache is None else Path(cache) / f"references-{_key(model, tokenizer, settings)}.json"
    if file is not None and file.is_file():
        found: list[dict[str, list[int]]] = json.loads(file.read_text())
        return found
    writer, found, seen, tried = _Writer(model, tokenizer, tokens, temperature), [], set[Any](), 0
    training = [module for module in model.modules() if module.training]
    with (
        torch.random.fork_rng(),
        torch.no_grad(),
        tqdm(total=n, desc="references", disable=not progress) as bar,
    ):
        try:
            model.eval()
            torch.manual_seed(seed)
            while len(found) < n and tried < _PATIENCE * n:
                for one in writer.texts(min(batch, n)):
                    tried += 1
                    new = tuple(one["labels" if "labels" in one else "input_ids"])
                    if new in seen or len(new) < _SHORTEST or len(set(new)) < _DIFFERENT * len(new):
                        continue
                    seen.add(new)
                    found.append(one)
                bar.update(min(len(found), n) - bar.n)
        finally:
            for module in training:
                module.training = True
    if len(found) < n:
        raise ValueError(
            f"Only {len(found)} of {tried} texts that the model wrote are of use; the others are empty, "
            "repeated, or repeat themselves. Pass texts of your own."
        )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found[:n]))
    return found[:n]


class _Writer:
    """Samples texts from a model, in the way that fits it."""

    def __init__(self, model: Any, tokenizer: Any, tokens: int, temperature: float) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._encodes = getattr(model.config, "is_encoder_decoder", False)
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, list) else [ends, tokenizer.eos_token_id]
        self._ends = [token for token in ends if token is not None]
        known = (tokenizer.pad_token_id, *self._ends, 0)
        self._pad = next(token for token in known if token is not None)
        known = (tokenizer.bos_token_id, *self._ends, self._pad)
        self._first = [next(token for token in known if token is not None)]  # with which texts begin
        # The least likely tokens, 5 % in all, are cut: small models derail on them.
        self._options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": _NUCLEUS}
        self._options |= {"max_new_tokens": tokens, "pad_token_id": self._pad, "use_cache": True}

    def texts(self, n: int) -> list[dict[str, list[int]]]:
        """Return n new texts."""
        if self._encodes:
            inputs = [one or self._first for one in self._written([self._first] * n)]
            outputs = self._written(inputs)
            return [{"input_ids": a, "labels": b} for a, b in zip(inputs, outputs, strict=True)]
        if not getattr(self._tokenizer, "chat_template", None):
            return [{"input_ids": self._first + new} for new in self._written([self._first] * n)]
        before = self._template(_MARK).partition(_MARK)[0]  # up to the content of a user's message
        asked = self._written([self._ids(before)] * n)
        said = [self._tokenizer.decode(new, skip_special_tokens=True).strip() for new in asked]
        prompts = [self._ids(self._template(text, add_generation_prompt=True)) for text in said if text]
        answers = self._written(prompts) if prompts else []
        return [{"input_ids": a + b if b else []} for a, b in zip(prompts, answers, strict=True)]

    def _written(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the new tokens after each prompt, up to and with the first token that ends a text."""
        longest = max(map(len, prompts))
        padded = [[self._pad] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        given = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
        device = next(self._model.parameters()).device
        out = self._model.generate(**{key: a.to(device) for key, a in given.items()}, **self._options)
        rows = out[:, 1 if self._encodes else longest :].tolist()
        stops = [
            next((k + 1 for k, token in enumerate(row) if token in self._ends), len(row)) for row in rows
        ]
        return [row[:stop] for row, stop in zip(rows, stops, strict=True)]

    def _template(self, content: str, **options: Any) -> str:
        message = [{"role": "user", "content": content}]
        return str(self._tokenizer.apply_chat_template(message, tokenize=False, **options))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _key(model: Any, tokenizer: Any, settings: dict[str, Any]) -> str:
    """Return a key of a model (of the ends of each parameter), a tokenizer and settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(repr((getattr(tokenizer, "chat_template", None), len(tokenizer))).encode())
    for name, p in model.named_parameters():
        flat = p.detach().reshape(-1)
        ends = torch.cat([flat[:16], flat[-16:]]).float().cpu()
        digest.update(name.encode() + ends.numpy().tobytes())
    return digest.hexdigest()[:16]
