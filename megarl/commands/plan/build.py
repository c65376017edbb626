"""The plan of a recipe: memory of every stage, engine, device and host, put together from `count/`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.commands.plan.count.devices import (
    ROLLOUT,
    Occupants,
    largest_tensor,
    places,
    swaps_of,
    too_large,
    whole_expert_bytes,
)
from megarl.commands.plan.count.engines import Engine, engines, not_counted, rank_of, too_small
from megarl.commands.plan.count.host import host_refusals, hosts_note, hosts_of, keeps_weights
from megarl.commands.plan.count.libraries import LEGEND, counted_libraries
from megarl.commands.plan.count.rank_client import ENGINES, RankClient
from megarl.commands.plan.count.stages import Counted, check_trainable, counted, left_out
from megarl.commands.plan.count.types import EngineRank, Links, PipelineStage, RecipePlan
from megarl.commands.plan.count.workload import is_time_shared
from megarl.commands.plan.environment import device_kind
from megarl.commands.plan.explain import NotInstalled, adapters_alone, adapters_held, full_links, links, planned_from
from megarl.commands.plan.progress import Report, silent
from megarl.commands.plan.routes import as_expected, expected_routes
from megarl.commands.plan.search.fits import EngineChoice, Subject
from megarl.commands.plan.search.layouts import choice_of
from megarl.commands.plan.search.needed import shortage
from megarl.commands.plan.search.suggest import suggest
from megarl.engines import arguments_of
from megarl.engines.base import engine_name
from megarl.engines.specs import policy_spec
from megarl.errors import pluralize
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.families import has_tower
from megarl.platform.device_table import Device
from megarl.platform.kinds import kind_of
from megarl.recipe.derived.weight_sync_route import is_sharded, wants_adapters
from megarl.recipe.schema import ClusterConfig, Recipe

_WHOLE = 27.0
"""Seconds of a plan with suggestions. A plan that took more than two thirds of it without them gets half of that more, since
slow counts stay slow."""

ASSUMED = (
    "All micro batches are full (actor.max_tokens_per_micro_batch, or one sequence of the longest length, or one group of these "
    "if the loss compares its samples), and they fill the pipeline.",
    "Layers, attention and Adam are megarl's, on torch's kernels; fused kernels of a device's libraries keep less.",
    "Not counted: workspace of kernels and fragmentation of the allocator.",
)
OF_CONNECTIONS = (
    "Not counted: device memory of the groups that carry weights between devices; `megarl weight-sync` prints how many a rank has, and "
    "docs/weight_sync.md the size of each."
)
OF_EXPERTS = "All experts receive equally many tokens."
OF_IMAGES = (
    "Every sequence in training has one image, of data.max_pixels or as large as a prompt of the longest length allows. Videos with "
    "more tokens than that are not counted: plan them without data.max_pixels. Images in answers of tools are not counted."
)
OF_ENGINES = (
    "Weights of an engine are counted from vLLM's model. Its largest step: outputs of all linear layers of one layer for "
    "max_num_batched_tokens, and each logit of max_num_seqs sequences once in the model's precision and four times in float32."
)


def make_plan(
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device | None,
    *,
    memory: float | None = None,
    response: float | None = None,
    advise: bool = True,
    report: Report = silent,
) -> RecipePlan:
    """Build a plan. `models`: config.json of the policy ("rollout") and, if available, of critic, teacher and judge.

    `memory`: GiB, instead of the device's; without a device or `memory`, device memory is not checked. `advise`: suggest
    layouts that fit if something does not, ranked by the estimate for a mean `response`. `report` receives the progress. Raises ValueError for a model that
    cannot be trained, and for a layout that does not divide.
    """
    began, actor = time.monotonic(), models[ROLLOUT]
    routes = expected_routes(recipe, device)
    recipe = as_expected(recipe, routes)
    check_trainable(recipe, actor, models.get("critic", actor))  # takes milliseconds, so before engines are counted
    with RankClient() as trainers:  # used again for suggestions
        plan, kinds, ranks = _counted(recipe, models, device, memory, trainers, report)
        plan, memory = replace(plan, routes=routes), plan.memory
        if memory is None:
            return plan
        refusals = [
            refusal
            for kind in kinds
            if kind.section in ranks and (refusal := too_small(kind, ranks[kind.section], memory))
        ]
        of_hosts = host_refusals(plan.hosts, plan.device.host_memory) if plan.device is not None else []
        plan = replace(plan, refusals=[*refusals, *too_large(plan.places, memory, kinds)])
        if not advise or not plan.refusals or plan.device is None:
            return replace(plan, refusals=[*plan.refusals, *of_hosts])
        small = any(refusal.key.startswith(ROLLOUT) for refusal in refusals)
        engines_known = None if small else (choice_of(recipe).engines, ranks.get(ROLLOUT))
        took = time.monotonic() - began
        critic = models.get("critic", actor) if uses_critic(recipe.algorithm) else None
        subject = Subject(
            _as_sent(recipe, plan.weight_sync), actor, critic, replace(plan.device, memory=memory), response
        )
        seconds = max(_WHOLE - took, took / 2)
        report(f"the recipe does not fit: searching for layouts that do, for up to {seconds:.0f} s")
        plan = _with_suggestions(plan, subject, trainers, engines_known, seconds=seconds)
        return replace(plan, refusals=[*plan.refusals, *of_hosts])


def _counted(
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device | None,
    memory: float | None,
    trainers: RankClient,
    report: Report,
) -> tuple[RecipePlan, list[Engine], dict[str, EngineRank]]:
    """Return a plan without refusals, the engines, and one engine device per section."""
    actor = models[ROLLOUT]
    planned = recipe.train.source == "rollout" and is_sharded(recipe)

    def counted_engines() -> list[Engine]:
        kinds = engines(recipe, models, client)
        report(f"counted {pluralize(sum(kind.counts is not None for kind in kinds), 'kind')} of engines")
        return kinds

    report("importing Megatron and vLLM, to build ranks without memory (seconds, minutes on a busy machine)")
    with RankClient(child=ENGINES) as client, ThreadPoolExecutor() as executor:
        future = executor.submit(counted_engines)
        critic = models.get("critic", actor)
        counts = counted(recipe, actor, critic, trainers, held_slices=planned, report=report)
        if planned:
            report("computing which slices of the weights each engine needs")
        links, not_planned = _links(recipe, actor, counts, device, client)
        stages, kinds = counts.stages, future.result()
    recipe = _as_sent(recipe, links)
    if memory is None and device is not None:
        memory = device.memory
    libraries = counted_libraries(recipe, models, device)
    ranks = {
        kind.section: rank
        for kind in kinds
        if (rank := rank_of(kind, memory, libraries.communicators.get(kind.section, 0)))
    }
    not_counted_by_section = {kind.section: why for kind in kinds if (why := not_counted(kind, memory))}
    largest, keeps = largest_tensor(recipe.model.dtype, actor), keeps_weights(recipe.cluster, device)
    collected = whole_expert_bytes(recipe.model.dtype, actor)
    occupants = Occupants(recipe, stages, ranks, swaps_of(recipe), largest, keeps, collected)
    hosts = hosts_of(occupants, device)
    if device is not None and hosts:
        not_planned = [*not_planned, LEGEND, hosts_note(hosts, device.host_memory)]
    plan = RecipePlan(
        recipe=recipe.name,
        device=device,
        memory=memory,
        stages=stages,
        engine=ranks.get(ROLLOUT),
        places=places(occupants, unknown=not_counted_by_section, libraries=libraries),
        estimate=None,
        weight_sync=links,
        hosts=hosts,
        readers={section: rank for section, rank in ranks.items() if section != ROLLOUT},
        not_counted=list(not_counted_by_section),
        unchecked=list(not_counted_by_section.values()),
        notes=[*not_planned, *_notes(recipe, stages, kinds, actor), *_of_device(recipe.cluster, device), *ASSUMED],
    )
    return plan, kinds, ranks


def _links(
    recipe: Recipe, model: dict[str, Any], counts: Counted, device: Device | None, client: RankClient
) -> tuple[Links | None, list[str]]:
    """Return the bytes of a weight update by the recipe's route, and notes, e.g. why they are not known."""
    if recipe.train.source != "rollout":
        return None, []
    per_node = device.per_node if device is not None else None
    if wants_adapters(recipe):
        return _adapters(recipe, model, device, per_node)
    if not is_sharded(recipe):
        return full_links(recipe, model, per_node), []
    try:
        if counts.held is None:
            raise ValueError(counts.not_planned)
        return links(planned_from(counts.held, recipe, model, per_node, client)), []
    except NotInstalled as error:
        return None, [f"Bytes of the weight sync are not known here: {error}"]
    except ValueError as error:
        if recipe.weight_sync.route == "auto":  # as a run does
            return full_links(recipe, model, per_node), [
                f"Weights use the full route, since they cannot be sharded: {error}"
            ]
        return None, [f"Bytes of the weight sync are not known, since weights cannot be sharded: {error}"]


def _as_sent(recipe: Recipe, links: Links | None) -> Recipe:
    """Return the recipe with the route that weights will take, which determines buffers and times."""
    if links is None or links.route != "full":
        return recipe
    return replace(recipe, weight_sync=replace(recipe.weight_sync, route="full"))


def _adapters(
    recipe: Recipe, model: dict[str, Any], device: Device | None, per_node: int | None
) -> tuple[Links, list[str]]:
    """Return the bytes of adapter updates with notes, or of merged weights with the reason for merging."""
    kind = device.kind if device is not None and recipe.cluster.device == "auto" else recipe.cluster.device
    spec, whole = policy_spec(recipe, engine_name(0), updated=True), full_links(recipe, model, per_node)
    reason = arguments_of(recipe.rollout.engine).merged_because(spec, kind, model)
    if reason is not None:
        return whole, [
            f"weight_sync.adapters={recipe.weight_sync.adapters}: engines are sent merged weights, because {reason}."
        ]
    notes = [
        f"The first update also exports the weights below the adapters to engines: {whole.received / 2**30:.1f} GiB to each "
        "device. Engines also reserve memory for adapters, which is not counted: "
        f"{adapters_held(recipe, model) / 2**20:.1f} MiB at most."
    ]
    if is_time_shared(recipe.cluster):
        notes.append("While engines sleep, these weights are in host memory: no later update sends them again.")
    return adapters_alone(recipe, model, per_node), notes


def _with_suggestions(
    plan: RecipePlan, subject: Subject, trainers: RankClient, engines_known: EngineChoice | None, *, seconds: float
) -> RecipePlan:
    try:
        layouts, stopped = suggest(subject, trainers, engines=engines_known, seconds=seconds)
    except ValueError as error:  # engines cannot be counted, so no layout can be shown to fit
        return replace(plan, notes=[*plan.notes, str(error)])
    looked = f"The search for layouts that fit took {seconds:.0f} s and found {len(layouts) or 'none'}"
    notes = [f"{looked}; plan --search searches longer (--seconds)."] if stopped else []
    if not layouts and (text := shortage(subject)):
        notes = [text, *notes]
    return replace(plan, suggestions=layouts, notes=[*notes, *plan.notes])


def _of_device(cluster: ClusterConfig, device: Device | None) -> list[str]:
    """Return notes on missing software if this machine has the planned kind of device; another machine's software does not count."""
    name = device_kind(cluster, device)
    if name is None or not kind_of(name).is_here():
        return []
    return [f"On this machine {notice}." for notice in kind_of(name).installation_notices()]


def _notes(recipe: Recipe, stages: list[PipelineStage], kinds: list[Engine], model: dict[str, Any]) -> list[str]:
    dropped = sorted({*left_out(recipe.megatron), *left_out(recipe.critic.megatron)})
    notes = [
        f"Activations are not counted: {reason}."
        for reason in sorted({stage.not_counted for stage in stages if stage.not_counted})
    ]
    if dropped:
        notes.append(
            f"Left out of megatron.extra, since only the device's Megatron adapter defines them: {', '.join(dropped)}."
        )
    if "swap_optimizer" in dropped:
        notes.append(
            "With swap_optimizer, master weights and moments are on the host; this was not measured on a device."
        )
    if recipe.weight_sync.transport == "device":
        notes.append(OF_CONNECTIONS)
    if number_of_experts(text_fields(model)):
        notes.append(OF_EXPERTS)
    if has_tower(model):
        notes.append(OF_IMAGES)
    if kinds:
        notes.append(OF_ENGINES)
    for kind in kinds:
        if kind.name != "vllm":
            notes.append(f"{kind.section}.engine {kind.name} is assumed to hold as much as vLLM.")
        if kind.limits.assumed:
            notes.append(kind.limits.assumed)
    return notes
