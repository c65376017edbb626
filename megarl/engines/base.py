"""What a rollout engine is to the rest of megarl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.platform.tracing import TraceOptions
from megarl.types import Completion, GenerationRequest
from megarl.weight_sync.session import Report, Session

OnFinished = Callable[[int, list[Completion]], None]  # group number, its completions in seed order


class EngineDead(RuntimeError):
    """The engine failed or was shut down; it answers nothing any more. Its cause is in the message."""


class EngineRefused(RuntimeError):
    """The engine cannot do this now, or at all. It lives on."""


class GenerationAborted(RuntimeError):
    """`abort` ended the request that this call waited for."""


@dataclass(frozen=True)
class AdapterSpec:
    """Adapters that updates will bring instead of whole weights, if the engine can hold them: `recipe.lora`."""

    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class EngineTraces:
    """Where an engine writes its traces, and what they hold."""

    folder: str
    options: TraceOptions


@dataclass(frozen=True)
class EngineSpec:
    """One engine, in plain values. `engine_args` go to the engine under its own names."""

    name: str  # unique among the run's engines: names its receivers of weights
    model_path: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    max_model_len: int  # longest prompt and response together
    tensor_parallel: int = 1
    data_parallel: int = 1  # engines of its group, over all of which the experts are spread
    expert_parallel: bool = False  # each rank has whole experts, and others than the next; of a group's engines: always
    seed: int = 0
    seeded: bool = (
        True  # requests bring seeds; else the engine's generator, seeded anew with each version, draws for all
    )
    engine_args: dict[str, Any] = field(default_factory=dict)
    load_weights: bool = True  # False: dummy weights, until the first exchange brings real ones
    sleep_mode: bool = False  # prepare for sleep(); where the platform cannot, info["can_sleep"] is False
    # How training samples: log-probs are exact for requests that sample at this temperature.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    return_routed_experts: bool = False  # fill Completion.routed_experts, or refuse to start
    prompt_top_k: int | None = None  # largest GenerationRequest.prompt_top_k; None: none is asked for
    adapters: AdapterSpec | None = None  # None: updates bring whole weights
    deterministic: bool = False  # the recipe asks for it: `Platform.deterministic_rollout_env` is set
    traces: EngineTraces | None = None  # None: `start_profile` is never called
    device: str | None = None  # "cpu" | "cuda" | "npu", which the engine must run on; None: whichever it finds
    recipe_section: str = "rollout"  # whose settings these are, for messages


@dataclass(frozen=True)
class Seat:
    """Where an engine's group meets, and which of its `size` engines this one is. Plain values."""

    host: str
    port: int
    rank: int = 0
    size: int = 1


class RolloutEngine(Protocol):
    """A replica of the policy that samples. Every method may be called from any thread, and raises
    EngineDead once the engine has failed.

    Engines of a group (`EngineSpec.data_parallel`) take weights, sleep and wake together: each call waits until every
    engine of the group has been called. All else each does for itself, but steps: those are always the group's.
    """

    def start(self, seat: Seat | None = None) -> dict[str, Any]:
        """Load the model; blocks. `seat`: of an engine of a group, whose engines load together. Returns plain values:
        `engine`, `version` (of the engine's software), `device`, `can_sleep`, `can_update_in_flight`, `merged_because`, why
        it takes no adapters (None: it takes those of its spec), and `receivers`, the [name, host id] pairs that the weight
        exchange must serve. RuntimeError where dummy weights wait for an update that the engine's
        software cannot take."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], on_finished: OnFinished) -> None:
        """Sample all `requests`; returns when the last is finished.

        They enter the engine's queue in their order and all before its next step, so that equal
        calls make equal batches. `on_finished(group, completions)` is called in the calling thread
        as soon as all n samples of a group are there. `Completion.log_probs` are NaN for requests
        whose sampling differs from the spec's such that the engine does not know exact ones
        (greedy or filtered evaluation). `Completion.prompt` is there where `prompt_top_k` asks for it, at
        temperature 1 whatever the sampling is. ValueError for a request that cannot be served: then none
        is admitted. GenerationAborted after `abort`.
        """
        ...

    def pause(self) -> None:
        """Return once no step is running; none begins until `resume`, in the engine's whole group. Requests are still
        admitted."""
        ...

    def resume(self) -> None: ...

    def connect_exchange(self, session: Session) -> str | None:
        """Join a weight exchange; replaces an earlier one. Returns why the engine cannot take part in a planned one, where
        it cannot: an exported one may still replace it. EngineRefused where the engine's software cannot take weights
        safely."""
        ...

    def update_weights(self, version: int) -> Report:
        """Take `version` from the exchange; no step runs meanwhile, cached prefixes are dropped.

        Requests in flight go on under the new weights (their past is computed anew) where
        info["can_update_in_flight"], else EngineRefused; EngineRefused too where weights are asleep. Any
        failure leaves the engine dead: it may hold half a version.
        """
        ...

    def sleep(self) -> None:
        """Give device memory away. EngineRefused where info["can_sleep"] is False or requests run."""
        ...

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: all of it, or only that of "weights" or "kv_cache".

        generate raises EngineRefused until all is back, and, where sleep dropped the weights, until an
        update; an update needs "weights" alone. EngineRefused for a tag that is unknown or not asleep.
        """
        ...

    def start_profile(self, name: str) -> None:
        """Trace the engine's steps until `stop_profile`, as `EngineSpec.traces` says; `name` is part of the files' names where
        the engine's software has that."""
        ...

    def stop_profile(self) -> None: ...

    def abort(self) -> None:
        """End every running request; their `generate` calls raise GenerationAborted."""
        ...

    def watch(self) -> None:
        """Return when the engine has been shut down; EngineDead as soon as it has failed, though nothing was asked of it."""
        ...

    def shutdown(self) -> None:
        """End the engine and its processes, and with it the others of its group. May be called twice."""
        ...
