"""What each pipeline stage of a recipe's actor and critic holds and needs, asked of one rank of each."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import runs_reference_pass
from megarl.commands.plan.count.ask import Asker, Question
from megarl.commands.plan.count.counts import Activations, Held, Phase, phases
from megarl.commands.plan.count.interpolate import ends, may_be_alike, on_the_line
from megarl.commands.plan.count.time_shared import leaves
from megarl.commands.plan.count.workload import Workload, first_ranks, largest
from megarl.megatron.config_fields import check_extra, fields_of_megatron
from megarl.megatron.layout import check_layout
from megarl.megatron.lora.targets import check_lora
from megarl.megatron.model_checks import check_model
from megarl.platform.memory import swapped_parts
from megarl.recipe.critic import critic_view
from megarl.recipe.schema import Recipe
from megarl.recipe.training import MegatronConfig
from megarl.weight_sync.sharded.slices import SliceTable

_NOT_COUNTED = (
    "activations under megatron.extra.moe_token_dispatcher_type=flex are those of kernels that run on devices alone "
    "(DeepEP, HybridEP)"
)

# Kernels of Transformer Engine, which Megatron looks for while it makes its configuration.
_FUSED = ("moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion")


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its rank with the most of the optimizer's states stands for all."""

    role: str  # "actor" or "critic"
    number: int
    rank: int
    held: Held
    activations: Activations | None
    not_counted: str | None  # why there are no activations
    phases: dict[str, Phase]
    chunks: int = 1  # parts of the model that the stage holds: more than one under virtual pipeline stages


@dataclass(frozen=True)
class Counted:
    """`held`: of the actor's ranks, in their order, where it was asked for; `not_planned`: why it cannot be told."""

    stages: list[Stage]
    held: list[SliceTable] | None = None
    not_planned: str | None = None


def check_trainable(recipe: Recipe, actor_model: dict[str, Any], critic_model: dict[str, Any]) -> None:
    """Raise ValueError for a model that cannot be trained and a layout that does not divide, before anything is started."""
    views = [("megatron", recipe, actor_model)]
    if uses_critic(recipe.algorithm):
        views.append(("critic.megatron", critic_view(recipe), critic_model))
    for section, view, model in views:
        check_extra(view, model, section)
        _check(view, model)


def stages(recipe: Recipe, actor_model: dict[str, Any], critic_model: dict[str, Any]) -> list[Stage]:
    """Every stage of the actor, then of the critic where the recipe has one; `..._model`: their config.json.

    Raises ValueError as `check_trainable` does.
    """
    with Asker() as asker:
        return counted(recipe, actor_model, critic_model, asker).stages


def counted(
    recipe: Recipe, actor_model: dict[str, Any], critic_model: dict[str, Any], asker: Asker, *, holdings: bool = False
) -> Counted:
    """As `stages`; `holdings`: and what the actor's ranks hold of the checkpoint's tensors."""
    check_trainable(recipe, actor_model, critic_model)
    with tempfile.TemporaryDirectory() as directory:
        built = built_from(recipe, actor_model, Path(directory, "actor"))
        found = _counted("actor", built, recipe.megatron, asker, holdings=holdings)
        if uses_critic(recipe.algorithm):
            view = replace(recipe, critic=replace(recipe.critic, model_path=None))
            built = built_from(view, critic_model, Path(directory, "critic"))
            found = replace(found, stages=found.stages + stages_of("critic", built, recipe.critic.megatron, asker))
    return found


def holdings(recipe: Recipe, asker: Asker) -> list[SliceTable]:
    """Of each of the actor's ranks. `recipe`: of `built_from`. Raises ValueError where they cannot be told."""
    firsts = dict(enumerate(first_ranks(recipe.megatron, recipe.cluster.trainers)))
    answers = _answers({stage: Question(recipe, rank, holdings=True) for stage, rank in firsts.items()}, asker)
    return _descriptions(answers)


def _descriptions(answers: dict[int, dict[str, Any]]) -> list[SliceTable]:
    found = []
    for answer in answers.values():
        if "not_planned" in answer:
            raise ValueError(answer["not_planned"])
        unique = [SliceTable.from_bytes(base64.b64decode(text)) for text in answer["holdings"]["unique"]]
        found += [unique[number] for number in answer["holdings"]["of_rank"]]
    return found


def left_out(megatron: MegatronConfig) -> list[str]:
    """Names in `extra` that this machine's Megatron does not know: those of what adapts it to the device."""
    known = fields_of_megatron()
    return [] if known is None else sorted(name for name in megatron.extra if name not in known)


def built_from(recipe: Recipe, model: dict[str, Any], directory: Path) -> Recipe:
    """`recipe`, as a process can build its ranks that has nothing of the model but `model`, and no device's own libraries.

    Ranks hold the same without these."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model), encoding="utf-8")

    def known(megatron: MegatronConfig) -> MegatronConfig:
        without = {*left_out(megatron), *_FUSED}
        extra = {name: value for name, value in megatron.extra.items() if name not in without}
        return replace(megatron, extra=_without_flex(extra) if _flex(megatron) else extra)

    return replace(
        recipe,
        model=replace(recipe.model, path=str(directory)),
        megatron=known(recipe.megatron),
        critic=replace(recipe.critic, megatron=known(recipe.critic.megatron)),
    )


def _flex(megatron: MegatronConfig) -> bool:
    """Tokens are dispatched by kernels that there are for devices alone, DeepEP's or HybridEP's."""
    return megatron.extra.get("moe_token_dispatcher_type") == "flex"


def _without_flex(extra: dict[str, Any]) -> dict[str, Any]:
    """The same model with a dispatcher that can be built anywhere: a rank holds as much with either."""
    own = ("moe_flex_", "moe_deepep_", "moe_hybridep_", "moe_enable_deepep")
    return {name: value for name, value in extra.items() if not name.startswith(own)} | {
        "moe_token_dispatcher_type": "alltoall"
    }


def stages_of(
    role: str, recipe: Recipe, asked: MegatronConfig, asker: Asker, numbers: Sequence[int] | None = None
) -> list[Stage]:
    """`recipe`: of `built_from`. `asked`: the section as the recipe has it, with what `recipe` leaves out. `numbers`: of
    the stages that are wanted; None: all."""
    return _counted(role, recipe, asked, asker, numbers).stages


def _counted(
    role: str,
    recipe: Recipe,
    asked: MegatronConfig,
    asker: Asker,
    numbers: Sequence[int] | None = None,
    *,
    holdings: bool = False,
) -> Counted:
    view = critic_view(recipe) if role == "critic" else recipe
    model = json.loads((Path(view.model.path) / "config.json").read_text(encoding="utf-8"))
    _check(view, model)
    firsts = dict(enumerate(first_ranks(view.megatron, view.cluster.trainers)))
    works = {stage: None if _flex(asked) else largest(view, stage) for stage in numbers or firsts}
    alike = may_be_alike(view.megatron) if numbers is None else []
    questions = {
        stage: Question(recipe, firsts[stage], role == "critic", None if stage in alike[1:-1] else work, holdings)
        for stage, work in works.items()
    }
    answers = _answers(questions, asker)
    held, not_planned = None, None
    if holdings:
        try:
            held = _descriptions(answers)
        except ValueError as error:
            not_planned = str(error)
    others = {
        stage: replace(questions[stage], rank=answer["largest"], holdings=False)
        for stage, answer in answers.items()
        if answer["largest"] != questions[stage].rank
    }
    answers |= _answers(others, asker)
    questions |= others
    _fill_between(alike, questions, answers, works, asker)
    swaps = swapped_parts(asked.extra)
    found = [_stage(role, stage, questions[stage], answer, view, swaps) for stage, answer in answers.items()]
    return Counted(found, held, not_planned)


def _fill_between(
    alike: list[int],
    questions: dict[int, Question],
    answers: dict[int, dict[str, Any]],
    works: Mapping[int, Workload | None],
    asker: Asker,
) -> None:
    """Activations of those among the stages `alike` that were asked without work: from two others, where they hold the same as
    these, else they are asked again."""
    if len(alike) < 3 or works[alike[0]] is None:
        return
    between = ends({stage: answers[stage]["held"] for stage in alike})
    first, last = between
    other = [stage for stage in alike if answers[stage]["held"] != answers[last]["held"]]
    again = [stage for stage in (*other, first) if "activations" not in answers[stage]]
    questions |= {stage: replace(questions[stage], work=works[stage], holdings=False) for stage in again}
    answers |= _answers({stage: questions[stage] for stage in again}, asker)
    known = [Activations(**answers[stage]["activations"]) for stage in between]
    for stage in alike:
        if "activations" not in answers[stage]:
            answers[stage]["activations"] = asdict(on_the_line(stage, between, *known))


def _check(view: Recipe, model: dict[str, Any]) -> None:
    check_model(model)
    check_layout(model, view.megatron, view.cluster.trainers)
    check_lora(model, view.lora, view.megatron)


def _answers(questions: dict[int, Question], asker: Asker) -> dict[int, dict[str, Any]]:
    under_way = {stage: asker.submit(question) for stage, question in questions.items()}
    answers = {stage: future.result() for stage, future in under_way.items()}
    for answer in answers.values():
        if "error" in answer:
            raise ValueError(answer["error"])
    return answers


def _stage(
    role: str, number: int, question: Question, answer: dict[str, Any], view: Recipe, swaps: int | None
) -> Stage:
    held = Held(**answer["held"])
    beyond = Activations(**answer["activations"]) if "activations" in answer else None
    in_phases = phases(
        held,
        beyond,
        reference=role == "actor" and runs_reference_pass(view.algorithm),
        leaves=leaves(view),
        swaps=swaps,
    )
    chunks = view.megatron.virtual_pipeline or 1
    return Stage(role, number, question.rank, held, beyond, None if beyond else _NOT_COUNTED, in_phases, chunks)
