"""The loop. One process owns order, randomness and data; everything else answers its calls.

Synchronous, one-step-off and further ahead are this one loop: only how far the source may run ahead of
the policy (`rollout.max_staleness`) differs. So are RL and SFT: only the source differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.correction import total_mismatch
from megarl.algorithms.inputs import Outcomes
from megarl.algorithms.kl import KLWeight
from megarl.algorithms.moments import Moments, Whitening
from megarl.algorithms.objective import runs_old_log_prob_pass, runs_reference_pass
from megarl.batching.flops import FORWARD, ModelFlops
from megarl.batching.plan import StepPlan, plan_step, spread
from megarl.checkpoint.folder import load_state, set_aside_later
from megarl.checkpoint.saver import Saver
from megarl.checkpoint.skipped_steps import SkippedSteps
from megarl.cluster.base import WorkerGroup
from megarl.cluster.failures import ClusterError
from megarl.data.tokenizer import Tokenizer
from megarl.observe.log import RunLog
from megarl.observe.profiling import Profiling
from megarl.observe.samples import records_of
from megarl.recipe.schema import Recipe
from megarl.rollout.evaluate import EvaluationResult
from megarl.rollout.source import Batch, Source
from megarl.rollout.teacher import Teacher
from megarl.trainer.critic_group import Critic, KLPenalty, Part
from megarl.types import Group, Metrics
from megarl.weight_sync.handover import Placement


@dataclass
class Layout:
    """Where each trainer rank stands: filled from what the workers say of themselves."""

    data_parallel_rank: list[int]
    reports: list[bool]  # which rank of a data-parallel rank answers for it
    data_parallel: int
    micro_batches_multiple_of: int
    devices: int  # of trainers and engines together: what perf/throughput is counted over
    model_flops: ModelFlops | None  # None: not counted for this model
    device_peak: float | None  # of a trainer's device, in FLOP/s; None: not known


@dataclass
class Controller:
    """The parts of a run, and the loop over them."""

    recipe: Recipe
    trainers: WorkerGroup
    critic: Critic | None
    teacher: Teacher | None
    layout: Layout
    source: Source
    placement: Placement
    log: RunLog
    tokenizer: Tokenizer
    evaluate: Callable[[], EvaluationResult] | None  # None: nothing to evaluate with
    saver: Saver
    identity: dict[str, Any]  # what a checkpoint belongs to: see identity.py
    profiling: Profiling
    skipped: SkippedSteps = field(init=False)
    kl_weight: KLWeight = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = SkippedSteps(self.recipe.train.stop_after_skipped, self.saver.folder)
        algorithm = self.recipe.algorithm
        self.kl_weight = KLWeight(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)

    def fit(self, resumed_from: Path | None = None) -> None:
        """Run from the first step, or from the one after a checkpoint, to `train.steps`."""
        done, unwritten = self._resume(resumed_from) if resumed_from else (0, None)
        self.log.begin()
        if unwritten is not None:
            self.log.add(unwritten)
            self._conclude(done)
        elif done < self.recipe.train.steps:
            self._publish(done)
            if self.recipe.train.source == "rollout":
                self.log.reached("engines have the trainers' weights")
            if self.recipe.evaluation.at_start and done == 0:
                self._evaluate(0)
        try:
            for step in range(done + 1, self.recipe.train.steps + 1):
                self.profiling.before_sampling(step)
                self.source.admit(step - 1)
                self._step(step)
            self.saver.finish()
        except BaseException as error:
            self._rescue_checkpoint(error)
            raise
        self.source.close()

    def _step(self, step: int) -> None:
        if self.saver.pending:
            with self.log.phase("save"):
                self.log.add(self.saver.poll())
        self._learn(step)
        self._save_if_due(step)
        self._conclude(step)
        self.skipped.check(step)

    def _learn(self, step: int) -> None:
        """Take a batch and train on it. Nothing holds its vectors afterwards."""
        log, recipe = self.log, self.recipe
        with log.phase("gen") if recipe.train.source == "rollout" else log.phase("data"):
            batch = self.source.take(recipe.data.prompts_per_step)
        self.profiling.after_sampling(step)
        log.add(batch.metrics)
        for notice in batch.notices:
            log.notice(f"step {step}: {notice}")
        if batch.groups:
            with self.profiling.training(step):
                self._train(step, batch)
        else:
            self.profiling.nothing_to_compute(step)
            self.placement.to_train()
            log.warn(f"step {step}: no group with spread was found, so there is nothing to learn from: no update")
            log.add({"actor/skipped_updates": float(recipe.actor.mini_batches)})
            self.skipped.note("actor", step, "no group with spread was found")

    def _conclude(self, step: int) -> None:
        """What follows an update: new weights to the engines, evaluation, the step's line."""
        recipe, last = self.recipe, step == self.recipe.train.steps
        evaluation = self._due(step, recipe.evaluation.every) or (last and recipe.evaluation.at_end)
        if not last or evaluation:
            self._publish(step)
        if evaluation:
            self._evaluate(step)
        tokens = self.log.pending().get("perf/total_num_tokens", 0.0)
        self.log.add({"perf/throughput": tokens / self.log.elapsed() / self.layout.devices})
        self.log.step(step)

    def _train(self, step: int, batch: Batch) -> None:
        log, recipe = self.log, self.recipe
        layout = self.layout
        warming_up = self.critic is not None and step <= recipe.critic.warmup_steps
        in_reward = recipe.algorithm.kl_in_reward
        advantages = None
        if self.teacher is not None and (in_reward or not warming_up):
            with log.phase("teacher"):  # before the plan, which says where vectors lie
                self.teacher.read(batch.groups)
        plan = plan_step(
            batch.groups, recipe, layout.data_parallel, layout.micro_batches_multiple_of, layout.model_flops
        )
        if self.critic is not None and not in_reward:  # before the actor, which then comes once
            advantages = self._consult_critic(step, batch, plan)
        self.placement.to_train()
        self._scatter("load_shard", plan.shards)
        if runs_old_log_prob_pass(recipe.algorithm):
            with log.phase("old_log_prob"):
                log.add(total_mismatch(self.trainers.call("compute_old_log_probs")).metrics())
            self._add_speed("old_log_prob", "old_log_prob", plan.flops * FORWARD)
        if runs_reference_pass(recipe.algorithm) and (in_reward or not warming_up):
            with log.phase("reference"):
                self.trainers.call("compute_reference_log_probs")
        outcomes = self._penalise(plan) if in_reward else plan.outcomes
        if self.critic is not None and in_reward:
            advantages = self._consult_critic(step, batch, plan)
            self.placement.to_train()
        if not warming_up:  # a pass before the updates measures the gap to the engine all the same
            self._give_advantages(plan, outcomes, advantages)
            self._update_actor(step, plan)
        if recipe.algorithm.kl_target is not None:
            self._adapt_kl_weight(len(plan.outcomes.rewards), still=warming_up)
        log.add(plan.metrics)
        if recipe.train.source == "rollout":
            log.add(staleness(batch.groups, step - 1))
            wanted = -(-recipe.observe.samples_per_step // recipe.rollout.samples_per_prompt)
            log.samples(step, records_of(batch.groups, step, wanted, self.tokenizer))

    def _add_speed(self, name: str, phase: str, flops: float) -> None:
        """What the trainers made of a phase that has just ended: `flops` on all devices together."""
        if flops:
            seconds = self.log.pending()[f"timing_s/{phase}"]
            self.log.add(speed(name, flops / seconds / self.trainers.size, self.layout.device_peak))

    def _consult_critic(self, step: int, batch: Batch, plan: StepPlan) -> list[list[Part]]:
        """Values, advantages, the critic's update. Returns where the advantages of each data-parallel rank lie."""
        assert self.critic is not None
        log, critic = self.log, self.critic
        self.placement.to_critic()
        critic.load(batch.groups)
        with log.phase("values"):
            critic.compute_values(self._kl_penalty(plan) if self.recipe.algorithm.kl_in_reward else None)
        with log.phase("adv"):
            advantages, metrics = critic.advantages(plan.shards)
        with log.phase("update_critic"):
            self._add_update(step, "critic", critic.update())
        log.add(metrics)
        return advantages

    def _penalise(self, plan: StepPlan) -> Outcomes:
        """Have each token's KL to the reference policy estimated. Returns the batch's outcomes less its sums."""
        with self.log.phase("adv"):
            kl = np.zeros(len(plan.outcomes.rewards))
            for sums in self.trainers.call("penalise_kl"):
                for number, total in (sums or {}).items():
                    kl[number] = total
        counted = plan.outcomes.loss_tokens
        self.log.add({"actor/reward_kl_penalty": float(kl[counted > 0].sum() / max(counted.sum(), 1))})
        return replace(plan.outcomes, rewards=plan.outcomes.rewards - self.kl_weight.value * kl)

    def _kl_penalty(self, plan: StepPlan) -> KLPenalty:
        layout = self.layout
        return KLPenalty(self.kl_weight.value, self.trainers, layout.data_parallel_rank, layout.reports, plan.shards)

    def _give_advantages(self, plan: StepPlan, outcomes: Outcomes, critics: list[list[Part]] | None) -> None:
        """Where they did not come with the shards: from the critic, of tokens, or of outcomes less the KL."""
        settings = self.recipe.algorithm
        estimator = ADVANTAGES[settings.advantage]
        if critics is None and not estimator.of_tokens and not settings.kl_in_reward:
            return  # they came with the shards, or there are none
        with self.log.phase("adv"):
            if critics is not None:
                self._scatter("load_advantages", critics)
            elif estimator.of_tokens:
                self._estimate_of_tokens()
            elif settings.kl_in_reward:
                assert estimator.function is not None
                found = estimator.function(outcomes, settings)
                self._scatter(
                    "set_advantages", [[float(found[s.number]) for s in shard.samples] for shard in plan.shards]
                )
                self.log.add(spread("critic/advantages", found))

    def _estimate_of_tokens(self) -> None:
        found = self.trainers.call("estimate_advantages", self.kl_weight.value)
        moments = sum((part for part in found if part is not None), Moments())
        whitening = Whitening.by(moments) if self.recipe.algorithm.whiten_advantages else Whitening()
        self.trainers.call("whiten_advantages", whitening)
        self.log.add(moments.metrics("critic/advantages", whitening))

    def _adapt_kl_weight(self, samples: int, still: bool) -> None:
        """After a step of so many samples; not where the policy stood `still` and its KL says nothing."""
        name = "actor/reward_kl_penalty" if self.recipe.algorithm.kl_in_reward else "actor/kl"
        self.log.add({"actor/kl_weight": self.kl_weight.value})
        if not still:
            self.kl_weight.learn(self.log.pending()[name], samples)

    def _update_actor(self, step: int, plan: StepPlan) -> None:
        log, scales = self.log, None
        with log.phase("update_actor"):
            if self.recipe.algorithm.correction.normalize:
                scales = correction_scales(self.trainers.call("correction_totals"))
            self._add_update(step, "actor", self.trainers.call("update_actor", self.kl_weight.value, scales))
        if not runs_old_log_prob_pass(self.recipe.algorithm):
            log.add(total_mismatch(self.trainers.call("measured_mismatch")).metrics())
        self._add_speed("actor", "update_actor", plan.update_flops)

    def _add_update(self, step: int, role: str, per_rank: Sequence[list[Metrics] | None]) -> None:
        """The actor's or the critic's; the memory is that of whichever has held more."""
        metrics, memory = combine_updates(per_rank, role), "perf/max_memory_allocated_gb"
        all_skipped = metrics[f"{role}/skipped_updates"] == max(len(part or ()) for part in per_rank)
        norm = metrics[f"{role}/grad_norm"]
        self.skipped.note(role, step, f"{role}/grad_norm was {norm}" if all_skipped else None)
        self.log.add({**metrics, memory: max(metrics[memory], self.log.pending().get(memory, 0.0))})

    def _scatter(self, method: str, per_data_parallel_rank: Sequence[Any]) -> None:
        """Call the trainers, each with what its data-parallel rank is to have."""
        self.trainers.scatter(method, [(per_data_parallel_rank[rank],) for rank in self.layout.data_parallel_rank])

    def _publish(self, version: int) -> None:
        """Weights to the engines, once nothing samples with the old ones. SFT and DPO have no engines."""
        if self.recipe.train.source != "rollout":
            return
        with self.log.phase("drain"):
            self.source.drain()
        with self.log.phase("weight_exchange"):
            self.log.add(self.placement.to_rollout(version))

    def _evaluate(self, step: int) -> None:
        assert self.evaluate is not None
        with self.log.phase("eval"):
            result = self.evaluate()
        for notice in result.notices:
            self.log.notice(f"evaluation after step {step}: {notice}")
        self.log.evaluation(step, result.metrics)

    def _save_if_due(self, step: int) -> None:
        train, last = self.recipe.train, step == self.recipe.train.steps
        if last and train.save_at_end:
            self._save(step)
        elif self._due(step, train.save_every):
            if self.skipped.keeps_checkpoints:
                self.log.notice(f"step {step}: no checkpoint, since no weight has changed; the ones before it are kept")
            else:
                self._save(step)

    def _save(self, step: int) -> None:
        with self.log.phase("drain"):
            self.source.drain()
        with self.log.phase("save"):
            state = {
                "step": step,
                "identity": self.identity,
                "metrics": self.log.pending(),  # the step's line is not written yet: a kill now must not lose it
                "source": self.source.state(),
                "kl_weight": None if self.kl_weight.target is None else self.kl_weight.value,  # else it is the recipe's
            }
            self.log.add(self.saver.save(step, state))

    def _rescue_checkpoint(self, error: BaseException) -> None:
        """The run ends with `error`: a checkpoint that is being written beside training is worth some patience."""
        lives = not isinstance(error, ClusterError)  # else nobody writes any more
        if lives and self.saver.pending:
            self.log.notice("waiting for the checkpoint that is being written; once more Ctrl-C or SIGTERM gives it up")
        try:
            path = self.saver.rescue(wait=lives)
        except Exception as failure:  # noqa: BLE001 -- what ends the run is `error`
            self.log.warn(f"the checkpoint that was being written is lost: {failure}")
            return
        if path is not None:
            self.log.notice(f"{path.name} was completed before the end")

    def _resume(self, checkpoint: Path) -> tuple[int, Metrics | None]:
        """The step that is done, and its metrics where its line was never written."""
        with self.log.phase("load"):
            state = load_state(checkpoint)
            notice = self._load_workers(checkpoint)
            self.source.restore(state["source"])
            if self.kl_weight.target is not None and state.get("kl_weight") is not None:
                self.kl_weight.value = state["kl_weight"]
            for path in set_aside_later(self.saver.folder, state["step"]):
                self.log.notice(f"a later checkpoint, of what this run now leaves behind, is kept as {path}")
        if notice is not None:
            self.log.notice(notice)
        self.log.notice(f"resumed after step {state['step']} from {checkpoint}")
        return int(state["step"]), state["metrics"] if self.log.next_step == state["step"] else None

    def _load_workers(self, checkpoint: Path) -> str | None:
        """Returns a notice where the run does not go on to the last bit."""
        notices = []
        if self.critic is not None:
            self.placement.to_critic()
            notices += self.critic.workers.call("load", str(checkpoint / "critic"))
        self.placement.to_train()
        notices = self.trainers.call("load", str(checkpoint / "trainer")) + notices
        return next((notice for notice in notices if notice is not None), None)

    @staticmethod
    def _due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0


def correction_scales(totals: Sequence[np.ndarray | None]) -> list[float]:
    """Each rank's sums and numbers of weights, mini batch by mini batch -> what makes each mini batch's mean weight 1."""
    sums = np.sum([part for part in totals if part is not None], axis=0)
    return [float(number / total) if total else 1.0 for total, number in sums]


def combine_updates(per_rank: Sequence[list[Metrics] | None], role: str) -> Metrics:
    """Metrics of the step, of the actor's or the critic's updates: the mean over its mini batches (skipped updates:
    their number; lr: the last)."""
    steps = next(part for part in per_rank if part is not None)
    metrics = {name: float(np.mean([step[name] for step in steps if name in step])) for name in steps[-1]}
    rate, skipped = f"{role}/lr", f"{role}/skipped_updates"
    return {**metrics, rate: steps[-1][rate], skipped: sum(step[skipped] for step in steps)}


def speed(name: str, flops_per_second: float, peak: float | None) -> Metrics:
    """A device's model FLOP/s -> TFLOP/s, and MFU where its peak is known."""
    metrics = {f"perf/tflops_per_device/{name}": flops_per_second / 1e12}
    return metrics if peak is None else {**metrics, f"perf/mfu/{name}": flops_per_second / peak}


def staleness(groups: Sequence[Group], version: int) -> Metrics:
    """How many versions the batch's samples lag behind the policy that learns from them."""
    lags = [version - sample.version for group in groups for sample in group.samples]
    return {"rollout/staleness_mean": float(np.mean(lags)), "rollout/staleness_max": float(np.max(lags))}
