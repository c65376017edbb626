"""Interface between an engine and its inference library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megarl.engines.group import EngineGroup
from megarl.types import Completion, GenerationRequest, Partial
from megarl.weight_sync.session import Session, UpdateReport


class Backend(Protocol):
    """Interface to an inference library. Only the owning thread calls it, except for `check`. `running`: running requests."""

    unloaded: str | None  # why it has no usable weights until the next update; None if it has
    staged: int | None  # version of weights that wait in host memory for `load_weights`; None: none wait
    asleep: tuple[str, ...]  # the parts of memory ("weights", "kv_cache") that are asleep

    def join(self, group: EngineGroup) -> None:
        """Set the engine's group, before `start`. Steps and updates are then collective."""
        ...

    def start(self) -> dict[str, Any]: ...

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError for an invalid request. Called from any thread."""
        ...

    def admit(self, key: str, request: GenerationRequest) -> None:
        """Queue a valid request. An exception here is fatal."""
        ...

    def step(self) -> list[tuple[str, list[Completion]]]:
        """Run one step; returns (key, completions) of requests with all samples finished. In a group, an engine without
        requests takes part in the step."""
        ...

    def lengths(self, key: str) -> dict[int, int]:
        """Return the number of tokens so far of each unfinished sample of a running request, by index."""
        ...

    def partials(self, key: str) -> list[Partial] | None:
        """Return the samples of a running request so far, in seed order, without spans; None if they cannot be continued.
        EngineRefused if the library does not return them while they run."""
        ...

    def cancel(self, keys: list[str]) -> None: ...

    def hand_over(self, keys: list[str]) -> dict[str, list[Partial] | None]:
        """Cancel requests and return their samples so far, as `partials` does."""
        ...

    def connect_weight_sync(self, session: Session) -> str | None: ...

    def update_weights(self, version: int, running: int) -> UpdateReport: ...

    def load_weights(self, running: int) -> int:
        """Load the weights that wait in host memory, if any; returns the version of the weights."""
        ...

    def sleep(self, running: int) -> None: ...

    def wake(self, tags: Sequence[str] | None) -> None: ...

    def profile(self, name: str | None) -> None:
        """Start a trace called `name`; None ends it."""
        ...

    def shutdown(self) -> None: ...
