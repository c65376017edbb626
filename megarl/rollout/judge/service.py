"""Rollout services whose groups have been judged, too, by the time they can be collected.

A group goes on to the judge as soon as its other scorers are done, while others are sampled; whoever collects it,
training or evaluation, knows nothing of that.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.cluster.calls import Service
from megarl.recipe.judge import JUDGE
from megarl.recipe.schema import Recipe
from megarl.rewards.weighted import with_judgement
from megarl.rollout.judge.server import Verdict
from megarl.types import DataRef, Group, Prompt, SampleFailure, SampleTokens


@dataclass(frozen=True)
class JudgedData:
    """A DataRef to a group's vectors, with the judge's verdicts among the reasons. Neither is fetched before it is asked
    for, nor copied: the vectors stay where they were made."""

    vectors: DataRef
    verdicts: DataRef

    def get(self) -> list[SampleTokens]:
        pairs = zip(self.vectors.get(), self.verdicts.get(), strict=True)
        return [replace(sample, reason=_reasons(sample.reason, verdict)) for sample, verdict in pairs]


def _reasons(others: str, verdict: str) -> str:
    return "\n".join(part for part in (others, f"{JUDGE}: {verdict}") if part)


@dataclass
class _Engine:
    """One of the judge's, and the groups that wait for it."""

    service: Service
    waiting: set[int] = field(default_factory=set)
    since: float = 0.0  # when it last finished a group, or was given its first


class Judge:
    """The judge as the controller sees it. Groups go to whichever engine has the fewest."""

    def __init__(self, recipe: Recipe, services: Sequence[Service]):
        self.recipe, self.engines = recipe, [_Engine(service) for service in services]
        self._lock = threading.Lock()

    def around(self, services: Sequence[Service]) -> list[Service]:
        """`services`, whose groups come back judged."""
        return [JudgedService(service, self) for service in services]

    def check(self) -> None:
        """Raise RuntimeError where an engine with groups to judge has finished none for judge.timeout seconds."""
        limit = self.recipe.judge.timeout
        with self._lock:
            for engine in self.engines:
                seconds = time.monotonic() - engine.since
                if engine.waiting and seconds > limit:
                    name = engine.service.name
                    raise RuntimeError(
                        f"{name} has judged no group for {seconds:.0f} s (judge.timeout = {limit:g}); "
                        f"{len(engine.waiting)} wait for it, number {min(engine.waiting)} among them. Its log is in the "
                        f"run's logs/{name}.log; raise judge.timeout if it is only slow."
                    )

    def judge(self, group: Group, prompt: Prompt, data: DataRef, said: DataRef) -> Future[tuple[Group, DataRef]]:
        """`group` with the judge's term in its rewards. `said`: what the policy said in each of its samples."""
        result: Future[tuple[Group, DataRef]] = Future()
        engine, began = self._chosen(group.number), time.monotonic()

        def judged(call: Future[Any]) -> None:
            with self._lock:
                engine.waiting.discard(group.number)
                engine.since = time.monotonic()
            verdicts, texts = call.result()
            self._add(group, verdicts)
            group.judge_seconds = time.monotonic() - began
            result.set_result((group, JudgedData(data, texts)))

        asked = engine.service.call_with_data(
            "judge", group.number, replace(prompt, tokens=(), text="", images=()), said
        )
        _when_done(asked, judged, result)
        return result

    def _chosen(self, group: int) -> _Engine:
        with self._lock:
            engine = min(self.engines, key=lambda engine: len(engine.waiting))
            if not engine.waiting:
                engine.since = time.monotonic()
            engine.waiting.add(group)
            return engine

    def _add(self, group: Group, verdicts: Sequence[Verdict]) -> None:
        reward = self.recipe.reward
        for sample, verdict in zip(group.samples, verdicts, strict=True):
            group.scoring_retries += verdict.retries
            if isinstance(verdict.result, SampleFailure):
                group.failures += (verdict.result,)
                sample.reward = math.nan
                continue
            score = verdict.result
            sample.reward, sample.reward_parts = with_judgement(
                sample.reward, sample.reward_parts, score, reward.functions.get(JUDGE), self.recipe.judge.right_from
            )


class JudgedService:
    """A rollout service (see rollout/server.py) that collects groups only once they have been judged, too."""

    def __init__(self, service: Service, judge: Judge):
        self.service, self.judge = service, judge
        self._prompts: dict[int, Prompt] = {}  # of groups that are under way

    @property
    def name(self) -> str:
        return self.service.name

    def call(self, method: str, *args: Any) -> Future[Any]:
        if method == "submit":
            (requests,) = args
            self._prompts.update({request.group: request.prompt for request in requests})
        return self.service.call(method, *args)

    def call_with_data(self, method: str, *args: Any) -> Future[tuple[Any, DataRef]]:
        if method != "collect":
            return self.service.call_with_data(method, *args)
        result: Future[tuple[Any, DataRef]] = Future()

        def collected(call: Future[tuple[Group, DataRef]]) -> None:
            group, data = call.result()
            prompt = self._prompts.pop(group.number)
            if group.failures:  # one that could not be scored is not judged any more
                result.set_result((_without_rewards(group), data))
                return

            def told(call: Future[tuple[None, DataRef]]) -> None:
                judged = self.judge.judge(group, prompt, data, call.result()[1])
                _when_done(judged, lambda done: result.set_result(done.result()), result)

            _when_done(self.service.call_with_data("said", group.number), told, result)

        _when_done(self.service.call_with_data(method, *args), collected, result)
        return result


def _when_done(call: Future[Any], then: Callable[[Future[Any]], None], result: Future[Any]) -> None:
    """Run `then` once `call` is done, in the transport's thread. What it raises, the call's own error included, is the
    outcome of `result`."""

    def done(call: Future[Any]) -> None:
        try:
            then(call)
        except BaseException as error:  # noqa: BLE001 -- whoever waits for the result is told
            result.set_exception(error)

    call.add_done_callback(done)


def _without_rewards(group: Group) -> Group:
    """Where no judge was asked nobody knows a sample's whole reward."""
    for sample in group.samples:
        sample.reward = math.nan
    return group


def with_judge(
    recipe: Recipe, services: Sequence[Service], judges: Sequence[Service], check: Callable[[], None]
) -> tuple[Sequence[Service], Callable[[], None]]:
    """`services` whose groups are judged by the engines `judges`, and `check` with a look at these; as they are where
    there are none."""
    if not judges:
        return services, check
    judge = Judge(recipe, judges)

    def both() -> None:
        check()
        judge.check()

    return judge.around(services), both
