"""Tables of numbers on a device: copied without waiting for it, and there for every replay of a graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# A captured graph reads its tables, or the pinned memory they are copied from, at every replay.
_captured: list[Table] = []
# Pinned memory for tables that are new during a capture, when none may be pinned: made by the first table,
# and how much of it is taken.
_spare: dict[torch.device, tuple[Tensor, int]] = {}
_POOL = 1 << 17


class Table:
    """Whole numbers, int64, on a device."""

    def __init__(self, numbers: np.ndarray, device: torch.device) -> None:
        self._there = self._here = torch.from_numpy(numbers)
        self._on_device = device.type == "cuda"
        self.lasts = True  # False for one that holds nothing until a graph is replayed
        if not self._on_device:
            return
        self.lasts = not torch.cuda.is_current_stream_capturing()
        self._here = self._here.pin_memory() if self.lasts else _from_pool(self._here, device)
        self._there = self._here.to(device, non_blocking=True)
        self._stream = torch.cuda.current_stream(device)
        if self.lasts:
            self._copied = self._stream.record_event()
            if device not in _spare:
                _spare[device] = torch.empty(_POOL, dtype=torch.int64, pin_memory=True), 0
        else:
            _captured.append(self)

    def get(self) -> Tensor:
        """Return the numbers, for a launch in the current stream."""
        if self._on_device and self.lasts:
            stream = torch.cuda.current_stream(self._there.device)
            if torch.cuda.is_current_stream_capturing():
                _captured.append(self)  # was copied before: captures begin after all work of the device
            elif stream != self._stream:
                stream.wait_event(self._copied)
                self._there.record_stream(stream)
        return self._there


def _from_pool(numbers: Tensor, device: torch.device) -> Tensor:
    pool, used = _spare.get(device, (numbers, _POOL))
    if used + len(numbers) > _POOL:
        return numbers.pin_memory()
    _spare[device] = pool, used + len(numbers)
    return pool[used : used + len(numbers)].copy_(numbers)
