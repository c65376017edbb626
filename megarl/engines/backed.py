"""A `RolloutEngine` over an inference library that one thread owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megarl.engines.base import EngineRefused, EngineSpec, OnFinished
from megarl.engines.loop import Backend, EngineLoop
from megarl.types import GenerationRequest
from megarl.weight_sync.session import Session, UpdateReport

TAGS = ("weights", "kv_cache")  # memory that sleeps; vLLM and SGLang use the same names


class WeightsBackend(Backend, Protocol):
    """A `Backend` with weight updates. Only the owning thread calls it, except for `check`. `running`: running requests."""

    unloaded: str | None  # why it has no usable weights until the next update; None if it has
    asleep: tuple[str, ...]  # the TAGS that are asleep

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError for an invalid request. Called from any thread."""
        ...

    def connect_weight_sync(self, session: Session) -> str | None: ...

    def update_weights(self, version: int, running: int) -> UpdateReport: ...

    def sleep(self, running: int) -> None: ...

    def wake(self, tags: Sequence[str] | None) -> None: ...

    def profile(self, name: str | None) -> None:
        """Start a trace called `name`; None ends it."""
        ...


class BackedEngine(EngineLoop):
    """A `RolloutEngine` over a `WeightsBackend`."""

    def __init__(self, backend: WeightsBackend, spec: EngineSpec) -> None:
        super().__init__(backend, spec.name)
        self._weights = backend
        self._spec = spec

    def generate(self, requests: Sequence[GenerationRequest], on_finished: OnFinished) -> None:
        for request in requests:
            self._weights.check(request)
        if self._weights.asleep:
            raise EngineRefused(f"engine {self._spec.name!r} sleeps ({', '.join(self._weights.asleep)}); wake it first")
        if self._weights.unloaded is not None:
            raise EngineRefused(f"engine {self._spec.name!r} {self._weights.unloaded}; update its weights first")
        super().generate(requests, on_finished)

    def connect_weight_sync(self, session: Session) -> str | None:
        return self.call(lambda: self._weights.connect_weight_sync(session))

    def update_weights(self, version: int) -> UpdateReport:
        return self.call(lambda: self._weights.update_weights(version, self.running), collective=True)

    def sleep(self) -> None:
        self.call(lambda: self._weights.sleep(self.running), collective=True)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        self.call(lambda: self._weights.wake(tags), collective=True)

    def start_profile(self, name: str) -> None:
        self.call(lambda: self._weights.profile(name))

    def stop_profile(self) -> None:
        self.call(lambda: self._weights.profile(None))


def check_tokens(request: GenerationRequest, spec: EngineSpec, vocab_size: int) -> None:
    """Raise ValueError for a request that is invalid for engines of `spec`."""
    tokens, sampling = request.prompt.tokens, request.sampling
    longest = len(tokens) + sampling.max_tokens
    if not tokens or longest > spec.max_model_len:
        raise ValueError(
            f"prompt {request.prompt.uid!r}: {len(tokens)} prompt tokens + {sampling.max_tokens} response tokens "
            f"= {longest}; the engine was started for 1 to {spec.max_model_len} in all"
        )
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(
            f"prompt {request.prompt.uid!r} has token ids from {min(tokens)} to {max(tokens)}; the model's "
            f"vocabulary has {vocab_size}. Is it tokenized for another model?"
        )
    if sampling.temperature == 0 and sampling.n > 1:
        raise ValueError(f"greedy sampling gives one answer, but n is {sampling.n}; ask for n=1")


def asleep_after_wake(tags: Sequence[str], asleep: tuple[str, ...], engine: str) -> tuple[str, ...]:
    """Return the tags that stay asleep after waking `tags`. EngineRefused for a tag that is unknown or awake, which the
    libraries would silently ignore."""
    if not tags or not set(tags) <= set(asleep):
        raise EngineRefused(f"wake({list(tags)}): engine {engine!r} has {list(asleep)} asleep")
    return tuple(tag for tag in asleep if tag not in tags)
