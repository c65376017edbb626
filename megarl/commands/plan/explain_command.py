"""Command `weight-sync`: which rank sends which weights to which engine ranks, planned without devices."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl.commands.plan.explain import plan_of_recipe
from megarl.commands.plan.preflight import checked, require
from megarl.commands.plan.show.tables import table, transposed
from megarl.commands.plan.show.units import decimal
from megarl.commands.plan.weight_flows import Flow, Totals, flows, totals
from megarl.errors import InputError, as_input_error, pluralize
from megarl.preflight.load import load_recipe
from megarl.preflight.models import policy_config_of
from megarl.recipe.derived.weight_sync_route import is_sharded, why_not_sharded
from megarl.recipe.schema import Recipe, WeightSyncConfig
from megarl.recipe.text import hardware_of
from megarl.weight_sync.relay import max_connections
from megarl.weight_sync.session import SHARED_MEMORY_TRANSPORTS
from megarl.weight_sync.sharded.intersect import ITEM_SIZES
from megarl.weight_sync.sharded.plan import TransferPlan


def show_weight_sync(
    path: Path, overrides: Sequence[str], *, model: str | None, per_node: int | None, as_json: bool
) -> int:
    """Print the weight flows of a recipe."""
    recipe = load_recipe(path, overrides)
    if recipe.train.source != "rollout":
        raise InputError(f"{path}: train.source is {recipe.train.source}, which has no engines, so no weights are sent")
    require(checked(recipe, path, model), strict=False)
    with as_input_error():
        config = policy_config_of(recipe.model, path, model)
        machine = hardware_of(path)
        each = per_node or (machine[2] if machine is not None else None)
        start = time.perf_counter()
        plan = plan_of_recipe(recipe, config, each)
        seconds = time.perf_counter() - start
    rows, sums = flows(plan, _kinds(recipe)), totals(plan)
    notes = _notes(recipe, plan, each)
    if as_json:
        result = {"totals": asdict(sums), "flows": [asdict(flow) for flow in rows], "notes": notes, "seconds": seconds}
        print(json.dumps(result))
        return 0
    console = Console(width=100)
    console.print(_table(rows))
    for line in [*_lines(recipe.weight_sync, plan, rows, sums, seconds), *notes]:
        console.print(f"- {line}", highlight=False)
    return 0


def _kinds(recipe: Recipe) -> list[str]:
    each = recipe.cluster.trainers // recipe.megatron.pipeline_parallel
    return [f"stage {rank // each}" for rank in range(recipe.cluster.trainers)]


def _table(rows: Sequence[Flow]) -> Table:
    head = ["from", "ranks", "weights", "tensors", "to", "sent", "a rank", "engine", "relayed", "nodes", "buckets"]
    cells = [
        [
            flow.source,
            str(flow.senders),
            flow.weights,
            f"{flow.tensors:,}",
            "-".join(map(str, dict.fromkeys(flow.audience))),
            *map(decimal, (flow.sent, flow.sent_by_rank, flow.received_by_rank, flow.relayed, flow.between_hosts)),
            f"{flow.buckets:,}",
        ]
        for flow in rows
    ]
    return table(transposed([head, *cells]), "One update of the engines, in bytes", left=("weights",))


def _lines(
    weight_sync: WeightSyncConfig, plan: TransferPlan, rows: Sequence[Flow], sums: Totals, seconds: float
) -> list[str]:
    trainers, engines = len(plan.hosts.trainers), len(plan.hosts.engines)
    model = _whole_model(plan)
    return [
        f"to: number of engine ranks that need the same data. relayed: bytes that all of them but the first receive, {_relays(weight_sync.transport)}. "
        "a rank, engine: maximum over the sending ranks and over the receiving engine ranks. nodes: bytes between machines. "
        "buckets: buckets with data of this row, each counted once; a bucket with experts and other weights counts in two rows.",
        f"Sent by {pluralize(trainers, 'trainer rank')}: {decimal(sums.sent)}, at most {decimal(sums.sent_by_rank)} per rank; "
        f"received by {pluralize(engines, 'engine rank')}: {decimal(sums.received)}, at most {decimal(sums.received_by_rank)} per "
        f"rank, of which up to {decimal(sums.relayed_by_rank)} are relayed to other ranks; between machines: "
        f"{decimal(sums.between_hosts)}.",
        f"{pluralize(sums.streams, 'stream')}, {pluralize(sums.buckets, 'bucket')} of at most {weight_sync.bucket_mb} MiB"
        f"{_shared(rows, sums)}; "
        f"described, traced and planned in {seconds:.1f} s.",
        _connections(weight_sync.transport, plan),
        f"With a full export instead, every trainer rank gathers and every engine rank reads {decimal(model)}.",
    ]


def _relays(transport: str) -> str:
    """Describe the path of a bucket from the first engine rank to the others (megarl/weight_sync/relay.py: path)."""
    if transport not in SHARED_MEMORY_TRANSPORTS:
        return "each from the previous rank"
    return "over the network once for each further machine, else out of memory that the ranks of a machine share"


def _connections(transport: str, plan: TransferPlan) -> str:
    how = "device to device" if transport == "device" else "over gloo"
    most = max_connections(plan, shares_memory=transport in SHARED_MEMORY_TRANSPORTS)
    return f"A rank has at most {pluralize(most, 'connection')}, {how}."


def _shared(rows: Sequence[Flow], sums: Totals) -> str:
    """Return a remark on buckets that count in two rows, or ""."""
    twice = sum(flow.buckets for flow in rows) - sums.buckets
    return f", of which {twice:,} {'is' if twice == 1 else 'are'} in two rows" if twice else ""


def _whole_model(plan: TransferPlan) -> int:
    """Return the bytes of all tensors that trainers hold, each once, in the trainers' precision."""
    slices = plan.held.slices
    return int((slices[:, 3] * slices[:, 4] * ITEM_SIZES[slices[:, 5]]).sum())


def _notes(recipe: Recipe, plan: TransferPlan, per_node: int | None) -> list[str]:
    notes = []
    if not is_sharded(recipe):
        why = why_not_sharded(recipe) or "weight_sync.route=full"
        notes.append(f"The recipe does not use this route: {why}. The plan shows sharded copies to vLLM.")
    if recipe.lora.rank:
        notes.append(
            "The plan is for whole weights: with lora.rank, trainers send adapters or merged weights; see `megarl plan`."
        )
    if per_node is None:
        notes.append("All devices are assumed to be in one machine; set --per-node otherwise.")
    if whole := sorted({name for table in plan.needed.tables for name in table.whole}):
        shown = ", ".join(whole[:3]) + (", ..." if len(whole) > 3 else "")
        notes.append(
            f"Loaded whole by vLLM's loader, since it does more than copy: {pluralize(len(whole), 'tensor')} ({shown})."
        )
    return notes
