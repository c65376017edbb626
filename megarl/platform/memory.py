"""What moves the optimizer's states out of the device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def swapped_parts(extra: Mapping[str, Any]) -> int | None:
    """In how many parts MindSpeed's swap_optimizer of `megatron.extra` brings master weights and moments from the host to
    the device, where it is on. 16 is its default: docs/zh/features/swap-optimizer.md of MindSpeed's sources."""
    return int(extra.get("swap_optimizer_times", 16)) if extra.get("swap_optimizer") else None
