"""The ``small`` backbone, a GPT-2 of a few layers: pretrained on the stream's training text, and then cached.

Adapters of rank 8 cannot replace the features that a network of random weights lacks. So the small model gets
the basics of larger models in a minute: a tokenizer, word vectors from the co-occurrence of words, and
language modelling. It sees the training text only.
"""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ..common.command import SetupError
from . import backbone
from .config import Config
from .stream import Experience

END, PAD = "<|endoftext|>", "<|pad|>"
BATCH, LR, SEED = 32, 2e-3, 0
EMBEDDING_SCALE = 0.1  # root mean square of the word vectors before language modelling
THREADS = 2  # fixed: another number changes the order of sums, and so the model
LIBRARIES = ("torch", "transformers", "tokenizers", "scikit-learn", "numpy")
AVX512 = ("F", "CD", "_SKX", "_CLX", "_CNL", "_ICL", "_SPR")  # feature names in various versions of NumPy
# Libraries choose their kernels by the processor, and kernels round differently. With these variables all x86
# processors with AVX2 make the same model, bit for bit; other settings of MKL do so on Intel's only.
SAME_EVERYWHERE = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 " + " ".join(f"AVX512{x}" for x in AVX512),
    "OMP_WAIT_POLICY": "passive",  # changes no number, and leaves the cores to others
}


def backbone_folder(config: Config, experiences: Sequence[Experience], cache: Path, console: Console) -> Path:
    """Return the folder of the backbone; the small one is pretrained unless it is in the cache."""
    if config.backbone != "small":
        folder = backbone.locate(config.backbone, cache)
        backbone.check(folder, config)
        console.print(f"[bold]backbone[/]  {config.backbone}")
        return folder
    texts = [text for experience in experiences for text in experience.train.texts]
    folder = cached(config, texts, cache)
    told = "[bold]backbone[/]  small GPT-2,"
    if folder.is_dir():
        console.print(f"{told} pretrained earlier ({folder})")
        return folder
    if len(texts) < BATCH:
        raise SetupError(
            f"rows: {config.experiences} experiences of {config.rows} have {len(texts)} training articles, "
            f"and pretraining the small GPT-2 needs {BATCH}; ask for more"
        )
    console.print(f"{told} to be pretrained once on the {len(texts):,} training articles")
    prepare(config, texts, folder, silent=console.quiet)
    console.print(f"          kept in {folder}")
    return folder


def cached(config: Config, texts: Sequence[str], cache: Path) -> Path:
    """Return the folder of this model, which may not exist; its name is a hash of all that decides it."""
    shape = [config.small_layers, config.small_width, config.small_vocabulary, config.small_steps]
    majors = [version(name).split(".")[0] for name in LIBRARIES]
    training = [BATCH, LR, SEED, EMBEDDING_SCALE, THREADS]
    recipe = [shape, config.max_length, *training, SAME_EVERYWHERE, majors, list(texts)]
    return cache / f"small-gpt2-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:20]}"


def prepare(config: Config, texts: Sequence[str], folder: Path, silent: bool) -> None:
    """Write the pretrained model and its tokenizer into a folder, which appears complete or not at all.

    This takes a new process, because libraries read the variables above when they are loaded.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draft-", dir=folder.parent) as parent:
        given, draft = Path(parent, "given"), Path(parent, "model")
        given.write_bytes(pickle.dumps((config, texts, silent)))
        command = [sys.executable, "-m", f"{__package__}.small", str(given), str(draft)]
        environment = os.environ | SAME_EVERYWHERE | {"PYTHONPATH": os.pathsep.join(sys.path)}
        # Libraries print to stdout; progress and errors are on stderr.
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has made the same model meanwhile
                raise


def pretrain(given: Path, folder: Path) -> None:
    """Read settings and texts, pretrain with a progress bar, and write the model and its tokenizer.

    This is what the new process does: it sets the threads and the seed of torch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends this one
    backbone.quiet()
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

    It runs on the CPU, whatever the device of the experiment: so it is the same model everywhere.
    """
    rows = tokenizer(
        list(texts), truncation=True, max_length=config.max_length, padding=True, return_tensors="pt"
    )
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    model = initial_model(config, tokenizer, texts).train()
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
