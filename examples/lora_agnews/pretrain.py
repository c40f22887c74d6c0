"""Pretraining of the ``small`` backbone, a GPT-2 of a few layers, on the stream's training text.

Adapters of rank 8 cannot replace the features that a network of random weights lacks. So the small model gets
the basics of larger models in a minute: a tokenizer, word vectors from the co-occurrence of words, and
language modelling. It sees the training text only.
"""

import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

from .config import Config
from .small import BATCH, EMBEDDING_SCALE, LR, SEED, THREADS

END, PAD = "<|endoftext|>", "<|pad|>"


def pretrain(given: Path, folder: Path) -> None:
    """Read settings and texts, pretrain with a progress bar, and write the model and its tokenizer.

    Call it in a new process: it sets the threads and the seed of torch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends this one
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config, texts, silent = pickle.loads(given.read_bytes())
    tokenizer = train_tokenizer(texts, config.small_vocabulary)
    train_model(config, tokenizer, texts, Console(stderr=True, quiet=silent)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def train_model(
    config: Config, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], console: Console
) -> GPT2LMHeadModel:
    """Train a language model on the texts for a fixed number of steps, one article a row; show progress.

    It runs on the device of the experiment. Only CPUs give the same model to the bit.
    """
    rows = tokenizer(
        list(texts), truncation=True, max_length=config.max_length, padding=True, return_tensors="pt"
    )
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    rows = {name: rows[name].to(config.device) for name in ("input_ids", "attention_mask")}
    model = initial_model(config, tokenizer, texts).train().to(config.device)
    # Fused, because the other one calls torch.sqrt, whose last bit depends on the processor.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, config.small_steps, pct_start=0.1)
    for _ in track(range(config.small_steps), "pretraining", console=console):
        chosen = torch.randint(len(texts), (BATCH,))
        tokens, mask = rows["input_ids"][chosen], rows["attention_mask"][chosen]
        loss = model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def initial_model(
    config: Config, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> GPT2LMHeadModel:
    """Return a model whose first layer already averages meaningful word vectors.

    A minute of training would not be enough for that. So the value and output maps of the first attention
    start near the identity, and its attention weights start uniform.
    """
    width = config.small_width
    sizes = {"n_positions": config.max_length, "n_embd": width, "n_layer": config.small_layers}
    sizes |= {"vocab_size": len(tokenizer), "n_head": max(1, width // 32)}
    tokens = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    # Dropout took half of the time of a step, and the adapters have their own.
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    # The activation is GPT-2's own, in one operation.
    options = {"activation_function": "gelu_pytorch_tanh", "pad_token_id": tokenizer.pad_token_id}
    shape = GPT2Config(**sizes, **tokens, **dropout, **options)
    model = GPT2LMHeadModel(shape)
    attention = model.transformer.h[0].attn
    with torch.no_grad():
        model.transformer.wte.weight.copy_(word_vectors(width, tokenizer, texts))
        attention.c_attn.weight[:, -width:] += torch.eye(width)
        attention.c_proj.weight += torch.eye(width)
    return model


def word_vectors(width: int, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """Return (vocabulary, width) vectors: normalised right singular vectors of the articles' tf-idf."""
    tfidf = TfidfVectorizer(
        analyzer=tokenizer.tokenize, vocabulary=tokenizer.get_vocab(), lowercase=False, sublinear_tf=True
    )
    vectors = TruncatedSVD(width, random_state=SEED).fit(tfidf.fit_transform(texts)).components_.T
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # Vectors of rare tokens stay short.
    directions = vectors / np.maximum(lengths, 1e-3 * lengths.max())
    return torch.from_numpy(directions * EMBEDDING_SCALE * width**0.5).float()


if __name__ == "__main__":
    pretrain(*map(Path, sys.argv[1:]))
