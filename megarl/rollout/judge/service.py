"""Add the judge's scores to groups before they are collected.

A group goes to the judge as soon as its other scorers are done, while other groups are sampled. Training and evaluation
collect groups in the same way with and without a judge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from megarl.cluster.calls import when_done
from megarl.recipe.judge import JUDGE, JudgeConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards.weighted import with_judgement
from megarl.rollout.engine_handle import EngineHandle, JudgeHandle, SamplingEngine
from megarl.rollout.fleet.fixed import FixedModelEngines
from megarl.rollout.judge.server import Judgement
from megarl.rollout.judge.tape import Verdicts
from megarl.types import DataRef, GenerationRequest, Group, InlineData, Partial, Prompt, SampleFailure, SampleTokens

_OF_A_REPLAY = "the recorded verdict, see samples/ of the recorded run"


@dataclass(frozen=True)
class JudgedData:
    """Reference to a group's vectors and to the judge's verdicts on it. `get` fetches both and adds each verdict to its
    sample's `reason`."""

    vectors: DataRef
    verdicts: DataRef

    @property
    def is_lost(self) -> bool:
        return self.vectors.is_lost or self.verdicts.is_lost

    def get(self) -> list[SampleTokens]:
        pairs = zip(self.vectors.get(), self.verdicts.get(), strict=True)
        return [
            replace(sample, reason="\n".join(filter(None, (sample.reason, f"{JUDGE}: {verdict}"))))
            for sample, verdict in pairs
        ]


class Judge:
    """The judge's engines. A group goes to the engine with the fewest groups, and to another one if it dies."""

    def __init__(
        self,
        settings: JudgeConfig,
        reward: RewardConfig,
        engines: FixedModelEngines[JudgeHandle],
        verdicts: Verdicts | None = None,
    ):
        """verdicts: the tape that records them; None: no tape."""
        self.settings, self.reward, self.engines, self.verdicts = settings, reward, engines, verdicts

    def judge(self, group: Group, prompt: Prompt, data: DataRef, responses: DataRef) -> Future[tuple[Group, DataRef]]:
        """Add the judge's term to the rewards of `group`. `responses`: the text of each sample."""
        result: Future[tuple[Group, DataRef]] = Future()
        row, began = replace(prompt, tokens=(), text="", images=(), videos=()), time.monotonic()

        def judged(call: Future[tuple[list[Judgement], DataRef]]) -> None:
            judgements, texts = call.result()
            _add(group, judgements, self.settings, self.reward)
            if self.verdicts is not None:
                self.verdicts.write(group.number, judgements)
            group.judge_seconds = time.monotonic() - began
            result.set_result((group, JudgedData(data, texts)))

        when_done(self.engines.ask(lambda engine: engine.judge(group.number, row, responses)), judged, result)
        return result


class RecordedJudge:
    """The judge of a replay: it adds the recorded verdicts."""

    def __init__(self, settings: JudgeConfig, reward: RewardConfig, verdicts: Verdicts):
        self.settings, self.reward, self.verdicts = settings, reward, verdicts

    def judge(self, group: Group, prompt: Prompt, data: DataRef, responses: DataRef) -> Future[tuple[Group, DataRef]]:
        """Add the recorded judge's term to the rewards of `group`. Without a record, the result never comes: a killed run had
        not collected the group, and its replay ends before it needs it. Raises ReplayError for a group that it had collected.
        """
        result: Future[tuple[Group, DataRef]] = Future()
        judgements = self.verdicts.next(group.number)
        if judgements is not None:
            _add(group, judgements, self.settings, self.reward)
            self.verdicts.write(group.number, judgements)
            result.set_result((group, JudgedData(data, InlineData([_OF_A_REPLAY] * len(judgements)))))
        return result


def _add(group: Group, judgements: Sequence[Judgement], settings: JudgeConfig, reward: RewardConfig) -> None:
    """Add the judge's term to the rewards of a group's samples."""
    for sample, judgement in zip(group.samples, judgements, strict=True):
        group.scoring_retries += judgement.retries
        if isinstance(judgement.result, SampleFailure):
            group.failures += (judgement.result,)
            sample.reward = math.nan
            continue
        sample.reward, sample.reward_parts = with_judgement(
            sample.reward, sample.reward_parts, judgement.result, reward.functions.get(JUDGE), settings.right_from
        )


class JudgedEngine:
    """A `SamplingEngine` that collects groups after the judge has scored them."""

    def __init__(self, engine: EngineHandle, judge: Judge | RecordedJudge):
        self.engine, self.judge = engine, judge
        self._prompts: dict[int, Prompt] = {}  # of groups in flight

    @property
    def name(self) -> str:
        return self.engine.name

    def submit(self, requests: list[GenerationRequest]) -> Future[None]:
        self._prompts.update({request.group: request.prompt for request in requests})
        return self.engine.submit(requests)

    def collect(self, number: int) -> Future[tuple[Group, DataRef]]:
        result: Future[tuple[Group, DataRef]] = Future()

        def collected(call: Future[tuple[Group, DataRef]]) -> None:
            prompt = self._prompts.pop(number)
            group, data = call.result()
            if group.failures:  # a group that could not be scored is not judged: its rewards stay incomplete
                for sample in group.samples:
                    sample.reward = math.nan
                result.set_result((group, data))
                return

            def judge(call: Future[tuple[None, DataRef]]) -> None:
                judged = self.judge.judge(group, prompt, data, call.result()[1])
                when_done(judged, lambda done: result.set_result(done.result()), result)

            when_done(self.engine.collect_responses(group.number), judge, result)

        when_done(self.engine.collect(number), collected, result)
        return result

    def hand_over(self, groups: list[int]) -> Future[dict[int, tuple[Partial, ...]]]:
        return self.engine.hand_over(groups)

    def copy_partials(self, number: int) -> Future[dict[int, tuple[Partial, ...]]]:
        return self.engine.copy_partials(number)

    def load_weights(self) -> Future[int]:
        return self.engine.load_weights()


def judged_like(first: SamplingEngine, engine: EngineHandle) -> SamplingEngine:
    """Return a further engine with the judge of `first`, if it has one. `first`: one of the engines of `with_judge`."""
    return JudgedEngine(engine, first.judge) if isinstance(first, JudgedEngine) else engine


def with_judge(
    settings: JudgeConfig,
    reward: RewardConfig,
    engines: Sequence[EngineHandle],
    judges: FixedModelEngines[JudgeHandle] | None,
    verdicts: Verdicts | None = None,
) -> Sequence[SamplingEngine]:
    """Return engines that collect groups scored by `judges`.

    verdicts: the tape of the verdicts; None: no tape. In a replay, recorded verdicts score the groups. Otherwise without
    judges, `engines` are returned unchanged.
    """
    judge: Judge | RecordedJudge
    if verdicts is not None and verdicts.replays:
        judge = RecordedJudge(settings, reward, verdicts)
    elif judges is not None:
        judge = Judge(settings, reward, judges, verdicts)
    else:
        return engines
    return [JudgedEngine(engine, judge) for engine in engines]
