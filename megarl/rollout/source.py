"""What the controller's loop takes its batches from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.types import Group, Metrics


@dataclass
class Batch:
    """The groups of one controller step, in admission order, and what is known of how they came about."""

    groups: list[Group]
    metrics: Metrics = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class Source(Protocol):
    """RL and SFT differ in this alone: the loop takes batches and announces versions."""

    def admit(self, version: int) -> None:
        """The weights of `version` are in place: begin what they allow."""

    def take(self, count: int) -> Batch:
        """The next `count` groups, in admission order; fewer only where the recipe allows it (and then said so)."""

    def drain(self) -> None:
        """Wait until everything admitted has finished, so that weights may change."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain values, numpy arrays and groups that wait to be taken. Call after `drain`."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""

    def close(self) -> None: ...
