"""The pipeline's schedule equals Megatron's, and its bubble the published formula."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megarl.commands.plan.time.pipeline import Pass, TimedPass, bubble, folded, order, schedule

LAYOUTS = [
    (1, 1, 3),
    (2, 1, 1),
    (4, 1, 2),
    (4, 1, 8),
    (3, 1, 7),
    (2, 2, 2),
    (2, 2, 6),
    (4, 2, 4),
    (4, 3, 8),
    (8, 2, 16),
]


@pytest.mark.stack
@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), LAYOUTS)
def test_the_order_equals_megatrons(
    stages: int, chunks: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in range(stages):
        megatrons = order_of_megatron(stage, stages, chunks, micro_batches, monkeypatch)
        assert order(stage, stages, chunks, micro_batches) == megatrons


def order_of_megatron(
    stage: int, stages: int, chunks: int, micro_batches: int, patch: pytest.MonkeyPatch
) -> list[Pass]:
    """Record the passes of Megatron's schedule for a stage, with passes and neighbours that neither compute nor send."""
    from megatron.core.pipeline_parallel import schedules

    done: list[Pass] = []

    def forward(*_: Any, current_microbatch: int, vp_stage: int | None = None, **__: Any) -> tuple[list[Pass], int]:
        done.append(Pass(vp_stage or 0, current_microbatch, False))
        return [done[-1]], 0

    def backward(_: Any, output: list[Pass], *__: Any) -> list[None]:
        done.append(output[0]._replace(backward=True))
        return [None]

    zeros = torch.zeros
    patch.setattr(torch, "zeros", lambda *sizes, device=None, **kwargs: zeros(*sizes, **kwargs))
    patch.setattr(schedules, "forward_step", forward)
    patch.setattr(schedules, "backward_step", backward)
    virtual = chunks if chunks > 1 else None
    config = Settings(
        virtual_pipeline_model_parallel_size=virtual, microbatch_group_size_per_vp_stage=stages, hidden_size=1
    )
    groups = Settings(tp=Group(), cp=Group(), pp=Group(stage, stages))
    model = [Chunk(config) for _ in range(chunks)]
    schedules.get_forward_backward_func(stages, virtual)(
        forward_step_func=None,
        data_iterator=[iter(()) for _ in model],
        model=model,
        num_microbatches=micro_batches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=Neighbours(groups.pp, config, virtual),
        pg_collection=groups,
    )
    return done


class Settings:
    """Settings are None unless a test sets them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> None:
        return None


class Group:
    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Chunk(torch.nn.Module):
    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config, self.model_type = config, None


class Neighbours:
    """Megatron's P2PCommunicator without peers."""

    def __init__(self, pp_group: Group, config: Settings, virtual: int | None) -> None:
        self.pp_group, self.config, self.virtual_pipeline_model_parallel_size = pp_group, config, virtual

    def __getattr__(self, name: str) -> Any:
        both = name == "send_forward_backward_recv_forward_backward"
        return lambda *_, **__: (None, None) if both else None


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), LAYOUTS)
def test_every_pass_runs_once_and_after_its_inputs(stages: int, chunks: int, micro_batches: int) -> None:
    slots = schedule(stages, chunks, micro_batches)
    ends = {slot[:4]: slot.end for slot in slots}
    assert len(slots) == len(ends) == 2 * stages * chunks * micro_batches
    last = (stages - 1, chunks - 1)
    for slot in slots:
        if slot.backward:
            assert slot.begin >= ends[slot._replace(backward=False)[:4]]
            if slot[:2] != last:
                behind = (slot.stage + 1, slot.chunk) if slot.stage + 1 < stages else (0, slot.chunk + 1)
                assert slot.begin >= ends[(*behind, slot.micro_batch, True)]
        elif slot[:2] != (0, 0):
            before = (slot.stage - 1, slot.chunk) if slot.stage else (stages - 1, slot.chunk - 1)
            assert slot.begin >= ends[(*before, slot.micro_batch, False)]
    for stage in range(stages):
        stage_slots = [slot for slot in slots if slot.stage == stage]
        assert all(first.end <= second.begin for first, second in itertools.pairwise(stage_slots))


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [*LAYOUTS, (16, 1, 64), (8, 4, 32)])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_the_bubble_equals_the_published_formula(stages: int, chunks: int, micro_batches: int, backward: float) -> None:
    slots = schedule(stages, chunks, micro_batches, backward=backward)
    length = max(slot.end for slot in slots)
    for stage in range(stages):
        busy = sum(slot.end - slot.begin for slot in slots if slot.stage == stage)
        assert busy == pytest.approx(micro_batches * (1 + backward))
        assert 1 - busy / length == pytest.approx(bubble(stages, chunks, micro_batches))


def test_hand_worked() -> None:
    """Two stages, two micro batches, backward passes twice as long."""
    assert schedule(2, 1, 2) == [
        TimedPass(0, 0, 0, False, 0, 1),
        TimedPass(0, 0, 1, False, 1, 2),
        TimedPass(0, 0, 0, True, 4, 6),
        TimedPass(0, 0, 1, True, 7, 9),
        TimedPass(1, 0, 0, False, 1, 2),
        TimedPass(1, 0, 0, True, 2, 4),
        TimedPass(1, 0, 1, False, 4, 5),
        TimedPass(1, 0, 1, True, 5, 7),
    ]


def test_a_short_schedule_is_not_folded() -> None:
    slots = schedule(2, 1, 2)
    window = folded(slots, 20)
    assert window.slots == slots and window.length == 9 and window.fold is None and window.hidden == 0


def test_a_long_schedule_keeps_its_ends() -> None:
    slots = schedule(4, 1, 64)
    window = folded(slots, 40)
    assert window.length == 41 and window.fold == (20, 21) and window.hidden == max(s.end for s in slots) - 41
    assert window.slots[0] == slots[0]
    assert {slot.micro_batch for slot in window.slots} >= {0, 1, 2, 62, 63}
    assert max(slot.end for slot in window.slots) == 41
    for slot in window.slots:
        assert slot.end <= 20 or slot.begin >= 21, "nothing is drawn within the fold"
        assert slot.end > slot.begin
