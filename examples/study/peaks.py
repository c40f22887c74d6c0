"""How much memory the parts of a step take at most."""

import re
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR.exists():
        CLEAR.write_text("5", encoding="ascii")  # proc_pid_clear_refs(5): the peak resident set size


def peak(device: torch.device) -> int | None:
    """Return the peak in bytes: of tensors on a CUDA device, else of the process, where Linux tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text(encoding="ascii")) if CLEAR.exists() else None
    return 1024 * int(found[1]) if found else None
