"""All stages, in the order in which they run. Importing this module imports no stage."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.commands.accept.context import StageContext


@dataclass(frozen=True)
class Stage:
    """One stage. `minutes` is its share of the time on devices; `--expect` prints `runs` and `passes`."""

    number: int
    name: str
    minutes: float
    runs: str
    passes: str

    @property
    def module(self) -> str:
        """Name of the stage's module in `stages/`."""
        return self.name.replace(" ", "_")

    def folder(self, directory: Path) -> Path:
        """Return the stage's folder in the folder of an acceptance."""
        return directory / f"{self.number}-{self.module}"

    def function(self) -> Callable[[StageContext], None]:
        """Import the stage's module and return its `run`."""
        run: Callable[[StageContext], None] = importlib.import_module(f"{__package__}.stages.{self.module}").run
        return run


STAGES: tuple[Stage, ...] = (
    Stage(
        0,
        "environment",
        2,
        "the doctor's checks on every node, and for the recipe; versions; capabilities of the engine's package; route and "
        "transport of the weight sync; host memory and /dev/shm",
        "no check of the doctor fails; all nodes have the same versions; the route is the one in the recipe",
    ),
    Stage(
        1,
        "kernels",
        5,
        "layers as the platform builds them, against float64 on the CPU: packed attention of uneven lengths (GQA, MLA "
        "192/128), rms_norm, swiglu, grouped matmul with empty experts, permute, rotary embedding, Adam, storage resize, "
        "page-locked copies; in float32 and bfloat16, twice under train.deterministic",
        "largest error below 1e-5 in float32 and 2e-2 in bfloat16, relative to the reference's largest value; both calls give the same bits",
    ),
    Stage(
        2,
        "model parity",
        8,
        "four tiny models (dense, MoE, MLA with MoE and YaRN, vision-language) in TP, PP, EP, ETP and CP of up to 4 "
        "devices: log-probs, two optimizer steps, recomputation, offload, checkpoint and resume",
        "log-probs within 1e-4 nats in float32 (largest) and 2e-2 in bfloat16 (mean) of references; gradient norms within "
        "0.1 % and 3 %; a resumed step within 5e-3 nats, on a CPU bit for bit",
    ),
    Stage(
        3,
        "collectives",
        5,
        "all_reduce, gather, all_to_all and p2p in every group of the recipe's layout; pairs of ranks; two processes on a "
        "device; device memory of each communicator",
        "values are right; rates reach 60 % of the links in the table of devices; no rank enters 0.05 s late; no pair is "
        "below half the median of its kind (within a node, between nodes); a communicator keeps at most 1 GiB",
    ),
    Stage(
        4,
        "engine",
        8,
        "an engine of tiny models: start, greedy samples twice, log-probs against the trainer, sleep and wake x 20, abort, "
        "samples with graphs and without; a group of two engines; then the recipe's engine, or group, with dummy weights and "
        "4 layers",
        "greedy samples repeat; the mean gap to the trainer is below 0.02 nats; graphs change at most 20 % of tokens; sleep "
        "frees 90 % and keeps less than 10 MiB a cycle; an abort takes less than 10 s",
    ),
    Stage(
        5,
        "weight_sync",
        8,
        "weights of tiny models from trainers to an engine: sharded and full, through shared memory, out of the trainers' "
        "device memory, over the network and from device to device; log-probs after each; then a trainer dies in an update",
        "checksums of both sides agree; the mean gap after an update is below 0.02 nats; a death ends every wait within "
        "weight_sync.silence + 5 s and is named",
    ),
    Stage(
        6,
        "rl step",
        12,
        "megarl train on tiny models: 3 steps colocated, a resume from the checkpoint, 3 steps one step off; then the "
        "recipe with its widths, few layers, and its layout reduced to the devices of one node; on a CPU a tiny copy",
        "exit status 0; every metric is finite; no update is skipped; the gap of fresh samples is below 0.02 nats; the first "
        "importance ratios are within 0.02 of 1; gradients are not zero; a trainer's peak memory is at most 110 % of the plan's",
    ),
    Stage(
        7,
        "speed",
        8,
        "matrix products, copies, Adam and links of each device; log-probs of a trainer; decoding and prefill of an engine; "
        "calibration.yaml for megarl plan --calibration",
        "no limits: figures are compared with the table of devices",
    ),
)
OF_ALL_NODES = (0, 3)  # the other stages run on one node
BUNDLE = 8  # the last stage; the controller runs it, so it works after any failure of the others
BUNDLE_MINUTES = 1.0


def stage_numbers() -> tuple[int, ...]:
    """Return the numbers that `--stages` accepts."""
    return (*(stage.number for stage in STAGES), BUNDLE)


def shares(stages: Sequence[Stage], minutes: float) -> dict[int, float]:
    """Return the deadline of each stage in seconds from the start: `minutes`, divided in proportion to the stages' minutes.

    A stage may use the time that earlier stages did not use.
    """
    whole = sum(stage.minutes for stage in stages) + BUNDLE_MINUTES
    ends, spent = {}, 0.0
    for stage in stages:
        spent += stage.minutes
        ends[stage.number] = 60.0 * minutes * spent / whole
    return ends
