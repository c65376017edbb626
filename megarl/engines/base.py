"""Interface of rollout engines: `RolloutEngine`, its specification and its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.platform.tracing import TraceOptions
from megarl.types import Completion, GenerationRequest
from megarl.weight_sync.session import Session, UpdateReport

OnFinished = Callable[[int, list[Completion]], None]  # group number, its completions in seed order


class EngineDead(RuntimeError):
    """The engine failed or was shut down, and serves no more calls. The message has the cause."""


class EngineRefused(RuntimeError):
    """The engine cannot serve this call, now or at all. It stays alive."""


class GenerationAborted(RuntimeError):
    """`abort` ended the requests of this `generate` call."""


@dataclass(frozen=True)
class AdapterSpec:
    """LoRA adapters that updates bring instead of full weights, if the engine can hold them: `recipe.lora`."""

    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class EngineTraces:
    """Folder and contents of an engine's traces."""

    folder: str
    options: TraceOptions


@dataclass(frozen=True)
class EngineSpec:
    """Specification of one engine, in plain values. `engine_args` use the engine's argument names."""

    name: str  # unique among the run's engines; part of the names of its weight receivers
    model_path: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    max_model_len: int  # tokens of prompt and response together
    tensor_parallel: int = 1
    data_parallel: int = 1  # engines in its group; a group spreads the experts over all its engines
    expert_parallel: bool = False  # each rank has different whole experts; always so in a group
    seed: int = 0
    seeded: bool = True  # requests have seeds; else the engine's generator, reseeded with each version, draws for all
    engine_args: dict[str, Any] = field(default_factory=dict)
    load_weights: bool = True  # False: dummy weights until the first weight update
    sleep_mode: bool = False  # prepare for sleep(); info["can_sleep"] is False if the platform has no sleep mode
    # Sampling settings of training: log-probs are exact for requests that sample at this temperature.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    return_routed_experts: bool = False  # fill Completion.routed_experts, or refuse to start
    fp32_head: bool = False  # compute logits in float32 (megatron.fp32_head), or refuse to start
    prompt_top_k: int | None = None  # largest GenerationRequest.prompt_top_k; None: no request sets it
    adapters: AdapterSpec | None = None  # None: updates bring full weights
    deterministic: bool = False  # train.deterministic; `Platform.deterministic_rollout_env` is set
    traces: EngineTraces | None = None  # None: `start_profile` is never called
    device: str | None = None  # "cpu" | "cuda" | "npu", which the engine must run on; None: any
    recipe_section: str = "rollout"  # section of the recipe with these settings, for messages


@dataclass(frozen=True)
class EngineLimits:
    """Step size and device memory of an engine, from its arguments."""

    tokens: int  # per step
    sequences: int  # per step
    share: float | None  # of the device's memory for the engine; None: the engine chooses at its start
    share_key: str  # the engine argument that sets `share`
    covers_step: bool  # `share` includes the memory of a step, not only weights and KV cache
    cache: int | None = None  # bytes of the KV cache, if an argument sets them
    assumed: str | None = None  # note on values that the engine would choose at its start


@dataclass(frozen=True)
class GroupRank:
    """Rendezvous address of an engine group, and one engine's rank in it. Plain values."""

    host: str
    port: int
    rank: int = 0
    size: int = 1


class RolloutEngine(Protocol):
    """A replica of the policy that samples. Every method is thread-safe, and raises EngineDead after the engine failed.

    Engines of a group (`EngineSpec.data_parallel`) update weights, sleep and wake together: each of these calls blocks
    until every engine of the group has received it. They also step together. All other calls concern one engine.
    """

    def start(self, group_rank: GroupRank | None = None) -> dict[str, Any]:
        """Load the model; blocks. `group_rank`: rank of the engine in its group, which loads together; None without a group.

        Returns plain values: `engine`, `version` (of the engine's software), `device`, `can_sleep`,
        `can_update_in_flight`, `merged_because` (the reason why it needs merged weights; None: it takes the adapters of its
        spec) and `receivers` ([name, host id] pairs for weight sync). RuntimeError if the engine starts with dummy weights
        and its software cannot update weights.
        """
        ...

    def generate(self, requests: Sequence[GenerationRequest], on_finished: OnFinished) -> None:
        """Sample all `requests`; returns when the last is finished.

        The requests enter the engine's queue in order and before its next step, so that equal calls make equal batches.
        `on_finished(group, completions)` is called in the calling thread once all n samples of a group are finished.
        `Completion.log_probs` are NaN for requests that the engine cannot score exactly, because their sampling differs
        from the spec's (greedy or filtered evaluation). `Completion.prompt` is set for requests with `prompt_top_k`, at
        temperature 1 for any sampling. ValueError for an invalid request: then no request is admitted.
        GenerationAborted after `abort`.
        """
        ...

    def pause(self) -> None:
        """Return once no step is running; no step starts until `resume`, in the whole group. Requests are still admitted."""
        ...

    def resume(self) -> None: ...

    def connect_weight_sync(self, session: Session) -> str | None:
        """Join a weight sync session, which replaces an earlier one. Returns why the engine cannot join a sharded session,
        or None; it may still join a full one. EngineRefused if the engine's software cannot update weights safely."""
        ...

    def update_weights(self, version: int) -> UpdateReport:
        """Receive and load weights of `version`. No step runs meanwhile; cached prefixes are dropped.

        Running requests continue with the new weights (their KV cache is recomputed) if info["can_update_in_flight"].
        EngineRefused otherwise, and while weights are asleep. Any failure leaves the engine dead, since its weights may be
        a mixture of two versions.
        """
        ...

    def sleep(self) -> None:
        """Release device memory. EngineRefused if info["can_sleep"] is False or requests are running."""
        ...

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again: all of it, or only the memory of the `tags` "weights" and "kv_cache".

        `generate` raises EngineRefused until all memory is back and, if sleep dropped the weights, until an update. An
        update needs only "weights". EngineRefused for a tag that is unknown or not asleep.
        """
        ...

    def start_profile(self, name: str) -> None:
        """Trace the engine's steps until `stop_profile`, as in `EngineSpec.traces`. `name` becomes part of the file names if
        the engine's software supports it."""
        ...

    def stop_profile(self) -> None: ...

    def abort(self) -> None:
        """End every running request; their `generate` calls raise GenerationAborted."""
        ...

    def watch(self) -> None:
        """Block until the engine is shut down. Raises EngineDead as soon as it fails, even without a pending call."""
        ...

    def shutdown(self) -> None:
        """End the engine with its processes, and the other engines of its group. May be called twice."""
        ...
