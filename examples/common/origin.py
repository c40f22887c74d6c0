"""What results depend on besides their settings: versions, the machine, and hashes of data."""

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

# Read without importing the packages: an import takes seconds, and not all workers need one.
VERSIONS = {name: importlib.metadata.version(name) for name in ("gemproj", "torch", "transformers", "peft")}


def origin(**hashes: str) -> dict[str, Any]:
    """Return the versions, the hashes and the machine."""
    machine = {"machine": platform.processor() or platform.machine(), "system": platform.system()}
    return {"versions": VERSIONS, "hashes": hashes} | machine


def digest(*parts: Any) -> str:
    """Return a short hash: of arrays, of the contents of files, or of what JSON can hold."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype} {part.shape}".encode())
            found.update(np.ascontiguousarray(part))
        elif isinstance(part, Path):
            found.update(np.memmap(part, mode="r"))  # files of weights are large
        else:
            found.update(json.dumps(part, sort_keys=True, default=list).encode())
    return found.hexdigest()[:12]
