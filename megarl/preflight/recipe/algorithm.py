"""Checks of the section `algorithm`: unknown names, settings without effect, contradictions."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from megarl.algorithms.catalogue import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES, import_modules
from megarl.algorithms.objective import needs_reference, reads_old_log_probs, runs_old_log_prob_pass
from megarl.algorithms.rejection import NAMES, criteria, of_icepop
from megarl.errors import RecipeError, plain
from megarl.recipe.algorithm import AlgorithmConfig, CorrectionConfig, DynamicSamplingConfig
from megarl.recipe.schema import Recipe

Errors = Iterator[RecipeError]
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def name_errors(algorithm: AlgorithmConfig) -> Errors:
    """Import `algorithm.modules`, which register names, and yield an error for each name that is not registered."""
    error = _import_error(algorithm)
    if error is not None:
        yield error
    for name, value, registry in (
        ("advantage", algorithm.advantage, ADVANTAGES),
        ("loss", algorithm.loss, LOSSES),
        ("aggregation", algorithm.aggregation, AGGREGATIONS),
        ("kl_estimator", algorithm.kl_estimator, KL_ESTIMATORS),
    ):
        if value not in registry:
            remedy = f"choose one of: {', '.join(registry.names())}"
            if error is not None:
                remedy += "; or correct algorithm.modules, which may register it"
            yield RecipeError(f"algorithm.{name}", registry.unknown(value), remedy, value=value)


def source_errors(recipe: Recipe) -> Errors:
    """Yield an error if the loss needs samples of another source."""
    source, loss = recipe.train.source, recipe.algorithm.loss
    if LOSSES[loss].source != source:
        fitting = ", ".join(name for name in LOSSES.names() if LOSSES[name].source == source)
        yield RecipeError(
            "algorithm.loss",
            f"the loss needs train.source={LOSSES[loss].source}, and train.source is '{source}'",
            f"set train.source={LOSSES[loss].source}, or algorithm.loss to one of: {fitting}",
            value=loss,
        )


def algorithm_errors(recipe: Recipe) -> Errors:
    """Yield errors of combinations. Every name in the section must be registered."""
    yield from _unread_errors(recipe.algorithm)
    yield from _data_set_errors(recipe)
    yield from _reward_errors(recipe)
    yield from _oversample_errors(recipe.algorithm.dynamic_sampling)
    yield from _old_log_prob_errors(recipe)
    yield from _kl_in_reward_errors(recipe.algorithm)
    yield from _correction_errors(recipe.algorithm)
    yield from _reward_part_errors(recipe.algorithm)
    if recipe.algorithm.pass_k > recipe.rollout.samples_per_prompt and recipe.algorithm.advantage == "pass_at_k":
        problem = f"a group has {recipe.rollout.samples_per_prompt} samples (rollout.samples_per_prompt)"
        remedy = f"set it to at most {recipe.rollout.samples_per_prompt}, or raise rollout.samples_per_prompt"
        yield RecipeError("algorithm.pass_k", problem, remedy, value=recipe.algorithm.pass_k)


# --- algorithm.modules -----------------------------------------------------------------------------------------------


def _import_error(algorithm: AlgorithmConfig) -> RecipeError | None:
    try:
        import_modules(algorithm)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        failure = RecipeError(
            "algorithm.modules",
            f"the import failed{_user_line(error)}: {type(error).__name__}: {error}",
            _import_remedy(error, algorithm.modules),
            value=list(algorithm.modules),
        )
        failure.__cause__ = error
        return failure
    return None


def _user_line(error: Exception) -> str:
    """Return " at FILE:LINE" for the last traceback line outside libraries and megarl; "" if every line is inside them."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_library(file: str) -> bool:
    return (
        file.startswith(("<frozen", _STANDARD_LIBRARY)) or "site-packages" in file or f"{os.sep}megarl{os.sep}" in file
    )


def _import_remedy(error: Exception, modules: list[str]) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in {part for name in modules for part in _packages(name)}:
        files = [name for name in modules if name.endswith(".py")]
        if files:
            return f"name the module, not the file: {files[0].removesuffix('.py')}"
        return "put the module into the directory where megarl starts, or add its folder to PYTHONPATH"
    return "correct the module"


def _packages(module: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


# --- combinations ----------------------------------------------------------------------------------------------------


def _unread_errors(algorithm: AlgorithmConfig) -> Errors:
    """Yield an error for each setting that is not at its default and that the chosen advantage, loss and KL ignore."""
    advantage, loss = ADVANTAGES[algorithm.advantage], LOSSES[algorithm.loss]
    readers: dict[str, list[str]] = {}
    for registry in (ADVANTAGES, LOSSES):
        for name in registry.names():
            for setting in registry[name].settings:
                readers.setdefault(setting, []).append(name)
    for setting in sorted(readers.keys() - {*advantage.settings, *loss.settings}):
        chosen = f"algorithm.advantage is '{algorithm.advantage}' and algorithm.loss '{algorithm.loss}'"
        problem = f"{chosen}; only {_alternatives(readers[setting])} reads it"
        yield from _unless_default(algorithm, setting, problem, f"choose {_alternatives(readers[setting])}")
    if algorithm.aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"):
        problem = f"algorithm.aggregation is '{algorithm.aggregation}', which divides by counts"
        remedy = "choose token_sum or seq_mean_token_sum_norm"
        yield from _unless_default(algorithm, "aggregation_divisor", problem, remedy)
    if algorithm.options and not algorithm.modules:
        problem = "only user functions read it, and algorithm.modules is empty"
        remedy = "name their module, or leave it out"
        yield RecipeError("algorithm.options", problem, remedy, value=dict(algorithm.options))
    if not reads_old_log_probs(algorithm):
        problem = f"algorithm.loss is '{algorithm.loss}', which reads no old log-probs"
        yield from _unless_default(algorithm, "old_log_probs", problem, "set another algorithm.loss")
    if not needs_reference(algorithm):
        problem = f"algorithm.kl_coef is 0 and algorithm.loss={algorithm.loss} reads no reference policy"
        yield from _unless_default(algorithm, "refresh_reference_every", problem, "set algorithm.kl_coef")
    elif algorithm.reference == "teacher":
        problem = "algorithm.reference is teacher, and a teacher's weights are fixed"
        yield from _unless_default(algorithm, "refresh_reference_every", problem, "set algorithm.reference=start")
    if not algorithm.kl_coef:
        for setting in ("kl_estimator", "kl_in_reward", "kl_straight_through", "kl_importance", "kl_target"):
            problem = "algorithm.kl_coef is 0, which disables the KL to the reference policy"
            yield from _unless_default(algorithm, setting, problem, "set algorithm.kl_coef")
    if algorithm.kl_target is None:
        problem = "algorithm.kl_target is unset, so the weight of the KL is constant"
        yield from _unless_default(algorithm, "kl_horizon", problem, "set algorithm.kl_target")
    if algorithm.kl_in_reward:
        problem = "with algorithm.kl_in_reward the KL has no gradient"
        for setting in ("kl_straight_through", "kl_importance"):
            yield from _unless_default(algorithm, setting, problem, "set algorithm.kl_in_reward=false")
    if algorithm.kl_straight_through and algorithm.kl_importance:
        problem = (
            "algorithm.kl_straight_through replaces the gradient of the KL by its own; weights would change it again"
        )
        yield RecipeError("algorithm.kl_importance", problem, "choose one of the two", value=True)


def _unless_default(section: Any, setting: str, problem: str, remedy: str, prefix: str = "algorithm") -> Errors:
    value, default = getattr(section, setting), getattr(type(section)(), setting)
    if value != default:
        yield RecipeError(f"{prefix}.{setting}", problem, f"{remedy}, or leave it at {plain(default)}", value=value)


def _alternatives(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _data_set_errors(recipe: Recipe) -> Errors:
    """Yield errors of settings that need rewards or rollout log-probs, which SFT and DPO rows do not have."""
    algorithm, source = recipe.algorithm, recipe.train.source
    if LOSSES[algorithm.loss].whole_groups and algorithm.aggregation != "seq_mean_token_mean":
        yield RecipeError(
            "algorithm.aggregation",
            f"algorithm.loss={algorithm.loss} is a mean over sequences of whole groups; only seq_mean_token_mean computes it",
            "set algorithm.aggregation=seq_mean_token_mean",
            value=algorithm.aggregation,
        )
    if source == "rollout":
        return
    default = AlgorithmConfig()
    if algorithm.advantage not in ("none", default.advantage):
        problem = f"train.source={source} has no rewards to compute advantages from"
        yield RecipeError("algorithm.advantage", problem, "set algorithm.advantage=none", value=algorithm.advantage)
    for setting in ("entropy_coef", "kl_in_reward", "kl_importance", "correction", "dynamic_sampling", "overlong"):
        if getattr(algorithm, setting) != getattr(default, setting):
            problem = f"train.source={source} has no samples and no rewards, so this has no effect"
            yield RecipeError(f"algorithm.{setting}", problem, "leave it out")


def _reward_errors(recipe: Recipe) -> Errors:
    """Yield an error for each setting that filters or shapes rewards if neither advantage nor loss reads rewards."""
    algorithm = recipe.algorithm
    if recipe.train.source != "rollout":
        return
    if algorithm.advantage != "none" and not ADVANTAGES[algorithm.advantage].needs_kl_in_reward:
        return
    chosen = f"algorithm.advantage={algorithm.advantage} and algorithm.loss={algorithm.loss} read no rewards"
    for key, value in (
        ("dynamic_sampling.enabled", algorithm.dynamic_sampling.enabled),
        ("overlong.penalty_buffer", algorithm.overlong.penalty_buffer),
    ):
        if value:
            yield RecipeError(f"algorithm.{key}", f"{chosen}, so this has no effect", "leave it out", value=value)


def _oversample_errors(dynamic: DynamicSamplingConfig) -> Errors:
    key = "algorithm.dynamic_sampling.oversample"
    if dynamic.oversample > 1.0 and not dynamic.enabled:
        problem = "without algorithm.dynamic_sampling.enabled no group is filtered, so none needs a replacement"
        yield RecipeError(key, problem, "set it to 1.0", value=dynamic.oversample)
    elif dynamic.enabled and dynamic.oversample > dynamic.max_attempts:
        problem = f"a step may try {dynamic.max_attempts} times its prompts (algorithm.dynamic_sampling.max_attempts)"
        yield RecipeError(key, problem, "lower it, or raise max_attempts", value=dynamic.oversample)


def _old_log_prob_errors(recipe: Recipe) -> Errors:
    algorithm, updates = recipe.algorithm, recipe.actor.optimizer_steps
    if algorithm.old_log_probs == "current" and updates > 1:
        yield RecipeError(
            "algorithm.old_log_probs",
            f"with {updates} optimizer steps (actor.mini_batches x epochs) the policy changes within a step, so its current "
            "log-probs differ from its log-probs at the start of the step",
            "set it to computed, or actor.mini_batches=1 and actor.epochs=1",
            value="current",
        )
    if ADVANTAGES[algorithm.advantage].of_positions and algorithm.old_log_probs != "computed":
        yield RecipeError(
            "algorithm.old_log_probs",
            f"algorithm.advantage={algorithm.advantage} needs each position's sum of squared probabilities, which only the pass "
            f"before the step's updates computes, and {algorithm.old_log_probs} skips this pass",
            "set it to computed, or another algorithm.advantage",
            value=algorithm.old_log_probs,
        )
    samples = recipe.data.prompts_per_step * recipe.rollout.samples_per_prompt
    if algorithm.kl_target is not None and algorithm.kl_horizon < samples:
        yield RecipeError(
            "algorithm.kl_horizon",
            f"a step has {samples} samples (data.prompts_per_step x rollout.samples_per_prompt), so the weight of the KL "
            "could change by more than a fifth in a step",
            f"set it to {samples} or more",
            value=algorithm.kl_horizon,
        )


def _kl_in_reward_errors(algorithm: AlgorithmConfig) -> Errors:
    name, advantage = algorithm.advantage, ADVANTAGES[algorithm.advantage]
    in_loss = "set it to false: the KL is then a term of the loss"
    if algorithm.kl_in_reward and algorithm.old_log_probs != "computed":
        yield RecipeError(
            "algorithm.kl_in_reward",
            "token rewards need the policy's log-probs before the step's updates, and "
            f"algorithm.old_log_probs={algorithm.old_log_probs} skips the pass that computes them",
            "set algorithm.old_log_probs=computed, or algorithm.kl_in_reward=false",
            value=True,
        )
    if algorithm.kl_in_reward and advantage.of_steps is not None:
        problem = f"algorithm.advantage={name} reads rewards of steps, which contain no KL"
        yield RecipeError("algorithm.kl_in_reward", problem, in_loss, value=True)
    if algorithm.kl_in_reward and advantage.reads_scores:
        problem = f"algorithm.advantage={name} reads the scorers' rewards, which must contain no KL"
        yield RecipeError("algorithm.kl_in_reward", problem, in_loss, value=True)
    if not advantage.needs_kl_in_reward:
        return
    if not algorithm.kl_in_reward:
        problem = f"algorithm.advantage={name} needs the KL of each token in the reward"
        yield RecipeError("algorithm.kl_in_reward", problem, "set it to true, and algorithm.kl_coef", value=False)
    if algorithm.kl_estimator != "kl":
        problem = f"as an advantage ({name}) only `kl` gives the gradient of the KL; the gradient of low_var_kl is near 0 for close policies"
        yield RecipeError("algorithm.kl_estimator", problem, "set it to kl", value=algorithm.kl_estimator)
    if algorithm.kl_target is not None:
        problem = f"algorithm.advantage={name} learns only from the KL, so the weight of the KL must be constant"
        yield RecipeError("algorithm.kl_target", problem, "leave it out", value=algorithm.kl_target)


def _reward_part_errors(algorithm: AlgorithmConfig) -> Errors:
    key, parts = "algorithm.reward_parts", algorithm.reward_parts
    if algorithm.advantage != "gdpo":
        return
    if not parts:
        problem = "algorithm.advantage=gdpo normalizes each part of the reward"
        yield RecipeError(key, problem, "name the parts with their weights, e.g. {accuracy: 1.0}", value=parts)
    elif algorithm.overlong.penalty_buffer and "overlong_penalty" not in parts:
        problem = "algorithm.overlong.penalty_buffer is a part of the reward, overlong_penalty, which is not among them"
        yield RecipeError(key, problem, "add overlong_penalty: 1.0, or leave the penalty out", value=dict(parts))


def _correction_errors(algorithm: AlgorithmConfig) -> Errors:
    key, correction = "algorithm.correction", algorithm.correction
    if correction.weights == "none":
        for setting in ("truncate", "normalize"):
            yield from _unless_default(correction, setting, f"{key}.weights is none", f"set {key}.weights", key)
    elif algorithm.old_log_probs == "rollout":
        yield RecipeError(
            f"{key}.weights",
            "with algorithm.old_log_probs=rollout the importance ratio of the loss is already p(trainer) / p(engine), so this "
            "weight would apply it twice",
            "set algorithm.old_log_probs=computed, algorithm.loss=reinforce (without old_log_probs), or "
            f"{key}.weights=none",
            value=correction.weights,
        )
    if correction.icepop is not None:
        yield from _icepop_errors(correction)
    for name, limit in correction.reject.items():
        try:
            criteria({name: limit})
        except ValueError as error:
            example = "a ratio's is e.g. [0.5, 2.0], others' 0.01"
            remedy = (
                f"choose from: {', '.join(NAMES)}"
                if name not in NAMES
                else f"{example}; docs/algorithms.md explains them"
            )
            yield RecipeError(f"{key}.reject.{name}", str(error), remedy, value=limit)
    if correction.normalize and not runs_old_log_prob_pass(algorithm):
        yield RecipeError(
            f"{key}.normalize",
            "it needs a pass that computes the mean weight of a mini batch before its update, and "
            f"algorithm.loss={algorithm.loss} with algorithm.old_log_probs={algorithm.old_log_probs} has no such pass",
            "set a loss that reads old log-probs and algorithm.old_log_probs=computed, or leave it off",
            value=True,
        )


def _icepop_errors(correction: CorrectionConfig) -> Errors:
    """Yield an error if `icepop` is not an interval, or if another key contradicts it."""
    key = "algorithm.correction"
    try:
        expected = of_icepop(correction)
    except ValueError as error:
        yield RecipeError(f"{key}.icepop", str(error), "set it to e.g. [0.5, 5.0]", value=correction.icepop)
        return
    for name, value in expected.items():
        if getattr(correction, name) != value:
            problem = f"{key}.icepop={correction.icepop} sets it to {plain(value)}"
            yield RecipeError(
                f"{key}.{name}", problem, f"leave it out, or {key}.icepop", value=getattr(correction, name)
            )
