"""What users of a Trainer pass as data, as examples: texts, conversations, tokens, data sets and frames."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial, reduce
from itertools import chain, islice
from operator import add
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gemproj._warn import warn
from gemproj.torch.data import STREAM, Collate, is_kind
from gemproj.torch.references import positions_of

# Longest kept text, in tokens, unless the training arguments set a length.
_LONGEST = 1024
# Columns of examples that are no texts any more, and those of texts in the formats of TRL.
_COLUMNS = {"input_ids", "pixel_values", "input_features", "input_values"}
_COLUMNS |= {"image", "images", "audio", "audios", "video", "videos"}
_TEXTS = [("messages",), ("text",), ("prompt", "completion"), ("prompt", "chosen"), ("chosen",), ("prompt",)]
# Key of the tokens of a text, which no collator of a Trainer knows, and the columns that it may have.
TEXT, _TOKENS = "tokens of a text", {"input_ids", "labels", "attention_mask"}


class _Made(Dataset[Any]):
    """Examples that are made of data when they are read: of a sample, only the chosen ones are."""

    def __init__(self, data: Any, make: Callable[[Any], Any]) -> None:
        self.data, self.make = data, make

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, k: int) -> Any:
        return self.make(self.data[k])


class Examples:
    """Makes examples of data, and batches: of tokens itself, of other examples by the Trainer's collator."""

    def __init__(self, model: Any, tokenizer: Any, args: Any, loader: Any) -> None:
        self.tokenizer = tokenizer
        # Without a batch sampler, the elements of the data set are batches.
        batched = getattr(loader, "batch_sampler", None) is not None
        self.collate: Collate | None = loader.collate_fn if batched else None
        longest = min(getattr(tokenizer, "model_max_length", _LONGEST), _LONGEST)
        self.positions = positions_of(model)
        self.longest = min(getattr(args, "max_length", None) or longest, self.positions)
        field = getattr(args, "dataset_text_field", "text")  # of TRL
        self.texts = [_TEXTS[0], (field,), *_TEXTS[1:]]
        self.labelled = getattr(model, "can_generate", bool)()
        self.encodes = self.labelled and getattr(model.config, "is_encoder_decoder", False)
        self.answers = getattr(args, "completion_only_loss", True)  # of TRL; None is for texts only
        # Strings to which TRL adds the token that ends a text: a model must not forget where to stop.
        self.ends = {"completion", "chosen", *([field, ""] * hasattr(args, "dataset_text_field"))}
        self.cut = False  # whether a text was longer
        takes = {*inspect.signature(base_of(model).forward).parameters}
        labels = {"label", "label_ids", "labels", *(args.label_names or ())}
        removes = args.remove_unused_columns
        self.columns, self.inputs = (takes | labels, takes - labels) if removes else (set(), set())

    def of(self, data: Any) -> tuple[Any, Collate | None]:
        """Return data of a Trainer's user as `keep` takes it, with a collate function."""
        if isinstance(data, str):
            raise TypeError("data must be a list of texts; found one text. Pass [text].")
        if type(data) is dict and any(isinstance(one, DataLoader | Dataset) for one in data.values()):
            raise TypeError("data must be one set; found a dict of sets. Call keep(one, name=...) for each.")
        if inspect.isgenerator(data):
            begin = [*islice(data, 1)]
            if begin and isinstance(begin[0], str):
                raise TypeError("data must be a list of texts; found a generator. Pass list(texts).")
            data = chain(begin, data)
        data = listed(data)
        streams = isinstance(data, IterableDataset) or is_kind(data, STREAM)
        indexed = hasattr(data, "__getitem__") and not isinstance(data, DataLoader | Mapping)
        if not (streams or (indexed and len(data))):
            return data, None
        stream = iter(data) if streams else iter(())
        first: Any = next(stream, None) if streams else data[0]

        def made(make: Any) -> Any:  # of a stream that may be read once
            return map(make, chain([first], stream)) if streams else _Made(data, make)

        keys = first.keys() if isinstance(first, Mapping) else set()
        if keys >= {"role", "content"}:
            raise TypeError(
                "data must be a list of conversations; found one conversation. Pass [conversation]."
            )
        parts = next((names for names in self.texts if keys >= set(names) and not keys & _COLUMNS), ())
        said = first[parts[0]] if parts else first
        if isinstance(said, str) or (isinstance(said, list) and said and isinstance(said[0], Mapping)):
            if self.tokenizer is None:
                raise ValueError(
                    "data holds texts, and the trainer has no tokenizer: pass processing_class=."
                )
            if parts == ("prompt",) and not self.encodes:  # which is refused below
                warn("data has prompts only: what the model answers is not kept. Add a column completion.")
            self.cut = False
            return made(partial(self.of_text, parts)), self
        if not keys:  # the elements of a list are batches
            return data, self if self.collate and isinstance(data, Dataset) and not streams else None
        row = self.row(first)
        own = {"input_ids"} if self.labelled else {"input_ids", "labels"}  # the collator may make labels
        tokens = own <= row.keys() <= _TOKENS and {np.ndim(one) for one in row.values()} == {1}
        if streams and np.ndim(row.get("input_ids", 0)) > 1:  # batches
            return data, None
        if tokens or row is not first or (streams and self.collate):
            data = made(partial(self.of_row, row.keys(), tokens))
        if tokens or self.collate:
            return data, self
        return data if streams or row is first else [data[k] for k in range(len(data))], None

    def of_text(self, parts: tuple[str, ...], one: Any) -> dict[str, Any]:
        """Return a text, or parts of a row, as an example; after a prompt, only an answer has labels."""
        said, about = ([one[name] for name in parts], one) if parts else ([one], {})
        options: dict[str, Any] = {}
        if not isinstance(said[0], str):  # columns of TRL for chat templates
            tools, more = about.get("tools") or None, about.get("chat_template_kwargs")
            options = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
            options |= more if isinstance(more, Mapping) else {}
        if self.encodes:
            keys = ("text", "text_target")
            return self.of_tokens(
                *(self.ids(one, options, key) for one, key in zip(said, keys, strict=False))
            )
        talk: Any = said[0] if len(said) == 1 and not isinstance(said[0], str) else ()
        if len(talk) > 1 and talk[-1].get("role") == "assistant":
            said = [talk[:-1], talk[-1:]]  # the last answer is the completion
        whole, start = self.ids(reduce(add, said), options), 0
        ends = isinstance(said[-1], str) and ["", *parts][-1] in self.ends
        end = getattr(self.tokenizer, "eos_token_id", None)
        if ends and 0 < len(whole) < self.longest and end not in (None, whole[-1]):
            whole.append(end)
        if len(said) > 1 and self.labelled and self.answers is not False:
            prompt = self.ids(said[0], options | {"add_generation_prompt": True})
            # A tokenizer may merge the end of the prompt with the answer.
            start = [*(a == b for a, b in zip(prompt, whole, strict=False)), False].index(False)
        return self.of_tokens(whole, [-100] * start + whole[start:] if start else None)

    def row(self, one: Any) -> Any:
        """Return the columns of an example that the model takes, with labels where masks of TRL have ones."""
        names = ("assistant_masks", *["completion_mask"] * bool(self.answers))
        masks = [one[name] for name in names if name in one]
        if masks and self.labelled and "labels" not in one:
            one = {**one, "labels": np.where(np.all(masks, axis=0), one["input_ids"], -100).tolist()}
        if not self.inputs & one.keys():  # the collator makes what the model takes
            return one
        return {name: value for name, value in one.items() if name in self.columns}

    def of_row(self, keys: Any, tokens: bool, one: Any) -> Any:
        """Return an example with the columns `keys`, made of tokens if it has nothing else."""
        found = self.row(one)
        if found.keys() != keys:
            raise ValueError(
                f"data must have the same columns in all examples; found {', '.join(keys)} in the first "
                f"one, and {', '.join(found) or 'none'} in another one."
            )
        return self.of_tokens(**found) if tokens else found

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

    def ids(self, one: Any, template: Mapping[str, Any], key: str = "text") -> list[int]:
        """Return the tokens of a text or of a conversation, cut to the longest length."""
        plain = isinstance(one, str)
        for said in [] if plain else one:  # a template may leave out what it does not find
            if "role" not in said or not {"content", "tool_calls"} & said.keys():
                raise ValueError(f"A message must have role and content; found {', '.join(said)}.")
        text = one if plain else self.tokenizer.apply_chat_template(one, tokenize=False, **template)
        # A template writes its own special tokens.
        options = {key: text, "truncation": True, "add_special_tokens": plain}
        found = self.tokenizer(**options, max_length=self.longest + 1)["input_ids"]
        if len(found) > self.longest:
            if not self.cut:
                remedy = "Pass tokens to keep longer ones, or set max_length in arguments of TRL."
                if self.longest >= self.positions:
                    remedy = "The model takes no longer ones."
                warn(f"Texts that are longer than {self.longest:,} tokens are cut there. {remedy}")
            self.cut = True
            found = self.tokenizer(**options, max_length=self.longest)["input_ids"]
        return list(found) if text.strip() else []

    def __call__(self, examples: list[Any]) -> Any:
        """Make a batch of examples."""
        if TEXT not in examples[0]:
            assert self.collate is not None
            try:
                return self.collate(examples)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                named = examples[0] if isinstance(examples[0], Mapping) else [type(examples[0]).__name__]
                raise ValueError(
                    f"The collator of the trainer makes no batch of examples with {', '.join(named)}: "
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
