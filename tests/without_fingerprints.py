"""Planned updates without fingerprints of buckets: what these cost is measured against it."""

from __future__ import annotations

from megarl.exchange import planned_receiver, planned_sender
from megarl.exchange.fingerprint import fingerprint


def set_fingerprints(on: bool) -> None:
    """Of this process."""
    for module in (planned_sender, planned_receiver):
        module.fingerprint = fingerprint if on else (lambda data: str(len(data)))  # type: ignore[attr-defined]
