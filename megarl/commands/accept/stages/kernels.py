"""Stage 1, kernels: single layers as the platform builds them, compared with float64 references on the CPU."""

from __future__ import annotations

import math

from megarl.commands.accept.context import StageContext
from megarl.commands.accept.kernel_rank import Condition, Deviation
from megarl.commands.accept.ranks import local_ranks
from megarl.commands.accept.tiny_families import write_family

RANK = "megarl.commands.accept.kernel_rank:KernelRank"
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}  # relative to the largest value of the reference
_FAMILIES = ("dense", "moe", "mla")


def run(context: StageContext) -> None:
    """Check layers in float32 and bfloat16, with deterministic kernels. Each layer is called twice."""
    for family in _FAMILIES:
        write_family(family, context.shared)
    context.doing("starting one rank")
    with local_ranks(context, RANK, 1, name="kernels", deterministic=True) as ranks:
        for dtype in LIMITS:
            for family in _FAMILIES:
                context.doing(f"layers of the {family} model in {dtype}")
                ((deviations, conditions),) = ranks.call("check", family, str(context.shared / family), dtype)
                record(context, deviations, conditions, dtype)


def record(context: StageContext, deviations: list[Deviation], conditions: list[Condition], dtype: str) -> None:
    """Record a check for every layer and every condition.

    On devices a missing float32 kernel is NOT RUN, since trainers use bfloat16 there.
    """
    for deviation in deviations:
        name = f"{dtype} {deviation.check or deviation.kernel}"
        if deviation.problem and dtype == "float32" and not context.tiny:
            context.not_run(name, deviation.problem)
            continue
        relative = deviation.relative if math.isfinite(deviation.relative) else math.inf
        context.at_most(name, relative, limit=LIMITS[dtype], unit="of the largest value", cause=deviation.cause)
    for condition in conditions:
        context.equal(f"{dtype} {condition.name}", condition.good, True, cause=condition.cause)
