"""The folder of the backbone; the ``small`` one is pretrained in a process of its own, and then cached."""

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

from ..common.command import SetupError
from .config import Config
from .stream import Experience

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
        from .backbone import check, locate  # whose imports take seconds

        folder = locate(config.backbone)
        check(folder, config.max_length)
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
    if config.device != "cpu":
        recipe.append(config.device)
    return cache / f"small-gpt2-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:20]}"


def prepare(config: Config, texts: Sequence[str], folder: Path, silent: bool) -> None:
    """Write the pretrained model and its tokenizer into a folder, which appears complete or not at all.

    This takes a new process, because libraries read the variables above when they are loaded.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="draft-", dir=folder.parent) as parent:
        given, draft = Path(parent, "given"), Path(parent, "model")
        given.write_bytes(pickle.dumps((config, texts, silent)))
        command = [sys.executable, "-m", f"{__package__}.pretrain", str(given), str(draft)]
        environment = os.environ | SAME_EVERYWHERE | {"PYTHONPATH": os.pathsep.join(sys.path)}
        # Libraries print to stdout; progress and errors are on stderr.
        status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        if status:
            raise RuntimeError(f"pretraining ended with exit status {status}; its error stands above")
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has made the same model meanwhile
                raise
