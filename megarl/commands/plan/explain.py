"""Plan of a recipe's weight sync, from config.json and the layouts alone."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.cluster.device_map import Demand
from megarl.commands.plan.count.engines import NO_VLLM
from megarl.commands.plan.count.rank_client import ENGINES, EngineRequest, RankClient
from megarl.commands.plan.count.stages import built_from, held_slices
from megarl.commands.plan.count.types import Links
from megarl.commands.plan.equal_layers import SampledLayers
from megarl.commands.plan.weight_flows import totals
from megarl.engines.base import engine_name
from megarl.engines.specs import policy_spec
from megarl.engines.vllm.lora import held_rank
from megarl.hf.config import text_fields
from megarl.hf.linears import adapter_sizes
from megarl.hf.shape import model_shape
from megarl.recipe.schema import Recipe
from megarl.weight_sync.session import SHARED_MEMORY_TRANSPORTS
from megarl.weight_sync.sharded.plan import Hosts, TransferPlan, plan_transfers
from megarl.weight_sync.sharded.slices import SliceTable, held_tensors

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)")


class NotInstalled(ValueError):
    """A package that is needed to plan the weight sync is not installed here."""


def full_links(recipe: Recipe, model: dict[str, Any], per_node: int | None) -> Links:
    """Return the bytes of one full update: rank 0 has the whole model, and every engine rank reads all of it. Arguments as
    in `plan_of_recipe`."""
    return _from_the_first("full", model_shape(model).total * _bytes_of_a_number(recipe.model.dtype), recipe, per_node)


def adapters_alone(recipe: Recipe, model: dict[str, Any], per_node: int | None) -> Links:
    """Return the bytes of one update, after the first, that sends only adapters: rank 0 has all, every engine rank reads
    all."""
    sizes = adapter_sizes(text_fields(model), recipe.lora.rank, recipe.lora.targets)
    return _from_the_first("adapters", sum(sizes.values()) * _bytes_of_a_number(recipe.model.dtype), recipe, per_node)


def adapters_held(recipe: Recipe, model: dict[str, Any]) -> int:
    """Return the largest size of the adapters on an engine's device in bytes: as if tensor parallelism did not cut them."""
    sizes = adapter_sizes(text_fields(model), held_rank(recipe.lora.rank), recipe.lora.targets)
    return sum(sizes.values()) * (4 if (recipe.rollout.dtype or recipe.model.dtype) == "float32" else 2)


def _bytes_of_a_number(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _from_the_first(route: str, size: int, recipe: Recipe, per_node: int | None) -> Links:
    """Return the bytes if trainer rank 0 sends equal data to all engine ranks. Between nodes it travels once per node with
    shared memory (`relay.full_relays`), else once per rank."""
    placed = hosts(recipe, per_node)
    remote = [host for host in placed.engines if host != placed.trainers[0]]
    outside = len(set(remote) if recipe.weight_sync.transport in SHARED_MEMORY_TRANSPORTS else remote)
    return Links(route, size, size, size * len(placed.engines), size * outside)


def links(plan: TransferPlan) -> Links:
    """Return the bytes of one sharded update."""
    sums = totals(plan)
    return Links("sharded", sums.sent_by_rank, sums.received_by_rank, sums.received, sums.between_hosts)


def plan_of_recipe(recipe: Recipe, model: dict[str, Any], per_node: int | None = None) -> TransferPlan:
    """Plan one sharded update of the policy's engines. `model`: config.json; `per_node`: devices per machine (None: one
    machine has all). Raises ValueError if the weights cannot be sharded."""
    with tempfile.TemporaryDirectory() as directory, RankClient() as client, RankClient(child=ENGINES) as engines:
        held = held_slices(built_from(recipe, model, Path(directory, "model")), client)
        return planned_from(held, recipe, model, per_node, engines)


def planned_from(
    held: Sequence[SliceTable], recipe: Recipe, model: dict[str, Any], per_node: int | None, engines: RankClient
) -> TransferPlan:
    """Plan like `plan_of_recipe`. `held`: slices held by each trainer rank. `engines`: a client of `ENGINES`."""
    if importlib.util.find_spec("vllm") is None:
        raise NotInstalled(NO_VLLM)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        needed = _needed_slices(recipe, held, Path(directory), engines)
    return plan_transfers(held, needed, hosts(recipe, per_node), recipe.weight_sync.bucket_mb << 20)


def hosts(recipe: Recipe, per_node: int | None) -> Hosts:
    """Return the host of each rank. Trainers fill machines in rank order, then the critic, then engines, unless they are
    colocated."""
    demand = Demand.of(recipe, trainers=True, engines=True, critic=uses_critic(recipe.algorithm))
    each = per_node or demand.devices
    return Hosts(
        [f"node {rank // each}" for rank in range(demand.trainers)],
        [f"node {(demand.first_engine + rank) // each}" for rank in range(demand.engine_devices)],
    )


def _needed_slices(recipe: Recipe, held: Sequence[SliceTable], directory: Path, client: RankClient) -> list[SliceTable]:
    """Return the slices that each engine rank needs.

    Only ranks of a group's first engine and the group's last rank are built: in between, ranks differ by expert numbers
    alone. If the last rank contradicts that, all ranks are built.
    """
    rollout = recipe.rollout
    spec = policy_spec(recipe, engine_name(0), updated=True)
    spec = replace(spec, model_path=str(directory), engine_args=dict(spec.engine_args))
    whole = held_tensors(held)
    sampled = SampledLayers.of(whole)

    def request(ranks: list[int], tensors: Sequence[Any], name: str) -> list[SliceTable]:
        file = directory / name
        file.write_text(json.dumps(tensors), encoding="utf-8")
        futures = [client.submit(EngineRequest("vllm", spec, rank, file)) for rank in ranks]
        return [_description(future.result()) for future in futures]

    def tables(ranks: list[int]) -> list[SliceTable]:
        expanded = [sampled.expand(table) for table in request(ranks, sampled.tensors, "some.json")]
        if None in expanded:
            return request(ranks, whole, "all.json")
        return [table for table in expanded if table is not None]

    group, each = rollout.data_parallel, rollout.tensor_parallel
    if group == 1:
        return tables(list(range(each))) * rollout.engines
    *first, last = tables([*range(each), group * each - 1])
    of_group = [_later(first[rank % each], rank // each * each) for rank in range(group * each)]
    if of_group[-1].digest != last.digest:
        of_group = tables(list(range(group * each)))
    return of_group * (rollout.engines // group)


def _description(answer: dict[str, Any]) -> SliceTable:
    if "error" in answer:
        raise ValueError(answer["error"])
    return SliceTable.from_bytes(base64.b64decode(answer["description"]))


def _later(table: SliceTable, ranks: int) -> SliceTable:
    """Shift the expert numbers of a table to a rank that is `ranks` further on in the group."""
    count = len({match[2] for name in table.tensors if (match := _EXPERT.match(name))})
    names = (_EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + ranks * count}", name) for name in table.tensors)
    return replace(table, tensors=tuple(names))
