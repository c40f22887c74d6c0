"""Pretraining the ``small`` backbone: a tokenizer, word vectors, and some steps of language modelling."""

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

END, PAD = "<|endoftext|>", "<|pad|>"
BATCH, LR, SEED = 32, 2e-3, 0
EMBEDDING_SCALE = 0.1  # root mean square of the word vectors before language modelling
THREADS = 2  # fixed: sums in another order make another model


def main(given: Path, folder: Path) -> None:
    """Read settings and texts, show how far it is, and write a model and its tokenizer.

    For a process of its own, see `small`: it sets the threads and the seed of torch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends this one
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config, texts, quiet = pickle.loads(given.read_bytes())
    tokenizer = train_tokenizer(texts, config.small_vocabulary)
    train_model(config, tokenizer, texts, Console(stderr=True, quiet=quiet)).save_pretrained(folder)
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
    """Model the language of the texts for a fixed number of steps, one article a row; show progress."""
    rows = tokenizer(
        list(texts), truncation=True, max_length=config.max_length, padding=True, return_tensors="pt"
    )
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    model = initial_model(config, tokenizer, texts).train()
    # Not fused, it would take torch.sqrt, whose last bit depends on the processor.
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

    A minute of training would not teach it that. So the value and output maps of the first attention start
    near the identity, and attention itself starts out uniform.
    """
    width = config.small_width
    shape = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=config.max_length,
        n_embd=width,
        n_layer=config.small_layers,
        n_head=max(1, width // 32),
        activation_function="gelu_pytorch_tanh",  # GPT-2's own, in one operation
        resid_pdrop=0.0,  # dropout took half of a training step here, and the adapters have their own
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
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
    # A token that is hardly seen stays short.
    directions = vectors / np.maximum(lengths, 1e-3 * lengths.max())
    return torch.from_numpy(directions * EMBEDDING_SCALE * width**0.5).float()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
