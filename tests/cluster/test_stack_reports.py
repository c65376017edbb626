"""The report of who waits for whom, from recorded stacks, and the watch of a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import ProcessInfo
from megarl.cluster.stacks import stall
from megarl.cluster.stacks.report import GroupStacks, lines_of, process_lines, situation
from megarl.cluster.stacks.stall import LOOKS, StallWatch, TrainersStalled, progress
from tests.support.rank_states import DATA, IN_ALL_REDUCE, IN_USER_CODE, SILENT, TENSOR, WORLD, group_of, rank_state


def test_the_rank_in_user_code_is_missing_and_the_others_wait() -> None:
    waiting = rank_state(*IN_ALL_REDUCE, wait=("all_reduce", DATA), counts=[(DATA, 3, 5), (WORLD, 3, 2)])
    hanging = rank_state(*IN_USER_CODE, layer=12, counts=[(DATA, 3, 4), (WORLD, 3, 2)], state="D")
    group = group_of(waiting, hanging, waiting, log="logs/trainer.log")
    assert lines_of(group, lambda log: "  the last line") == [
        "waiting for others:",
        "  ranks 0, 2: all_reduce in the data parallel with cp group (ranks 0-2)",
        "    megatron/core/optimizer/clip_grads.py:90 norm",
        "others wait for:",
        "  trainer rank 1 on node7 (pid 101): backward of layer 12, blocked in the kernel (state D), as by a file system or "
        "a device driver, 1 collective behind in the data parallel with cp group",
        "    /home/me/hooks.py:10 slow",
        "    torch/autograd/function.py:325 apply",
        "    megarl/trainer/actor.py:99 update",
        "    its output, logs/trainer.log, ends:",
        "      the last line",
    ]
    error = str(TrainersStalled(group, 600.0))
    assert error.startswith(
        "trainer rank 1 on node7 (pid 101) failed: others wait for it in update_actor, where nothing has changed on any rank "
        "for 600 s (cluster.stall).\n"
    )
    assert "dmesg" in error and error.count("logs/trainer.log") == 1


def test_a_chain_of_waiting_ranks_leads_to_its_first() -> None:
    """Rank 0 waits for 1 in their tensor group, rank 1 for 3 in its data group; rank 2 is in the call's end already."""
    chain = group_of(
        rank_state(*IN_ALL_REDUCE, wait=("all_reduce", TENSOR), counts=[(TENSOR, 2, 9)]),
        rank_state(*IN_ALL_REDUCE, wait=("all_reduce", DATA), counts=[(TENSOR, 2, 8), (DATA, 2, 4)]),
        rank_state(counts=[(("4", TENSOR[1]), 2, 8)]),
        rank_state(*IN_USER_CODE, counts=[(("4", TENSOR[1]), 2, 8), (DATA, 2, 3)]),
    )
    state = situation(chain)
    assert (state.waiting, state.missing, state.returned) == ([0, 1], [3], [2])


@pytest.mark.parametrize(
    ("states", "missing"),
    [
        # On devices ranks start collectives without waiting: the count shows who is behind.
        ([rank_state("a.py:1 sync", counts=[(DATA, 2, 5)]), rank_state("b.py:2 slow", counts=[(DATA, 2, 4)])], [1]),
        # Ahead in a group, but others wait for it in another one.
        (
            [
                rank_state(*IN_ALL_REDUCE, wait=("all_reduce", TENSOR), counts=[(TENSOR, 2, 6), (DATA, 2, 4)]),
                rank_state("b.py:2 slow", counts=[(TENSOR, 2, 5), (DATA, 2, 5)]),
            ],
            [1],
        ),
        # Behind in one group and ahead in another: a link of a chain that ends at the last rank.
        (
            [
                rank_state("a.py:1 sync", counts=[(TENSOR, 2, 6)]),
                rank_state("a.py:1 sync", counts=[(TENSOR, 2, 5), (DATA, 2, 5)]),
                rank_state("b.py:2 slow", counts=[(DATA, 2, 4)]),
            ],
            [2],
        ),
        # It left the call without the collective.
        (
            [
                rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD), counts=[(WORLD, 2, 3)]),
                rank_state(counts=[(WORLD, 2, 2)]),
            ],
            [1],
        ),
        # A backend that does not count.
        ([rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD)), rank_state("b.py:2 slow")], [1]),
        # Nothing is known of it; rank 1 may be in a collective on its device.
        ([rank_state(*IN_ALL_REDUCE, wait=("barrier", WORLD)), rank_state("a.py:1 sync"), SILENT], [2]),
        # All ranks are in a collective of different groups.
        (
            [
                rank_state(*IN_ALL_REDUCE, wait=("all_reduce", DATA), counts=[(DATA, 2, 5), (TENSOR, 2, 3)]),
                rank_state(*IN_ALL_REDUCE, wait=("broadcast", TENSOR), counts=[(DATA, 2, 4), (TENSOR, 2, 4)]),
            ],
            [],
        ),
    ],
)
def test_missing_ranks(states: list[Any], missing: list[int]) -> None:
    assert situation(group_of(*states)).missing == missing


def test_a_rank_that_returned_without_the_collective_is_named() -> None:
    waiting = rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD), counts=[(WORLD, 2, 3)])
    assert lines_of(group_of(waiting, rank_state(counts=[(WORLD, 2, 2)])))[-2:] == [
        "others wait for:",
        "  trainer rank 1 on node7 (pid 101): has returned from the call, 1 collective behind in the group of all trainers",
    ]


def test_ranks_in_different_collectives_are_listed_with_their_lag() -> None:
    states = [
        rank_state(*IN_ALL_REDUCE, wait=("all_reduce", DATA), counts=[(DATA, 2, 5), (TENSOR, 2, 3)]),
        rank_state("torch/distributed/distributed_c10d.py:1 barrier", wait=("barrier", WORLD), counts=[(DATA, 4, 4)]),
    ]
    assert lines_of(group_of(*states)) == [
        "waiting for others:",
        "  rank 0: all_reduce in the data parallel with cp group (ranks 0-1)",
        "    megatron/core/optimizer/clip_grads.py:90 norm",
        "  rank 1: barrier in the group of all trainers, 1 collective behind in the data parallel with cp group",
    ]
    assert "different branches" in str(TrainersStalled(group_of(*states), 600.0))


def test_a_report_of_1024_ranks_is_short() -> None:
    """Ranks that are alike share a line; ranks that do not answer do, too."""
    waiting = rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD), counts=[(WORLD, 1024, 5)])
    slow = [rank_state(f"/home/me/loader.py:{line} read") for line in range(6)]
    states = [SILENT if rank % 100 == 7 else waiting for rank in range(1018)]
    lines = lines_of(group_of(*states, *slow))
    assert len(lines) < 20 and max(map(len, lines)) < 300
    assert "of 1024)" in lines[1]
    missing = lines[lines.index("others wait for:") + 1]
    assert missing.startswith("  trainer rank 7 on node7 (pid 107), and ranks 107, 207, 307")
    many = lines_of(group_of(*slow))
    assert many[0] == "running:" and many[-1] == "  ... and 2 others"


def test_a_service_shows_the_frames_outside_of_the_transport() -> None:
    state = rank_state(
        "ray/_private/worker.py:1 get", "/x/megarl/cluster/calls.py:3 wait", "/x/megarl/train.py:74 run_steps"
    )
    assert process_lines(ProcessInfo("controller", "node7", 9), state) == [
        "controller on node7 (pid 9)",
        "  thread MainThread:",
        "    /x/megarl/train.py:74 run_steps",
    ]


# --- the watch of a call ------------------------------------------------------------------------------


class Looks:
    """A watch with a limit of 400 s that sees `looks` in order, one in 100 s; the last one repeats."""

    def __init__(self, looks: list[GroupStacks], monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks, self.requests, self.clock = looks, [], 0.0
        monkeypatch.setattr(stall.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(
            stall, "_in_thread", lambda read: SimpleNamespace(done=lambda: True, result=lambda: read(False))
        )
        self.watch = StallWatch(self.read, 400.0)

    def read(self, full: bool) -> GroupStacks:
        self.requests.append(full)
        return self.looks[min(len(self.requests), len(self.looks)) - 1]

    def pass_by(self, count: int) -> None:
        for _ in range(count):
            self.watch.check()  # not due
            self.clock += 100.0
            self.watch.check()
            self.watch.check()


def test_a_call_ends_after_looks_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = group_of(rank_state(*IN_ALL_REDUCE, wait=("all_reduce", WORLD)), rank_state(*IN_USER_CODE))
    looks = Looks([hanging], monkeypatch)
    looks.pass_by(LOOKS)
    assert looks.requests == [False] * LOOKS
    with pytest.raises(
        TrainersStalled, match=r"trainer rank 1 on node7 \(pid 101\) failed: others wait for it"
    ) as caught:
        looks.pass_by(1)
    assert looks.requests[-1] and caught.value.failure.place.pid == 101


MOVES = [
    {"digest": 2},
    {"other_limit": True},
    {"io_bytes": (1 << 20) + 1},
    {"cpu_ticks": 101},
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: next(iter(move)))
def test_progress_of_one_rank_is_progress_of_the_call(move: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = group_of(rank_state(*IN_ALL_REDUCE), rank_state(*IN_USER_CODE))
    now = group_of(rank_state(*IN_ALL_REDUCE), rank_state(*IN_USER_CODE, **move))
    assert progress(before, now) and not progress(before, before)
    looks = Looks([*[before] * (LOOKS - 1), now] * 3, monkeypatch)
    looks.pass_by(3 * LOOKS)
    looks = Looks([*[before] * (LOOKS + 1), now], monkeypatch)  # in the look for the report
    looks.pass_by(LOOKS + 1)
    assert looks.requests == [False] * (LOOKS + 1) + [True]


def test_little_io_of_a_log_is_no_progress() -> None:
    before, now = group_of(rank_state(*IN_USER_CODE)), group_of(rank_state(*IN_USER_CODE, io_bytes=5000, cpu_ticks=3))
    assert not progress(before, now)
    assert not progress(group_of(SILENT), group_of(SILENT))
    assert progress(group_of(SILENT), now)


def test_a_wait_for_an_engine_is_no_progress_beside_a_rank_that_does_not_answer() -> None:
    before, now = (
        rank_state(f"store.py:{line} _poll", other_limit=True, digest=line, io_bytes=line << 20) for line in (101, 107)
    )
    assert progress(group_of(before, rank_state()), group_of(now, rank_state()))
    assert not progress(group_of(before, SILENT), group_of(now, SILENT))


def test_a_stall_of_0_never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_in_thread", lambda read: pytest.fail("a look"))
    StallWatch(lambda full: group_of(), 0.0).check()
