"""Protocol of the sources that the training loop takes batches from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.types import Group, Metrics


@dataclass
class Batch:
    """The groups of a step in admission order, with the metrics and notices of their rollout."""

    groups: list[Group]
    metrics: Metrics = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class SampleSource(Protocol):
    """Source of batches. RL and SFT differ only here: the loop announces weight versions and takes batches."""

    def admit(self, version: int) -> None:
        """Start the groups that may use the weights of `version`. The engines must have loaded these weights."""

    def take(self, count: int) -> Batch:
        """Return the next `count` groups in admission order; fewer, with a notice, only if the recipe allows it."""

    def drain(self) -> None:
        """With `rollout.at_update: drain`, wait until all admitted groups have finished. Otherwise only wait for engines that hand
        groups over."""

    def load_newest(self, version: int) -> None:
        """With `rollout.at_update: finish`, wait until every engine has loaded `version`, which was the last update."""

    def state(self, *, interrupted: bool = False) -> dict[str, Any]:
        """Return the state for a checkpoint: plain values, NumPy arrays, and groups that wait for training.

        Call after `drain`, or with `interrupted` when the run ends while it waits for groups. Groups that still run are
        saved with their tokens so far, which a resumed run continues, or as numbers if samples cannot be continued.
        """

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""

    def close(self) -> None: ...
