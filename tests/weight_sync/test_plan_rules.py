"""Rules of a transfer plan beyond correctness: balance, near holders, relays, determinism and rejected inputs."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.weight_sync.sharded.plan import Hosts, TransferPlan, plan_transfers
from megarl.weight_sync.sharded.slices import SliceTable, SliceTableBuilder, as_matrix

MIB = 1 << 20


def slice_table(*slices: tuple[str, tuple[int, ...], tuple[int, int, int, int]], dtype: str = "bfloat16") -> SliceTable:
    builder = SliceTableBuilder()
    for number, (name, shape, part) in enumerate(slices):
        builder.add(builder.tensor(name, shape), part, builder.parameter(f"{number}", dtype), 0, part[3])
    return builder.build()


def whole(*names: str, size: int = 256, dtype: str = "bfloat16") -> SliceTable:
    return slice_table(*((name, (size, size), (0, 0, size, size)) for name in names), dtype=dtype)


def sent(plan: TransferPlan, trainers: int) -> np.ndarray:
    return np.bincount(plan.sources, plan.stream_bytes, trainers)


def layers(count: int) -> list[str]:
    return [f"model.layers.{number}.weight" for number in range(count)]


def test_holders_send_similar_amounts() -> None:
    """Four replicas hold the layers; only two of them hold and can send the extra tensors."""
    names = layers(61)
    rich, poor = whole(*names, "extra.0", "extra.1"), whole(*names)
    plan = plan_transfers([rich, rich, poor, poor], [rich], Hosts(["a"] * 4, ["b"]), MIB)
    assert sent(plan, 4).sum() == rich.nbytes
    assert np.ptp(sent(plan, 4)) <= 256 * 256 * 2, "more than one tensor apart"


def test_large_tensors_are_divided_over_holders() -> None:
    table = whole("embedding", size=1024)  # 2 MiB
    plan = plan_transfers([table] * 4, [table], Hosts(["a"] * 4, ["b"]), 128 * 1024)
    assert sent(plan, 4).tolist() == [table.nbytes / 4] * 4


def test_replicas_relay_buckets_to_each_other() -> None:
    table = whole(*layers(8))
    plan = plan_transfers([table] * 2, [table] * 4, Hosts(["t", "t"], ["a", "b", "a", "b"]), MIB)
    assert sent(plan, 2).sum() == table.nbytes, "trainers send once, whatever the number of engines"
    assert set(plan.targets) == {(0, 2, 1, 3)}, "within a host first"


def test_a_holder_on_the_engines_host_is_preferred() -> None:
    table = whole(*layers(8))
    plan = plan_transfers([table] * 3, [table] * 3, Hosts(["a", "b", "c"], ["b", "d", "a"]), MIB)
    feeds = {(int(source), targets) for source, targets in zip(plan.sources, plan.targets, strict=True)}
    assert feeds == {(1, (0, 1)), (0, (2,))}, "hosts with a holder are fed there, others by the host before them"


def test_engines_before_the_first_holders_host_have_a_chain_of_their_own() -> None:
    """Then the only holder sends each slice twice: from its own host no bucket returns to an earlier one."""
    table = whole(*layers(8))
    plan = plan_transfers([table], [table] * 2, Hosts(["b"], ["a", "b"]), MIB)
    assert set(plan.targets) == {(0,), (1,)} and sent(plan, 1).tolist() == [2 * table.nbytes]


def test_a_slice_that_an_engine_needs_twice_is_sent_once() -> None:
    part = ("shared", (8, 8), (0, 0, 8, 8))
    plan = plan_transfers([slice_table(part)], [slice_table(part, part)], Hosts(["a"], ["a"]), MIB)
    (stream,) = plan.streams_to(0)
    assert len(stream.copies) == 2 and stream.bucket_elements.tolist() == [64]


@pytest.mark.parametrize(
    "held, needed, travels",
    [("float32", "bfloat16", "bfloat16"), ("bfloat16", "float32", "bfloat16"), ("float32", "float32", "float32")],
)
def test_the_smaller_dtype_is_sent(held: str, needed: str, travels: str) -> None:
    plan = plan_transfers([whole("w", dtype=held)], [whole("w", dtype=needed)], Hosts(["a"], ["a"]), MIB)
    assert [stream.dtype for stream in plan.streams_from(0)] == [travels]


def test_equal_slice_tables_give_equal_plans() -> None:
    def once() -> list[object]:
        held = [slice_table(*((n, (64, 64), (32 * r, 0, 32, 64)) for n in layers(9))) for r in (0, 1, 0, 1)]
        plan = plan_transfers(
            held, [whole(*layers(9), size=64)] * 3, Hosts(["a", "a", "b", "b"], ["a", "b", "c"]), 4096
        )
        parts = [plan.streams_from(r) for r in range(4)] + [plan.streams_to(r) for r in range(3)]
        return [
            [
                stream.number,
                stream.source,
                stream.targets,
                stream.dtype,
                *(a.tolist() for a in (stream.bucket_elements, stream.copies, stream.tensors)),
            ]
            for part in parts
            for stream in part
        ]

    assert once() == once()


def test_slice_tables_round_trip() -> None:
    builder = SliceTableBuilder()
    builder.add_whole("conv", (4, 3, 2, 2), "float32")
    table = builder.build()
    read = SliceTable.from_bytes(table.to_bytes())
    assert read.shapes == ((4, 3, 2, 2),) and read.whole == {"conv"} and read.digest == table.digest
    assert (read.slices == table.slices).all() and read.nbytes == 4 * 48
    assert as_matrix((5,)) == (1, 5) and as_matrix(()) == (1, 1)


def test_digests_do_not_depend_on_the_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different zlib versions of trainers and engines compress the same slice table to different bytes."""
    table, same = whole("w"), whole("w")
    monkeypatch.setattr("zlib.compress", lambda data, level: data)
    assert table.to_bytes() and table.digest == same.digest
    monkeypatch.undo()
    assert whole("w").digest == table.digest != whole("v").digest


def halves(*rows: tuple[int, int]) -> list[SliceTable]:
    return [slice_table(("w", (8, 4), (row, 0, count, 4))) for row, count in rows]


@pytest.mark.parametrize(
    "held, message",
    [
        (halves((0, 4), (5, 3)), "engine ranks 0, 1 need 8 rows .* of w: of these 32 elements the trainers hold 28"),
        (halves((0, 5), (4, 4)), "trainer rank 0 and trainer rank 1 hold slices of w .* 1 rows from row 4"),
        ([*halves((0, 5), (4, 4))][:1] * 2, "engine ranks 0, 1 need .* hold 20"),
        (
            [slice_table(("w", (4, 8), (0, 0, 4, 8)))],
            r"w has shape \[8, 4\] at engine rank 0, but \[4, 8\] at trainer rank 0: do both load the same model\?",
        ),
        ([slice_table(("v", (8, 4), (0, 0, 8, 4)))], "hold 0"),
        ([*halves((0, 8)), slice_table(("w", (8, 4), (0, 0, 8, 4)), dtype="float32")], "in different types"),
    ],
)
def test_holes_and_overlaps_are_refused(held: list[SliceTable], message: str) -> None:
    """A check of sizes alone would accept a hole and an overlap of the same size."""
    with pytest.raises(ValueError, match=message):
        plan_transfers(held, halves((0, 8)) * 2, Hosts(["a"] * len(held), ["b"] * 2), MIB)


def test_a_dtype_that_no_stream_carries_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"engine parameter '0' is float8_e4m3fn, .* float32, bfloat16, float16 or float64"
    ):
        plan_transfers([whole("w")], [whole("w", dtype="float8_e4m3fn")], Hosts(["a"], ["b"]), MIB)
