"""Transfer plans executed on arrays: every needed element arrives once, for any layouts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weight_sync.sharded.intersect import elements
from megarl.weight_sync.sharded.plan import Hosts, Stream, TransferPlan, plan_transfers
from megarl.weight_sync.sharded.slices import ITEM_BYTES, SliceTable, SliceTableBuilder

NUMPY = {"float32": np.float32, "bfloat16": np.float16, "float16": np.float16}  # numpy has no bfloat16


class Rank:
    """Parameters of one rank and the checkpoint slices in them."""

    def __init__(self) -> None:
        self.builder = SliceTableBuilder()
        self.memory: list[np.ndarray] = []
        self.slices: list[tuple[str, tuple[int, int, int, int], int, int, int]] = []

    def parameter(self, size: int, dtype: str) -> int:
        number = self.builder.parameter(f"parameter{len(self.memory)}", dtype)
        self.memory.append(np.full(size, np.nan, NUMPY[dtype]))
        return number

    def add(self, name: str, shape: tuple[int, ...], part: tuple[int, int, int, int], at: tuple[int, int, int]) -> None:
        self.builder.add(self.builder.tensor(name, shape), part, *at)
        self.slices.append((name, part, *at))

    def place(self, name: str, shape: tuple[int, ...], part: tuple[int, int, int, int], dtype: str, gap: int) -> None:
        """Add a separate parameter for the slice, with `gap` elements between rows."""
        _, _, rows, columns = part
        stride = columns + gap
        self.add(name, shape, part, (self.parameter(gap + rows * stride, dtype), gap, stride))

    def slice_table(self) -> SliceTable:
        return self.builder.build()


def part_of(memory: np.ndarray, offset: int, stride: int, rows: int, columns: int) -> np.ndarray:
    item = memory.itemsize
    assert offset >= 0 and offset + (rows - 1) * stride + columns <= memory.size
    return np.lib.stride_tricks.as_strided(memory[offset:], (rows, columns), (stride * item, item))


def carry_out(plan: TransferPlan, trainers: list[Rank], engines: list[Rank]) -> np.ndarray:
    """Execute the plan; returns the bytes that each engine rank received."""
    sent: dict[tuple[int, int], list[np.ndarray]] = {}
    for number, rank in enumerate(trainers):
        for stream in plan.streams_from(number):
            assert stream.source == number
            buckets = [np.full(size, np.nan, NUMPY[stream.dtype]) for size in stream.bucket_elements]
            for bucket, at, parameter, offset, stride, rows, columns in stream.copies.tolist():
                hole = buckets[bucket][at : at + rows * columns]
                assert np.isnan(hole).all(), "two slices overlap in a bucket"
                hole[:] = part_of(rank.memory[parameter], offset, stride, rows, columns).ravel()
            assert all(bucket.size and not np.isnan(bucket).any() for bucket in buckets), "a bucket with a hole"
            sent[stream.number, stream.targets[0]] = buckets
    received = np.zeros(len(engines), np.int64)
    waiting = [(number, stream) for number in range(len(engines)) for stream in plan.streams_to(number)]
    while waiting:
        ready = [item for item in waiting if (item[1].number, item[0]) in sent]
        assert ready, "engine ranks wait for each other"
        for number, stream in ready:
            waiting.remove((number, stream))
            received[number] += receive(stream, number, sent, engines[number])
    return received


def receive(stream: Stream, number: int, sent: dict, rank: Rank) -> int:
    buckets = sent.pop((stream.number, number))
    assert [bucket.size for bucket in buckets] == stream.bucket_elements.tolist()
    for bucket, at, parameter, offset, stride, rows, columns in stream.copies.tolist():
        values = buckets[bucket][at : at + rows * columns].reshape(rows, columns)
        target = part_of(rank.memory[parameter], offset, stride, rows, columns)
        assert np.isnan(target).all(), "an element of a parameter came twice"
        target[:] = values
    after = stream.targets[stream.targets.index(number) + 1 :]
    if after:
        sent[stream.number, after[0]] = buckets
    return sum(bucket.nbytes for bucket in buckets)


def cuts(draw, size: int) -> list[tuple[int, int]]:
    """Draw a partition of `size` into runs (start, length)."""
    inner = draw(st.lists(st.integers(1, size - 1), max_size=3, unique=True)) if size > 1 else []
    bounds = [0, *sorted(inner), size]
    return [(a, b - a) for a, b in pairwise(bounds)]


@st.composite
def sync_plans(draw):
    """Draw tensors with one partition over trainer ranks and another over engine ranks; some ranks are replicas."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5))
    trainers = [Rank() for _ in range(draw(st.integers(1, 5)))]
    engines = [Rank() for _ in range(draw(st.integers(1, 5)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = {}
    for number, shape in enumerate(shapes):
        name = f"model.{number}.weight"
        values[name] = rng.integers(-1000, 1000, shape).astype(np.float32)  # exact in each type
        for ranks in (trainers, engines):
            dtype = draw(st.sampled_from(["float32", "bfloat16"]))
            parts = [
                (row, column, rows, columns)
                for row, rows in cuts(draw, shape[0])
                for column, columns in cuts(draw, shape[1])
            ]
            for place, part in enumerate(parts):
                # at least one trainer rank holds each slice, so that no element is missing; engine ranks need any subset
                some = draw(st.sets(st.integers(0, len(ranks) - 1), min_size=ranks is trainers))
                if ranks is trainers or some or place == 0:
                    for owner in sorted(some):
                        ranks[owner].place(name, shape, part, dtype, draw(st.integers(0, 2)))
    for rank in trainers:
        for name, (row, column, rows, columns), parameter, offset, stride in rank.slices:
            part_of(rank.memory[parameter], offset, stride, rows, columns)[:] = values[name][
                row : row + rows, column : column + columns
            ]
    names = st.sampled_from(["a", "b", "c"])
    hosts = Hosts([draw(names) for _ in trainers], [draw(names) for _ in engines])
    return values, trainers, engines, hosts, draw(st.sampled_from([1, 7, 64, 1 << 20]))


@given(sync_plans())
@settings(max_examples=75, deadline=None)
def test_every_needed_element_arrives_once(sync_plan) -> None:
    values, trainers, engines, hosts, bucket_bytes = sync_plan
    held, needed = [rank.slice_table() for rank in trainers], [rank.slice_table() for rank in engines]
    plan = plan_transfers(held, needed, hosts, bucket_bytes)
    received = carry_out(plan, trainers, engines)
    for rank in engines:
        for name, (row, column, rows, columns), parameter, offset, stride in rank.slices:
            value = part_of(rank.memory[parameter], offset, stride, rows, columns)
            assert np.array_equal(value, values[name][row : row + rows, column : column + columns])
    types = {name: dtype for table in held for name, dtype in types_of(table)}
    for number, table in enumerate(needed):
        expected = 0
        for _, name, rows, columns, dtype in set(slices_of(table)):
            expected += rows * columns * min(ITEM_BYTES[dtype], ITEM_BYTES[types[name]])
        assert received[number] == expected
    for stream in range(len(plan.targets)):
        pieces = plan.pieces[plan.starts[stream] : plan.starts[stream + 1]]
        sizes = np.add.reduceat(elements(pieces), plan.bucket_starts(stream)[:-1])
        assert (sizes <= max(bucket_bytes // ITEM_BYTES[("float32", "bfloat16")[plan.dtypes[stream]]], 1)).all()


def types_of(table: SliceTable):
    return [(table.tensors[row[0]], table.dtypes[row[5]]) for row in table.slices.tolist()]


def slices_of(table: SliceTable):
    for row in table.slices.tolist():
        yield tuple(row[1:3]), table.tensors[row[0]], *row[3:5], table.dtypes[row[5]]
