"""Sharded updates without bucket fingerprints, to measure the cost of the fingerprints."""

from __future__ import annotations

import torch

from megarl.weight_sync import fingerprint as module


class _Length(module.StreamingFingerprint):
    def __init__(self, memory: torch.Tensor) -> None:
        self._length = len(memory)

    def advance(self, byte: int) -> None:
        pass

    def result(self) -> str:
        return str(self._length)


_REAL = module.fingerprint, module.StreamingFingerprint


def set_fingerprints(on: bool) -> None:
    """Turn the fingerprints of this process's buckets on or off."""
    module.fingerprint, module.StreamingFingerprint = _REAL if on else (lambda data: str(len(data)), _Length)  # type: ignore[misc, assignment]
