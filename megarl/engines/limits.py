"""How large an engine's steps are, and how much of a device it takes: as its arguments say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    tokens: int  # of a step
    sequences: int  # of a step
    share: float | None  # of the device's memory that the engine takes; None: it finds out itself
    share_key: str  # the argument that says so
    covers_step: bool  # whether the share has room for what a step takes, beside weights and cache
    cache: int | None = None  # bytes of the KV cache, where they are given outright
    assumed: str | None = None  # of these numbers, what the engine would find out itself
