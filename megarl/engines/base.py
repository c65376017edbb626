"""Specification and errors of rollout engines. `backed.BackedEngine` is the interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megarl.engines.tape import TapeSpec
from megarl.errors import ProcessFailure
from megarl.platform.tracing import TraceOptions
from megarl.recipe.derived.at_update import UpdateRule
from megarl.types import Completion

OnFinished = Callable[[int, list[Completion]], None]  # group number, its completions in seed order


def engine_name(number: int) -> str:
    """Return the name of an engine of the policy."""
    return f"engine{number}"


class EngineDead(ProcessFailure):
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
    seeded: bool = True  # requests have seeds; else the engine's generator draws for all (vLLM reseeds it at updates)
    engine_args: dict[str, Any] = field(default_factory=dict)
    load_weights: bool = True  # False: dummy weights until the first weight update
    at_update: UpdateRule = "drain"  # whether requests run during updates, and their KV caches are recomputed or kept
    refresh_after: int | None = None  # with keep: recompute caches that are this many versions old; None: never
    sleep_mode: bool = False  # prepare for sleep(); info["can_sleep"] is False if the platform has no sleep mode
    # Sampling settings of training: log-probs are exact for requests that sample at this temperature.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    return_routed_experts: bool = False  # fill Completion.routed_experts, or refuse to start
    quantization: str | None = (
        None  # "fp8": hold matrices in FP8, quantized at each load and update (rollout.quantization)
    )
    fp32_head: bool = False  # compute logits in float32 (megatron.fp32_head), or refuse to start
    prompt_top_k: int | None = None  # largest GenerationRequest.prompt_top_k; None: no request sets it
    adapters: AdapterSpec | None = None  # None: updates bring full weights
    deterministic: bool = False  # train.deterministic; `Platform.deterministic_rollout_env` is set
    tape: TapeSpec | None = None  # where the engine records the steps of its requests and updates; None: nowhere
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
