"""Memory of each pipeline stage of a recipe's actor and critic, counted on one rank of each stage."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import runs_reference_pass
from megarl.commands.plan.count.host import host_copies
from megarl.commands.plan.count.rank_client import RankClient, RankRequest
from megarl.commands.plan.count.types import Activations, PipelineStage, RankMemory
from megarl.commands.plan.count.workload import Workload, first_ranks, peak_workload, trainers_offload
from megarl.commands.plan.progress import Report, silent
from megarl.hf.families.check import check_model
from megarl.megatron.extra_settings import check_extra, fields_of_megatron
from megarl.megatron.layout import check_layout
from megarl.megatron.lora.targets import check_lora
from megarl.platform.adaptor import swapped_parts
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig
from megarl.weight_sync.sharded.slices import SliceTable

_NOT_COUNTED = (
    "activations under megatron.extra.moe_token_dispatcher_type=flex belong to kernels that run on devices only "
    "(DeepEP, HybridEP)"
)

_FLEX = ("moe_flex_", "moe_deepep_", "moe_hybridep_", "moe_enable_deepep")
"""Prefixes of the settings of that dispatcher."""

# Settings that need Transformer Engine, which Megatron imports while it builds its configuration.
_FUSED = ("moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion")


@dataclass(frozen=True)
class Counted:
    """Counted stages. `held`: slices of the actor's ranks, in rank order, if requested; `not_planned`: why they are missing."""

    stages: list[PipelineStage]
    held: list[SliceTable] | None = None
    not_planned: str | None = None


def check_trainable(recipe: Recipe, actor_model: dict[str, Any], critic_model: dict[str, Any]) -> None:
    """Raise ValueError for a model that cannot be trained and a layout that does not divide. Starts no process."""
    views = [("megatron", recipe, actor_model)]
    if uses_critic(recipe.algorithm):
        views.append(("critic.megatron", critic_view(recipe), critic_model))
    for section, view, model in views:
        check_extra(view, model, section)
        _check(view, model)


def counted(
    recipe: Recipe,
    actor_model: dict[str, Any],
    critic_model: dict[str, Any],
    client: RankClient,
    *,
    held_slices: bool = False,
    report: Report = silent,
) -> Counted:
    """Count every stage of the actor, then of the critic if there is one.

    `..._model`: config.json. `held_slices`: also describe the actor ranks' slices of the checkpoint's tensors. `report` receives the
    progress. Raises ValueError for a layout that does not divide; `check_trainable` checks more.
    """
    with tempfile.TemporaryDirectory() as directory:
        built = built_from(recipe, actor_model, Path(directory, "actor"))
        result = _counted("actor", built, recipe.megatron, client, held_slices=held_slices, report=report)
        if uses_critic(recipe.algorithm):
            view = replace(recipe, critic=replace(recipe.critic, model_path=None))
            built = built_from(view, critic_model, Path(directory, "critic"))
            critic = _counted("critic", built, recipe.critic.megatron, client, report=report)
            result = replace(result, stages=result.stages + critic.stages)
    return result


def held_slices(recipe: Recipe, client: RankClient) -> list[SliceTable]:
    """Describe the slices of each actor rank. `recipe`: from `built_from`. Raises ValueError if they cannot be described."""
    firsts = dict(enumerate(first_ranks(recipe.megatron, recipe.cluster.trainers)))
    answers = _answers({stage: RankRequest(recipe, rank, held_slices=True) for stage, rank in firsts.items()}, client)
    return _descriptions(answers)


def _descriptions(answers: dict[int, dict[str, Any]]) -> list[SliceTable]:
    descriptions = []
    for answer in answers.values():
        if "not_planned" in answer:
            raise ValueError(answer["not_planned"])
        unique = [SliceTable.from_bytes(base64.b64decode(text)) for text in answer["held_slices"]["unique"]]
        descriptions += [unique[number] for number in answer["held_slices"]["of_rank"]]
    return descriptions


def left_out(megatron: MegatronConfig) -> list[str]:
    """Return the names in `extra` that this machine's Megatron does not have: the fields of an adapter for the device."""
    fields = fields_of_megatron()
    return [] if fields is None else sorted(name for name in megatron.extra if name not in fields)


def built_from(recipe: Recipe, model: dict[str, Any], directory: Path) -> Recipe:
    """Return a recipe with ranks that can be built from `model` (config.json) in `directory`, without device libraries.

    Ranks hold the same memory without these libraries.
    """
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model), encoding="utf-8")

    def portable(megatron: MegatronConfig) -> MegatronConfig:
        without = {*left_out(megatron), *_FUSED}
        extra = {name: value for name, value in megatron.extra.items() if name not in without}
        if _flex(megatron):  # the rank's memory is equal with a dispatcher that can be built anywhere
            extra = {name: value for name, value in extra.items() if not name.startswith(_FLEX)}
            extra["moe_token_dispatcher_type"] = "alltoall"
        return replace(megatron, extra=extra)

    return replace(
        recipe,
        model=replace(recipe.model, path=str(directory)),
        megatron=portable(recipe.megatron),
        critic=replace(recipe.critic, megatron=portable(recipe.critic.megatron)),
    )


def _flex(megatron: MegatronConfig) -> bool:
    """Return True if tokens are dispatched by kernels that run on devices only (DeepEP, HybridEP)."""
    return megatron.extra.get("moe_token_dispatcher_type") == "flex"


def stages_of(
    role: str, recipe: Recipe, section: MegatronConfig, client: RankClient, numbers: Sequence[int] | None = None
) -> list[PipelineStage]:
    """Count the stages of one role. `recipe`: from `built_from`. `section`: the Megatron section of the
    recipe, with the fields that `built_from` left out.
    `numbers`: stages to count; None: all."""
    return _counted(role, recipe, section, client, numbers).stages


def _counted(
    role: str,
    recipe: Recipe,
    section: MegatronConfig,
    client: RankClient,
    numbers: Sequence[int] | None = None,
    *,
    held_slices: bool = False,
    report: Report = silent,
) -> Counted:
    view = critic_view(recipe) if role == "critic" else recipe
    model = json.loads((Path(view.model.path) / "config.json").read_text(encoding="utf-8"))
    _check(view, model)
    firsts = dict(enumerate(first_ranks(view.megatron, view.cluster.trainers)))
    works = {stage: None if _flex(section) else peak_workload(view, stage) for stage in numbers or firsts}
    inner = inner_stages(view.megatron) if numbers is None else []
    questions = {
        stage: RankRequest(recipe, firsts[stage], role == "critic", None if stage in inner[1:-1] else work, held_slices)
        for stage, work in works.items()
    }
    answers = _answers(
        questions, client, lambda done: report(f"{role}: counted {done} of {len(works)} pipeline stages")
    )
    held, not_planned = None, None
    if held_slices:
        try:
            held = _descriptions(answers)
        except ValueError as error:
            not_planned = str(error)
    larger = {
        stage: replace(questions[stage], rank=answer["largest"], held_slices=False)
        for stage, answer in answers.items()
        if answer["largest"] != questions[stage].rank
    }
    answers |= _answers(larger, client)
    questions |= larger
    _interpolate(inner, questions, answers, works, client)
    swaps = swapped_parts(section.extra)
    stages = [_stage(role, stage, questions[stage], answer, view, swaps) for stage, answer in answers.items()]
    return Counted(stages, held, not_planned)


def _interpolate(
    inner: list[int],
    questions: dict[int, RankRequest],
    answers: dict[int, dict[str, Any]],
    works: Mapping[int, Workload | None],
    client: RankClient,
) -> None:
    """Add the activations of `inner` stages that were counted without work: interpolated between two stages that hold
    equally much, counted again if they differ."""
    if len(inner) < 3 or works[inner[0]] is None:
        return
    between = ends({stage: answers[stage]["held"] for stage in inner})
    first, last = between
    different = [stage for stage in inner if answers[stage]["held"] != answers[last]["held"]]
    again = [stage for stage in (*different, first) if "activations" not in answers[stage]]
    questions |= {stage: replace(questions[stage], work=works[stage], held_slices=False) for stage in again}
    answers |= _answers({stage: questions[stage] for stage in again}, client)
    counted_ends = [Activations(**answers[stage]["activations"]) for stage in between]
    for stage in inner:
        if "activations" not in answers[stage]:
            answers[stage]["activations"] = asdict(interpolated(stage, between, *counted_ends))


def _check(view: Recipe, model: dict[str, Any]) -> None:
    check_model(model)
    check_layout(model, view.megatron, view.cluster.trainers)
    check_lora(model, view.lora, view.megatron)


def _answers(
    questions: dict[int, RankRequest], client: RankClient, report: Callable[[int], None] = lambda _: None
) -> dict[int, dict[str, Any]]:
    """Return the answers by stage. `report` receives the number of answers after each of them."""
    in_flight = {stage: client.submit(question) for stage, question in questions.items()}
    for done, future in enumerate(as_completed(in_flight.values()), 1):
        future.result()
        report(done)
    answers = {stage: future.result() for stage, future in in_flight.items()}
    for answer in answers.values():
        if "error" in answer:
            raise ValueError(answer["error"])
    return answers


def _stage(
    role: str, number: int, question: RankRequest, answer: dict[str, Any], view: Recipe, swaps: int | None
) -> PipelineStage:
    held = RankMemory(**answer["held"])
    beyond = Activations(**answer["activations"]) if "activations" in answer else None
    copies = host_copies(
        role, held, offloads=trainers_offload(view), swaps=swaps, reference=runs_reference_pass(view.algorithm)
    )
    host, chunks = sum(copies.values()), view.megatron.virtual_pipeline or 1
    return PipelineStage(role, number, question.rank, held, beyond, None if beyond else _NOT_COUNTED, host, chunks)


# --- equal pipeline stages -----------------------------------------------------------------------
#
# In 1F1B each earlier stage has one more micro batch in flight (Narayanan et al. 2021, section 2.2.1), and each micro batch
# keeps equally much. So stages with equal layers differ by a multiple of one micro batch's activations, and two runs suffice.


def inner_stages(megatron: MegatronConfig) -> list[int]:
    """Return the stages without embedding and head. Empty with interleaving, where stages hold several chunks."""
    return [] if megatron.virtual_pipeline else list(range(1, megatron.pipeline_parallel - 1))


def ends(held: Mapping[int, object]) -> tuple[int, int]:
    """Return the first and the last of the inner stages that hold as much as the last one."""
    last = max(held)
    return min(stage for stage, memory in held.items() if memory == held[last]), last


def interpolated(stage: int, ends: tuple[int, int], first: Activations, last: Activations) -> Activations:
    """Interpolate the activations of `stage` between the two `ends`, which have `first` and `last`."""

    def at(name: str) -> int:
        begin, end = getattr(first, name), getattr(last, name)
        return round(begin + (end - begin) * (stage - ends[0]) / (ends[1] - ends[0]))

    return Activations(**{name: at(name) for name in Activations.__dataclass_fields__})
