"""Texts that a language model writes itself, to keep what it says without anybody's data."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from bisect import bisect_left
from contextlib import suppress
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from gemproj._checks import check_count, check_number
from gemproj._warn import warn
from gemproj.torch.processes import Processes
from gemproj.torch.rows import forked, reshard
from gemproj.torch.rows import seed as seeded
from gemproj.torch.vector import group_of, local, mesh_of

# A text is of use from so many tokens on, an answer in it from one token and its end on; and if at least this
# share of the tokens are different ones. So must be the answers, of which some may be alike, as refusals are.
_SHORTEST, _ANSWER, _DIFFERENT = 8, 2, 0.2
# The model may write this many times the wanted number; if fewer are of use, it is refused.
_PATIENCE = 3
# Settings of generation, known to some version of transformers, with which a model does not only sample.
_OTHER_WAYS = ["max_time", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "dola_layers"]
_OTHER_WAYS += ["constraints", "force_words_ids"]
# What a config says of the loading and the use of a model, not of what the model says.
_NOISE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
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
    tokenizer : transformers.PreTrainedTokenizerBase or transformers.ProcessorMixin
    n : int, default 256
        Number of texts.
    tokens : int, default 128
        Largest number of tokens of each message; fewer if the model has positions for fewer.
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
        If most of the texts, or of the answers of a chat model, are empty, repeated, or repeat themselves,
        which says how many.
    """
    for value, name in ((n, "n"), (tokens, "tokens"), (batch, "batch")):
        check_count(value, name, 1)
    check_number(temperature, "temperature", 0.0, strict=True)
    if not callable(getattr(model, "generate", None)):
        raise TypeError(f"model must have a method generate; found {type(model).__name__}.")
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # which transformers needs

    held = list(model.parameters())
    empty = any(hasattr(p, "ds_id") for p in held)  # ZeRO-3 gathers weights for a pass only
    # Then every pass needs all processes, which therefore end together.
    shared = empty or any(mesh_of(p) is not None for p in held)
    group = group_of(held) if shared else None
    topology = Processes(held[0].device, group, collective=shared)
    writer = _Writer(model, tokenizer_of(tokenizer), tokens, temperature, shared)
    settings = {"n": n, "tokens": tokens, "temperature": temperature, "batch": batch, "seed": seed}
    file = None if cache is None or empty else Path(cache) / f"references-{writer.key(settings)}.json"
    texts: list[dict[str, list[int]]] = []
    if file is not None:
        with suppress(Exception):  # there is none, or no home, or it is damaged
            stored = json.loads(file.expanduser().read_text())
            texts = stored if len(stored) == n and all(one["input_ids"] for one in stored) else []
    if topology.least(len(texts)):
        return texts
    found, answers, tried = dict[Any, Any](), set[Any](), 0  # each text once
    training = [module for module in model.modules() if module.training]
    with (
        forked(held[0].device),
        torch.no_grad(),
        tqdm(total=n, desc="references", disable=not progress) as bar,
    ):
        try:
            model.eval()
            seeded(seed, held[0].device)
            while topology.least(len(found)) < n and tried < _PATIENCE * n:
                tried += min(batch, n)
                for one, text, answer in writer.texts(min(batch, n)):
                    if _is_of_use(text, _SHORTEST) and _is_of_use(answer, _ANSWER):
                        found.setdefault(tuple(text), one)
                        answers.add(tuple(answer))
                bar.update(min(len(found), n) - bar.n)
        finally:
            reshard(model)
            for module in training:
                module.training = True
    if len(found) < n or len(answers) < _DIFFERENT * n:
        of_use = min(len(found), len(answers))
        raise ValueError(
            f"Only {of_use} of {tried} texts that the model wrote are of use; the others, or the answers in "
            "them, are empty, repeated, or repeat themselves. Pass texts of your own."
        )
    texts = [*found.values()][:n]
    if file is not None:
        try:
            file = file.expanduser()
            file.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=file.parent) as folder:  # another process may read or write the file
                (draft := Path(folder) / file.name).write_text(json.dumps(texts))
                draft.replace(file)
        except (OSError, RuntimeError) as error:
            warn(f"The texts that the model wrote are not stored, so another run writes them again: {error}.")
    return texts


def tokenizer_of(processing: Any) -> Any:
    """Return the tokenizer of a processor, with the processor's chat template; a tokenizer as it is."""
    tokenizer = getattr(processing, "tokenizer", processing)
    template = getattr(processing, "chat_template", None)
    if template and tokenizer is not processing:
        tokenizer = copy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def positions_of(model: Any) -> int:
    """Return how many tokens a model takes, as far as its config says."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not (isinstance(most, int) and most > 0):
        return sys.maxsize
    # Models like RoBERTa number positions from the one after that of the padding on.
    known = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = [module.padding_idx for module in known if getattr(module, "padding_idx", None) is not None]
    prompt = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0
    return most - max(padding, default=-1) - 1 - prompt


def _is_of_use(said: list[int], shortest: int) -> bool:
    return len(said) >= shortest and len(set(said)) >= _DIFFERENT * len(said)


class _Writer:
    """Samples texts from a model, in the way that fits it."""

    def __init__(
        self, model: Any, tokenizer: Any, tokens: int, temperature: float, shared: bool = False
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._encodes = getattr(model.config, "is_encoder_decoder", False)
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, list) else [ends, tokenizer.eos_token_id]
        self._ends = [token for token in ends if token is not None]
        pad, bos = tokenizer.pad_token_id, tokenizer.bos_token_id
        self._pad = [*self._ends, 0][0] if pad is None else pad
        self._first = [bos] if bos is not None else [*self._ends, self._pad][:1]  # with which texts begin
        # The least likely tokens, 5 % in all, are cut: small models derail on them.
        self._options: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0}
        self._options |= {"top_p": 0.95, "pad_token_id": self._pad, "use_cache": True}
        # A generation config may have other values of these, and strings that end a text. Without these, old
        # versions of transformers would pass the tokenizer to an encoder.
        self._options |= {"num_return_sequences": 1, "return_dict_in_generate": False, "num_beams": 1}
        self._options |= {name: None for name in _OTHER_WAYS if hasattr(model.generation_config, name)}
        if getattr(model.generation_config, "stop_strings", None):
            self._options["tokenizer"] = tokenizer
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            self._options["output_router_logits"] = False  # of experts, which padding does not fit
        self._options |= {"synced_gpus": True} if shared else {}  # all processes take as many passes
        self._chats = not self._encodes and bool(getattr(tokenizer, "chat_template", None))
        self._nested = False  # whether the template takes only lists of parts, as those of processors may
        self._nested = self._chats and _MARK not in self._template(_MARK)
        self._room = positions_of(model) - 1  # of a message
        if self._chats:  # a question and its answer, in the template
            self._room = (self._room - len(self._ids(self._template(_MARK, add_generation_prompt=True)))) // 2
        self._options["max_new_tokens"] = max(min(tokens, self._room), 1)

    def texts(self, n: int) -> list[tuple[Any, list[int], list[int]]]:
        """Return at most n texts, each with the tokens that must be new, and those of the answer in them."""
        if self._encodes:
            inputs = [one or self._first for one in self._written([self._first] * n)]
            outputs = self._written(inputs)
            return [({"input_ids": a, "labels": b}, b, b) for a, b in zip(inputs, outputs, strict=True)]
        if not self._chats:
            return [({"input_ids": self._first + new}, new, new) for new in self._written([self._first] * n)]
        before, _, after = self._template(_MARK, add_generation_prompt=True).partition(_MARK)
        end = (after.strip() or _MARK).splitlines()[0]  # of a user's message
        asked = self._written([self._ids(before) or self._first] * n)
        said = [self._asked(new, end) for new in asked]
        # They may have more tokens when they are read again.
        said = [text for text in said if len(self._ids(text)) <= self._room]
        prompts = [self._ids(self._template(text, add_generation_prompt=True)) for text in said if text]
        answers = self._written(prompts or [self._first])  # always, as other processes may wait
        return [({"input_ids": a + b}, a + b, b) for a, b in zip(prompts, answers, strict=False)]

    def _asked(self, new: list[int], end: str) -> str:
        """Return a question up to its end in the template, where the model may write on."""
        decode = self._tokenizer.decode
        stop = bisect_left(range(len(new)), True, key=lambda k: end in decode(new[: k + 1])) + 1
        asked = self._ids(str(decode(new[:stop])).partition(end)[0])
        return str(decode(asked, skip_special_tokens=True)).strip()

    def _written(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the new tokens after each prompt, up to and with the first token that ends a text."""
        side = "right" if self._encodes else "left"  # an encoder may number positions from the first one on
        rows = [torch.tensor(prompt) for prompt in prompts]
        ids = pad_sequence(rows, True, self._pad, side)
        mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, side)
        device = next(self._model.parameters()).device
        out = self._model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **self._options)[
            :, 1 if self._encodes else ids.shape[1] :
        ]
        return [self._ended(row) for row in out.tolist()]

    def _ended(self, row: list[int]) -> list[int]:
        """Return a row up to and with its end; a string may have ended it, which leaves padding."""
        stop = next((k + 1 for k, token in enumerate(row) if token in self._ends), len(row))
        while stop and row[stop - 1] == self._pad and self._pad not in self._ends:
            stop -= 1
        return row[:stop]

    def _template(self, content: str, **options: Any) -> str:
        said = [{"type": "text", "text": content}] if self._nested else content
        message = [{"role": "user", "content": said}]
        return str(self._tokenizer.apply_chat_template(message, tokenize=False, **options))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def key(self, settings: dict[str, Any]) -> str:
        """Return a key of the model, by a sample of its weights, of the tokenizer and of settings."""
        model, words = self._model, sorted(self._tokenizer.get_vocab().items())
        template = getattr(self._tokenizer, "chat_template", None)
        about = [settings, self._ends, self._first, self._pad, template, words, model.generation_config]
        about.append(getattr(model, "_adapters_disabled", None))  # those that are prompts
        for name, module in model.named_modules():  # layers of peft have several adapters
            if isinstance(active := getattr(module, "active_adapters", None), list):
                about.append((name, active, getattr(module, "disable_adapters", None) is True))
                about.append(getattr(module, "scaling", None))
        about += sorted(one for one in model.config.to_dict().items() if one[0] not in _NOISE)
        digest = hashlib.sha256(repr(about).encode())
        samples = {}
        for name, p in model.named_parameters():
            flat = local(p.detach()).reshape(-1)
            digest.update(b"" if mesh_of(p) is None else str(dist.get_rank()).encode())  # it is a part
            samples[name] = flat[:: max(len(flat) // 1024, 1)].float().cpu().numpy()
        for name, sample in samples.items():
            # Of a new adapter, one factor is zero, and the other one is random and of no effect.
            if samples.get(name.replace(".lora_A.", ".lora_B."), sample).any():
                digest.update(name.encode() + sample.tobytes())
        return digest.hexdigest()[:16]
