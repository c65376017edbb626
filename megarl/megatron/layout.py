"""Check that a model's sizes and the number of trainers are divisible by the parallel sizes in `megatron`. Pure functions.

`layers_of_chunks` assigns layers to pipeline stages.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megarl.errors import pluralize
from megarl.hf.config import SHARED, number_of_experts, text_fields
from megarl.hf.families import deepstack_layers, find_family, has_delta_nets, has_tower
from megarl.recipe.trainers import MegatronConfig

_MOST_NAMED = 64  # largest size that an error message proposes


def check_layout(hf_config: dict[str, Any], megatron: MegatronConfig, world_size: int) -> None:
    """Refuse a layout that does not divide.

    `hf_config` is the model's config.json; `world_size` counts trainer processes. Raises ValueError with
    the arithmetic and the recipe's key.
    """
    hf_config = text_fields(hf_config)
    data_parallel = _check_world(megatron, world_size)
    _check_heads(hf_config, megatron)
    _check_widths(hf_config, megatron)
    _check_vision_tower(hf_config.get("vision_config") if has_tower(hf_config) else None, megatron)
    _check_packing(hf_config, megatron)
    _check_pipeline(hf_config, megatron, world_size)
    _check_deepstack(hf_config, megatron)
    _check_experts(hf_config, megatron, data_parallel)


def uses_sequence_parallel(megatron: MegatronConfig) -> bool:
    """Return whether sequence parallel is on; unset means on with tensor_parallel > 1."""
    return megatron.tensor_parallel > 1 if megatron.sequence_parallel is None else megatron.sequence_parallel


def layers_of_chunks(layers: int, megatron: MegatronConfig) -> list[range]:
    """Return the layers of each model chunk, for a layout that passes `check_layout`.

    One chunk per pipeline stage and virtual stage, in model order: virtual stage 0 of every pipeline stage, then
    virtual stage 1 of each, and so on.
    """
    pp, vpp = megatron.pipeline_parallel, megatron.virtual_pipeline or 1
    first, last = megatron.first_stage_layers, megatron.last_stage_layers
    free = pp - (first is not None) - (last is not None)
    each = (layers - (first or 0) - (last or 0)) // free if free else 0
    stages = [each] * pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    chunks, start = [], 0
    for _ in range(vpp):
        for count in stages:
            chunks.append(range(start, start + count // vpp))
            start += count // vpp
    return chunks


def vocab_divisor(hf_config: dict[str, Any], megatron: MegatronConfig) -> int | None:
    """Return the number that the padded vocabulary must be a multiple of; None if no padding is needed."""
    return None if hf_config["vocab_size"] % megatron.tensor_parallel == 0 else megatron.tensor_parallel


def _check_world(megatron: MegatronConfig, world_size: int) -> int:
    """Return the data-parallel size. Raises ValueError if `world_size` does not divide."""
    tp, pp, cp = megatron.tensor_parallel, megatron.pipeline_parallel, megatron.context_parallel
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"{world_size} trainer processes cannot be laid out as tensor x pipeline x context parallel = "
            f"{tp} x {pp} x {cp} = {tp * pp * cp}: {world_size} is not a multiple of {tp * pp * cp}. Change "
            "cluster.trainers, megatron.tensor_parallel, megatron.pipeline_parallel or megatron.context_parallel."
        )
    return world_size // (tp * pp * cp)


def _check_heads(hf_config: dict[str, Any], megatron: MegatronConfig) -> None:
    heads = hf_config["num_attention_heads"]
    latent = bool(hf_config.get("kv_lora_rank"))  # MLA has no key/value heads to shard
    groups = heads if latent else hf_config.get("num_key_value_heads") or heads
    _check_divides(megatron, "tensor_parallel", heads, f"the model's {heads} attention heads", groups)
    _check_divides(megatron, "tensor_parallel", groups, f"the model's {groups} key/value heads", heads)
    if linear := hf_config.get("linear_num_key_heads"):
        _check_divides(megatron, "tensor_parallel", linear, f"the {linear} key heads of the model's delta nets", heads)


def _check_divides(megatron: MegatronConfig, key: str, count: int, noun: str, *further_counts: int) -> None:
    """Raise ValueError if `megatron.key` does not divide `count`, which `noun` names. The message lists the values of the
    key that divide `count` and all `others`."""
    size = getattr(megatron, key) or 1
    if count % size:
        common = math.gcd(count, *further_counts)
        fitting = [size for size in range(1, min(common, _MOST_NAMED) + 1) if common % size == 0]
        raise ValueError(
            f"megatron.{key}={size} does not divide {noun} ({count} / {size} = {count / size:g}). megatron.{key} may be "
            f"{', '.join(map(str, fitting))}{' ...' if common > _MOST_NAMED else ''}."
        )


def _check_widths(hf_config: dict[str, Any], megatron: MegatronConfig) -> None:
    """Check widths of layers that every token passes; expert-tensor parallel shards the routed experts instead."""
    experts, widths = number_of_experts(hf_config), {}
    family = find_family(hf_config)
    layers = range(hf_config["num_hidden_layers"])
    if not experts or family is None or not all(family.sparse(hf_config, layer) for layer in layers):
        widths["intermediate_size"] = hf_config.get("intermediate_size") or 0
    for name in SHARED:
        if shared := hf_config.get(name):
            widths[f"moe_intermediate_size x {name}"] = hf_config["moe_intermediate_size"] * shared
    if shared := hf_config.get("shared_expert_intermediate_size"):
        widths["shared_expert_intermediate_size"] = shared
    for name, width in widths.items():
        _check_divides(megatron, "tensor_parallel", width, f"the model's {name} of {width}")


def _check_vision_tower(vision: dict[str, Any] | None, megatron: MegatronConfig) -> None:
    """Check the vision tower: tensor parallel shards it like the text model; the first pipeline stage holds it in full."""
    if vision and not megatron.packing:
        raise ValueError("megatron.packing=false pads text; a model that reads images needs megatron.packing=true.")
    for name in ("num_heads", "intermediate_size"):
        if vision and name in vision:
            _check_divides(megatron, "tensor_parallel", vision[name], f"the vision tower's {name} of {vision[name]}")


def _check_packing(hf_config: dict[str, Any], megatron: MegatronConfig) -> None:
    family = find_family(hf_config)
    if megatron.packing or family is None:
        return
    delta_nets = has_delta_nets(hf_config)
    if delta_nets or family.indexer:
        raise ValueError(
            f"megatron.packing=false pads sequences, and megarl's {'gated delta nets take' if delta_nets else 'sparse attention takes'} "
            "packed sequences only: set megatron.packing=true."
        )


def _check_pipeline(hf_config: dict[str, Any], megatron: MegatronConfig, world_size: int) -> None:
    pp, vpp, layers = megatron.pipeline_parallel, megatron.virtual_pipeline, hf_config["num_hidden_layers"]
    first, last = megatron.first_stage_layers, megatron.last_stage_layers
    if pp == 1:
        for name, value in (("virtual_pipeline", vpp), ("first_stage_layers", first), ("last_stage_layers", last)):
            if value is not None:
                raise ValueError(
                    f"megatron.{name}={value} needs megatron.pipeline_parallel > 1. Raise that, or leave it out."
                )
        return
    rest = layers - (first or 0) - (last or 0)
    stages = pp - (first is not None) - (last is not None)
    divides = rest > 0 and rest % stages == 0 if stages else rest == 0
    if not divides:
        raise ValueError(
            f"{_uneven_problem(layers, megatron, rest, stages)}. {_uneven_remedy(hf_config, megatron, world_size)}."
        )
    if vpp is None:
        return
    if has_tower(hf_config):
        raise ValueError(
            f"megatron.virtual_pipeline={vpp}: megarl does not build virtual pipeline stages of a model with a vision tower. Leave "
            "megatron.virtual_pipeline unset."
        )
    if stages == 0:
        raise ValueError(
            f"megatron.virtual_pipeline={vpp} with the layers of both stages given: Megatron cannot interleave without a "
            "stage between the first and the last. Leave megatron.first_stage_layers or megatron.last_stage_layers unset, "
            "or megatron.virtual_pipeline."
        )
    for stage, count in (("first", first), ("last", last), ("other", rest // stages if stages else None)):
        if count is not None:
            noun = f"the {count} layers of the {stage} pipeline stage{'s' if stage == 'other' else ''}"
            _check_divides(megatron, "virtual_pipeline", count, noun)


def _uneven_problem(layers: int, megatron: MegatronConfig, rest: int, stages: int) -> str:
    """Describe `rest` layers, outside a fixed first and last stage, that do not divide over `stages` others."""
    pp, ends = megatron.pipeline_parallel, ("first_stage_layers", "last_stage_layers")
    counts = {key: count for key in ends if (count := getattr(megatron, key)) is not None}
    if not counts:
        return f"megatron.pipeline_parallel={pp} does not divide the model's {layers} layers ({layers} / {pp} = {layers / pp:g})"
    keys = " and ".join(f"megatron.{key}={count}" for key, count in counts.items())
    fixed = f"{keys} {'leave' if len(counts) > 1 else 'leaves'} {layers} - {sum(counts.values())} = {rest}"
    if stages and rest <= 0:
        return f"{fixed}: no layers for the other {pluralize(stages, 'stage')} of megatron.pipeline_parallel={pp}"
    if stages == 0:
        return f"{fixed} layers to no stage: megatron.pipeline_parallel={pp} has only these two"
    return f"{fixed}; {rest} layers do not divide over the other {stages} of megatron.pipeline_parallel={pp}"


def _uneven_remedy(hf_config: dict[str, Any], megatron: MegatronConfig, world_size: int) -> str:
    """Name pipeline sizes and layers of first and last stage that pass all checks."""
    layers, pp, chunks = hf_config["num_hidden_layers"], megatron.pipeline_parallel, megatron.virtual_pipeline or 1

    def passes(size: int, first: int | None = None, last: int | None = None) -> bool:
        changed = replace(megatron, pipeline_parallel=size, first_stage_layers=first, last_stage_layers=last)
        try:
            check_layout(hf_config, changed, world_size)
        except ValueError:
            return False
        return True

    sizes = [size for size in range(1, layers // chunks + 1) if layers % (size * chunks) == 0 and passes(size)]
    fixed = megatron.first_stage_layers is not None or megatron.last_stage_layers is not None
    named = ", ".join(map(str, sizes[:-1])) + " or " * (len(sizes) > 1) + str(sizes[-1]) if sizes else ""
    equal = f"choose megatron.pipeline_parallel={named} (equal stages)"
    equal = f"leave both out and {equal}" if fixed else equal
    pairs = uneven_stages(layers // chunks, pp) if layers % chunks == 0 else []
    for first, last in pairs:
        if first is not None and last is not None and passes(pp, first * chunks, last * chunks):
            ends = f"megatron.first_stage_layers={first * chunks} and megatron.last_stage_layers={last * chunks}"
            return f"Set {ends}" + (f", or {equal}" if sizes else "")
    return (
        equal[0].upper() + equal[1:]
        if sizes
        else f"Change megatron.pipeline_parallel{' or megatron.virtual_pipeline' * (chunks > 1)}"
    )


def uneven_stages(units: int, stages: int) -> list[tuple[int | None, int | None]]:
    """Split `units` over `stages` so that the inner stages are equal and the largest stage is smallest.

    Returns (first, last) pairs. (None, None): all stages are equal. Empty with more stages than units.
    """
    if units % stages == 0:
        return [(None, None)]
    most_of: dict[tuple[int, int], int] = {}  # layers of the largest stage
    for each in (units // stages, units // stages + 1) if units > stages else ():
        ends = units - each * (stages - 2)
        for first in (ends // 2, ends - ends // 2):
            if first >= 1 and ends - first >= 1:
                most_of[first, ends - first] = max(each if stages > 2 else 0, first, ends - first)
    least = min(most_of.values(), default=0)
    return [pair for pair, most in most_of.items() if most == least]


def _check_deepstack(hf_config: dict[str, Any], megatron: MegatronConfig) -> None:
    """Check that the first pipeline stage, which has the vision tower, has all text layers that the tower feeds."""
    fed, first = deepstack_layers(hf_config), len(layers_of_chunks(hf_config["num_hidden_layers"], megatron)[0])
    if first < fed:
        raise ValueError(
            f"The first pipeline stage has {first} layers, and the vision tower on it feeds the first {fed} (DeepStack). Set "
            f"megatron.first_stage_layers to at least {fed}, or lower megatron.pipeline_parallel."
        )


def _check_experts(hf_config: dict[str, Any], megatron: MegatronConfig, data_parallel: int) -> None:
    family = find_family(hf_config)
    if (megatron.expert_tensor_parallel or 1) > 1 and family is not None and family.stacks_experts:
        raise ValueError(
            f"megatron.expert_tensor_parallel={megatron.expert_tensor_parallel}: {hf_config['model_type']} checkpoints store all "
            "experts of a layer as one tensor, which expert-tensor parallel cannot split. Leave it out."
        )
    experts, ep, etp = number_of_experts(hf_config), megatron.expert_parallel, megatron.expert_tensor_parallel or 1
    tp, cp = megatron.tensor_parallel, megatron.context_parallel
    if not experts:
        for name, size in (("expert_parallel", ep), ("expert_tensor_parallel", etp)):
            if size > 1:
                raise ValueError(
                    f"megatron.{name}={size} needs a mixture of experts; this model is dense. Leave it out."
                )
        if megatron.routing_replay != "none":
            raise ValueError(
                f"megatron.routing_replay={megatron.routing_replay} needs a mixture of experts; this model is dense. "
                "Leave it out."
            )
        for name in ("moe_aux_loss_coef", "moe_z_loss_coef"):
            if getattr(megatron, name):
                raise ValueError(f"megatron.{name} needs a mixture of experts; this model is dense. Leave it out.")
        return
    _check_divides(megatron, "expert_parallel", experts, f"the model's {experts} experts")
    stage = data_parallel * tp * cp
    if stage % (ep * etp):
        raise ValueError(
            f"expert x expert-tensor parallel = {ep} x {etp} = {ep * etp} does not divide the processes of a pipeline "
            f"stage, data x tensor x context = {data_parallel} x {tp} x {cp} = {stage}. Change "
            "megatron.expert_parallel, megatron.expert_tensor_parallel or cluster.trainers."
        )
    width = hf_config.get("moe_intermediate_size") or hf_config.get("intermediate_size")
    if width:
        _check_divides(megatron, "expert_tensor_parallel", width, f"the experts' width of {width}")
    if tp > 1 and megatron.sequence_parallel is False:
        raise ValueError(
            f"megatron.sequence_parallel=false with tensor_parallel={tp}: Megatron's mixture of experts needs sequence "
            "parallel if TP > 1. Leave megatron.sequence_parallel unset."
        )
