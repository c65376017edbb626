"""Stage 1, kernels: single layers as the platform builds them, compared with float64 references on the CPU."""

from __future__ import annotations

import math

from megarl.commands.accept.context import StageContext
from megarl.commands.accept.families import write_family
from megarl.commands.accept.kernel_rank import Error, Outcome
from megarl.commands.accept.ranks import local_ranks

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
                ((errors, outcomes),) = ranks.call("check", family, str(context.shared / family), dtype)
                record(context, errors, outcomes, dtype)


def record(context: StageContext, errors: list[Error], outcomes: list[Outcome], dtype: str) -> None:
    """Record a check for every layer and every condition."""
    for error in errors:
        _record(context, error, dtype)
    for outcome in outcomes:
        context.equal(f"{dtype} {outcome.name}", outcome.good, True, cause=outcome.cause)


def _record(context: StageContext, error: Error, dtype: str) -> None:
    """Record one error. On devices a missing float32 kernel is NOT RUN, since trainers use bfloat16 there."""
    name = f"{dtype} {error.check or error.kernel}"
    if error.problem and dtype == "float32" and not context.tiny:
        context.not_run(name, error.problem)
        return
    relative = error.relative if math.isfinite(error.relative) else math.inf
    context.at_most(name, relative, limit=LIMITS[dtype], unit="of the largest value", cause=error.cause)
