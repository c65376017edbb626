"""What is refused of the recipe's section `teacher`, and of an algorithm that needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.errors import RecipeError

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe


def check_teacher(recipe: Recipe) -> None:
    """Raise RecipeError for a teacher that cannot be had as asked, and for one that nothing asks for."""
    from megarl.algorithms.catalogue import LOSSES
    from megarl.algorithms.objective import needs_reference, needs_teacher
    from megarl.recipe.schema import TeacherConfig

    algorithm = recipe.algorithm
    if LOSSES[algorithm.loss].needs_top and algorithm.reference != "teacher":
        what = f"algorithm.loss={algorithm.loss} compares with a teacher's likeliest tokens"
        raise RecipeError("algorithm.reference", what, "set it to teacher", value=algorithm.reference)
    if algorithm.reference == "teacher" and not needs_reference(algorithm):
        what = f"algorithm.kl_coef is 0 and algorithm.loss={algorithm.loss} compares with no reference policy"
        remedy = "set algorithm.kl_coef (recipes/base/on_policy_distillation.yaml), or algorithm.loss=gkd"
        raise RecipeError("algorithm.reference", what, remedy, value="teacher")
    if not needs_teacher(algorithm):
        if recipe.teacher != TeacherConfig():
            what = "nothing compares the policy with a teacher: this section would change nothing"
            raise RecipeError("teacher", what, "set algorithm.reference=teacher, or leave the section out")
        return
    if not recipe.teacher.path:
        what = "algorithm.reference is teacher, and no teacher is named"
        raise RecipeError("teacher.path", what, "give the teacher's Hugging Face directory", value=recipe.teacher.path)
    if recipe.train.source != "rollout":
        what = f"a teacher reads what the policy samples, and train.source is '{recipe.train.source}'"
        raise RecipeError("algorithm.reference", what, "set train.source=rollout", value="teacher")
    if recipe.rollout.temperature != 1:
        what = "the teacher's log-probs are those at temperature 1, and the policy's are taken at this one"
        raise RecipeError("rollout.temperature", what, "set it to 1", value=recipe.rollout.temperature)
