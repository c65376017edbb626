"""When each pipeline stage computes which micro batch: Megatron's schedules, with and without interleaving. Pure.

The order on a stage is Megatron's (`pipeline_parallel/schedules.py` of megatron-core 0.16); the times are those of a
pipeline whose stages are equally fast and whose communication takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BACKWARD = 2.0  # times a forward pass: gradients of inputs and of weights


class Slot(NamedTuple):
    """One pass of one micro batch through one stage's chunk. A forward pass through all chunks of a stage takes 1."""

    stage: int
    chunk: int
    micro_batch: int
    backward: bool
    begin: float
    end: float


class Pass(NamedTuple):
    """What a stage does next."""

    chunk: int
    micro_batch: int
    backward: bool


def schedule(stages: int, chunks: int, micro_batches: int, *, backward: float = BACKWARD) -> list[Slot]:
    """All passes of one mini batch, stage by stage, each in the stage's order.

    `chunks`: of a stage, more than one under virtual pipeline stages, where `micro_batches` must be a multiple of
    `stages`. A pass begins once the stage is free and what it reads has been computed.
    """
    assert stages > 0 and chunks > 0 and micro_batches > 0
    assert chunks == 1 or (stages > 1 and micro_batches % stages == 0), (
        "interleaving takes whole rounds of the pipeline"
    )
    orders = [order(stage, stages, chunks, micro_batches) for stage in range(stages)]
    seconds = {False: 1.0 / chunks, True: backward / chunks}
    ends: dict[tuple[int, Pass], float] = {}
    free, done = [0.0] * stages, [0] * stages
    slots: list[list[Slot]] = [[] for _ in range(stages)]
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
                slots[stage].append(Slot(stage, *now, begin, free[stage]))
                done[stage] += 1
            else:
                waiting.remove(stage)
        assert sum(done) > before, "every stage waits for another"
    return [slot for of_stage in slots for slot in of_stage]


def order(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """What `stage` computes, in Megatron's order: forward passes that fill the pipeline, then one forward and one
    backward pass in turn, then the backward passes that are left."""
    forward = _in_rounds(stages if chunks > 1 else micro_batches, chunks, micro_batches)
    backward = [Pass(chunks - 1 - chunk, micro_batch, True) for chunk, micro_batch, _ in forward]
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(forward))
    in_turn = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    return forward[:ahead] + in_turn + backward[len(forward) - ahead :]


def bubble(stages: int, chunks: int, micro_batches: int) -> float:
    """Share of its time in which a stage waits: (p - 1) / (v m + p - 1), as in "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (arXiv:2104.04473), where it is given as (p - 1) / (v m) of the time
    without bubbles."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def _in_rounds(group: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Forward passes: `group` micro batches through the first chunk, the same through the next, then the next group."""
    return [
        Pass(chunk, micro_batch, False)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


def _reads(stage: int, now: Pass, stages: int, chunks: int) -> tuple[int, Pass] | None:
    """The pass whose result `now` reads: of the stage before it or behind it, whose first and last are neighbours of
    the next chunk."""
    chunk, micro_batch, backward = now
    part, step = chunk * stages + stage, -1 if backward else 1
    before = part - step
    if before < 0:
        return None
    if before == stages * chunks:  # the loss
        return stage, now._replace(backward=False)
    return before % stages, Pass(before // stages, micro_batch, backward)


class Window(NamedTuple):
    """A schedule cut down to what a page can show."""

    slots: list[Slot]  # those of the middle left out, those after it moved to the left
    length: float  # of what is shown
    fold: tuple[float, float] | None  # from where to where the middle was; its width is what stands for it
    hidden: float  # time that was left out


def folded(slots: Sequence[Slot], length: float) -> Window:
    """At most about `length` of a schedule: its beginning, a fold of width 1, and its end."""
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
