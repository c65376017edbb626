"""Estimated time of a step, phase by phase, from FLOPs, bytes and the table of devices. Pure, in milliseconds.

Every number is an estimate. Each phase states its assumptions; docs/planner.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from megarl.algorithms.advantages import AdvantageSource, uses_critic
from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.objective import needs_teacher, runs_old_log_prob_pass, runs_reference_pass
from megarl.commands.plan.count.engines import policy_engine
from megarl.commands.plan.count.types import EngineRank, Estimate, Links, PhaseTime, RecipePlan
from megarl.commands.plan.time import trainers as training
from megarl.commands.plan.time.cost import Cost, host_seconds
from megarl.commands.plan.time.engines import Engines, generate, read, room
from megarl.commands.plan.time.lengths import Lengths, MicroBatches, micro_batches
from megarl.commands.plan.time.spread import published_ratios, runs_of_kind, spreads
from megarl.commands.plan.time.trainers import Trainers
from megarl.commands.plan.time.weight_sync import moved, uncounted, weight_sync_cost
from megarl.errors import pluralize
from megarl.hf import published
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.shape import ModelShape, model_shape
from megarl.platform.device_table import Device
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.derived.lengths import samples_per_group
from megarl.recipe.derived.weight_sync_route import is_sharded
from megarl.recipe.schema import Recipe

T = TypeVar("T")
HAND_OVER = "hand_over"
"""The phase in which trainers return to the devices. No metric timing_s/... exists for it; timing_s/step contains it."""

_VECTORS = "a few vectors with one number per token"


def estimate(
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device,
    *,
    response: float | None = None,
    lengths: Lengths | None = None,
    engine: EngineRank | None = None,
    links: Links | None = None,
    tried: float = 1.0,
) -> Estimate:
    """Estimate one step of `recipe` after the critic's warm-up, without evaluation and checkpoints.

    `models`: config.json of the policy ("rollout"), and of critic and teacher, which are as large as the policy if absent.
    `response`: mean tokens of a response (`Lengths.of`); `lengths`: all lengths instead. `engine`: counted memory of an engine
    rank; `links`: bytes of the weight sync; None: computed by formula. `tried`: prompts sampled per prompt that is trained on;
    with over-sampling, a synchronous step samples at least `oversample` of them. Raises ValueError for a model without a FLOP count.
    """
    step = Step(
        recipe,
        device,
        lengths or Lengths.of(recipe, response),
        model_shape(models["rollout"]),
        model_shape(models["critic"]) if "critic" in models else None,
        model_shape(models["teacher"]) if "teacher" in models else None,
        engine,
        links,
        tried,
    )
    phases, batches = step.phases(), step.batches
    return Estimate(
        phases=phases,
        seconds=duration(phases),
        tokens=step.samples * step.lengths.tokens,
        micro_batches=batches.count,
        tokens_per_micro_batch=batches.tokens,
        bubble=training.bubble(step.actor, batches),
        response=step.lengths.response,
        weights=step.seconds_by_route() if recipe.train.source == "rollout" else {},
    )


def with_estimate(
    counted: RecipePlan,
    recipe: Recipe,
    models: Mapping[str, dict[str, Any]],
    device: Device,
    table: Device | None,
    response: float | None,
) -> RecipePlan:
    """Return `counted` with its estimate.

    With a calibrated `device` the estimate for the `table`'s device is added, else the range over published runs.
    """

    def estimate_on(candidate: Device) -> Estimate:
        return estimate(recipe, models, candidate, response=response, engine=counted.engine, links=counted.weight_sync)

    result = estimate_on(device)
    if table is not None and table != device:
        return replace(counted, estimate=replace(result, uncalibrated=estimate_on(table)))
    if device.factors:
        return replace(counted, estimate=result)
    return _with_spread(counted, result, models["rollout"])


def _with_spread(counted: RecipePlan, estimate: Estimate, model: dict[str, Any]) -> RecipePlan:
    """Add the range of `estimate` over published runs; for the step also without runs of the recipe's model."""
    experts, ratios = bool(number_of_experts(text_fields(model))), published_ratios()
    spread = spreads(estimate, experts=experts, ratios=ratios)
    if not spread:
        return replace(counted, estimate=estimate)
    runs, shape = runs_of_kind(experts=experts, ratios=ratios), model_shape(model)
    of_model = [run for run in runs if model_shape(published.read(run.model)) == shape]
    other_runs = [run for run in runs if run not in of_model]
    other_spreads = spreads(estimate, experts=experts, ratios=other_runs) if of_model else []
    return replace(
        counted,
        estimate=estimate,
        spread=spread,
        compared=[run.run for run in runs],
        model_kind="with experts" if experts else "without experts",
        own_runs=[run.run for run in of_model] if other_spreads else [],
        without_own=other_spreads[-1] if other_spreads else None,
    )


def spans(phases: list[PhaseTime]) -> list[tuple[float, float]]:
    """Return begin and end of each phase in seconds since the begin of the step."""
    result, now = [], 0.0
    for phase in phases:
        begin = now if phase.begin is None else phase.begin
        now = begin + phase.seconds
        result.append((begin, now))
    return result


def duration(phases: list[PhaseTime]) -> float:
    """Return the seconds of a step."""
    return max(end for _, end in spans(phases))


@dataclass
class Step:
    """One step of a recipe, and the cost of each phase. Steps of recipes that differ only in layout may share `cache`."""

    recipe: Recipe
    device: Device
    lengths: Lengths
    shape: ModelShape
    critic_shape: ModelShape | None = None
    teacher_shape: ModelShape | None = None
    engine: EngineRank | None = None
    links: Links | None = None
    tried: float = 1.0
    cache: dict[Hashable, Any] = field(default_factory=dict)  # parts that steps with another layout share
    _found: list[PhaseTime] = field(default_factory=list)
    _begin: float | None = None  # begin of the next phase, if it is not the end of the previous one

    @property
    def samples(self) -> int:
        """Samples that are trained on."""
        return self.recipe.data.prompts_per_step * samples_per_group(self.recipe)

    @property
    def tries(self) -> float:
        """Prompts sampled per prompt that is trained on. With staleness, a surplus of over-sampling enters the next batches."""
        dynamic = self.recipe.algorithm.dynamic_sampling
        starts = dynamic.oversample if dynamic.enabled and self.recipe.rollout.max_staleness == 0 else 1.0
        return max(self.tried, starts)

    @property
    def actor(self) -> Trainers:
        return Trainers(self.recipe, self.shape, self.device)

    @property
    def critic(self) -> Trainers:
        return Trainers(critic_view(self.recipe), self.critic_shape or self.shape, self.device, output=False)

    @cached_property
    def batches(self) -> MicroBatches:
        return self._batches(self.actor)

    def _once(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self.cache:
            self.cache[key] = compute()
        value: T = self.cache[key]
        return value

    def _batches(self, trainers: Trainers) -> MicroBatches:
        recipe, megatron, ranks = trainers.recipe, trainers.recipe.megatron, trainers.data_parallel
        each = self.samples / recipe.actor.mini_batches
        every = megatron.pipeline_parallel if megatron.virtual_pipeline else 1
        tokens = recipe.actor.max_tokens_per_micro_batch
        key = "batches", trainers.output, ranks, megatron.context_parallel, every, tokens
        return self._once(key, lambda: micro_batches(recipe, trainers.shape, self.lengths, each, ranks))

    @cached_property
    def engines(self) -> Engines:
        rollout = self.recipe.rollout
        number = 4 if (rollout.dtype or self.recipe.model.dtype) == "float32" else 2
        engines = Engines(
            self.shape,
            self.device,
            count=rollout.engines,
            tensor=rollout.tensor_parallel,
            number=number,
            weight=number if rollout.quantization is None else 1,
            group=rollout.data_parallel,
            spread=rollout.spreads_experts and bool(self.shape.experts),
            prefix=rollout.engine_args.get("enable_prefix_caching", True) is not False,
        )
        return replace(engines, sequences=room(engines, self.lengths, policy_engine(self.recipe).limits, self.engine))

    def phases(self) -> list[PhaseTime]:
        """Return the phases in the order of the training loop. Engines that may run ahead overlap with the trainers."""
        recipe, settings = self.recipe, self.recipe.algorithm
        rolls = recipe.train.source == "rollout"
        overlaps = rolls and recipe.rollout.max_staleness > 0 and recipe.cluster.placement == "disaggregated"
        self._found, self._begin = [], None
        if rolls:
            self._add("gen", self._generate(), self._of_engines())
            self._begin = 0.0 if overlaps else None
        if needs_teacher(settings):
            self._add("teacher", read(self._teachers, self.lengths.tokens, self.samples), self._of_teacher())
        critic_first = uses_critic(settings) and not settings.kl_in_reward
        if critic_first:
            self._consult_critic()
        self._add(HAND_OVER, self._hand_over(), "in no timing_s/... but timing_s/step; host memory is page-locked")
        passed = training.forward(self.actor, self.batches, recipe.actor.mini_batches)
        if runs_old_log_prob_pass(settings):
            self._add("old_log_prob", passed, self._of_trainers())
        if runs_reference_pass(settings):
            self._add("reference", passed + training.reference_swap(self.actor), self._of_trainers())
        if uses_critic(settings) and not critic_first:
            self._consult_critic()
        elif ADVANTAGES[settings.advantage].source is AdvantageSource.TOKENS:
            self._add("adv", self._vectors(), _VECTORS)
        learned = training.update(self.actor, self.batches, recipe.actor.mini_batches) * recipe.actor.epochs
        self._add("update_actor", learned, self._of_trainers())
        if rolls:
            if overlaps:
                self._begin = max(end for _, end in spans(self._found))
            sharded = self._sharded()
            sent = weight_sync_cost(self.actor, self.engines, sharded) + moved(self.actor)
            self._add("weight_sync", sent, self._describe_weight_sync(sharded))
        return self._found

    def _add(self, name: str, cost: Cost, assumed: str) -> None:
        """Add a phase, unless it costs nothing."""
        if not cost.seconds:
            return
        factor = self.device.factors.get(name, 1.0)
        if factor != 1:
            assumed = f"{assumed}; times {factor:.3g}, the measured factor"
        cost *= factor
        self._found.append(PhaseTime(name, cost.seconds, cost.bound, assumed, self._begin, cost.parts))
        self._begin = None

    def _hand_over(self) -> Cost:
        """Return the cost of moving the actor to the devices, after the critic has used them."""
        cost = moved(self.actor)
        return cost + moved(self.critic) * 2 if uses_critic(self.recipe.algorithm) else cost

    def _generate(self) -> Cost:
        greedy = ADVANTAGES[self.recipe.algorithm.advantage].needs_greedy
        rollout, prompts = self.recipe.rollout, self.recipe.data.prompts_per_step * self.tries
        key = "gen", rollout.engines, rollout.tensor_parallel, rollout.data_parallel, rollout.expert_parallel
        samples = rollout.samples_per_prompt + greedy
        return self._once(key, lambda: generate(self.engines, self.lengths, prompts, samples))

    @property
    def _teachers(self) -> Engines:
        teacher, engines = self.recipe.teacher, sum(each.engines for each in self.recipe.teacher.by_key.values())
        number = 4 if (teacher.dtype or self.recipe.model.dtype) == "float32" else 2
        shape = self.teacher_shape or self.shape
        return Engines(shape, self.device, engines, teacher.tensor_parallel, number=number, weight=number)

    def _consult_critic(self) -> None:
        critic = self.critic
        batches, mini_batches = self._batches(critic), critic.recipe.actor.mini_batches
        self._add("values", training.forward(critic, batches, mini_batches), self._of_trainers())
        self._add("adv", self._vectors(), _VECTORS)
        learned = training.update(critic, batches, mini_batches) * critic.recipe.actor.epochs
        self._add("update_critic", learned, self._of_trainers())

    def _vectors(self) -> Cost:
        """Return the cost of three vectors of four bytes per token, to the host and back, per data-parallel rank."""
        tokens = self.samples * self.lengths.tokens / self.actor.data_parallel
        return Cost(host=host_seconds(self.device, 24 * tokens))

    # --- assumptions of the phases -----------------------------------------------------------------------------------

    def _of_trainers(self) -> str:
        return f"{self.device.train_share:.0%} of {self.device.flops / 1e12:.0f} TFLOP/s; {self.lengths.assumed}"

    def _of_engines(self) -> str:
        device, engines = self.device, self.engines
        parts = [
            f"{device.decode_share:.0%} of {device.bandwidth / 1e12:.2g} TB/s, {device.prefill_share:.0%} of "
            f"{device.flops / 1e12:.0f} TFLOP/s",
            f"{pluralize(round(engines.sequences), 'sequence')} at a time"
            + (", experts used evenly" if self.shape.experts else ""),
            self.lengths.assumed,
            f"responses spread evenly from {self.lengths.shortest:.0f} to {self.lengths.longest:.0f}",
            "scoring, tools and judges keep up",
        ]
        if self.recipe.algorithm.dynamic_sampling.enabled:
            filtered = 1 - 1 / self.tries
            missing = "filtered" if self.recipe.algorithm.dynamic_sampling.oversample == 1.0 else "filtered or surplus"
            parts.append(f"{filtered:.0%} of groups are {missing}" if filtered else f"no group is {missing}")
        return "; ".join(parts)

    def _of_teacher(self) -> str:
        size = "" if self.teacher_shape else "; as large as the policy"
        if len(self.recipe.teacher.by_source) > 1:
            size += "; teachers as large as the largest, with equal shares"
        return (
            f"{self.device.prefill_share:.0%} of {self.device.flops / 1e12:.0f} TFLOP/s{size}; {self.lengths.assumed}"
        )

    def _sharded(self) -> Links | None:
        """Return the bytes of sharded copies, or of adapters only; None: full sync."""
        if self.links is None:
            return uncounted(self.actor, self.engines) if is_sharded(self.recipe) else None
        return self.links if self.links.route != "full" else None

    def seconds_by_route(self) -> dict[str, float]:
        """Return the seconds of a weight update by each possible route, with the trainers' offloading."""
        sharded, whole = self._sharded(), weight_sync_cost(self.actor, self.engines, None)
        factor = self.device.factors.get("weight_sync", 1.0)
        costs = {"full": whole} | (
            {sharded.route: weight_sync_cost(self.actor, self.engines, sharded)} if sharded else {}
        )
        return {name: (cost + moved(self.actor)).seconds * factor for name, cost in costs.items()}

    def _describe_weight_sync(self, sharded: Links | None) -> str:
        ways = {"device": "from device to device", "ipc": "out of the trainers' device memory"}
        way = ways.get(self.recipe.weight_sync.transport, "through the host's memory")
        routes = {
            "sharded": f"sharded copies, {way}",
            "adapters": "adapters alone, through the host's memory",
            "full": "every trainer gathers all weights, rank 0 sends",
        }
        how = routes[sharded.route if sharded else "full"]
        return f"{self.device.link_share:.0%} of links; {how}"
