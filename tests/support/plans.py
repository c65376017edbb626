"""Hand-written plans for the code that prints plans: a large model on many devices."""

from __future__ import annotations

from dataclasses import replace

from megarl.commands.plan.count.types import (
    Activations,
    DeviceUses,
    EngineRank,
    Estimate,
    Links,
    PhaseTime,
    PipelineStage,
    RankMemory,
    RecipePlan,
    Refusal,
    Suggestion,
    Use,
)
from megarl.platform.device_table import device_named

GIB = 2**30
DEVICE = device_named("910B")
_HELD = RankMemory(3_060_000_000, 3_060_000_000, 6 * GIB, 2**20, 12 * GIB, 12 * GIB, 24 * GIB, 6 * GIB)
_BEYOND = Activations(2 * GIB, 14 * GIB, 11 * GIB, 3 * GIB)


def stage(number: int, role: str = "actor", chunks: int = 1) -> PipelineStage:
    held = replace(_HELD, weights=(5 + number % 4) * GIB)
    return PipelineStage(role, number, 32 * number, held, _BEYOND, None, 48 * GIB, chunks)


def place(number: int) -> DeviceUses:
    """Memory use of a time-shared pipeline stage and engine; later stages have fewer micro batches in flight."""
    weights, gradients, waiting = (5 + number % 4) * GIB, 12 * GIB, (8 - number) * GIB
    computing = {"weights": weights, "gradients": gradients}
    uses = [
        Use("gen", {"engine weights": 22 * GIB, "engine's working memory": 2 * GIB, "KV cache": 27 * GIB}),
        Use("reward", {"engine weights": 22 * GIB, "KV cache": 27 * GIB}),
        Use("old_log_prob", {**computing, "activations": 2 * GIB, "logits": 3 * GIB // 2}),
        Use("reference", {**computing, "activations": 2 * GIB, "logits": 3 * GIB // 2}),
        Use("values", {**computing, "activations": GIB}),
        Use("update_actor", {**computing, "activations": 4 * waiting, "logits": 3 * GIB // 2}),
        Use("optimizer", {**computing, "optimizer": 9 * GIB // 4}),
        Use("weight_sync", {"weights": weights, "engine weights": 22 * GIB, "weight-sync buffers": GIB}),
    ]
    return DeviceUses(f"actor {number} + engine", 32, uses)


PHASES = [
    PhaseTime(
        "gen", 482.2, "memory bandwidth", "responses of half the longest length; waves of 64 sequences an engine"
    ),
    PhaseTime("reward", 20.4, "host", "one core a scorer"),
    PhaseTime("old_log_prob", 105.5, "compute", "35 % of 376 TFLOP/s"),
    PhaseTime("reference", 92.7, "compute and host link", "35 % of 376 TFLOP/s"),
    PhaseTime("adv", 0.2, "host", "sums over 8,192 samples"),
    PhaseTime("update_actor", 342.9, "compute", "35 % of 376 TFLOP/s; the bubble of 8 stages"),
    PhaseTime("save", 0.0, "disk", "not every step"),
    PhaseTime("weight_sync", 38.0, "links", "70 % of 28 GB/s"),
]
ESTIMATE = Estimate(PHASES, sum(phase.seconds for phase in PHASES), 8192 * 1600.0, 64, 2987.5, 7 / 71, 1024.0)
LARGE = RecipePlan(
    recipe="grpo-deepseek-v3",
    device=DEVICE,
    stages=[stage(number) for number in range(8)],
    engine=EngineRank(11_000_000_000, 22 * GIB, 35136.0, 2 * GIB, 27 * GIB, 268.0),
    places=[place(number) for number in range(8)],
    estimate=ESTIMATE,
    weight_sync=Links("sharded", 700 * 2**20, 22 * GIB, 5600 * GIB, 5200 * GIB),
    unchecked=["The data files are not on this machine: their columns and lengths were not looked at."],
    memory=64.0,
    notes=["Every micro batch is full, and the pipeline full of them.", "Experts are sent equally many tokens."],
)
TOO_LARGE = replace(
    LARGE,
    memory=40.0,
    refusals=[
        Refusal(
            "megatron.pipeline_parallel",
            "actor stage 0 needs 51.8 GiB in update_actor: weights 5.0 + gradients 12.0 + activations 32.0 + logits 1.5; "
            "910B has 40",
            "more stages, or megatron.recompute=full",
        ),
    ],
    suggestions=[
        Suggestion("megatron.recompute=full", 1.21),
        Suggestion("megatron.pipeline_parallel=16 megatron.first_stage_layers=3 megatron.last_stage_layers=2", 1.3),
    ],
)
_TINY = RankMemory(200_000, 200_000, 800_000, 4096, 800_000, 800_000, 1_600_000, 0)
SMALL = RecipePlan(
    recipe="quickstart",
    device=None,
    stages=[PipelineStage("actor", 0, 0, _TINY, Activations(300_000, 900_000, 700_000, 200_000), None)],
    engine=None,
    places=[DeviceUses("actor", 2, [Use("update_actor", {"weights": 800_000, "activations": 900_000})])],
    estimate=None,
    weight_sync=None,
)
INTERLEAVED = replace(LARGE, stages=[stage(number, chunks=2) for number in range(4)], places=LARGE.places[:4])
AHEAD = replace(  # one step off: engines write while the trainers learn
    LARGE,
    estimate=replace(
        ESTIMATE,
        phases=[
            PHASES[0],
            *[
                replace(phase, begin=begin)
                for phase, begin in zip(PHASES[1:6], (0, 20.4, 125.9, 218.6, 218.8), strict=True)
            ],
            replace(PHASES[7], begin=561.7),
        ],
        seconds=599.7,
    ),
)
BARE = replace(SMALL, stages=[], places=[], recipe="nothing")
