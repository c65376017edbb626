"""All checks that need only the recipe: bounds of values, contradictions between settings, and the other files of this folder.

Checks that read models, data or the machine are in megarl/preflight/survey.py. They also run before any process starts.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from megarl.algorithms.objective import runs_old_log_prob_pass
from megarl.errors import RecipeError, raise_all
from megarl.preflight.recipe.agent import agent_errors
from megarl.preflight.recipe.algorithm import algorithm_errors, name_errors, source_errors
from megarl.preflight.recipe.at_update import at_update_errors, staleness_errors
from megarl.preflight.recipe.critic import critic_errors
from megarl.preflight.recipe.data import column_errors, data_errors
from megarl.preflight.recipe.environment import environment_errors
from megarl.preflight.recipe.fleet import elastic_errors, fleet_errors
from megarl.preflight.recipe.judge import judge_errors
from megarl.preflight.recipe.megatron_ddp import ddp_errors
from megarl.preflight.recipe.megatron_extra import extra_errors
from megarl.preflight.recipe.observe import observe_errors
from megarl.preflight.recipe.optimizer_extra import optimizer_extra_errors
from megarl.preflight.recipe.reward import reward_errors
from megarl.preflight.recipe.rollout import engine_group_errors, quantization_errors, sampling_errors
from megarl.preflight.recipe.shared import mini_batch_errors, optimizer_errors, parallel_size_errors
from megarl.preflight.recipe.teacher import teacher_errors
from megarl.preflight.recipe.train import (
    journal_errors,
    keep_workers_errors,
    restart_errors,
    spike_errors,
    trainer_restart_errors,
)
from megarl.preflight.recipe.weight_sync import weight_sync_errors
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.derived.epochs import epochs_errors
from megarl.recipe.schema import EvaluationConfig, Recipe
from megarl.recipe.trainers import LoraConfig

Errors = Iterator[RecipeError]
LONGEST_RUN_NAME = 200  # bytes; files next to the run's folder add to it, and file systems allow 255
LARGEST_NUMBER = 1e15
"""Larger settings are refused: no size, time or coefficient of a run comes near it, and kernels overflow."""


def validate(recipe: Recipe) -> None:
    """Raise a RecipeError for everything in `recipe` that cannot work."""
    raise_all(recipe_errors(recipe, list(name_errors(recipe.algorithm))))


def recipe_errors(recipe: Recipe, names: Sequence[RecipeError]) -> Iterator[ValueError]:
    """Yield errors that need only the recipe. `names`: errors of `name_errors`, which has imported the user's modules.

    The first checks examine single settings: bounds, and names of algorithms. For the checks of combinations, a setting with
    such an error is reset to its default, and `train.source` is set to the source that the loss needs.
    `megarl.errors.independent` drops errors that may follow from earlier ones.
    """
    single = [*bound_errors(recipe), *names]
    yield from single
    combined = with_defaults(recipe, [error.key for error in single])
    contradictions = list(source_errors(combined))
    yield from contradictions
    if contradictions:
        source: Any = LOSSES[combined.algorithm.loss].source
        combined.train.source = source
    yield from combination_errors(combined)


def combination_errors(recipe: Recipe) -> Iterator[ValueError]:
    """Yield the contradictions between settings."""
    yield from algorithm_errors(recipe)
    yield from environment_errors(recipe.cluster.environment)
    yield from required_key_errors(recipe)
    yield from epochs_errors(recipe)
    yield from critic_errors(recipe)
    yield from teacher_errors(recipe)
    yield from reward_errors(recipe.reward)
    yield from judge_errors(recipe)
    yield from agent_errors(recipe)
    yield from weight_sync_errors(recipe)
    yield from routing_replay_errors(recipe)
    yield from fp32_head_errors(recipe)
    yield from advantage_errors(recipe)
    yield from group_size_errors(recipe)
    yield from lora_errors(recipe.lora)
    yield from actor_errors(recipe)
    yield from sampling_errors(recipe.rollout)
    yield from overlong_errors(recipe)
    yield from evaluation_errors(recipe)
    yield from restart_errors(recipe)
    yield from trainer_restart_errors(recipe)
    yield from journal_errors(recipe.train)
    yield from keep_workers_errors(recipe)
    yield from spike_errors(recipe)
    yield from staleness_errors(recipe)
    yield from at_update_errors(recipe)
    yield from fleet_errors(recipe)
    yield from elastic_errors(recipe.cluster)
    yield from engine_group_errors(recipe.rollout)
    yield from quantization_errors(recipe)
    yield from offload_errors(recipe)
    yield from extra_errors(recipe)
    yield from optimizer_extra_errors(recipe, "actor.optimizer")
    yield from optimizer_extra_errors(critic_view(recipe), "critic.optimizer")
    yield from ddp_errors(recipe)
    yield from data_errors(recipe.data)
    yield from column_errors(recipe.train.source, recipe.data.columns)
    yield from observe_errors(recipe)


def declared_settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Yield (dotted key, section, field) of each setting in `section`, also in mappings of sections such as `agent.mcp`."""
    for field in dataclasses.fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        named = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {key: value}
        inner = {name: entry for name, entry in named.items() if dataclasses.is_dataclass(entry)}
        for name, entry in inner.items():
            yield from declared_settings(entry, f"{name}.")
        if not inner:
            yield key, section, field


def bound_errors(recipe: Recipe) -> Errors:
    """Yield an error for each number that is NaN or outside the bounds that the schema declares for it."""
    for key, section, field in declared_settings(recipe):
        value = getattr(section, field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield from _bound_errors(key, value, field.metadata)


def _bound_errors(name: str, value: float, metadata: Any) -> Errors:
    if isinstance(value, float) and not math.isfinite(value):
        yield RecipeError(
            name, f"the value is {'NaN' if math.isnan(value) else value}", "give a finite number", value=value
        )
        return
    if abs(value) > LARGEST_NUMBER:
        yield RecipeError(name, f"must be at most {LARGEST_NUMBER:g}", "give a smaller number", value=value)
        return
    for bound, holds, words in (
        ("at_least", operator.ge, "at least"),
        ("above", operator.gt, "above"),
        ("at_most", operator.le, "at most"),
    ):
        limit = metadata.get(bound)
        if limit is not None and not holds(value, limit):
            yield RecipeError(name, f"must be {words} {limit}", f"set {name} {words} {limit}", value=value)


def with_defaults(recipe: Recipe, keys: Sequence[str]) -> Recipe:
    """Return a copy of `recipe` in which the settings `keys` (dotted) have their defaults."""
    changed = copy.deepcopy(recipe)
    for key, section, field in declared_settings(changed):
        if key in keys:
            setattr(section, field.name, getattr(type(section)(), field.name))
    return changed


def required_key_errors(recipe: Recipe) -> Errors:
    if not recipe.model.path:
        yield RecipeError("model.path", "unset", "give the Hugging Face directory of the starting model", value="")
    is_folder_name = recipe.name not in ("", ".", "..") and "/" not in recipe.name and recipe.name.isprintable()
    if not is_folder_name or len(recipe.name.encode(errors="replace")) > LONGEST_RUN_NAME:
        problem = f"a run's name must be a folder name of at most {LONGEST_RUN_NAME} bytes"
        yield RecipeError("name", problem, "use letters, digits, - and _", value=recipe.name)


def actor_errors(recipe: Recipe) -> Errors:
    yield from optimizer_errors("actor", recipe.actor.optimizer)
    yield from mini_batch_errors("actor", recipe.actor.mini_batches, recipe.data.prompts_per_step)
    if recipe.actor.mini_batch_order == "balanced" and recipe.actor.mini_batches == 1:
        problem = "a step has one mini batch (actor.mini_batches=1), with all groups in any order"
        yield RecipeError("actor.mini_batch_order", problem, "leave it out", value="balanced")
    yield from parallel_size_errors("cluster.trainers", recipe.cluster.trainers, "megatron", recipe.megatron)


def fp32_head_errors(recipe: Recipe) -> Errors:
    dtypes: set[str] = {recipe.model.dtype}
    if recipe.train.source == "rollout":
        dtypes.add(recipe.rollout.dtype or recipe.model.dtype)
    if recipe.megatron.fp32_head and dtypes == {"float32"}:
        problem = "the whole model computes in float32 (model.dtype), so this has no effect"
        yield RecipeError("megatron.fp32_head", problem, "leave it out", value=True)


def routing_replay_errors(recipe: Recipe) -> Errors:
    replay = recipe.megatron.routing_replay
    if replay == "none":
        return
    if recipe.train.source != "rollout":
        problem = f"train.source={recipe.train.source} routes each token only once, so routing is never replayed"
        yield RecipeError("megatron.routing_replay", problem, "set it to none", value=replay)
    elif replay == "old_log_probs" and not runs_old_log_prob_pass(recipe.algorithm):
        yield RecipeError(
            "megatron.routing_replay",
            f"algorithm.loss={recipe.algorithm.loss} with algorithm.old_log_probs={recipe.algorithm.old_log_probs} has no "
            "old-log-prob pass to replay",
            "set it to rollout or none",
            value=replay,
        )
    if recipe.megatron.extra.get("moe_router_fusion"):
        problem = f"the fused router cannot replay routing (megatron.routing_replay={replay})"
        yield RecipeError("megatron.extra.moe_router_fusion", problem, "leave it out", value=True)


def advantage_errors(recipe: Recipe) -> Errors:
    loss, advantage = recipe.algorithm.loss, recipe.algorithm.advantage
    if recipe.train.source != "rollout" or LOSSES[loss].needs_advantages == (advantage != "none"):
        return
    if advantage == "none":
        problem, remedy = f"algorithm.loss={loss} has no gradient without advantages", "set algorithm.advantage=grpo"
    else:
        problem, remedy = f"algorithm.loss={loss} reads no advantages", "set algorithm.advantage=none"
    yield RecipeError("algorithm.advantage", problem, remedy, value=advantage)


def group_size_errors(recipe: Recipe) -> Errors:
    advantage = recipe.algorithm.advantage
    if recipe.train.source != "rollout" or recipe.rollout.samples_per_prompt > 1:
        return
    key, remedy = "rollout.samples_per_prompt", "set rollout.samples_per_prompt to 2 or more"
    if ADVANTAGES[advantage].needs_siblings:
        problem = f"algorithm.advantage={advantage} compares the samples of a prompt, and a single sample always has advantage 0"
        yield RecipeError(key, problem, remedy, value=1)
    elif recipe.algorithm.dynamic_sampling.enabled:
        problem = "algorithm.dynamic_sampling drops groups with equal rewards, and a group with a single sample is always dropped"
        yield RecipeError(key, problem, remedy, value=1)


def lora_errors(lora: LoraConfig) -> Errors:
    if not lora.targets:
        remedy = "name linears, or all-linear; set lora.rank=0 to train all weights"
        yield RecipeError("lora.targets", "no linear would have an adapter", remedy, value=[])
    elif not lora.rank and lora != LoraConfig():
        remedy = "set lora.rank, e.g. to 32, or leave out the other keys of lora"
        yield RecipeError("lora.rank", "rank 0 makes no adapters, but other keys of lora are set", remedy, value=0)


def overlong_errors(recipe: Recipe) -> Errors:
    buffer, longest = recipe.algorithm.overlong.penalty_buffer, recipe.rollout.max_response_length
    if buffer > longest:
        problem = f"the buffer is longer than rollout.max_response_length = {longest}"
        yield RecipeError("algorithm.overlong.penalty_buffer", problem, f"set it to at most {longest}", value=buffer)


def evaluation_errors(recipe: Recipe) -> Errors:
    evaluation = recipe.evaluation
    if _evaluates(evaluation) and not recipe.data.eval_files:
        off = {"every": 0, "at_start": False, "at_end": False}
        settings = [
            f"evaluation.{name}={json.dumps(value)}"
            for name, value in off.items()
            if getattr(evaluation, name) != value
        ]
        remedy = f"name held-out files, or disable evaluation: {' '.join(settings)}"
        yield RecipeError("data.eval_files", "evaluation is on but has no data", remedy, value=[])
    if recipe.train.source != "rollout":
        yield from _held_out_loss_errors(recipe)
        return
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield RecipeError(
            "evaluation.temperature",
            f"evaluation.samples is {evaluation.samples}, and greedy samples of a prompt are identical",
            "set evaluation.samples=1 and ks=[1], or use evaluation.greedy=true with a temperature above 0",
            value=0.0,
        )
    for k in evaluation.ks:
        if not 1 <= k <= evaluation.samples:
            problem = f"k = {k} is not between 1 and evaluation.samples = {evaluation.samples}"
            remedy = "raise evaluation.samples or drop this k"
            yield RecipeError("evaluation.ks", problem, remedy, value=list(evaluation.ks))


def _evaluates(evaluation: EvaluationConfig) -> bool:
    return evaluation.every > 0 or evaluation.at_start or evaluation.at_end


def _held_out_loss_errors(recipe: Recipe) -> Errors:
    evaluation, loss = recipe.evaluation, recipe.algorithm.loss
    default = type(evaluation)()
    for name in ("samples", "ks", "temperature", "top_p", "greedy"):
        if getattr(evaluation, name) != getattr(default, name):
            problem = f"with train.source={recipe.train.source} an evaluation computes the loss of held-out rows and samples nothing"
            yield RecipeError(f"evaluation.{name}", problem, "leave it out", value=getattr(evaluation, name))
    if LOSSES[loss].selection is not None and _evaluates(evaluation):
        yield RecipeError(
            "algorithm.loss",
            "it treats the highest-scored tokens of a mini batch specially, and held-out rows form no mini batch",
            "disable evaluation, or set another algorithm.loss",
            value=loss,
        )


def offload_errors(recipe: Recipe) -> Errors:
    unshared = recipe.cluster.placement == "disaggregated" or recipe.train.source != "rollout"
    if recipe.megatron.offload and unshared:
        yield RecipeError(
            "megatron.offload",
            "the trainers share their devices with no engine, so nothing would be offloaded",
            "set megatron.offload=false, or cluster.placement=colocated",
            value=True,
        )
