"""An engine whose library samples, takes weights and sleeps, as one thread owns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megarl.engines.base import EngineRefused, EngineSpec, OnFinished
from megarl.engines.loop import Backend, EngineLoop
from megarl.types import GenerationRequest
from megarl.weight_sync.session import FullReport, Report, Session, ShardedReport, WeightSyncError, merge_reports

TAGS = ("weights", "kv_cache")  # what sleeps, by the names that vLLM and SGLang both have


class WeightsBackend(Backend, Protocol):
    """A `Backend` whose weights change. All but `check` are called by the owning thread alone; `running`: requests."""

    unloaded: str | None  # why it has no weights to sample with, until an update
    asleep: tuple[str, ...]  # of TAGS, what sleeps

    def check(self, request: GenerationRequest) -> None:
        """ValueError for a request that cannot be served. Called from any thread."""
        ...

    def connect_exchange(self, session: Session) -> str | None: ...

    def update_weights(self, version: int, running: int) -> Report: ...

    def sleep(self, running: int) -> None: ...

    def wake(self, tags: Sequence[str] | None) -> None: ...

    def profile(self, name: str | None) -> None:
        """Begin a trace called `name`; None: end it."""
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

    def connect_exchange(self, session: Session) -> str | None:
        return self.call(lambda: self._weights.connect_exchange(session))

    def update_weights(self, version: int) -> Report:
        return self.call(lambda: self._weights.update_weights(version, self.running), together=True)

    def sleep(self) -> None:
        self.call(lambda: self._weights.sleep(self.running), together=True)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        self.call(lambda: self._weights.wake(tags), together=True)

    def start_profile(self, name: str) -> None:
        self.call(lambda: self._weights.profile(name))

    def stop_profile(self) -> None:
        self.call(lambda: self._weights.profile(None))


def check_tokens(request: GenerationRequest, spec: EngineSpec, vocab_size: int) -> None:
    """ValueError for a request that no engine of `spec` can serve."""
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


def agreed(reports: Sequence[Report], engine: str) -> Report:
    """What an engine's ranks report together: of the export, the slowest one's. WeightSyncError where they then hold different
    weights."""
    planned = [report for report in reports if isinstance(report, ShardedReport)]
    if planned:
        return merge_reports(planned)
    exported = [report for report in reports if isinstance(report, FullReport)]
    for report in exported[1:]:
        if not report.agrees_with(exported[0]):
            raise WeightSyncError(f"ranks of engine {engine!r} hold different weights: {exported}")
    return max(exported, key=lambda report: report.seconds)


def awakened(tags: Sequence[str], asleep: tuple[str, ...], engine: str) -> tuple[str, ...]:
    """What sleeps on once `tags` are woken. EngineRefused for a tag that is unknown or awake: libraries would wake nothing."""
    if not tags or not set(tags) <= set(asleep):
        raise EngineRefused(f"wake({list(tags)}): of engine {engine!r}, asleep is {list(asleep)}")
    return tuple(tag for tag in asleep if tag not in tags)
