"""Interface of rollout engines: an inference library that one thread owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.engines.backend import Backend
from megarl.engines.base import EngineRefused, EngineSpec, OnFinished
from megarl.engines.loop import EngineLoop
from megarl.engines.partials import check_partials, is_begun, library_requests
from megarl.engines.tape import LOAD_EVENT, update_event
from megarl.types import GenerationRequest
from megarl.weight_sync.session import Session, UpdateReport

TAGS = ("weights", "kv_cache")  # memory that sleeps; vLLM and SGLang use the same names


class BackedEngine(EngineLoop):
    """A replica of the policy that samples. Every method is thread-safe, and raises EngineDead after the engine failed.

    Engines of a group (`EngineSpec.data_parallel`) update weights, sleep and wake together: each of these calls blocks
    until every engine of the group has received it. They also step together. All other calls concern one engine.
    """

    def __init__(self, backend: Backend, spec: EngineSpec) -> None:
        super().__init__(backend, spec.name, spec.tape)
        self._spec = spec
        self._updated = False  # it has weights of the trainers

    def generate(self, requests: Sequence[GenerationRequest], on_finished: OnFinished) -> None:
        """Sample all `requests`; returns when the last is finished.

        The requests enter the engine's queue in order and before its next step, so that equal calls make equal batches.
        `on_finished(group, completions)` is called in the calling thread once all n samples of a group are finished; with
        `with_greedy`, the greedy sample is the last of n + 1.
        `Completion.log_probs` are NaN for requests that the engine cannot score exactly, because their sampling differs
        from the spec's (greedy or filtered evaluation). `Completion.prompt` is set for requests with `prompt_top_k`, at
        temperature 1 for any sampling. ValueError for an invalid request: then no request is admitted.
        GenerationAborted after `abort`. `hand_over` ends groups without a call of `on_finished`.

        The engine continues the samples of a request with `partials` with its weights and a new KV cache, and completions
        contain all tokens. EngineRefused if partial samples have newer weights than the engine.
        """
        for request in requests:
            self._check(request)
        waits_for_waking = self._spec.at_update == "refresh" and self._updated
        if self._backend.asleep and not waits_for_waking:
            raise EngineRefused(f"engine {self._spec.name!r} sleeps ({', '.join(self._backend.asleep)}); wake it first")
        if self._backend.unloaded is not None and not waits_for_waking:
            raise EngineRefused(f"engine {self._spec.name!r} {self._backend.unloaded}; update its weights first")
        super().generate(requests, on_finished)

    def _check(self, request: GenerationRequest) -> None:
        self._backend.check(replace(request, partials=()))
        if is_begun(request):
            check_partials(request, self._spec)
            for _, part in library_requests(request):
                self._backend.check(part)

    def connect_weight_sync(self, session: Session) -> str | None:
        """Join a weight sync session, which replaces an earlier one. Returns why the engine cannot join a sharded session,
        or None; it may still join a full one. EngineRefused if the engine's software cannot update weights safely."""
        return self.call(lambda: self._backend.connect_weight_sync(session))

    def update_weights(self, version: int) -> UpdateReport:
        """Receive and load weights of `version`. No step runs meanwhile, and later requests reuse no cached prefix.

        Running requests continue with the new weights if info["can_update_in_flight"]; `Completion.spans` has the version
        of each token. Their KV cache is recomputed unless `EngineSpec.at_update` is keep. EngineRefused otherwise, and while
        weights are asleep. Any failure leaves the engine dead, since its weights may be a mixture of two versions.

        If `EngineSpec.at_update` is finish, updates after the first one of a session leave the weights in host memory until
        `load_weights`.
        """

        def update() -> UpdateReport:
            report = self._backend.update_weights(version, self.running)
            if self._backend.staged == version:
                return report
            self._updated = True
            self._running.spans.update(version, {key: self._backend.lengths(key) for key in self._running.keys_of()})
            return report

        return self.call(update, collective=True, event=update_event(version))

    def load_weights(self) -> int:
        """Load the weights that wait in host memory, if any; returns the version of the weights. EngineRefused if requests run."""

        def load() -> int:
            version = self._backend.load_weights(self.running)
            self._running.spans.update(version, {})
            return version

        return self.call(load, event=LOAD_EVENT)

    def sleep(self) -> None:
        """Release device memory. EngineRefused if info["can_sleep"] is False, or if requests run and
        `EngineSpec.at_update` is not refresh. With refresh they wait, and continue after `wake` with a recomputed KV cache.
        """

        def sleep() -> None:
            self._backend.sleep(self.running)
            self._paused = self._spec.at_update == "refresh"

        self.call(sleep, collective=True, event="pause")

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again: all of it, or only the memory of the `tags` "weights" and "kv_cache".

        `generate` raises EngineRefused until all memory is back and, if sleep dropped the weights, until an update. An
        update needs only "weights". EngineRefused for a tag that is unknown or not asleep.
        """

        def wake() -> None:
            self._backend.wake(tags)
            self._paused = self._paused and bool(self._backend.asleep)

        self.call(wake, collective=True, event="resume" if tags is None or "kv_cache" in tags else None)

    def start_profile(self, name: str) -> None:
        """Trace the engine's steps until `stop_profile`, as in `EngineSpec.traces`. `name` becomes part of the file names if
        the engine's software supports it."""
        self.call(lambda: self._backend.profile(name))

    def stop_profile(self) -> None:
        self.call(lambda: self._backend.profile(None))


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
