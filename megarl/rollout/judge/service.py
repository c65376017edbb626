"""Add the judge's scores to groups before they are collected.

A group goes to the judge as soon as its other scorers are done, while other groups are sampled. Training and evaluation
collect groups in the same way with and without a judge.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.errors import ProcessFailure
from megarl.recipe.judge import JUDGE, JudgeConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards.weighted import with_judgement
from megarl.rollout.engine_handle import EngineHandle, JudgeHandle, SamplingEngine
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

    def get(self) -> list[SampleTokens]:
        pairs = zip(self.vectors.get(), self.verdicts.get(), strict=True)
        return [
            replace(sample, reason="\n".join(filter(None, (sample.reason, f"{JUDGE}: {verdict}"))))
            for sample, verdict in pairs
        ]


@dataclass
class _Engine:
    """An engine of the judge, and the numbers of the groups that wait for it."""

    handle: JudgeHandle
    waiting: set[int] = field(default_factory=set)
    since: float = 0.0  # start of the time-out: when it finished its last group, or received a group while it had none


class Judge:
    """The judge's engines. A group goes to the engine with the fewest waiting groups."""

    def __init__(
        self,
        settings: JudgeConfig,
        reward: RewardConfig,
        engines: Sequence[JudgeHandle],
        verdicts: Verdicts | None = None,
    ):
        """verdicts: the tape that records them; None: no tape."""
        self.settings, self.reward, self.verdicts = settings, reward, verdicts
        self.engines = [_Engine(engine) for engine in engines]
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise ProcessFailure if an engine with waiting groups has finished none for judge.timeout seconds."""
        limit = self.settings.timeout
        with self._lock:
            for engine in self.engines:
                seconds = time.monotonic() - engine.since
                if engine.waiting and seconds > limit:
                    name = engine.handle.name
                    raise ProcessFailure(
                        f"{name} has judged no group for {seconds:.0f} s (judge.timeout = {limit:g}); "
                        f"{len(engine.waiting)} wait for it, number {min(engine.waiting)} among them. Its log is in the "
                        f"run's logs/{name}.log; raise judge.timeout if the judge is slow."
                    )

    def judge(self, group: Group, prompt: Prompt, data: DataRef, responses: DataRef) -> Future[tuple[Group, DataRef]]:
        """Add the judge's term to the rewards of `group`. `responses`: the text of each sample."""
        result: Future[tuple[Group, DataRef]] = Future()
        engine, began = self._chosen(group.number), time.monotonic()

        def judged(call: Future[Any]) -> None:
            with self._lock:
                engine.waiting.discard(group.number)
                engine.since = time.monotonic()
            judgements, texts = call.result()
            _add(group, judgements, self.settings, self.reward)
            if self.verdicts is not None:
                self.verdicts.write(group.number, judgements)
            group.judge_seconds = time.monotonic() - began
            result.set_result((group, JudgedData(data, texts)))

        judgements = engine.handle.judge(group.number, replace(prompt, tokens=(), text="", images=()), responses)
        _when_done(judgements, judged, result)
        return result

    def _chosen(self, group: int) -> _Engine:
        with self._lock:
            engine = min(self.engines, key=lambda engine: len(engine.waiting))
            if not engine.waiting:
                engine.since = time.monotonic()
            engine.waiting.add(group)
            return engine


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
                _when_done(judged, lambda done: result.set_result(done.result()), result)

            _when_done(self.engine.collect_responses(group.number), judge, result)

        _when_done(self.engine.collect(number), collected, result)
        return result

    def hand_over(self, groups: list[int]) -> Future[dict[int, tuple[Partial, ...]]]:
        return self.engine.hand_over(groups)

    def copy_partials(self, number: int) -> Future[dict[int, tuple[Partial, ...]]]:
        return self.engine.copy_partials(number)

    def load_weights(self) -> Future[int]:
        return self.engine.load_weights()


def _when_done(call: Future[Any], then: Callable[[Future[Any]], None], result: Future[Any]) -> None:
    """Run `then` once `call` is done, in the transport's thread. Errors of `then` and of `call` become the exception of
    `result`."""

    def done(call: Future[Any]) -> None:
        try:
            then(call)
        except BaseException as error:  # noqa: BLE001 -- `result` raises it
            result.set_exception(error)

    call.add_done_callback(done)


def judged_like(first: SamplingEngine, engine: EngineHandle) -> SamplingEngine:
    """Return a further engine with the judge of `first`, if it has one. `first`: one of the engines of `with_judge`."""
    return JudgedEngine(engine, first.judge) if isinstance(first, JudgedEngine) else engine


def with_judge(
    settings: JudgeConfig,
    reward: RewardConfig,
    engines: Sequence[EngineHandle],
    judges: Sequence[JudgeHandle],
    check: Callable[[], None],
    verdicts: Verdicts | None = None,
) -> tuple[Sequence[SamplingEngine], Callable[[], None]]:
    """Return engines that collect groups scored by `judges`, and a check that also covers the judge.

    verdicts: the tape of the verdicts; None: no tape. In a replay, recorded verdicts score the groups. Otherwise without
    judges, `engines` and `check` are returned unchanged.
    """
    if verdicts is not None and verdicts.replays:
        recorded = RecordedJudge(settings, reward, verdicts)
        return [JudgedEngine(engine, recorded) for engine in engines], check
    if not judges:
        return engines, check
    judge = Judge(settings, reward, judges, verdicts)

    def check_all() -> None:
        check()
        judge.check()

    return [JudgedEngine(engine, judge) for engine in engines], check_all
