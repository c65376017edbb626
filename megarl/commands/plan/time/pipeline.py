"""Megatron's pipeline schedules with and without interleaving: which stage computes which micro batch when. Pure.

The order on a stage is Megatron's (`pipeline_parallel/schedules.py` of megatron-core 0.16). Times assume equally fast stages
and communication that takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BACKWARD = 2.0  # relative to a forward pass: gradients of inputs and of weights


class TimedPass(NamedTuple):
    """One pass of one micro batch through one chunk. A forward pass through all chunks of a stage takes 1."""

    stage: int
    chunk: int
    micro_batch: int
    backward: bool
    begin: float
    end: float


class Pass(NamedTuple):
    """A pass in the order of a stage."""

    chunk: int
    micro_batch: int
    backward: bool


def schedule(stages: int, chunks: int, micro_batches: int, *, backward: float = BACKWARD) -> list[TimedPass]:
    """Return all passes of one mini batch, stage by stage, each in the stage's order.

    `chunks`: per stage; more than one under virtual pipeline stages, which need `micro_batches` to be a multiple of
    `stages`. A pass begins when the stage is free and its input has been computed.
    """
    assert stages > 0 and chunks > 0 and micro_batches > 0
    assert chunks == 1 or (stages > 1 and micro_batches % stages == 0), (
        "interleaving needs whole rounds of the pipeline"
    )
    orders = [order(stage, stages, chunks, micro_batches) for stage in range(stages)]
    seconds = {False: 1.0 / chunks, True: backward / chunks}
    ends: dict[tuple[int, Pass], float] = {}
    free, done = [0.0] * stages, [0] * stages
    slots: list[list[TimedPass]] = [[] for _ in range(stages)]
    waiting = set(range(stages))
    while waiting:
        before = sum(done)
        for stage in sorted(waiting):
            while done[stage] < len(orders[stage]):
                now = orders[stage][done[stage]]
                needed = _reads(stage, now, stages, chunks)
                if needed is not None and needed not in ends:
                    break
                begin = max(free[stage], ends[needed] if needed else 0.0)
                free[stage] = ends[stage, now] = begin + seconds[now.backward]
                slots[stage].append(TimedPass(stage, *now, begin, free[stage]))
                done[stage] += 1
            else:
                waiting.remove(stage)
        assert sum(done) > before, "every stage waits for another"
    return [slot for of_stage in slots for slot in of_stage]


def order(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return the passes of `stage` in Megatron's order: warm-up forward passes, then one forward and one backward pass in
    turn, then the remaining backward passes."""
    forward = _in_rounds(stages if chunks > 1 else micro_batches, chunks, micro_batches)
    backward = [Pass(chunks - 1 - chunk, micro_batch, True) for chunk, micro_batch, _ in forward]
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(forward))
    in_turn = [step for pair in zip(forward[ahead:], backward, strict=False) for step in pair]
    return forward[:ahead] + in_turn + backward[len(forward) - ahead :]


def bubble(stages: int, chunks: int, micro_batches: int) -> float:
    """Return the share of time in which a stage waits: (p - 1) / (v m + p - 1), from "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (arXiv:2104.04473), which gives (p - 1) / (v m) relative to the time without
    bubbles."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def _in_rounds(group: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return forward passes: `group` micro batches through each chunk in turn, then the next group."""
    return [
        Pass(chunk, micro_batch, False)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


def _reads(stage: int, now: Pass, stages: int, chunks: int) -> tuple[int, Pass] | None:
    """Return the pass that computes the input of `now`, on the previous or next stage. The last stage of a chunk is next to
    the first stage of the next chunk."""
    chunk, micro_batch, backward = now
    part, step = chunk * stages + stage, -1 if backward else 1
    before = part - step
    if before < 0:
        return None
    if before == stages * chunks:  # the loss
        return stage, now._replace(backward=False)
    return before % stages, Pass(before // stages, micro_batch, backward)


class Window(NamedTuple):
    """A schedule shortened for a page."""

    slots: list[TimedPass]  # without the middle; later slots are moved to the left
    length: float  # of the shortened schedule
    fold: tuple[float, float] | None  # (begin, end) of the gap that replaces the middle
    hidden: float  # time left out


def folded(slots: Sequence[TimedPass], length: float) -> Window:
    """Shorten a schedule to about `length`: its begin, a gap of width 1, and its end."""
    whole = max(slot.end for slot in slots)
    if whole <= length + 2:
        return Window(list(slots), whole, None, 0.0)
    left, right, width = length / 2, whole - length / 2, 1.0
    hidden = right - left - width
    kept = []
    for slot in slots:
        if slot.begin < left:
            kept.append(slot._replace(end=min(slot.end, left)))
        if slot.end > right:
            kept.append(slot._replace(begin=max(slot.begin, right) - hidden, end=slot.end - hidden))
    return Window(kept, whole - hidden, (left, left + width), hidden)
