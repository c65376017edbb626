"""The command `exchange`: who sends which weights to whom, before anything has started."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.commands.plan.explain import planned
from megarl.commands.plan.preflight import checked
from megarl.commands.plan.show.units import decimal
from megarl.commands.plan.weight_flows import Flow, Totals, flows, totals
from megarl.errors import InputError, as_input_error
from megarl.preflight.load import load_recipe
from megarl.preflight.models import config_of
from megarl.recipe.exchange import is_sharded, why_not_sharded
from megarl.recipe.header import hardware_of
from megarl.recipe.schema import Recipe
from megarl.text import pluralize
from megarl.weight_sync.relay import max_connections
from megarl.weight_sync.session import SHARED_MEMORY_TRANSPORTS
from megarl.weight_sync.sharded.intersect import ITEM_SIZES
from megarl.weight_sync.sharded.plan import TransferPlan


def exchange(path: Path, overrides: Sequence[str], *, model: str | None, per_node: int | None, as_json: bool) -> int:
    """Print who sends what to whom."""
    recipe = load_recipe(path, overrides)
    if recipe.train.source != "rollout":
        raise InputError(f"{path}: train.source is {recipe.train.source}, which has no engines: no weights are sent")
    checked(recipe, path, model).require(strict=False)
    with as_input_error():
        config = config_of(recipe.model.path, path, name=model)
        each = per_node or _per_node(path)
        start = time.perf_counter()
        made = planned(recipe, config, each)
        seconds = time.perf_counter() - start
    found, of_all = flows(made, _kinds(recipe)), totals(made)
    notes = _notes(recipe, made, each)
    if as_json:
        told = {"totals": asdict(of_all), "flows": [asdict(flow) for flow in found], "notes": notes, "seconds": seconds}
        print(json.dumps(told))
        return 0
    console = Console(width=100)
    console.print(_table(found))
    for line in [*_lines(recipe, made, found, of_all, seconds), *notes]:
        console.print(f"- {line}", highlight=False)
    return 0


def _per_node(path: Path) -> int | None:
    """Devices of a machine that the recipe's head names."""
    machine = hardware_of(path)
    return None if machine is None else machine[2]


def _kinds(recipe: Recipe) -> list[str]:
    each = recipe.cluster.trainers // recipe.megatron.pipeline_parallel
    return [f"stage {rank // each}" for rank in range(recipe.cluster.trainers)]


def _table(found: Sequence[Flow]) -> Table:
    table = Table(
        title="One update of the engines, in bytes",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("from", "ranks", "what", "tensors", "to", "sent", "a rank", "engine", "relayed", "nodes", "buckets"):
        table.add_column(name, justify="left" if name in ("from", "what") else "right", no_wrap=True)
    for flow in found:
        table.add_row(
            flow.source,
            str(flow.senders),
            flow.what,
            f"{flow.tensors:,}",
            "-".join(map(str, dict.fromkeys(flow.audience))),
            *map(decimal, (flow.sent, flow.sent_by_rank, flow.received_by_rank, flow.relayed, flow.between_hosts)),
            f"{flow.buckets:,}",
        )
    return table


def _lines(recipe: Recipe, made: TransferPlan, found: Sequence[Flow], of_all: Totals, seconds: float) -> list[str]:
    trainers, engines = len(made.hosts.trainers), len(made.hosts.engines)
    model = _whole_model(made)
    return [
        f"to: engine ranks that need the same. relayed: what all of them but the first receive, {_relays(recipe)}. a rank, "
        "engine: the most that one of the senders sends, and that one engine rank receives. "
        "nodes: from machine to machine. buckets: that have any of it in them, each once however many engine ranks read it; one "
        "with experts and other weights is in two rows.",
        f"Sent by {pluralize(trainers, 'trainer rank')}: {decimal(of_all.sent)}, {decimal(of_all.sent_by_rank)} at most by one; "
        f"received by {pluralize(engines, 'engine rank')}: {decimal(of_all.received)}, {decimal(of_all.received_by_rank)} at most "
        f"by one, of which others receive up to {decimal(of_all.relayed_by_rank)}, too; from machine to machine: "
        f"{decimal(of_all.between_hosts)}.",
        f"{pluralize(of_all.streams, 'stream')}, {pluralize(of_all.buckets, 'bucket')} of at most {recipe.exchange.bucket_mb} MiB"
        f"{_shared(found, of_all)}; "
        f"described, traced and planned in {seconds:.1f} s.",
        _connections(recipe, made),
        f"Exported and loaded whole instead, every trainer rank gathers and every engine rank reads {decimal(model)}.",
    ]


def _relays(recipe: Recipe) -> str:
    """The way of a bucket from the first engine rank to the others (megarl/weight_sync/relay.py: path)."""
    if recipe.exchange.transport not in SHARED_MEMORY_TRANSPORTS:
        return "each from the rank before it"
    return "over the network once for each further machine, else out of memory that the ranks of a machine share"


def _connections(recipe: Recipe, made: TransferPlan) -> str:
    transport = recipe.exchange.transport
    how = "device to device" if transport == "device" else "over gloo"
    most = max_connections(made, shares_memory=transport in SHARED_MEMORY_TRANSPORTS)
    return f"A rank has connections with {pluralize(most, 'other')} at most, {how}."


def _shared(found: Sequence[Flow], of_all: Totals) -> str:
    """Why the rows' buckets are more than there are, where they are."""
    twice = sum(flow.buckets for flow in found) - of_all.buckets
    return f", of which {twice:,} {'is' if twice == 1 else 'are'} in two rows" if twice else ""


def _whole_model(made: TransferPlan) -> int:
    """Bytes of all tensors that trainers hold, once, as they hold them."""
    slices = made.held.slices
    return int((slices[:, 3] * slices[:, 4] * ITEM_SIZES[slices[:, 5]]).sum())


def _notes(recipe: Recipe, made: TransferPlan, per_node: int | None) -> list[str]:
    notes = []
    if not is_sharded(recipe):
        why = why_not_sharded(recipe) or "exchange.route=export"
        notes.append(f"The recipe's weights do not go this way: {why}. It is how planned copies to vLLM would go.")
    if recipe.lora.rank:
        notes.append(
            "Of whole weights: with lora.rank, trainers send adapters alone, or merged weights, as `megarl plan` says."
        )
    if per_node is None:
        notes.append("All devices are taken to be of one machine; --per-node says otherwise.")
    if whole := sorted({name for one in made.needed.tables for name in one.whole}):
        shown = ", ".join(whole[:3]) + (", ..." if len(whole) > 3 else "")
        notes.append(f"Through vLLM's loader, being no copies of boxes: {pluralize(len(whole), 'tensor')} ({shown}).")
    return notes
