"""What each pipeline stage of a recipe's actor and critic holds and needs, asked of one rank of each."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import runs_reference_pass
from megarl.config.critic import critic_view
from megarl.config.schema import Recipe
from megarl.config.training import MegatronConfig
from megarl.megatron.config_fields import check_extra, fields_of_megatron
from megarl.megatron.layout import check_layout
from megarl.megatron.lora.targets import check_lora
from megarl.megatron.model_checks import check_model
from megarl.planner.ask import Question, ask
from megarl.planner.counts import Activations, Held, Phase, phases
from megarl.planner.workload import first_ranks, largest
from megarl.platform.memory import swapped_parts


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


def stages(recipe: Recipe, actor_model: dict[str, Any], critic_model: dict[str, Any]) -> list[Stage]:
    """Every stage of the actor, then of the critic where the recipe has one; `..._model`: their config.json.

    Raises ValueError for a model that cannot be trained and a layout that does not divide.
    """
    with tempfile.TemporaryDirectory() as directory:
        check_extra(recipe, actor_model, "megatron")
        found = _stages_of("actor", _built_from(recipe, actor_model, Path(directory, "actor")), recipe.megatron)
        if uses_critic(recipe.algorithm):
            check_extra(critic_view(recipe), critic_model, "critic.megatron")
            view = replace(recipe, critic=replace(recipe.critic, model_path=None))
            found += _stages_of(
                "critic", _built_from(view, critic_model, Path(directory, "critic")), recipe.critic.megatron
            )
    return found


def left_out(megatron: MegatronConfig) -> list[str]:
    """Names in `extra` that this machine's Megatron does not know: those of what adapts it to the device."""
    known = fields_of_megatron()
    return [] if known is None else sorted(name for name in megatron.extra if name not in known)


def _built_from(recipe: Recipe, model: dict[str, Any], directory: Path) -> Recipe:
    """`recipe`, as a process can build its ranks that has nothing of the model but `model`."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model), encoding="utf-8")

    def known(megatron: MegatronConfig) -> MegatronConfig:
        unknown = left_out(megatron)
        return replace(megatron, extra={name: value for name, value in megatron.extra.items() if name not in unknown})

    return replace(
        recipe,
        model=replace(recipe.model, path=str(directory)),
        megatron=known(recipe.megatron),
        critic=replace(recipe.critic, megatron=known(recipe.critic.megatron)),
    )


def _stages_of(role: str, recipe: Recipe, asked: MegatronConfig) -> list[Stage]:
    """`asked`: the section as the recipe has it, with what `recipe` leaves out."""
    view = critic_view(recipe) if role == "critic" else recipe
    model = json.loads((Path(view.model.path) / "config.json").read_text(encoding="utf-8"))
    check_model(model)
    check_layout(model, view.megatron, view.cluster.trainers)
    check_lora(model, view.lora, view.megatron)
    firsts = first_ranks(view.megatron, view.cluster.trainers)
    questions = [Question(recipe, rank, role == "critic", largest(view, stage)) for stage, rank in enumerate(firsts)]
    answers = _asked(questions)
    others = {
        stage: replace(question, rank=answer["largest"])
        for stage, (question, answer) in enumerate(zip(questions, answers, strict=True))
        if answer["largest"] != question.rank
    }
    for (stage, question), answer in zip(others.items(), _asked(list(others.values())), strict=True):
        questions[stage], answers[stage] = question, answer
    return [
        _stage(role, stage, question, answer, view, swapped_parts(asked.extra))
        for stage, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]


def _asked(questions: list[Question]) -> list[dict[str, Any]]:
    answers = ask(questions) if questions else []
    for answer in answers:
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
        leaves=view.megatron.offload and view.cluster.placement == "colocated",
        swaps=swaps,
    )
    return Stage(role, number, question.rank, held, beyond, answer.get("not_counted"), in_phases)
