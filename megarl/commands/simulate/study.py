"""Simulations of a recipe for each rule, staleness, window, split and factor of over-sampling, and the recommended one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megarl.commands.plan.search.layouts import overrides
from megarl.commands.simulate.cli_options import STEPS
from megarl.commands.simulate.group_filter import DrawnFilter
from megarl.commands.simulate.lengths import DrawnLengths
from megarl.commands.simulate.outcome import Outcome
from megarl.commands.simulate.planned import SimulatedRecipe
from megarl.commands.simulate.simulation import AsyncSchedule, Simulation
from megarl.errors import InputError
from megarl.recipe.algorithm import DynamicSamplingConfig
from megarl.recipe.derived.at_update import UpdateRule, update_rule
from megarl.recipe.schema import Recipe

RULES: tuple[UpdateRule, ...] = ("drain", "finish", "refresh", "keep")
STALENESS, WINDOWS = (1, 2, 4, 8), (0.0, 0.3)
_FIRST_STALENESS, _FIRST_WINDOW = 4, 0.3  # of the schedule with which splits are compared first
CONTROLLER_BYTES = 600  # per sample on the controller: `types.Sample`, measured with 16 samples a group
_NEAR = 0.95  # of the fastest: below it less lag, or fewer sampled groups, are not worth the time
_SURPLUS = (0.8, 1.0, 1.1, 1.25, 1.5)  # factors of over-sampling, relative to the expected groups for a place


@dataclass(frozen=True)
class Setting:
    """A point of the comparison. `trainers` is the number of all devices if `colocated`; with a staleness above 0, running
    requests then wait for the update (rule refresh). `oversample`: None is the recipe's."""

    trainers: int
    rule: UpdateRule
    max_staleness: float = 0
    window: float = 0.0
    colocated: bool = False
    oversample: float | None = None

    @property
    def name(self) -> str:
        if self.colocated:
            return "colocated" if self.max_staleness else "sync"
        return self.rule


@dataclass(frozen=True)
class SimulatedRun:
    """The outcome of a setting. `gain`: tokens per second relative to the synchronous run; None without that run."""

    setting: Setting
    schedule: AsyncSchedule
    engines: int
    engine_devices: int
    outcome: Outcome
    gain: float | None

    @property
    def name(self) -> str:
        return self.setting.name


@dataclass(frozen=True)
class Oversampling:
    """Runs of a schedule with several factors of over-sampling, in order, and the recommended one of them."""

    runs: list[SimulatedRun]
    best: SimulatedRun


@dataclass
class Study:
    """All simulations of a recipe."""

    recipe: str
    device: str
    devices: int
    runs: list[SimulatedRun]  # one split, the synchronous run first
    splits: list[SimulatedRun]  # the recommended schedule with each split
    best: SimulatedRun
    settings: list[str]  # command-line settings of `best`
    bytes_per_token: float
    best_colocated: SimulatedRun | None = None  # of a colocated recipe, among its runs on shared devices
    colocated_settings: list[str] = field(default_factory=list)  # command-line settings of `best_colocated`
    oversampled: list[Oversampling] = field(default_factory=list)  # with dynamic sampling
    notes: list[str] = field(default_factory=list)

    @property
    def trainers(self) -> int:
        """Trainers of `runs` with separate devices."""
        return self.runs[-1].setting.trainers

    def pending_bytes(self, run: SimulatedRun) -> float:
        """Return the host memory of the most finished samples that wait, over all machines of engines."""
        return run.outcome.pending_tokens * self.bytes_per_token


class Runner:
    """Simulates settings of one recipe, each once. `steps`: measured ones."""

    def __init__(self, subject: SimulatedRecipe, steps: int) -> None:
        self.subject, self.steps = subject, steps
        self.refusals: dict[str, list[Setting]] = {}  # by reason
        self._runs: dict[Setting, SimulatedRun | None] = {}
        self._lengths = DrawnLengths(subject.lengths, subject.recipe.rollout.samples_per_prompt, subject.seed)
        self._filter = DrawnFilter(subject.filtered.share, subject.seed) if subject.filtered is not None else None
        self.synchronous: SimulatedRun | None = None
        self.synchronous = self.run(Setting(subject.devices, "drain", colocated=True))

    def layout(self, setting: Setting) -> Recipe:
        subject = self.subject
        if setting.colocated:
            layout = subject.colocated(setting.max_staleness, setting.window)
        else:
            layout = subject.split(setting.trainers, setting.rule, setting.max_staleness, setting.window)
        return layout if setting.oversample is None else subject.oversampled(layout, setting.oversample)

    def settings(self, run: SimulatedRun) -> list[str]:
        """Return the command-line settings that turn the recipe into the layout of `run`."""
        return overrides(self.subject.recipe, self.layout(run.setting), KEYS)

    def run(self, setting: Setting) -> SimulatedRun | None:
        """Return the simulated run; None if a run would refuse the setting."""
        if setting not in self._runs:
            self._runs[setting] = self._run(setting)
        return self._runs[setting]

    def _run(self, setting: Setting) -> SimulatedRun | None:
        layout = self.layout(setting)
        reason = self.subject.refusal(layout)
        if reason is not None:
            self.refusals.setdefault(reason, []).append(setting)
            return None
        schedule, costs = AsyncSchedule.of(layout), self.subject.costs(layout)
        simulation = Simulation(costs, schedule, self._lengths, layout.rollout.samples_per_prompt, self._filter)
        outcome = simulation.run(self.steps, warmup=2 * (schedule.max_lag + 1))
        gain: float | None
        if self.synchronous is not None:
            gain = outcome.tokens_per_second / self.synchronous.outcome.tokens_per_second
        else:
            gain = 1.0 if setting.name == "sync" else None
        rollout = layout.rollout
        return SimulatedRun(
            setting, schedule, rollout.engines, rollout.engines * rollout.tensor_parallel, outcome, gain
        )


def study(subject: SimulatedRecipe, *, steps: int = STEPS, max_lag: int | None = None) -> Study:
    """Simulate the recipe. `max_lag`: largest lag in versions of a recommended schedule; None: any.

    Raises InputError if no split of the devices has whole layouts and the recipe is not colocated, or if a run would refuse every
    setting.
    """
    counts = subject.trainer_counts()
    notes = []
    if not counts:
        block, group = subject.blocks
        undivided = (
            f"{subject.devices} devices cannot be split: trainers take multiples of {block} devices (section megatron), "
            f"engines multiples of {group} (rollout.tensor_parallel x data_parallel)"
        )
        enough = f"--devices {block + group} or another sum of such multiples"
        if subject.recipe.cluster.placement != "colocated":
            raise InputError(f"{undivided}. Give {enough}.")
        notes.append(f"Only engines on the trainers' devices are simulated: {undivided}. For the others give {enough}.")
    runner = Runner(subject, steps)
    trainers = _fastest_split(runner, counts) if counts else subject.devices
    runs, best, splits = _at_split(runner, counts, trainers, max_lag)
    if best.setting.trainers != trainers and not best.setting.colocated:  # another split suits the schedule better
        runs, best, splits = _at_split(runner, counts, best.setting.trainers, max_lag)
    oversampled = [_oversampling(runner, run) for run in _bases(runner, counts, best)]
    best = oversampled[-1].best if oversampled else best
    shared = _best_colocated(runs, max_lag)
    return Study(
        recipe=subject.recipe.name,
        device=subject.device.name,
        devices=subject.devices,
        runs=runs,
        splits=splits,
        best=best,
        settings=runner.settings(best),
        bytes_per_token=subject.bytes_per_token,
        best_colocated=shared,
        colocated_settings=[] if shared is None else runner.settings(shared),
        oversampled=oversampled,
        notes=[*notes, *_refused(runner), *assumptions(subject, steps)],
    )


def _fastest_split(runner: Runner, counts: list[int]) -> int:
    """Return the number of trainers that is fastest with a fixed schedule, the first rule that no run refuses."""
    for rule in ("refresh", "keep", "finish", "drain"):
        settings = [Setting(count, rule, _FIRST_STALENESS, _FIRST_WINDOW) for count in counts]
        runs = [run for setting in settings if (run := runner.run(setting)) is not None]
        if runs:
            return max(runs, key=lambda run: run.outcome.tokens_per_second).setting.trainers
    reasons = "; ".join(runner.refusals)
    raise InputError(f"A run would refuse every split of {runner.subject.devices} devices: {reasons}.")


def _at_split(
    runner: Runner, counts: list[int], trainers: int, max_lag: int | None
) -> tuple[list[SimulatedRun], SimulatedRun, list[SimulatedRun]]:
    """Return the runs of all schedules at a split, the recommended run, and its schedule at each split."""
    settings = _schedules(runner.subject, trainers if counts else None)
    runs = [run for setting in settings if (run := runner.run(setting)) is not None]
    if runner.synchronous is not None:
        runs = [runner.synchronous, *runs]
    if not runs:
        raise InputError(
            f"A run would refuse every setting on {runner.subject.devices} devices: {'; '.join(runner.refusals)}."
        )
    best = recommended(runs, max_lag)
    if best.setting.colocated:
        return runs, best, [best]
    chosen = best.setting
    candidates = [Setting(count, chosen.rule, chosen.max_staleness, chosen.window) for count in counts]
    splits = [run for setting in candidates if (run := runner.run(setting)) is not None]
    return runs, max(splits, key=lambda run: run.outcome.tokens_per_second), splits


def _schedules(subject: SimulatedRecipe, trainers: int | None) -> list[Setting]:
    """Return the settings of the table, but for `sync`. Requests of colocated engines run ahead only if the recipe is colocated.

    trainers: those with separate devices; None: the devices cannot be split.
    """
    rollout = subject.recipe.rollout
    windows, stalenesses = sorted({*WINDOWS, rollout.window}), sorted({*STALENESS, rollout.max_staleness} - {0})
    result = []
    if subject.recipe.cluster.placement == "colocated":
        result += [Setting(subject.devices, "refresh", s, w, colocated=True) for s in stalenesses for w in windows]
    for rule in RULES if trainers is not None else ():
        for staleness in stalenesses:
            for window in windows if rule != "drain" else windows[:1]:  # drain has no window
                result.append(Setting(trainers or 0, rule, staleness, window))
    return result


def recommended(runs: list[SimulatedRun], max_lag: int | None) -> SimulatedRun:
    """Return the run with the least lag among those with at least 95 % of the largest throughput.

    Raises InputError if every run has a larger lag than `max_lag`.
    """
    allowed = [run for run in runs if max_lag is None or run.schedule.max_lag <= max_lag]
    if not allowed:
        raise InputError(f"--max-lag {max_lag}: each possible schedule has a larger lag. Give a larger number.")
    fastest = max(run.outcome.tokens_per_second for run in allowed)
    near = [run for run in allowed if run.outcome.tokens_per_second >= _NEAR * fastest]
    return min(near, key=lambda run: (run.outcome.lag_mean, -run.outcome.tokens_per_second))


def _best_colocated(runs: list[SimulatedRun], max_lag: int | None) -> SimulatedRun | None:
    """Return the recommended run with colocated engines; None if no such run is within `max_lag`."""
    shared = [run for run in runs if run.setting.colocated and (max_lag is None or run.schedule.max_lag <= max_lag)]
    return recommended(shared, None) if any(run.name == "colocated" for run in shared) else None


def factors(dynamic: DynamicSamplingConfig, share: float) -> list[float]:
    """Return the factors of over-sampling that are compared, by the `share` of filtered groups: 1, the recipe's, and some around
    the expected number of groups for a place, within `algorithm.dynamic_sampling.max_attempts`."""
    around = {min(round(part / (1 - share), 1), float(dynamic.max_attempts)) for part in _SURPLUS}
    return sorted({1.0, dynamic.oversample, *(factor for factor in around if factor > 1)})


def _bases(runner: Runner, counts: list[int], best: SimulatedRun) -> list[SimulatedRun]:
    """Return the runs whose schedules are simulated with other factors of over-sampling: `sync`, the recipe's, and `best` last."""
    if runner.subject.filtered is None:
        return []
    recipes_run = runner.run(_own_setting(runner.subject.recipe, runner.subject.devices, counts, best.setting.trainers))
    runs = [run for run in (runner.synchronous, recipes_run) if run is not None and run is not best]
    return [*dict.fromkeys(runs), best]


def _own_setting(recipe: Recipe, devices: int, counts: list[int], trainers: int) -> Setting:
    """Return the schedule of the recipe, with its trainers if the devices can be split so, else with `trainers`."""
    rollout, rule = recipe.rollout, update_rule(recipe)
    window = 0.0 if rule == "drain" else rollout.window
    if recipe.cluster.placement == "colocated" or not counts:
        return Setting(devices, rule, rollout.max_staleness, window, colocated=True)
    given = recipe.cluster.trainers
    return Setting(given if given in counts else trainers, rule, rollout.max_staleness, window)


def _oversampling(runner: Runner, base: SimulatedRun) -> Oversampling:
    """Simulate the schedule of `base` with each factor. The smallest factor with at least 95 % of the largest throughput is recommended."""
    subject = runner.subject
    assert subject.filtered is not None
    dynamic = subject.recipe.algorithm.dynamic_sampling
    settings = [
        replace(base.setting, oversample=None if factor == dynamic.oversample else factor)
        for factor in factors(dynamic, subject.filtered.share)
    ]
    runs = [run for setting in settings if (run := runner.run(setting)) is not None]
    fastest = max(run.outcome.tokens_per_second for run in runs)
    return Oversampling(runs, next(run for run in runs if run.outcome.tokens_per_second >= _NEAR * fastest))


KEYS = (
    "cluster.placement",
    "cluster.trainers",
    "megatron.offload",
    "weight_sync.transport",
    "rollout.engines",
    "rollout.max_staleness",
    "rollout.at_update",
    "rollout.refresh_after",
    "rollout.window",
    "rollout.min_engines",
    "rollout.step_timeout",
    "algorithm.dynamic_sampling.oversample",
)
"""Recipe keys that a study may change."""


def _refused(runner: Runner) -> list[str]:
    notes = []
    for reason, settings in runner.refusals.items():
        names = sorted({setting.name for setting in settings})
        notes.append(f"Not simulated: {', '.join(names)}, which a run refuses: {reason}.")
    if runner.synchronous is None:
        notes.append("No synchronous run on all devices is possible, so no gain is shown.")
    return notes


def _filter_assumptions(subject: SimulatedRecipe) -> list[str]:
    if subject.filtered is None:
        return []
    return [f"{subject.filtered.assumed}, in each step alike and for responses of any length."]


def assumptions(subject: SimulatedRecipe, steps: int) -> list[str]:
    """Return the assumptions of a study, for the reader."""
    rates = "calibrated" if subject.device.factors else "from data sheets"
    return [
        f"{subject.lengths.assumed}; prompts of {subject.lengths.prompt:,.0f} tokens.",
        *_filter_assumptions(subject),
        f"Seconds of decode steps, prefill, training and weight sync are the planner's estimates for {subject.device.name} "
        f"({rates}), with caches of mean length. Memory is not counted: run `megarl plan` with the settings above.",
        "Engines and trainers wait during a weight sync. Scoring and tools take no time, and no evaluation or checkpoint "
        "interrupts.",
        f"{steps} steps after the start; repeat with another --seed to see the spread: with {STEPS} steps, about 5 % of the "
        "throughput with long tails, and more with fewer steps.",
        "Never measured on an accelerator: updates of running requests, their recomputed caches, and every gain shown here. The "
        "effect of the lag on learning is not simulated.",
    ]
