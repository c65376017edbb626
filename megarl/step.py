"""One training step: critic, log-prob passes, advantages, actor update."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.advantages import AdvantageSource
from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.inputs import Outcomes
from megarl.algorithms.shaping import subtract_kl
from megarl.assembly import Run
from megarl.batching.flops import FORWARD
from megarl.batching.metrics import mean_max_min
from megarl.batching.plan import StepPlan
from megarl.observe.samples import sample_records
from megarl.observe.token_values import token_records
from megarl.rollout.fleet.fixed import death_metrics
from megarl.rollout.source import Batch
from megarl.trainer.group import KLPenalty, VectorPart
from megarl.trainer.passes import CriticPass, StepPasses, passes_of
from megarl.trainer.reference import log_reference
from megarl.trainer.step_metrics import log_speed, log_update, staleness
from megarl.trainer.token_recorder import recorded_samples
from megarl.types import Metrics


def training_step(run: Run, batch: Batch, step: int) -> None:
    """Train on `batch`. See `StepPasses` for the order."""
    passes = passes_of(run.recipe.algorithm, run.recipe.critic.warmup_steps, step)
    kept = run.repeatable.batches if run.repeatable is not None else None
    if kept is None or step not in kept:  # a batch that was kept has the teacher's scores
        if passes.teacher and run.teacher is not None:  # before the plan, which holds the locations of the vectors
            with run.log.phase("teacher"):
                run.teacher.score(batch.groups)
        if kept is not None:
            kept.keep(step, batch.groups)
    plan = run.actor.plan(batch.groups)
    advantages = None
    if passes.critic is CriticPass.FIRST:
        advantages = critic_pass(run, batch, plan, step)
    run.devices.give_to_actor()
    run.actor.load_shards(plan.shards)
    if passes.old_log_probs:
        with run.log.phase("old_log_prob"):
            run.log.add(run.actor.compute_old_log_probs(step - 1))
        log_speed(run.log, "old_log_prob", "old_log_prob", plan.flops * FORWARD, run.actor.size, run.device_peak)
    if passes.reference:
        with run.log.phase("reference"):
            log_reference(run.log, run.recipe.algorithm, run.actor.compute_reference_log_probs())
    outcomes, reward_kl = outcomes_with_kl_penalty(run, plan) if passes.kl_in_reward else (plan.outcomes, None)
    if passes.critic is CriticPass.AFTER_KL:
        advantages = critic_pass(run, batch, plan, step)
        run.devices.give_to_actor()
    update: Metrics = {}
    if passes.update_actor:
        load_advantages(run, plan, outcomes, advantages)
        update = update_actor(run, plan, step, passes)
    if run.recipe.algorithm.kl_target is not None:
        run.log.add({"actor/kl_weight": run.kl_weight.value})
        if passes.update_actor:
            kl = update["actor/kl"] if reward_kl is None else reward_kl
            run.kl_weight.adapt(kl, samples=len(plan.outcomes.rewards))
    log_batch(run, batch, plan, step)


def critic_pass(run: Run, batch: Batch, plan: StepPlan, step: int) -> list[list[VectorPart]]:
    """Compute values and advantages and update the critic. Returns the locations of the advantages, per actor shard."""
    assert run.critic is not None
    log, critic = run.log, run.critic
    run.devices.give_to_critic()
    critic.load(batch.groups)
    with log.phase("values"):
        kl = KLPenalty(run.kl_weight.value, run.actor, plan.shards) if run.recipe.algorithm.kl_in_reward else None
        critic.compute_values(kl)
    with log.phase("adv"):
        advantages, metrics = critic.locate_advantages(plan.shards)
    with log.phase("update_critic"):
        log_update(log, run.skipped, step, "critic", critic.update(run.skipped.norms["critic"]))
    log.add(metrics)
    return advantages


def outcomes_with_kl_penalty(run: Run, plan: StepPlan) -> tuple[Outcomes, float]:
    """Estimate each token's KL to the reference policy, and subtract `kl_weight` x KL from the samples' rewards.

    Returns the outcomes and the mean KL of a loss token.
    """
    with run.log.phase("adv"):
        kl = run.actor.compute_kl(len(plan.outcomes.rewards))
    tokens = plan.outcomes.loss_tokens
    mean = float(kl[tokens > 0].sum() / max(tokens.sum(), 1))
    run.log.add({"actor/reward_kl_penalty": mean})
    return subtract_kl(plan.outcomes, kl, run.kl_weight.value), mean


def load_advantages(
    run: Run, plan: StepPlan, outcomes: Outcomes, from_critic: Sequence[list[VectorPart]] | None
) -> None:
    """Load the advantages that the shards lack: the critic's, estimates per token, or estimates after the KL penalty."""
    algorithm = run.recipe.algorithm
    estimator = ADVANTAGES[algorithm.advantage]
    if estimator.source is AdvantageSource.SAMPLES and not algorithm.kl_in_reward:
        return  # the plan estimated them, and the shards contain them
    with run.log.phase("adv"):
        if estimator.source is AdvantageSource.CRITIC:
            assert from_critic is not None
            run.actor.load_advantages(from_critic)
        elif estimator.source is AdvantageSource.TOKENS:
            moments = run.actor.estimate_token_advantages(run.kl_weight.value, plan.outcomes)
            whitening = estimator.whitening(moments, algorithm)
            run.actor.whiten_advantages(whitening)
            run.log.add(moments.metrics("critic/advantages", whitening))
        else:
            assert estimator.function is not None
            advantages = estimator.function(outcomes, algorithm)
            run.actor.set_advantages(advantages, plan.shards)
            run.log.add(mean_max_min("critic/advantages", advantages))


def update_actor(run: Run, plan: StepPlan, step: int, passes: StepPasses) -> Metrics:
    """Update the policy on the loaded shards, one optimizer step per mini batch. Returns the metrics of the update."""
    with run.log.phase("update_actor"):
        scales = run.actor.correction_scales() if run.recipe.algorithm.correction.normalize else None
        per_rank = run.actor.update(run.kl_weight.value, scales, run.skipped.norms["actor"])
        metrics = log_update(run.log, run.skipped, step, "actor", per_rank)
    if not passes.old_log_probs:
        run.log.add(run.actor.mismatch_metrics(step - 1))
    log_speed(run.log, "actor", "update_actor", plan.update_flops, run.actor.size, run.device_peak)
    return metrics


def log_batch(run: Run, batch: Batch, plan: StepPlan, step: int) -> None:
    """Log metrics and samples of the batch."""
    run.log.add(plan.metrics)
    if run.recipe.train.source == "rollout":
        run.log.add(death_metrics(run.recipe, run.fixed_engines))
        run.log.add(staleness(batch.groups, step - 1))
        groups = -(-run.recipe.observe.samples_per_step // run.recipe.rollout.samples_per_prompt)
        run.log.samples(step, sample_records(batch.groups, step, groups, run.tokenizer))
        if (count := recorded_samples(run.recipe)) and batch.groups:
            vectors = run.actor.recorded_tokens()
            run.log.tokens(step, token_records(batch.groups[0], count, vectors, run.tokenizer))
