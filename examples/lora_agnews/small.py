"""The ``small`` backbone: a GPT-2 of a few layers, pretrained on the stream's training text and then cached.

Adapters of rank 8 cannot make up for features that a network of random weights does not have. So the small
model gets in a minute what larger ones have: a tokenizer, word vectors that know which words occur together,
and language modelling. It sees the training text only.
"""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from . import pretrain
from .backbone import locate
from .config import Config
from .stream import Experience

LIBRARIES = ("torch", "transformers", "tokenizers", "scikit-learn", "numpy")
AVX512 = ("F", "CD", "_SKX", "_CLX", "_CNL", "_ICL", "_SPR")  # what NumPy has code for, by version
# Libraries choose their code by the processor, and each code rounds in its own way. With these variables all
# x86 processors with AVX2 make the same model, bit for bit; other settings of MKL hold on Intel's only.
SAME_EVERYWHERE = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "1",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 " + " ".join(f"AVX512{x}" for x in AVX512),
    "OMP_WAIT_POLICY": "passive",  # changes no number, and leaves the cores to others
}


def backbone_folder(config: Config, experiences: Sequence[Experience], cache: Path, console: Console) -> Path:
    """Return the folder of the backbone; the small one is made if it is not in the cache yet."""
    if config.backbone != "small":
        folder = locate(config.backbone)
        console.print(f"[bold]backbone[/]  {config.backbone}")
        return folder
    texts = [text for experience in experiences for text in experience.train.texts]
    folder = cached(config, texts, cache)
    told = "[bold]backbone[/]  small GPT-2,"
    if folder.is_dir():
        console.print(f"{told} pretrained earlier ({folder})")
        return folder
    console.print(f"{told} to be pretrained once on the {len(texts):,} training articles")
    prepare(config, texts, folder, quiet=console.quiet)
    console.print(f"          kept in {folder}")
    return folder


def cached(config: Config, texts: Sequence[str], cache: Path) -> Path:
    """Return the folder of this model, there already or not; its name is a hash of all that shapes it."""
    shape = [config.small_layers, config.small_width, config.small_vocabulary, config.small_steps]
    majors = [version(name).split(".")[0] for name in LIBRARIES]
    training = [pretrain.BATCH, pretrain.LR, pretrain.SEED, pretrain.EMBEDDING_SCALE, pretrain.THREADS]
    recipe = [shape, config.max_length, *training, SAME_EVERYWHERE, majors, list(texts)]
    return cache / f"small-gpt2-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:20]}"


def prepare(config: Config, texts: Sequence[str], folder: Path, quiet: bool) -> None:
    """Write the pretrained model and its tokenizer into a folder, which appears complete or not at all.

    A new process does it: libraries read the variables above when they are loaded.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draft-", dir=folder.parent) as parent:
        given, draft = Path(parent, "given"), Path(parent, "model")
        given.write_bytes(pickle.dumps((config, texts, quiet)))
        command = [sys.executable, "-m", pretrain.__name__, str(given), str(draft)]
        environment = os.environ | SAME_EVERYWHERE | {"PYTHONPATH": os.pathsep.join(sys.path)}
        # Libraries print, too; progress and errors are on the other stream.
        status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        if status:
            raise RuntimeError(f"pretraining ended with exit status {status}; its error stands above")
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has made the same model meanwhile
                raise
