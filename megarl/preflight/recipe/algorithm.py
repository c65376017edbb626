"""What is refused of the recipe's section `algorithm`: unknown names, settings that nobody reads, contradictions."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megarl.errors import RecipeError, plain
from megarl.recipe.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def check_algorithm(recipe: Recipe) -> None:
    """Raise RecipeError for the first thing that cannot be had as asked."""
    _import_modules(recipe.algorithm)
    _names_are_registered(recipe.algorithm)
    _source_and_loss_agree(recipe)
    _settings_are_read(recipe.algorithm)
    _source_is_what_it_needs(recipe)
    _rewards_are_learned_from(recipe)
    _old_log_probs_can_be_had(recipe)
    _correction_can_be_had(recipe)
    if recipe.algorithm.pass_k > recipe.rollout.samples_per_prompt and recipe.algorithm.advantage == "pass_at_k":
        raise RecipeError(
            "algorithm.pass_k",
            f"a group has {recipe.rollout.samples_per_prompt} samples (rollout.samples_per_prompt)",
            "make it smaller, or sample more",
            value=recipe.algorithm.pass_k,
        )


def _import_modules(algorithm: AlgorithmConfig) -> None:
    from megarl.algorithms.catalogue import import_modules

    try:
        import_modules(algorithm)
    except Exception as error:
        raise RecipeError(
            "algorithm.modules",
            f"importing them failed{_where(error)}: {type(error).__name__}: {error}",
            _remedy_of_import(error, algorithm.modules),
            value=list(algorithm.modules),
        ) from error


def _where(error: Exception) -> str:
    """The line of the user's own that an import ended in."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_of_a_library(frame.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_of_a_library(file: str) -> bool:
    return (
        file.startswith(("<frozen", _STANDARD_LIBRARY)) or "site-packages" in file or f"{os.sep}megarl{os.sep}" in file
    )


def _remedy_of_import(error: Exception, modules: list[str]) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in {part for name in modules for part in _packages(name)}:
        files = [name for name in modules if name.endswith(".py")]
        if files:
            return f"name the module, not its file: {files[0].removesuffix('.py')}"
        return "modules are looked up in the directory that megarl is started in, and in PYTHONPATH"
    return "mend the module"


def _packages(module: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _names_are_registered(algorithm: AlgorithmConfig) -> None:
    from megarl.algorithms.catalogue import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES

    for name, value, registry in (
        ("advantage", algorithm.advantage, ADVANTAGES),
        ("loss", algorithm.loss, LOSSES),
        ("aggregation", algorithm.aggregation, AGGREGATIONS),
        ("kl_estimator", algorithm.kl_estimator, KL_ESTIMATORS),
    ):
        if value not in registry:
            remedy = f"choose one of: {', '.join(registry.names())}"
            raise RecipeError(f"algorithm.{name}", registry.unknown(value), remedy, value=value)


def _source_and_loss_agree(recipe: Recipe) -> None:
    from megarl.algorithms.catalogue import LOSSES

    source, loss = recipe.train.source, recipe.algorithm.loss
    if LOSSES[loss].source != source:
        fitting = ", ".join(name for name in LOSSES.names() if LOSSES[name].source == source)
        raise RecipeError(
            "algorithm.loss",
            f"it learns from train.source={LOSSES[loss].source}, and train.source is '{source}'",
            f"set train.source={LOSSES[loss].source}, or algorithm.loss to one of: {fitting}",
            value=loss,
        )


def _settings_are_read(algorithm: AlgorithmConfig) -> None:
    """A setting that belongs to other advantages and losses than the chosen ones would change nothing."""
    from megarl.algorithms.catalogue import ADVANTAGES, LOSSES

    advantage, loss = ADVANTAGES[algorithm.advantage], LOSSES[algorithm.loss]
    readers: dict[str, list[str]] = {}
    for registry in (ADVANTAGES, LOSSES):
        for name in registry.names():
            for setting in registry[name].settings:
                readers.setdefault(setting, []).append(name)
    for setting in sorted(readers.keys() - {*advantage.settings, *loss.settings}):
        chosen = f"algorithm.advantage is '{algorithm.advantage}' and algorithm.loss '{algorithm.loss}'"
        what = f"{chosen}, and only {_listed(readers[setting])} reads it"
        _refuse_unless_default(algorithm, setting, what, "choose one that does")
    if algorithm.options and not algorithm.modules:
        what = "functions of your own read it, and algorithm.modules names none"
        raise RecipeError(
            "algorithm.options", what, "name their module, or leave it out", value=dict(algorithm.options)
        )
    if not (loss.needs_old_log_probs or algorithm.kl_in_reward):
        what = f"algorithm.loss is '{algorithm.loss}', which compares with no older policy"
        _refuse_unless_default(algorithm, "old_log_probs", what, "set another algorithm.loss")
    if not algorithm.kl_coef:
        for setting in ("kl_estimator", "kl_in_reward", "kl_straight_through", "kl_target"):
            what = "algorithm.kl_coef is 0, so there is no KL to the reference policy"
            _refuse_unless_default(algorithm, setting, what, "set algorithm.kl_coef")
    if algorithm.kl_target is None:
        what = "algorithm.kl_target is unset, so the KL's weight stays as it is"
        _refuse_unless_default(algorithm, "kl_horizon", what, "set algorithm.kl_target")
    if algorithm.kl_in_reward:
        what = "with algorithm.kl_in_reward the KL has no gradient"
        _refuse_unless_default(algorithm, "kl_straight_through", what, "set algorithm.kl_in_reward=false")


def _refuse_unless_default(section: Any, setting: str, what: str, remedy: str, prefix: str = "algorithm") -> None:
    (field,) = (field for field in dataclasses.fields(section) if field.name == setting)
    value = getattr(section, setting)
    if value != field.default:
        raise RecipeError(f"{prefix}.{setting}", what, f"{remedy}, or leave it at {plain(field.default)}", value=value)


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _source_is_what_it_needs(recipe: Recipe) -> None:
    """Answers of a data set were sampled by nobody and are not scored: what is made of rewards and samples means nothing."""
    from megarl.algorithms.catalogue import LOSSES

    algorithm, source = recipe.algorithm, recipe.train.source
    if LOSSES[algorithm.loss].whole_groups and algorithm.aggregation != "seq_mean_token_mean":
        raise RecipeError(
            "algorithm.aggregation",
            f"{algorithm.loss} is a mean over pairs, which only seq_mean_token_mean makes of their tokens",
            "set algorithm.aggregation=seq_mean_token_mean",
            value=algorithm.aggregation,
        )
    if source == "rollout":
        return
    default = AlgorithmConfig()
    if algorithm.advantage not in ("none", default.advantage):
        what = f"with train.source={source} there are no rewards to make advantages of"
        raise RecipeError("algorithm.advantage", what, "set algorithm.advantage=none", value=algorithm.advantage)
    for setting in ("entropy_coef", "kl_in_reward", "correction", "dynamic_sampling", "overlong"):
        if getattr(algorithm, setting) != getattr(default, setting):
            what = f"with train.source={source} nothing is sampled or rewarded, and this would change nothing"
            raise RecipeError(f"algorithm.{setting}", what, "leave it out")


def _rewards_are_learned_from(recipe: Recipe) -> None:
    """What is made of rewards alone says nothing where neither advantage nor loss reads any."""
    from megarl.algorithms.catalogue import ADVANTAGES

    algorithm = recipe.algorithm
    if recipe.train.source != "rollout":
        return
    if algorithm.advantage != "none" and not ADVANTAGES[algorithm.advantage].needs_kl_in_reward:
        return
    chosen = f"algorithm.advantage={algorithm.advantage} and algorithm.loss={algorithm.loss} learn from no reward"
    for key, given in (
        ("dynamic_sampling.enabled", algorithm.dynamic_sampling.enabled),
        ("overlong.penalty_buffer", algorithm.overlong.penalty_buffer),
    ):
        if given:
            raise RecipeError(
                f"algorithm.{key}", f"{chosen}, so equal or shaped ones mean nothing", "leave it out", value=given
            )


def _old_log_probs_can_be_had(recipe: Recipe) -> None:
    from megarl.algorithms.catalogue import ADVANTAGES

    algorithm, mini_batches = recipe.algorithm, recipe.actor.mini_batches
    if algorithm.old_log_probs == "current" and mini_batches > 1:
        raise RecipeError(
            "algorithm.old_log_probs",
            f"with actor.mini_batches={mini_batches} the policy moves within a step, and `current` would take it for "
            "the one from before the step",
            "set it to computed, or actor.mini_batches=1",
            value="current",
        )
    if algorithm.kl_in_reward and algorithm.old_log_probs != "computed":
        raise RecipeError(
            "algorithm.kl_in_reward",
            "what a token earns is settled before the step's updates, and algorithm.old_log_probs="
            f"{algorithm.old_log_probs} leaves out the pass that tells the policy's log-probs of then",
            "set algorithm.old_log_probs=computed, or algorithm.kl_in_reward=false",
            value=True,
        )
    if algorithm.kl_in_reward and ADVANTAGES[algorithm.advantage].of_steps is not None:
        what = f"{algorithm.advantage} compares rewards of steps, from which the KL is not taken"
        raise RecipeError("algorithm.kl_in_reward", what, "set it to false: the KL then is in the loss", value=True)
    if algorithm.kl_in_reward and ADVANTAGES[algorithm.advantage].reads_scores:
        raise RecipeError(
            "algorithm.kl_in_reward",
            f"{algorithm.advantage} is made of rewards as they were scored, which the KL would blur",
            "set it to false: the KL then is in the loss",
            value=True,
        )
    if ADVANTAGES[algorithm.advantage].needs_kl_in_reward and not algorithm.kl_in_reward:
        what = f"{algorithm.advantage} is made of the KL of each token"
        raise RecipeError("algorithm.kl_in_reward", what, "set it to true, and algorithm.kl_coef", value=False)
    if ADVANTAGES[algorithm.advantage].needs_kl_in_reward and algorithm.kl_estimator != "kl":
        what = f"as an advantage ({algorithm.advantage}) only `kl` has the gradient of the KL; low_var_kl's is near 0 where the policies are close"
        raise RecipeError("algorithm.kl_estimator", what, "set it to kl", value=algorithm.kl_estimator)
    if ADVANTAGES[algorithm.advantage].needs_kl_in_reward and algorithm.kl_target is not None:
        what = f"the KL is all that {algorithm.advantage} learns from, and its weight would be adapted"
        raise RecipeError("algorithm.kl_target", what, "leave it out", value=algorithm.kl_target)
    samples = recipe.data.prompts_per_step * recipe.rollout.samples_per_prompt
    if algorithm.kl_target is not None and algorithm.kl_horizon < samples:
        raise RecipeError(
            "algorithm.kl_horizon",
            f"a step has {samples} samples (data.prompts_per_step x rollout.samples_per_prompt), so the weight could "
            "move by more than a fifth in one step",
            f"set it to {samples} or more",
            value=algorithm.kl_horizon,
        )


def _correction_can_be_had(recipe: Recipe) -> None:
    algorithm, correction = recipe.algorithm, recipe.algorithm.correction
    key = "algorithm.correction"
    if correction.weights == "none":
        for setting in ("truncate", "normalize"):
            _refuse_unless_default(correction, setting, f"{key}.weights is none", f"set {key}.weights", key)
    if correction.mask == "none":
        for setting in ("mask_low", "mask_high"):
            _refuse_unless_default(correction, setting, f"{key}.mask is none", f"set {key}.mask", key)
    elif correction.mask_low >= correction.mask_high:
        what = f"nothing lies between {key}.mask_low={correction.mask_low} and mask_high={correction.mask_high}"
        raise RecipeError(f"{key}.mask_high", what, "raise it above mask_low", value=correction.mask_high)
    if correction.weights != "none" and algorithm.old_log_probs == "rollout":
        raise RecipeError(
            f"{key}.weights",
            "with algorithm.old_log_probs=rollout the loss's own importance ratio is p(trainer) / p(engine) already: it would count twice",
            f"set algorithm.old_log_probs=computed, algorithm.loss=reinforce (and leave old_log_probs out), or {key}.weights=none",
            value=correction.weights,
        )
    _normalize_can_be_had(recipe)


def _normalize_can_be_had(recipe: Recipe) -> None:
    from megarl.algorithms.objective import runs_old_log_prob_pass

    if recipe.algorithm.correction.normalize and not runs_old_log_prob_pass(recipe.algorithm):
        raise RecipeError(
            "algorithm.correction.normalize",
            f"the mean weight of a mini batch must be known before its update, and algorithm.loss={recipe.algorithm.loss} "
            f"with algorithm.old_log_probs={recipe.algorithm.old_log_probs} runs no pass that tells it",
            "set a loss that compares with old log-probs and algorithm.old_log_probs=computed, or leave it off",
            value=True,
        )
