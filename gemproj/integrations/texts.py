"""What users of a Trainer pass as data, as examples: texts, conversations, tokens, data sets and frames."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from gemproj._warn import warn
from gemproj.torch.data import Collate
from gemproj.torch.references import positions_of

# Longest kept text, in tokens, unless the training arguments set a length.
_LONGEST = 1024
# Columns of examples that are no texts any more, and those of texts in the formats of TRL.
_COLUMNS = {"input_ids", "pixel_values"}
_TEXTS = [("messages",), ("text",), ("prompt", "completion"), ("prompt", "chosen"), ("chosen",), ("prompt",)]
# Key of the tokens of a text, which no collator of a Trainer knows, and the columns that it may have.
TEXT, _TOKENS = "tokens of a text", {"input_ids", "labels", "attention_mask"}


class Examples:
    """Makes examples of data, and batches: of tokens itself, of other examples by the Trainer's collator."""

    def __init__(self, model: Any, tokenizer: Any, args: Any, loader: Any) -> None:
        self.tokenizer = tokenizer
        # Without a batch sampler, the elements of the data set are batches.
        batched = getattr(loader, "batch_sampler", None) is not None
        self.collate: Collate | None = loader.collate_fn if batched else None
        longest = min(getattr(tokenizer, "model_max_length", _LONGEST), _LONGEST)
        self.longest = min(getattr(args, "max_length", None) or longest, positions_of(model))
        field = getattr(args, "dataset_text_field", "text")  # of TRL
        self.texts = [_TEXTS[0], (field,), *_TEXTS[1:]]
        self.labelled = getattr(model, "can_generate", bool)()
        self.encodes = self.labelled and getattr(model.config, "is_encoder_decoder", False)
        self.cut = 0  # number of texts that were longer
        takes = inspect.signature(base_of(model).forward).parameters
        columns = {*takes, "label", "label_ids", *(args.label_names or ())}
        self.columns = columns if args.remove_unused_columns else set()

    def of(self, data: Any) -> tuple[Any, Collate | None]:
        """Return data of a Trainer's user as `keep` takes it, with a collate function."""
        if isinstance(data, str):
            raise TypeError("data must be a list of texts; found one text. Pass [text].")
        data = listed(data)
        batches = isinstance(data, DataLoader | Mapping | IterableDataset)
        if batches or not hasattr(data, "__getitem__") or not len(data):
            return data, None
        keys = data[0].keys() if isinstance(data[0], Mapping) else set()
        if keys >= {"role", "content"}:
            raise TypeError(
                "data must be a list of conversations; found one conversation. Pass [conversation]."
            )
        parts = next((names for names in self.texts if keys >= set(names) and not keys & _COLUMNS), ())
        first = data[0][parts[0]] if parts else data[0]
        if isinstance(first, str) or (isinstance(first, list) and first and isinstance(first[0], Mapping)):
            if self.tokenizer is None:
                raise ValueError(
                    "data holds texts, and the trainer has no tokenizer: pass processing_class=."
                )
            self.cut = 0
            said = ([one[name] for name in parts] if parts else [one] for one in data)
            if not self.encodes:
                said = ([reduce(add, some)] for some in said)
            made = [self.of_tokens(*map(self.ids, some, ("text", "text_target"))) for some in said]
            if self.cut:
                warn(
                    f"{self.cut} of {len(made)} texts are longer than {self.longest:,} tokens and are "
                    "cut there. Pass tokens to keep longer ones, or set max_length in arguments of TRL."
                )
            return made, self
        if not keys:
            return data, None
        if keys & self.columns:  # otherwise the collator makes what the model takes
            data = [{key: value for key, value in one.items() if key in self.columns} for one in data]
            keys = data[0].keys()
            odd = next((k for k, one in enumerate(data) if one.keys() != keys), None)
            if odd is not None:
                raise ValueError(
                    f"data must have the same columns in all examples; found {', '.join(keys)} in the first "
                    f"one, and {', '.join(data[odd]) or 'none'} in number {odd}."
                )
        own = {"input_ids"} if self.labelled else {"input_ids", "labels"}  # the collator may make labels
        if own <= keys <= _TOKENS and {np.ndim(one) for one in data[0].values()} == {1}:
            return [self.of_tokens(**one) for one in data], self
        return data, None if self.collate is None else self

    def of_tokens(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> dict[str, Any]:
        """Return tokens as an example; an empty one has no label, and no position that counts."""
        if self.encodes and labels is None:
            raise ValueError(
                "The model is an encoder-decoder, so data needs what it reads and what it says: pass "
                "examples with input_ids and labels, or with prompt and completion."
            )
        labels = input_ids if labels is None and self.labelled else labels
        if not len(input_ids) or (labels is not None and not len(labels)):
            input_ids, labels, attention_mask = [0], None if labels is None else [-100], [0]
        example = {"input_ids": input_ids} | ({} if labels is None else {"labels": labels})
        return {TEXT: example if attention_mask is None else example | {"attention_mask": attention_mask}}

    def ids(self, one: Any, key: str = "text") -> list[int]:
        """Return the tokens of a text or of a conversation, cut to the longest length."""
        plain = isinstance(one, str)
        text = one if plain else self.tokenizer.apply_chat_template(one, tokenize=False)
        # A template writes its own special tokens.
        options = {key: text, "truncation": True, "add_special_tokens": plain}
        found = self.tokenizer(**options, max_length=self.longest + 1)["input_ids"]
        if len(found) > self.longest:
            self.cut += 1
            found = self.tokenizer(**options, max_length=self.longest)["input_ids"]
        return list(found) if text.strip() else []

    def __call__(self, examples: list[Any]) -> Any:
        """Make a batch of examples."""
        if TEXT not in examples[0]:
            assert self.collate is not None
            try:
                return self.collate(examples)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"The collator of the trainer makes no batch of examples with {', '.join(examples[0])}: "
                    f"{error!r}. Pass texts, conversations, collate=, or examples with messages, text, "
                    "prompt and completion, chosen, or input_ids and labels."
                ) from error
        texts = [one[TEXT] for one in examples]
        texts = [{"attention_mask": [1] * len(one["input_ids"])} | one for one in texts]
        padding = {"input_ids": getattr(self.tokenizer, "pad_token_id", None) or 0, "labels": -100}
        return {
            name: pad_sequence([torch.as_tensor(one[name]) for one in texts], True, padding.get(name, 0))
            for name in texts[0]
        }


def listed(data: Any) -> Any:
    """Return a series or a frame of pandas as a list; other data are returned as they are."""
    if not hasattr(data, "iloc"):
        return data
    return list(data) if data.ndim == 1 else data.to_dict("records")


def base_of(model: Any) -> Any:
    """Return the model inside the adapters of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
