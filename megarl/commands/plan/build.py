"""A recipe's plan, put together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.commands.plan.count.devices import ROLLOUT, largest_tensor, places, swaps_of, too_large
from megarl.commands.plan.count.engines import Engine, engines, not_counted, rank_of, too_small
from megarl.commands.plan.count.host import Tenants, assumed, host_refusals, hosts_of, keeps_weights
from megarl.commands.plan.count.libraries import LEGEND, counted_libraries
from megarl.commands.plan.count.rank_client import ENGINES, RankClient
from megarl.commands.plan.count.stages import Counted, check_trainable, counted, left_out
from megarl.commands.plan.count.types import EngineRank, Links, Plan, Stage
from megarl.commands.plan.count.workload import is_time_shared
from megarl.commands.plan.explain import NotInstalled, adapters_alone, adapters_held, exported, links, planned_from
from megarl.commands.plan.routes import as_expected, expected_routes
from megarl.commands.plan.search.fits import Chosen, Subject
from megarl.commands.plan.search.layouts import choice_of
from megarl.commands.plan.search.suggest import proposals
from megarl.engines import merged_because
from megarl.engines.specs import policy_spec
from megarl.hf.config import number_of_experts, text_fields
from megarl.platform.cuda_kind import installation_notices
from megarl.platform.devices import Device
from megarl.recipe.exchange import is_sharded, wants_adapters
from megarl.recipe.schema import Recipe

_WHOLE = 27.0
"""Seconds that a plan takes with layouts looked for; where it took more than two thirds of them without, half of that more,
since what is slow to count once is slow to count again."""

ASSUMED = (
    "Every micro batch is full (actor.max_tokens_per_micro_batch, or one sequence of the longest length), and the "
    "pipeline full of them.",
    "Layers, attention and Adam are megarl's own on torch's kernels; fused ones of a device's own libraries keep less.",
    "Not counted: kernels' workspace and the allocator's fragmentation.",
)
OF_CONNECTIONS = (
    "Not counted: what groups that carry weights from device to device keep on either one; `exchange` says how many "
    "a rank has, and docs/exchange.md what one takes."
)
OF_EXPERTS = "Experts are sent equally many tokens."
OF_IMAGES = (
    "Every sequence that trainers compute has one image, of data.max_pixels, or as large as a prompt of the longest length "
    "may show."
)
OF_ENGINES = (
    "An engine's weights are those of vLLM's own model. Its largest step: what all linear layers of one layer put out for "
    "max_num_batched_tokens, and each logit of max_num_seqs sequences once as it comes and four times in float32."
)


def make_plan(
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device | None,
    *,
    memory: float | None = None,
    response: float | None = None,
    advise: bool = True,
) -> Plan:
    """`models`: the config.json of the policy (rollout), and of critic, teacher and judge, as far as they are known.

    `memory`: GiB, in place of the device's; with neither nothing is refused for it. `advise`: propose layouts that
    fit where something does not, the fastest first at a mean `response` of so many tokens.
    Raises ValueError for a model that cannot be trained, and for a layout that does not divide.
    """
    began, actor = time.monotonic(), models[ROLLOUT]
    routes = expected_routes(recipe, device)
    recipe = as_expected(recipe, routes)
    check_trainable(recipe, actor, models.get("critic", actor))  # in milliseconds, before engines are asked about
    with RankClient() as trainers:  # which is asked again where something does not fit
        plan, kinds, ranks = _counted(recipe, models, device, memory, trainers)
        plan, memory = replace(plan, routes=routes), plan.memory
        if memory is None:
            return plan
        refusals = [
            refusal
            for kind in kinds
            if kind.section in ranks and (refusal := too_small(kind, ranks[kind.section], memory))
        ]
        of_hosts = host_refusals(plan.hosts, plan.device.host_memory) if plan.device is not None else []
        plan = replace(plan, refusals=[*refusals, *too_large(plan.places, memory)])
        if not advise or not plan.refusals or plan.device is None:
            return replace(plan, refusals=[*plan.refusals, *of_hosts])
        small = any(refusal.key.startswith(ROLLOUT) for refusal in refusals)
        engines_known = None if small else (choice_of(recipe).engines, ranks.get(ROLLOUT))
        took = time.monotonic() - began
        critic = models.get("critic", actor) if uses_critic(recipe.algorithm) else None
        subject = Subject(_as_sent(recipe, plan.exchange), actor, critic, replace(plan.device, memory=memory), response)
        plan = _with_proposals(plan, subject, trainers, engines_known, seconds=max(_WHOLE - took, took / 2))
        return replace(plan, refusals=[*plan.refusals, *of_hosts])


def _counted(
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device | None,
    memory: float | None,
    trainers: RankClient,
) -> tuple[Plan, list[Engine], dict[str, EngineRank]]:
    """A plan without refusals; the engines, and a device of each section's."""
    actor = models[ROLLOUT]
    planned = recipe.train.source == "rollout" and is_sharded(recipe)
    with RankClient(child=ENGINES) as client, ThreadPoolExecutor() as beside:
        asked = beside.submit(engines, recipe, models, client)
        counts = counted(recipe, actor, models.get("critic", actor), trainers, holdings=planned)
        exchanged, not_planned = _links(recipe, actor, counts, device, client)
        found, kinds = counts.stages, asked.result()
    recipe = _as_sent(recipe, exchanged)
    if memory is None and device is not None:
        memory = device.memory
    libraries = counted_libraries(recipe, models, device)
    ranks = {
        kind.section: rank
        for kind in kinds
        if (rank := rank_of(kind, memory, libraries.communicators.get(kind.section, 0)))
    }
    unknown = {kind.section: why for kind in kinds if (why := not_counted(kind, memory))}
    largest, swaps = largest_tensor(recipe, actor), swaps_of(recipe)
    lying = places(recipe, found, ranks, swaps=swaps, largest=largest, unknown=unknown, libraries=libraries)
    hosts = hosts_of(Tenants(recipe, found, ranks, swaps, largest, keeps_weights(recipe, device)), device)
    if device is not None and hosts:
        not_planned = [*not_planned, LEGEND, assumed(hosts, device.host_memory)]
    plan = Plan(
        recipe=recipe.name,
        device=device,
        memory=memory,
        stages=found,
        engine=ranks.get(ROLLOUT),
        places=lying,
        estimate=None,
        exchange=exchanged,
        hosts=hosts,
        readers={section: rank for section, rank in ranks.items() if section != ROLLOUT},
        not_counted=list(unknown),
        unchecked=list(unknown.values()),
        notes=[*not_planned, *_notes(recipe, found, kinds, actor), *_of_device(recipe, device), *ASSUMED],
    )
    return plan, kinds, ranks


def _links(
    recipe: Recipe, model: dict[str, Any], counts: Counted, device: Device | None, client: RankClient
) -> tuple[Links | None, list[str]]:
    """Bytes of the weight exchange by the route that the recipe asks for; and why they are not known."""
    if recipe.train.source != "rollout":
        return None, []
    per_node = device.per_node if device is not None else None
    if wants_adapters(recipe):
        return _adapters(recipe, model, device, per_node)
    if not is_sharded(recipe):
        return exported(recipe, model, per_node), []
    try:
        if counts.held is None:
            raise ValueError(counts.not_planned)
        return links(planned_from(counts.held, recipe, model, per_node, client)), []
    except NotInstalled as error:
        return None, [f"Bytes of the weight exchange are not known here: {error}"]
    except ValueError as error:
        if recipe.exchange.route == "auto":  # as a run does
            return exported(recipe, model, per_node), [f"Weights go by export: no plan can be made of them: {error}"]
        return None, [f"Bytes of the weight exchange are not known: no plan can be made of them: {error}"]


def _as_sent(recipe: Recipe, exchanged: Links | None) -> Recipe:
    """The recipe with the route that weights will go by: what is laid out on devices, and how long it takes, follows."""
    if exchanged is None or exchanged.route != "export":
        return recipe
    return replace(recipe, exchange=replace(recipe.exchange, route="export"))


def _adapters(
    recipe: Recipe, model: dict[str, Any], device: Device | None, per_node: int | None
) -> tuple[Links, list[str]]:
    """Of a recipe whose engines are to be sent adapters alone; and what else it takes, or why they are sent merged weights."""
    kind = device.kind if device is not None and recipe.cluster.device == "auto" else recipe.cluster.device
    spec, whole = policy_spec(recipe, "engine0", load_weights=False), exported(recipe, model, per_node)
    reason = merged_because(recipe.rollout.engine, spec, kind, model)
    if reason is not None:
        return whole, [
            f"exchange.adapters={recipe.exchange.adapters}: engines are sent merged weights, because {reason}."
        ]
    notes = [
        f"The first update also brings engines the weights beside the adapters, exported: {whole.received / 2**30:.1f} GiB "
        "to each of their devices. Each then keeps room for adapters, which is not counted: "
        f"{adapters_held(recipe, model) / 2**20:.1f} MiB at most."
    ]
    if is_time_shared(recipe):
        notes.append("In engines that sleep, these weights lie in the host's memory: no update brings them again.")
    return adapters_alone(recipe, model, per_node), notes


def _with_proposals(
    plan: Plan, subject: Subject, trainers: RankClient, engines_known: Chosen | None, *, seconds: float
) -> Plan:
    try:
        found, stopped = proposals(subject, trainers, engines=engines_known, seconds=seconds)
    except ValueError as error:  # nothing can be said to fit
        return replace(plan, notes=[*plan.notes, str(error)])
    looked = f"Layouts that fit were looked for during {seconds:.0f} s, and {len(found) or 'none'} found in that time"
    notes = [f"{looked}; plan --search looks for longer (--seconds)."] if stopped else []
    return replace(plan, proposals=found, notes=[*notes, *plan.notes])


def _of_device(recipe: Recipe, device: Device | None) -> list[str]:
    """What the environment of this command lacks for the planned device; the machines of the run may have it."""
    name = device.kind if device is not None and recipe.cluster.device == "auto" else recipe.cluster.device
    return [f"In this environment {notice}." for notice in installation_notices()] if name == "cuda" else []


def _notes(recipe: Recipe, stages: list[Stage], kinds: list[Engine], model: dict[str, Any]) -> list[str]:
    unknown = sorted({*left_out(recipe.megatron), *left_out(recipe.critic.megatron)})
    notes = [
        f"Activations are not known: {reason}."
        for reason in sorted({stage.not_counted for stage in stages if stage.not_counted})
    ]
    if unknown:
        notes.append(
            f"Left out of megatron.extra, since only what adapts Megatron to the device knows them: {', '.join(unknown)}."
        )
    if "swap_optimizer" in unknown:
        notes.append(
            "With swap_optimizer, master weights and moments are on the host; their bytes were not measured on a device."
        )
    if recipe.exchange.transport == "device":
        notes.append(OF_CONNECTIONS)
    if number_of_experts(text_fields(model)):
        notes.append(OF_EXPERTS)
    if "vision_config" in model:
        notes.append(OF_IMAGES)
    if kinds:
        notes.append(OF_ENGINES)
    for kind in kinds:
        if kind.name != "vllm":
            notes.append(f"{kind.section}.engine {kind.name} is taken to hold what vLLM does.")
        if kind.limits.assumed:
            notes.append(kind.limits.assumed)
    return notes
