"""What results depend on besides their settings: versions, code, the machine, and hashes of data."""

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

import gemproj

# Read without importing the packages: an import takes seconds, and not all workers need one.
VERSIONS = {name: importlib.metadata.version(name) for name in ("gemproj", "torch", "transformers", "peft")}


def origin(*packages: str, **hashes: str) -> dict[str, Any]:
    """Return versions, the code of gemproj and of packages of the examples, hashes and the machine."""
    machine = {"machine": platform.processor() or platform.machine(), "system": platform.system()}
    code = {name: CODE[name] for name in ("gemproj", "common", *packages)}
    return {"versions": VERSIONS, "code": code, "hashes": hashes} | machine


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


# Hashes of the sources of gemproj and of each package of the examples, as they are imported, even if a file
# changes while runs are waiting.
CODE = {
    file.parent.name: digest([one.read_text("utf-8") for one in sorted(file.parent.rglob("*.py"))])
    for file in (Path(gemproj.__file__), *Path(__file__).parents[1].glob("*/__init__.py"))
}
