"""The weight exchange of a recipe before anything has started: from config.json and the layouts alone."""

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

from megarl.commands.plan.count.engines import NO_VLLM
from megarl.commands.plan.count.rank_client import ENGINES, EngineRequest, RankClient
from megarl.commands.plan.count.stages import built_from, holdings
from megarl.commands.plan.count.types import Links
from megarl.commands.plan.equal_layers import Sampled
from megarl.commands.plan.weight_flows import totals
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
    """What would tell how a plan is made is not on this machine."""


def exported(recipe: Recipe, model: dict[str, Any], per_node: int | None) -> Links:
    """Bytes of one update under `exchange.route: export`: rank 0 has the whole model, of which every engine rank reads
    all. Arguments as of `planned`."""
    return _from_the_first("export", model_shape(model).total * _bytes_of_a_number(recipe), recipe, per_node)


def adapters_alone(recipe: Recipe, model: dict[str, Any], per_node: int | None) -> Links:
    """Bytes of one update, other than a run's first, that brings adapters alone: rank 0 has all of them, and every engine rank
    reads all."""
    sizes = adapter_sizes(text_fields(model), recipe.lora.rank, recipe.lora.targets)
    return _from_the_first("adapters", sum(sizes.values()) * _bytes_of_a_number(recipe), recipe, per_node)


def adapters_held(recipe: Recipe, model: dict[str, Any]) -> int:
    """Bytes that an engine's device keeps for adapters at most: as if tensor-parallel ranks did not cut them."""
    sizes = adapter_sizes(text_fields(model), held_rank(recipe.lora.rank), recipe.lora.targets)
    return sum(sizes.values()) * (4 if (recipe.rollout.dtype or recipe.model.dtype) == "float32" else 2)


def _bytes_of_a_number(recipe: Recipe) -> int:
    return 4 if recipe.model.dtype == "float32" else 2


def _from_the_first(route: str, size: int, recipe: Recipe, per_node: int | None) -> Links:
    """Trainer rank 0 sends all engine ranks the same. Between nodes it travels once to each, where its ranks share memory
    (`hops.full_relays`), else once to each rank."""
    where = hosts(recipe, per_node)
    others = [host for host in where.engines if host != where.trainers[0]]
    outside = len(set(others) if recipe.exchange.transport in SHARED_MEMORY_TRANSPORTS else others)
    return Links(route, size, size, size * len(where.engines), size * outside)


def links(made: TransferPlan) -> Links:
    """Bytes of one update under `exchange.route: planned`."""
    found = totals(made)
    return Links("planned", found.sent_by_rank, found.received_by_rank, found.received, found.between_hosts)


def planned(recipe: Recipe, model: dict[str, Any], per_node: int | None = None) -> TransferPlan:
    """The plan of one update of the policy's engines; `model`: its config.json, `per_node`: devices of a machine (None: one
    machine has all). Raises ValueError where no plan can be made."""
    with tempfile.TemporaryDirectory() as directory, RankClient() as client, RankClient(child=ENGINES) as engines:
        haves = holdings(built_from(recipe, model, Path(directory, "model")), client)
        return planned_from(haves, recipe, model, per_node, engines)


def planned_from(
    haves: Sequence[SliceTable], recipe: Recipe, model: dict[str, Any], per_node: int | None, engines: RankClient
) -> TransferPlan:
    """As `planned`. `haves`: what each trainer rank holds. `engines`: of `ENGINES`."""
    if importlib.util.find_spec("vllm") is None:
        raise NotInstalled(NO_VLLM)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        needs = _needs(recipe, haves, Path(directory), engines)
    return plan_transfers(haves, needs, hosts(recipe, per_node), recipe.exchange.bucket_mb << 20)


def hosts(recipe: Recipe, per_node: int | None) -> Hosts:
    """Trainers fill machines in the order of ranks. Colocated engines do so with the same devices, others with the next."""
    trainers, engines = recipe.cluster.trainers, recipe.rollout.engines * recipe.rollout.tensor_parallel
    first = 0 if recipe.cluster.placement == "colocated" else trainers
    each = per_node or trainers + engines
    return Hosts(
        [f"node {rank // each}" for rank in range(trainers)],
        [f"node {(first + rank) // each}" for rank in range(engines)],
    )


def _needs(recipe: Recipe, haves: Sequence[SliceTable], directory: Path, client: RankClient) -> list[SliceTable]:
    """Of all engine ranks. Ranks of a group's first engine are built, and the group's last rank: in between, ranks differ by
    the numbers of their experts alone, or all are asked."""
    rollout = recipe.rollout
    spec = policy_spec(recipe, "engine0", load_weights=False)
    spec = replace(spec, model_path=str(directory), engine_args=dict(spec.engine_args))
    whole = held_tensors(haves)
    sampled = Sampled.of(whole)

    def asked(ranks: list[int], tensors: Sequence[Any], name: str) -> list[SliceTable]:
        file = directory / name
        file.write_text(json.dumps(tensors), encoding="utf-8")
        futures = [client.submit(EngineRequest("vllm", spec, rank, file)) for rank in ranks]
        return [_description(future.result()) for future in futures]

    def of(ranks: list[int]) -> list[SliceTable]:
        found = [sampled.whole(one) for one in asked(ranks, sampled.tensors, "some.json")]
        if None in found:
            return asked(ranks, whole, "all.json")
        return [one for one in found if one is not None]

    group, each = rollout.data_parallel, rollout.tensor_parallel
    if group == 1:
        return of(list(range(each))) * rollout.engines
    *first, last = of([*range(each), group * each - 1])
    of_group = [_later(first[rank % each], rank // each * each) for rank in range(group * each)]
    if of_group[-1].digest != last.digest:
        of_group = of(list(range(group * each)))
    return of_group * (rollout.engines // group)


def _description(answer: dict[str, Any]) -> SliceTable:
    if "error" in answer:
        raise ValueError(answer["error"])
    return SliceTable.from_bytes(base64.b64decode(answer["description"]))


def _later(one: SliceTable, ranks: int) -> SliceTable:
    """What the rank so many further on in a group needs, if each has equally many experts, numbered from rank to rank."""
    count = len({found[2] for name in one.tensors if (found := _EXPERT.match(name))})
    names = (_EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + ranks * count}", name) for name in one.tensors)
    return replace(one, tensors=tuple(names))
