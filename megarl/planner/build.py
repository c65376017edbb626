"""A recipe's plan, put together."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.config.exchange import planned_by_recipe
from megarl.config.schema import Recipe
from megarl.planner.ask import ENGINES, Asker
from megarl.planner.cache import not_counted, rank_of, too_small
from megarl.planner.engines import Engine, engines
from megarl.planner.exchange import exported, links, planned_from
from megarl.planner.judge import Subject
from megarl.planner.layouts import choice_of
from megarl.planner.nearest import proposals
from megarl.planner.places import ROLLOUT, largest_tensor, places, swaps_of
from megarl.planner.plan import EngineRank, Links, Plan
from megarl.planner.refusals import too_large
from megarl.planner.stages import Counted, Stage, check_trainable, counted, left_out
from megarl.platform.devices import Device

ASSUMED = (
    "Every micro batch is full (actor.max_tokens_per_micro_batch, or one sequence of the longest length), and the "
    "pipeline full of them.",
    "Experts are sent equally many tokens.",
    "Layers, attention and Adam are megarl's own on torch's kernels; fused ones of a device's own libraries keep less.",
    "Not counted: what communication libraries and drivers take, graphs that engines capture, and fragmentation.",
)
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
    advise: bool = True,
) -> Plan:
    """`models`: the config.json of the policy (rollout), and of critic, teacher and judge, as far as they are known.

    `memory`: GiB, in place of the device's; with neither nothing is refused for it. `advise`: propose layouts that
    fit where something does not.
    Raises ValueError for a model that cannot be trained, and for a layout that does not divide.
    """
    actor = models[ROLLOUT]
    check_trainable(recipe, actor, models.get("critic", actor))  # in milliseconds, before engines are asked about
    planned = recipe.train.source == "rollout" and planned_by_recipe(recipe)
    with Asker(child=ENGINES) as asker, ThreadPoolExecutor() as beside:
        asked = beside.submit(engines, recipe, models, asker)
        counts = counted(recipe, actor, models.get("critic", actor), holdings=planned)
        exchanged, not_planned = _links(recipe, actor, counts, device, asker)
        found, kinds = counts.stages, asked.result()
    if memory is None and device is not None:
        memory = device.memory
    ranks = {kind.section: rank for kind in kinds if (rank := rank_of(kind, memory))}
    unknown = {kind.section: why for kind in kinds if (why := not_counted(kind, memory))}
    lying = places(recipe, found, ranks, swaps=swaps_of(recipe), largest=largest_tensor(recipe, actor), unknown=unknown)
    plan = Plan(
        recipe=recipe.name,
        device=device,
        memory=memory,
        stages=found,
        engine=ranks.get(ROLLOUT),
        places=lying,
        estimate=None,
        exchange=exchanged,
        readers={section: rank for section, rank in ranks.items() if section != ROLLOUT},
        not_counted=list(unknown),
        unchecked=list(unknown.values()),
        notes=[*not_planned, *_notes(recipe, found, kinds, reads_images="vision_config" in actor), *ASSUMED],
    )
    return plan if memory is None else _with_refusals(plan, memory, recipe, models, kinds, ranks, advise)


def _links(
    recipe: Recipe, model: dict[str, Any], counts: Counted, device: Device | None, asker: Asker
) -> tuple[Links | None, list[str]]:
    """Bytes of the weight exchange by the route that the recipe asks for; and why they are not known."""
    if recipe.train.source != "rollout":
        return None, []
    per_node = device.per_node if device is not None else None
    if not planned_by_recipe(recipe):
        return exported(recipe, model, per_node), []
    try:
        if counts.held is None:
            raise ValueError(counts.not_planned)
        return links(planned_from(counts.held, recipe, model, per_node, asker)), []
    except ValueError as error:
        return None, [f"Bytes of the weight exchange are not known: no plan can be made of it: {error}"]


def _with_refusals(
    plan: Plan,
    memory: float,
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    kinds: list[Engine],
    ranks: dict[str, EngineRank],
    advise: bool,
) -> Plan:
    refusals = [
        refusal for kind in kinds if kind.section in ranks and (refusal := too_small(kind, ranks[kind.section], memory))
    ]
    plan = replace(plan, refusals=[*refusals, *too_large(plan.places, memory)])
    if not advise or not plan.refusals or plan.device is None:
        return plan
    critic = models.get("critic", models[ROLLOUT]) if uses_critic(recipe.algorithm) else None
    subject = Subject(recipe, models[ROLLOUT], critic, replace(plan.device, memory=memory))
    small = any(refusal.key.startswith(ROLLOUT) for refusal in refusals)
    engines_known = None if small else (choice_of(recipe).engines, ranks.get(ROLLOUT))
    try:
        return replace(plan, proposals=proposals(subject, engines=engines_known))
    except ValueError as error:  # nothing can be said to fit
        return replace(plan, notes=[*plan.notes, str(error)])


def _notes(recipe: Recipe, stages: list[Stage], kinds: list[Engine], *, reads_images: bool) -> list[str]:
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
        notes.append("With swap_optimizer, master weights and moments are on the host; its own parts were not run.")
    if reads_images:
        notes.append(OF_IMAGES)
    if kinds:
        notes.append(OF_ENGINES)
    for kind in kinds:
        if kind.name != "vllm":
            notes.append(f"{kind.section}.engine {kind.name} is taken to hold what vLLM does.")
        if kind.limits.assumed:
            notes.append(kind.limits.assumed)
    return notes
