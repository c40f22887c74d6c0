"""The processes that train together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def everyone() -> Any:
    """Return the group of all processes, None where there is one."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
