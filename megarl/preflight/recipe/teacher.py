"""Checks of the section `teacher`, and of algorithms that need a teacher."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.objective import needs_reference, needs_teacher
from megarl.errors import RecipeError
from megarl.preflight.recipe.shared import unused_section_errors
from megarl.recipe.judge import TeacherConfig
from megarl.recipe.schema import Recipe


def teacher_errors(recipe: Recipe) -> Iterator[RecipeError]:
    algorithm = recipe.algorithm
    if LOSSES[algorithm.loss].needs_top and algorithm.reference != "teacher":
        problem = f"algorithm.loss={algorithm.loss} needs the likeliest tokens of a teacher"
        yield RecipeError("algorithm.reference", problem, "set it to teacher", value=algorithm.reference)
    if algorithm.reference == "teacher" and not needs_reference(algorithm):
        problem = f"algorithm.kl_coef is 0 and algorithm.loss={algorithm.loss} does not use a reference policy"
        remedy = "set algorithm.kl_coef (recipes/base/on_policy_distillation.yaml), or algorithm.loss=gkd"
        yield RecipeError("algorithm.reference", problem, remedy, value="teacher")
    if not needs_teacher(algorithm):
        cause, remedy = "algorithm.reference is not teacher", "set algorithm.reference=teacher"
        yield from unused_section_errors("teacher", recipe.teacher, cause, remedy)
        return
    yield from _model_errors(recipe.teacher)
    if recipe.train.source != "rollout":
        problem = f"a teacher scores samples of the policy, and train.source is '{recipe.train.source}'"
        yield RecipeError("algorithm.reference", problem, "set train.source=rollout", value="teacher")
    if recipe.rollout.temperature != 1:
        problem = "the teacher's log-probs are computed at temperature 1, and the policy's at this temperature"
        yield RecipeError("rollout.temperature", problem, "set it to 1", value=recipe.rollout.temperature)


def _model_errors(settings: TeacherConfig) -> Iterator[RecipeError]:
    for key, teacher in settings.by_key.items():
        if not teacher.path:
            problem = "algorithm.reference is teacher, but the teacher's model is unset"
            yield RecipeError(key, problem, "give the teacher's Hugging Face directory", value=teacher.path)
    if settings.by_source and settings.path:
        problem = "teacher.by_source names a teacher for each data source"
        yield RecipeError("teacher.path", problem, "leave one of the two out", value=settings.path)
    if settings.by_source and settings.engines != 1:
        problem = "teacher.by_source has the number of engines of each teacher"
        yield RecipeError("teacher.engines", problem, "leave it out", value=settings.engines)
