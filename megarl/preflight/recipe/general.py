"""What is refused before any process starts: values out of bounds and options that contradict each other.

Only what the recipe itself shows is checked here; model files, data and layout against the model are
checked where they are read (megarl/preflight/run.py), still before any process starts.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Any

from megarl.errors import RecipeError
from megarl.recipe.training import LoraConfig

if typing.TYPE_CHECKING:
    from megarl.recipe.schema import Recipe
    from megarl.recipe.training import MegatronConfig, OptimizerConfig

CHECKS: list[Callable[[Recipe], None]] = []


def check(function: Callable[[Recipe], None]) -> Callable[[Recipe], None]:
    CHECKS.append(function)
    return function


def validate(recipe: Recipe) -> None:
    """Raise RecipeError for the first thing in `recipe` that cannot work."""
    _check_bounds(recipe, "")
    for function in CHECKS:
        function(recipe)


def _check_bounds(section: Any, prefix: str) -> None:
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            _check_bounds(value, f"{name}.")
            continue
        if value is None or isinstance(value, (str, bool, list, dict, tuple)):
            continue
        if math.isnan(value):
            raise RecipeError(name, "this is no number", "give a number", value=value)
        for bound, holds, words in (
            ("at_least", lambda value, limit: value >= limit, "at least"),
            ("above", lambda value, limit: value > limit, "above"),
            ("at_most", lambda value, limit: value <= limit, "at most"),
        ):
            limit = field.metadata.get(bound)
            if limit is not None and not holds(value, limit):
                raise RecipeError(name, f"must be {words} {limit}", f"set {name} {words} {limit}", value=value)


@check
def _algorithm_fits(recipe: Recipe) -> None:
    from megarl.preflight.recipe.algorithm import check_algorithm

    check_algorithm(recipe)


@check
def _environment_is_set(recipe: Recipe) -> None:
    from megarl.preflight.recipe.environment import check_environment

    check_environment(recipe)


@check
def _required_keys(recipe: Recipe) -> None:
    if not recipe.model.path:
        raise RecipeError(
            "model.path", "no model is named", "give the Hugging Face directory of the starting model", value=""
        )
    if not recipe.name or "/" in recipe.name or recipe.name in (".", ".."):
        raise RecipeError("name", "a run's name is one folder name", "use letters, digits, - and _", value=recipe.name)
    check_optimizer("actor", recipe.actor.optimizer)


def check_optimizer(section: str, optimizer: OptimizerConfig) -> None:
    for name, value in vars(optimizer).items():
        if isinstance(value, float) and math.isinf(value):
            what = "with an infinite one every weight would be no number"
            raise RecipeError(f"{section}.optimizer.{name}", what, "give a finite number", value=value)
    if any(beta < 0 or beta >= 1 for beta in optimizer.betas):
        raise RecipeError(
            f"{section}.optimizer.betas",
            "each beta lies in [0, 1)",
            "e.g. [0.9, 0.98]",
            value=list(optimizer.betas),
        )


@check
def _sections_fit(recipe: Recipe) -> None:
    from megarl.preflight.recipe.agent import check_agent
    from megarl.preflight.recipe.critic import check_critic
    from megarl.preflight.recipe.judge import check_judge
    from megarl.preflight.recipe.reward import check_reward
    from megarl.preflight.recipe.teacher import check_teacher
    from megarl.preflight.recipe.weight_sync import check_exchange

    check_critic(recipe)
    check_teacher(recipe)
    check_reward(recipe)
    check_judge(recipe)
    check_agent(recipe)
    check_exchange(recipe)


@check
def _routing_can_be_replayed(recipe: Recipe) -> None:
    from megarl.algorithms.objective import runs_old_log_prob_pass

    replay = recipe.megatron.routing_replay
    if replay != "none" and recipe.train.source != "rollout":
        raise RecipeError(
            "megatron.routing_replay", "demonstrations are routed once", "leave it at none for SFT", value=replay
        )
    if replay == "old_log_probs" and not runs_old_log_prob_pass(recipe.algorithm):
        raise RecipeError(
            "megatron.routing_replay",
            f"algorithm.loss={recipe.algorithm.loss} with algorithm.old_log_probs={recipe.algorithm.old_log_probs} has no "
            "old-log-prob pass to replay",
            "set it to rollout or none",
            value=replay,
        )
    if replay != "none" and recipe.megatron.extra.get("moe_router_fusion"):
        raise RecipeError(
            "megatron.extra.moe_router_fusion", "the fused router cannot replay", "leave it out", value=True
        )


@check
def _advantages_are_used(recipe: Recipe) -> None:
    from megarl.algorithms.catalogue import LOSSES

    loss, advantage = recipe.algorithm.loss, recipe.algorithm.advantage
    if recipe.train.source != "rollout" or LOSSES[loss].needs_advantages == (advantage != "none"):
        return
    if advantage == "none":
        what, remedy = f"without advantages algorithm.loss={loss} has no gradient", "set algorithm.advantage=grpo"
    else:
        what, remedy = f"algorithm.loss={loss} reads no advantages", "set algorithm.advantage=none"
    raise RecipeError("algorithm.advantage", what, remedy, value=advantage)


@check
def _groups_carry_a_signal(recipe: Recipe) -> None:
    from megarl.algorithms.catalogue import ADVANTAGES

    advantage = recipe.algorithm.advantage
    if recipe.train.source != "rollout" or recipe.rollout.samples_per_prompt > 1:
        return
    remedy = "set rollout.samples_per_prompt to 2 or more"
    if ADVANTAGES[advantage].needs_siblings:
        what = f"{advantage} compares a prompt's samples with each other; one alone always has advantage 0"
        raise RecipeError("rollout.samples_per_prompt", what, remedy, value=1)
    if recipe.algorithm.dynamic_sampling.enabled:
        what = "algorithm.dynamic_sampling keeps groups whose samples differ, and a group would have one"
        raise RecipeError("rollout.samples_per_prompt", what, remedy, value=1)


@check
def _adapters_are_trained(recipe: Recipe) -> None:
    lora = recipe.lora
    if not lora.targets:
        remedy = "name linears, or all-linear; set lora.rank=0 to train all weights"
        raise RecipeError("lora.targets", "no linear would have an adapter", remedy, value=[])
    if not lora.rank and lora != LoraConfig():
        remedy = "set lora.rank, e.g. to 32; or leave the other keys of lora out"
        raise RecipeError("lora.rank", "adapters are asked for, and none are made at rank 0", remedy, value=0)


@check
def _mini_batches_fit(recipe: Recipe) -> None:
    check_mini_batches("actor", recipe.actor.mini_batches, recipe)


def check_mini_batches(section: str, mini_batches: int, recipe: Recipe) -> None:
    if recipe.data.prompts_per_step % mini_batches:
        raise RecipeError(
            f"{section}.mini_batches",
            f"data.prompts_per_step = {recipe.data.prompts_per_step} does not divide into {mini_batches} mini batches",
            "choose a divisor of data.prompts_per_step",
            value=mini_batches,
        )


@check
def _sampling_keeps_the_whole_distribution(recipe: Recipe) -> None:
    filtered = recipe.rollout.top_p < 1 or recipe.rollout.top_k > 0
    if filtered and recipe.rollout.temperature != 1:
        raise RecipeError(
            "rollout.temperature",
            "with top_p or top_k the engine can return unfiltered log-probs at temperature 1 only; "
            "filtered ones would leak their renormalisation into the importance ratio",
            "set rollout.temperature=1, or rollout.top_p=1 and rollout.top_k=-1",
            value=recipe.rollout.temperature,
        )
    if recipe.rollout.top_k == 0:
        raise RecipeError("rollout.top_k", "0 would keep no token", "use -1 for the whole distribution", value=0)


@check
def _overlong_fits(recipe: Recipe) -> None:
    buffer, longest = recipe.algorithm.overlong.penalty_buffer, recipe.rollout.max_response_length
    if buffer > longest:
        raise RecipeError(
            "algorithm.overlong.penalty_buffer",
            f"the buffer is longer than rollout.max_response_length = {longest}",
            "make it shorter",
            value=buffer,
        )


@check
def _evaluation_is_possible(recipe: Recipe) -> None:
    evaluation = recipe.evaluation
    if (evaluation.every or evaluation.at_start or evaluation.at_end) and not recipe.data.eval_files:
        raise RecipeError(
            "data.eval_files",
            "evaluation is on and there is nothing to evaluate on",
            "name held-out files, or switch evaluation off",
            value=[],
        )
    if recipe.train.source != "rollout":
        _held_out_loss_can_be_had(recipe)
    if evaluation.temperature == 0 and evaluation.samples > 1:
        raise RecipeError(
            "evaluation.temperature",
            f"greedy answers are all the same, and evaluation.samples is {evaluation.samples}",
            "set evaluation.samples=1 and ks=[1], or use evaluation.greedy=true beside a temperature above 0",
            value=0.0,
        )
    for k in evaluation.ks:
        if not 1 <= k <= evaluation.samples:
            raise RecipeError(
                "evaluation.ks",
                f"k = {k} needs between 1 and evaluation.samples = {evaluation.samples} samples",
                "raise evaluation.samples or drop it",
                value=list(evaluation.ks),
            )


def _held_out_loss_can_be_had(recipe: Recipe) -> None:
    from megarl.algorithms.catalogue import LOSSES

    evaluation, loss = recipe.evaluation, recipe.algorithm.loss
    default = type(evaluation)()
    for name in ("samples", "ks", "temperature", "top_p", "greedy"):
        if getattr(evaluation, name) != getattr(default, name):
            raise RecipeError(
                f"evaluation.{name}",
                f"with train.source={recipe.train.source} an evaluation is the loss on held-out rows: nothing is sampled",
                "leave it out",
                value=getattr(evaluation, name),
            )
    if LOSSES[loss].scores is not None and (evaluation.every or evaluation.at_start or evaluation.at_end):
        raise RecipeError(
            "algorithm.loss",
            "it treats the tokens of a mini batch with the highest scores in a way of their own, and held-out rows are "
            "no mini batch",
            "switch evaluation off, or set another algorithm.loss",
            value=loss,
        )


@check
def _placement_and_staleness(recipe: Recipe) -> None:
    if recipe.cluster.placement == "colocated" and recipe.rollout.max_staleness > 0:
        raise RecipeError(
            "rollout.max_staleness",
            "colocated engines and trainers take turns on the same devices, so nothing can be sampled ahead",
            "set cluster.placement=disaggregated, or rollout.max_staleness=0",
            value=recipe.rollout.max_staleness,
        )


@check
def _engines_form_groups(recipe: Recipe) -> None:
    rollout = recipe.rollout
    if rollout.engines % rollout.data_parallel:
        raise RecipeError(
            "rollout.data_parallel",
            f"rollout.engines = {rollout.engines} do not divide into groups of {rollout.data_parallel}",
            "choose a divisor of rollout.engines, or change these",
            value=rollout.data_parallel,
        )
    if rollout.data_parallel > 1 and not rollout.spreads_experts:
        raise RecipeError(
            "rollout.expert_parallel",
            f"spreading experts is all that groups of rollout.data_parallel = {rollout.data_parallel} engines are for",
            "leave it out, or set rollout.data_parallel=1",
            value=False,
        )


@check
def _offload_has_a_purpose(recipe: Recipe) -> None:
    alone = recipe.cluster.placement == "disaggregated" or recipe.train.source != "rollout"
    if recipe.megatron.offload and alone:
        raise RecipeError(
            "megatron.offload",
            "the trainers have their devices to themselves, so nothing would ever be offloaded",
            "set megatron.offload=false, or cluster.placement=colocated",
            value=True,
        )


@check
def _parallel_sizes(recipe: Recipe) -> None:
    check_parallel_sizes("cluster.trainers", recipe.cluster.trainers, "megatron", recipe.megatron)


def check_parallel_sizes(key: str, processes: int, section: str, megatron: MegatronConfig) -> None:
    model_parallel = megatron.tensor_parallel * megatron.pipeline_parallel * megatron.context_parallel
    if processes % model_parallel:
        raise RecipeError(
            key,
            f"{processes} processes do not divide by tensor {megatron.tensor_parallel} x pipeline "
            f"{megatron.pipeline_parallel} x context {megatron.context_parallel} = {model_parallel}",
            f"use a multiple of {model_parallel}, or change the sizes in {section}",
            value=processes,
        )
    if megatron.sequence_parallel and megatron.tensor_parallel == 1:
        raise RecipeError(
            f"{section}.sequence_parallel",
            "it cuts sequences over tensor-parallel ranks, and there is one",
            f"set {section}.tensor_parallel > 1, or leave it out",
            value=True,
        )
    if megatron.virtual_pipeline and megatron.pipeline_parallel == 1:
        raise RecipeError(
            f"{section}.virtual_pipeline",
            "interleaving needs pipeline stages",
            f"set {section}.pipeline_parallel > 1, or unset it",
            value=megatron.virtual_pipeline,
        )


@check
def _extra_is_left_over(recipe: Recipe) -> None:
    from megarl.preflight.recipe.megatron_extra import check_extra_is_left_over

    check_extra_is_left_over(recipe)


@check
def _optimizers_fit(recipe: Recipe) -> None:
    from megarl.preflight.recipe.optimizer_extra import check_optimizer_extra
    from megarl.recipe.critic import critic_view

    check_optimizer_extra(recipe, "actor.optimizer")
    check_optimizer_extra(critic_view(recipe), "critic.optimizer")


@check
def _ddp_fits(recipe: Recipe) -> None:
    from megarl.preflight.recipe.megatron_ddp import check_ddp
    from megarl.recipe.megatron_ddp import refusal_of_ddp

    for section, megatron in (("megatron", recipe.megatron), ("critic.megatron", recipe.critic.megatron)):
        for name, value in megatron.ddp.items():
            if refusal := refusal_of_ddp(name):
                raise RecipeError(f"{section}.ddp.{name}", *refusal, value=value)
        adapters = section == "megatron" and recipe.lora.rank > 0
        check_ddp(section, megatron.ddp, distributed_optimizer=megatron.distributed_optimizer, adapters=adapters)


@check
def _data_fits(recipe: Recipe) -> None:
    from megarl.preflight.recipe.data import check_data

    check_data(recipe)


@check
def _observing_fits(recipe: Recipe) -> None:
    from megarl.preflight.recipe.observe import check_observe

    check_observe(recipe)
