"""Check each trainer process's slice table against mbridge's export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.megatron.held_slices import held_slices, held_tensors, parameter_names
from megarl.weight_sync.sharded.plan import Hosts, plan_transfers
from megarl.weight_sync.sharded.slices import SliceTable, as_matrix
from tests.support import held_ranks


def check(trainer: Any, exported: dict[str, torch.Tensor], record: Path) -> None:
    """Assert that every held slice equals the export's elements, and that all ranks' slices cover the export: a plan for one
    engine rank sends every element once.

    Collective. `record`: the file in which rank 0 writes the ranks' digests, for `check_planned`.
    """
    held = held_slices(trainer.model)
    weights = dict(zip(parameter_names(trainer.model), list(held_tensors(trainer.model)), strict=True))
    assert set(held.parameters) == set(weights)
    for tensor, row, column, rows, columns, parameter, offset, stride in held.slices.tolist():
        name = held.tensors[tensor]
        assert tuple(exported[name].shape) == held.shapes[tensor]
        assert str(weights[held.parameters[parameter]].dtype) == f"torch.{held.dtypes[parameter]}"
        whole = exported[name].reshape(as_matrix(exported[name].shape))
        weight = weights[held.parameters[parameter]].detach()
        part = weight.as_strided((rows, columns), (stride, 1), weight.storage_offset() + offset)
        assert torch.equal(whole[row : row + rows, column : column + columns], part), name
    encoded: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(encoded, held.to_bytes())
    tables = [SliceTable.from_bytes(data) for data in encoded]
    if dist.get_rank() == 0:
        record.write_text(json.dumps([table.digest for table in tables]))
    need = whole_model(exported)
    plan = plan_transfers(tables, [need], Hosts(["a"] * len(tables), ["a"]), 1 << 12)
    received = sum(int(stream.bucket_elements.sum()) for stream in plan.streams_to(0))
    assert received == sum(weight.numel() for weight in exported.values())
    assert np.bincount(plan.sources, plan.stream_bytes, len(tables)).sum() == need.nbytes


def check_planned(results: Path, cases: list[dict[str, Any]]) -> None:
    """Assert for each case that the planner computes every rank's slice table without its memory or the other ranks."""
    from megarl.commands.plan.count.rank_client import RankClient
    from megarl.commands.plan.count.stages import held_slices

    with RankClient() as client:
        for case in cases:
            recorded = json.loads((results / f"{case['name']}.holdings.json").read_text())
            planned = held_slices(held_ranks.recipe_of(case, results, len(recorded)), client)
            assert [description.digest for description in planned] == recorded, case["name"]


def whole_model(exported: dict[str, torch.Tensor]) -> SliceTable:
    """The slice table of an engine rank that needs every tensor."""
    from megarl.weight_sync.sharded.slices import SliceTableBuilder

    builder = SliceTableBuilder()
    for name, weight in exported.items():
        rows, columns = as_matrix(weight.shape)
        parameter = builder.parameter(name, str(weight.dtype).removeprefix("torch."))
        builder.add(builder.tensor(name, weight.shape), (0, 0, rows, columns), parameter, 0, columns)
    return builder.build()
