"""Evaluation on held-out problems: pass@k, maj@k and greedy accuracy."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import comb
from typing import TypeVar

import numpy as np

from megarl.cluster.calls import StallTimer, attach, wait
from megarl.cluster.failures import ClusterError
from megarl.cluster.outage_watch import OutageWatch
from megarl.recipe.schema import EvaluationConfig, Recipe, RolloutConfig
from megarl.rollout.engine_handle import SamplingEngine
from megarl.rollout.fleet.fleet import Fleet
from megarl.rollout.metrics import agent_figures, groups_by_source
from megarl.rollout.unscored_groups import check_evaluation, scoring_counts, scoring_notice
from megarl.types import GenerationRequest, Group, Metrics, Prompt, Sample, Sampling, derived_seed

T = TypeVar("T")

EVALUATION_SEED = 0x5EED  # differs from training's seeds; the same at every evaluation
FIRST_EVALUATION_GROUP = 1 << 48  # evaluation groups have different numbers than training's


@dataclass
class EvaluationResult:
    metrics: Metrics
    groups: list[Group] = field(default_factory=list)  # the sampled answers, problem by problem
    notices: list[str] = field(default_factory=list)


def is_correct(sample: Sample) -> bool:
    """Return True if `accuracy` is positive; without an accuracy, if the reward is positive."""
    return sample.reward_parts.get("accuracy", sample.reward) > 0


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Return the probability that at least 1 of k samples, drawn without replacement, is correct (Codex, arXiv 2107.03374)."""
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def majority_is_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return 1.0 if the most frequent answer is correct; ties share the vote. Samples without an answer do not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = {answer for answer, good in zip(answers, correct, strict=True) if good}
    return sum(answer in right for answer in winners) / len(winners)


def accuracy_metrics(groups: Sequence[Group], ks: Sequence[int]) -> Metrics:
    """Return pass@k over all samples of each problem, maj@k over its first k, rewards and lengths."""
    metrics: Metrics = {}
    for k in ks:
        passes, majorities = [], []
        for group in groups:
            correct = [is_correct(sample) for sample in group.samples]
            passes.append(pass_at_k(sum(correct), len(correct), k))
            answers = [sample.answer for sample in group.samples[:k]]
            majorities.append(majority_is_correct(answers, correct[:k]))
        metrics[f"eval/pass@{k}"] = float(np.mean(passes))
        if k > 1 and any(sample.answer is not None for group in groups for sample in group.samples):
            metrics[f"eval/maj@{k}"] = float(np.mean(majorities))
    samples = [sample for group in groups for sample in group.samples]
    metrics["eval/rewards/mean"] = float(np.mean([sample.reward for sample in samples]))
    metrics["eval/response_length/mean"] = float(np.mean([sample.response_length for sample in samples]))
    metrics["eval/response_length/clip_ratio"] = float(np.mean([sample.truncated for sample in samples]))
    return {**metrics, **{f"eval/{figure}": value for figure, value in agent_figures(samples).items()}}


def evaluation_metrics(groups: Sequence[Group], greedy: Sequence[Group], ks: Sequence[int]) -> Metrics:
    """Return the metrics of `groups`, one per problem, and of their `greedy` answers (may be empty).

    Means exclude problems with an answer that could not be scored, and are omitted if no problem is left.
    """
    metrics: Metrics = {}
    scored = [group for group in groups if not group.failures]
    if scored:
        metrics |= accuracy_metrics(scored, ks)
    answers = [group.samples[0] for group in greedy if not group.failures]
    if answers:
        metrics["eval/greedy"] = float(np.mean([is_correct(sample) for sample in answers]))
    failed = scoring_counts([*groups, *greedy], "eval")["eval/scoring_failed"]
    if failed:
        metrics["eval/scoring_failed"] = failed
    return metrics


def by_source(groups: Sequence[Group], greedy: Sequence[Group], ks: Sequence[int]) -> Metrics:
    """Return the metrics and number of problems of each data source; empty if all problems have the same source."""
    parts, answers = groups_by_source(groups), groups_by_source(greedy)
    if len(parts) < 2:
        return {}
    metrics: Metrics = {}
    for data_source, part in parts.items():
        metrics[f"eval/{data_source}/problems"] = float(len(part))
        for name, value in evaluation_metrics(part, answers.get(data_source, []), ks).items():
            metric = name.removeprefix("eval/")
            metrics[f"eval/{data_source}/{metric}"] = value
    return metrics


def evaluate(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    engines: Sequence[SamplingEngine],
    stop_token_ids: Sequence[int],
    check_processes: Callable[[], None],
    fleet: Fleet | None = None,
    outages: OutageWatch | None = None,
) -> EvaluationResult:
    """Sample every problem and score it. Batches are repeatable only if the engines are idle.

    `check_processes` is called every second and raises if a process of the run has died. Raises RuntimeError if no
    problem finishes within `rollout.timeout`, or if too many cannot be scored (`reward.max_failed_share`). If an answer
    cannot be scored, its problem is counted and excluded from the means. `fleet`: of engines that may die; others then sample
    their problems, with the same seeds. `outages`: of services; `rollout.timeout` does not count them.
    """
    settings = recipe.evaluation
    problems = list(prompts)[: settings.limit]
    sampling = _sampling(recipe.rollout, settings, stop_token_ids)
    watched = (check_processes, recipe.rollout.timeout, fleet, outages)
    groups = _run(problems, sampling, engines, *watched)
    check_evaluation(groups, recipe.reward.max_failed_share)
    answers: list[Group] = []
    if settings.greedy:
        greedy = Sampling(n=1, max_tokens=sampling.max_tokens, temperature=0.0, stop_token_ids=sampling.stop_token_ids)
        answers = _run(problems, greedy, engines, *watched)
        check_evaluation(answers, recipe.reward.max_failed_share)
    metrics = {**evaluation_metrics(groups, answers, settings.ks), **by_source(groups, answers, settings.ks)}
    notice = scoring_notice([*groups, *answers], "problems", "The evaluation's figures leave these problems out.")
    return EvaluationResult(metrics, groups, [notice] if notice is not None else [])


def _sampling(rollout: RolloutConfig, settings: EvaluationConfig, stop_token_ids: Sequence[int]) -> Sampling:
    return Sampling(
        n=settings.samples,
        max_tokens=rollout.max_response_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        stop_token_ids=() if rollout.ignore_eos else tuple(stop_token_ids),
    )


def _run(
    problems: Sequence[Prompt],
    sampling: Sampling,
    engines: Sequence[SamplingEngine],
    check_processes: Callable[[], None],
    timeout: float,
    fleet: Fleet | None,
    outages: OutageWatch | None = None,
) -> list[Group]:
    """Return the groups of the problems, in their order. Problems of an engine that dies, or leaves, go to the others."""
    groups: dict[int, Group] = {}
    with fleet.evaluation() if fleet is not None else contextlib.nullcontext():
        while left := [number for number in range(len(problems)) if number not in groups]:
            remaining = {number: problems[number] for number in left}
            groups |= _sample(remaining, sampling, engines, check_processes, timeout, fleet, outages)
    return [groups[number] for number in range(len(problems))]


def _sample(
    problems: Mapping[int, Prompt],
    sampling: Sampling,
    engines: Sequence[SamplingEngine],
    check_processes: Callable[[], None],
    timeout: float,
    fleet: Fleet | None,
    outages: OutageWatch | None = None,
) -> dict[int, Group]:
    """Submit problems, by number, round-robin, with one message per engine; return the groups of the engines that
    did not die."""
    if fleet is not None and not fleet.serving:
        check_processes()  # raises: too few engines are left
    serving = list(range(len(engines))) if fleet is None else fleet.serving
    processes = {index: 0 if fleet is None else fleet.process(index) for index in serving}
    shares: dict[int, list[GenerationRequest]] = {index: [] for index in serving}
    owners: dict[int, int] = {}
    for position, (number, prompt) in enumerate(problems.items()):
        request = GenerationRequest(
            FIRST_EVALUATION_GROUP + number, prompt, sampling, derived_seed(EVALUATION_SEED, number)
        )
        owners[number] = serving[position % len(serving)]
        shares[owners[number]].append(request)
    submitted = {index: engines[index].submit(share) for index, share in shares.items() if share}
    collected = {number: engines[owner].collect(FIRST_EVALUATION_GROUP + number) for number, owner in owners.items()}
    stall_timer = StallTimer(timeout, pauses=lambda: outages is not None and outages.is_down)
    for future in collected.values():
        future.add_done_callback(lambda _: stall_timer.reset())

    def check() -> None:
        check_processes()
        waiting = [number for number, future in collected.items() if not future.done()]
        if waiting:
            name = engines[owners[waiting[0]]].name
            stall_timer.check(len(waiting), f"problem {waiting[0]} of the evaluation, on {name}")

    def result(call: Future[T], engine: int) -> T | None:
        """Wait for a call; None if its engine has died."""
        try:
            return wait(call, check)
        except ClusterError as error:
            if fleet is not None and fleet.lost(engine, processes[engine], error):
                return None
            check_processes()  # raises if too few engines are left, and names all dead ones
            raise

    for index, submission in submitted.items():
        result(submission, index)
    answers = {number: result(future, owners[number]) for number, future in collected.items()}
    return {number: attach(answer) for number, answer in answers.items() if answer is not None}
