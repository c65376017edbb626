"""Stage 2, model parity: four tiny models in several layouts, compared with references; checkpoint, offload, resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from megarl.commands.accept.context import StageContext
from megarl.commands.accept.goldens import Golden, read_golden
from megarl.commands.accept.parity_rank import Case
from megarl.commands.accept.ranks import LocalRanks, local_ranks
from megarl.commands.accept.tiny_families import FAMILIES, LENGTHS, SKETCHES, write_family
from megarl.platform.adaptor import adaptor

RANK = "megarl.commands.accept.parity_rank:ParityRank"
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}  # nats: largest difference in float32, mean difference in bfloat16
AFTER = {"float32": 2e-4, "bfloat16": 8e-2}  # after two steps; bfloat16 rounds weights, which may change expert choices
GRADIENT = {"float32": 1e-3, "bfloat16": 3e-2}  # relative error of the gradient norm
LAYER = {"float32": 1e-4, "bfloat16": 5e-2}  # relative error of a layer's output, to find the first different layer
TENSOR = {"float32": 1e-3, "bfloat16": 2e-1}  # relative error of a tensor's gradient norm
RESUMED = 5e-3  # nats, on devices: their kernels add in any order; on a CPU a resumed step must be bitwise equal

SWAPPED = "swap_optimizer"  # setting of the device's adaptor: optimizer states are in host memory between updates
TP, PP, EP, CP = "tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel"


# On a CPU, where the test suite covers the layouts, each kind of parallelism is tested once or twice.
_TINY: dict[str, list[dict[str, Any]]] = {
    "dense": [{TP: 2}, {CP: 2}],
    "moe": [{EP: 2}, {TP: 2, "expert_tensor_parallel": 2}],
    "mla": [{PP: 2}],
    "vl": [{TP: 2}],
}


_TINY_SAVED = {1: ("mla", "vl"), 2: ("dense", "moe")}  # number of processes -> families with a checkpoint test on a CPU


def layouts(size: int, family: str, tiny: bool = False) -> list[dict[str, Any]]:
    """Return the layouts of `size` processes for a family: fields of the recipe's section `megatron`."""
    experts = family in ("moe", "mla")
    if size == 1:
        recomputed = family == "mla" or (family == "dense" and not tiny)
        return [{}, {"recompute": "full"}] if recomputed else [{}]
    if size == 2 and tiny:
        return _TINY[family]
    if size == 2:
        two: list[dict[str, Any]] = [{TP: 2}, {PP: 2}]
        two += [{EP: 2}, {TP: 2, "expert_tensor_parallel": 2}] if experts else []
        return two if family == "vl" else [*two, {CP: 2}]
    four: list[dict[str, Any]] = [{TP: 2, PP: 2}]
    return [*four, {TP: 2, EP: 2, "expert_tensor_parallel": 1}] if experts else four


def run(context: StageContext) -> None:
    """Check every family in every layout that fits on one node."""
    for family in FAMILIES:
        write_family(family, context.shared)
    sizes = [size for size in (1, 2, 4) if size <= context.settings.devices]
    for size in sizes:
        groups = [list(FAMILIES)] if context.tiny else [[family] for family in FAMILIES]
        for families in groups:
            context.doing(f"starting {size} ranks for {', '.join(families)}")
            with local_ranks(context, RANK, size, name=f"{size}-{families[0]}") as ranks:
                for case in cases(context, size, families):
                    context.doing(case.name)
                    _try(context, case, ranks)
    if context.settings.devices < 4:
        context.not_run("layouts of 4 processes", f"{context.settings.devices} devices")


def _try(context: StageContext, case: Case, ranks: LocalRanks) -> None:
    """Run one case. On devices an error in float32 is NOT RUN, since trainers use bfloat16 there."""
    try:
        answers = ranks.call("run", case)
    except RuntimeError as error:
        if case.dtype == "float32" and not context.tiny:
            context.not_run(case.name, " ".join(str(error).split())[:300])
            return
        raise
    check_case(context, case, answers, resumed=0.0 if context.tiny else RESUMED)


def cases(context: StageContext, size: int, families: list[str]) -> Iterator[Case]:
    """Yield the cases of one group of processes. The first layout of each family also tests a checkpoint."""
    for family in families:
        for number, megatron in enumerate(layouts(size, family, context.tiny)):
            saved = number == 0 and (not context.tiny or family in _TINY_SAVED[size])
            folder = str(context.shared / f"checkpoint-{size}-{family}") if saved else ""
            model = str(context.shared / family)
            first, second = ("float32", "bfloat16") if context.tiny else ("bfloat16", "float32")
            yield Case(family, model, first, megatron, folder)
            if number == 0 and size == 1 and (family == "dense" or not context.tiny):
                yield Case(family, model, second, megatron)
            if number == 0 and SWAPPED in adaptor(context.device).settings:
                swapped = {**megatron, "distributed_optimizer": True, "extra": {SWAPPED: True}}
                yield Case(family, model, "bfloat16", swapped, f"{folder}-swapped")


def check_case(context: StageContext, case: Case, answers: list[dict[str, Any]], resumed: float = 0.0) -> None:
    """Record the checks of one case. `answers`: results of its ranks; `resumed`: limit of the difference after a resume."""
    golden, dtype = read_golden(case.family), case.dtype
    layer, difference = first_layer_apart(golden, answers[0]["sketches"], LAYER[dtype])
    cause = f"layer {layer} is the first that differs, by {difference:.2g}" if layer else "every layer's output agrees"
    context.at_most(f"{case.name}: layers", difference, limit=LAYER[dtype], unit="relative", cause=cause)
    before = gathered(answers, "before")
    context.at_most(
        f"{case.name}: log-probs", apart(before, golden.log_probs, dtype), limit=LIMITS[dtype], unit="nats", cause=cause
    )
    norms = next(answer["grad_norms"] for answer in answers if answer["grad_norms"][0] is not None)
    worst = float(np.abs(np.array(norms) / np.array(golden.grad_norms) - 1).max())  # unlike max(), numpy keeps a NaN
    tensor, share = worst_tensor(golden, answers[0]["tensor_norms"])
    named = f"{tensor} differs most, by {share:.2g}" if tensor else cause
    context.at_most(f"{case.name}: gradient norm", worst, limit=GRADIENT[dtype], unit="relative", cause=named)
    if tensor:
        context.at_most(f"{case.name}: gradients of tensors", share, limit=TENSOR[dtype], unit="relative", cause=named)
    after = apart(gathered(answers, "after"), golden.log_probs_after, dtype)
    context.at_most(
        f"{case.name}: log-probs after 2 steps", after, limit=AFTER[dtype], unit="nats",
        cause="the optimizer's steps differ" if worst <= GRADIENT[dtype] else named,
    )  # fmt: skip
    if case.folder:
        context.at_most(
            f"{case.name}: resumed from a checkpoint", float(np.max([answer["resumed"] for answer in answers])), limit=resumed,
            unit="nats", cause="a step after a resume differs from the uninterrupted run",
        )  # fmt: skip


def gathered(answers: list[dict[str, Any]], name: str) -> np.ndarray:
    """Concatenate the ranks' log-probs to the log-probs of the whole batch, [T]."""
    parts: dict[int, np.ndarray] = {}
    for answer in answers:
        parts |= answer[name]
    return np.concatenate([parts[number] for number in range(len(LENGTHS))])


def apart(values: np.ndarray, right: np.ndarray, dtype: str) -> float:
    """Return the largest (float32) or mean (bfloat16) difference of log-probs from the reference, in nats."""
    difference = np.abs(values.astype(np.float64) - right)
    return float(difference.max() if dtype == "float32" else difference.mean())


def first_layer_apart(golden: Golden, table: np.ndarray, limit: float) -> tuple[int, float]:
    """Return the first layer (from 1) with a relative difference above `limit`, and this difference.

    If there is none, return layer 0 and the largest difference. `table`: [layers, SKETCHES + 1].
    """
    difference = table[:, :SKETCHES].astype(np.float64) - golden.sketches
    relative = np.sqrt((difference**2).mean(1) / golden.squares)
    over = np.nonzero(~(relative <= limit))[0]
    return (int(over[0]) + 1, float(relative[over[0]])) if len(over) else (0, float(relative.max()))


def worst_tensor(golden: Golden, norms: dict[str, float]) -> tuple[str, float]:
    """Return the tensor with the largest relative difference of the gradient norm, and the difference; ("", 0.0) without tensors."""
    largest = max(golden.tensor_norms.values())
    shares = {
        name: abs(norms[name] - right) / max(right, 1e-3 * largest)
        for name, right in golden.tensor_norms.items()
        if name in norms
    }
    worst = max(shares, key=lambda name: (math.isnan(shares[name]), shares[name]), default="")
    return worst, shares.get(worst, 0.0)
