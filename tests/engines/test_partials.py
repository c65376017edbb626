"""Requests that another engine continues: tokens, log-probs and versions so far are kept, and the rest follows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.engines.backed import BackedEngine
from megarl.engines.base import EngineRefused, EngineSpec
from megarl.engines.partials import continued_seed, joined_spans
from megarl.engines.tape import TapeSpec, read_segments, requests_event
from megarl.types import Completion, GenerationRequest, Partial, Span, derived_seed
from tests.support.counting_engine import CountingBackend, log_prob_of, request, token_of


class Engine:
    """An engine over a `CountingBackend`, with its `generate` calls."""

    def __init__(self, version: int, steps: int | None = 0, **settings: Any) -> None:
        self.backend = CountingBackend(steps)
        spec = EngineSpec("e0", "model", "float32", 64, at_update="refresh", **settings)
        self.engine = BackedEngine(self.backend, spec)  # type: ignore[arg-type]
        self.engine.start()
        self.engine.update_weights(version)
        self.pool = ThreadPoolExecutor(16)
        self.done: dict[int, list[Completion]] = {}
        self.copies: dict[int, list[GenerationRequest]] = {}

    def begin(self, *requests: GenerationRequest) -> Future[None]:
        """Start a `generate` call; returns when its requests are admitted."""
        before = len(self.backend.admitted) + len(self.done)
        call = self.pool.submit(
            self.engine.generate, requests, lambda group, samples: self.done.update({group: samples})
        )
        while len(self.backend.admitted) + len(self.done) == before and not call.done():
            time.sleep(0.0005)
        return call

    def step(self, count: int) -> None:
        """Take `count` steps."""
        assert self.backend.allowed is not None
        self.backend.let_step(count)
        while self.backend.allowed._value:
            time.sleep(0.0005)
        self.engine.call(lambda: None)  # the last step has ended

    def close(self) -> None:
        self.engine.shutdown()
        self.pool.shutdown()


@pytest.fixture
def start() -> Any:
    started: list[Engine] = []

    def make(*args: Any, **settings: Any) -> Engine:
        started.append(Engine(*args, **settings))
        return started[-1]

    yield make
    for each in started:
        each.close()


def sampled(version: int, seed: int, count: int, start: int = 0) -> tuple[list[int], list[np.float32]]:
    places = [(version, seed, place) for place in range(start, start + count)]
    return [token_of(*place) for place in places], [log_prob_of(*place) for place in places]


def assert_parts(sample: Completion | Partial, *parts: tuple[list[int], list[np.float32]]) -> None:
    assert sample.tokens.tolist() == [token for tokens, _ in parts for token in tokens]
    assert sample.log_probs.tolist() == [value for _, values in parts for value in values]
    assert sample.tokens.dtype == np.int32 and sample.log_probs.dtype == np.float32


def test_another_engine_continues_each_unfinished_sample(start: Callable[..., Engine]) -> None:
    """Sample 0 has finished, 1 and 2 continue; an update meets the group before and after it moves."""
    first, second = start(3), start(5)
    call = first.begin(request(7, (2, 10, 12)))
    first.step(4)
    first.engine.update_weights(4)
    first.step(2)
    (moved,) = first.engine.hand_over()
    call.result(5)
    assert first.done == {} and first.backend.requests == {}
    assert [partial.finish_reason for partial in moved.partials] == ["stop", None, None]
    assert [partial.spans for partial in moved.partials] == [(Span(0, 3),)] + [(Span(0, 3), Span(4, 4))] * 2
    assert_parts(moved.partials[2], sampled(3, 702, 4), sampled(4, 702, 2, start=4))

    rest = second.begin(moved)
    assert [each.sampling.max_tokens for each in second.backend.admitted] == [6, 6]
    assert [each.prompt.tokens[5:] for each in second.backend.admitted] == [
        tuple(partial.tokens) for partial in moved.partials[1:]
    ]
    second.step(3)
    second.engine.update_weights(6)
    second.step(3)
    rest.result(5)
    ended, *continued = second.done[7]
    assert_parts(ended, sampled(3, 700, 2))
    assert (ended.finish_reason, ended.spans) == ("stop", (Span(0, 3),))
    for index, sample in enumerate(continued, 1):
        seed = derived_seed(700 + index, 6)
        before = sampled(3, 700 + index, 4), sampled(4, 700 + index, 2, start=4)
        assert_parts(sample, *before, sampled(5, seed, 3), sampled(6, seed, 3, start=3))
        assert sample.spans == (Span(0, 3), Span(4, 4), Span(6, 5), Span(9, 6))
        assert sample.finish_reason == "length"


def test_a_group_may_move_again(start: Callable[..., Engine]) -> None:
    """The third engine continues what two others have sampled. The second has sampled nothing of sample 1 in its turn."""
    first, second, third = start(1), start(1), start(2)
    first.begin(request(1, (3, 9)))
    first.step(4)
    (moved,) = first.engine.hand_over([1])
    second.begin(moved)
    second.step(2)
    (moved,) = second.engine.hand_over([1])
    assert moved.partials[1].spans == (Span(0, 1),), "the same version continues its span"
    third.begin(moved)
    (moved,) = third.engine.hand_over([1])
    assert moved.partials[1].spans == (Span(0, 1),), "no token of version 2 yet"
    call = third.begin(moved)
    third.step(3)
    call.result(5)
    sample = third.done[1][1]
    parts = sampled(1, 101, 4), sampled(1, derived_seed(101, 4), 2), sampled(2, derived_seed(101, 6), 3)
    assert_parts(sample, *parts)
    assert sample.spans == (Span(0, 1), Span(6, 2))


def test_only_the_chosen_groups_are_handed_over(start: Callable[..., Engine]) -> None:
    engine = start(0)
    call = engine.begin(request(1, (4,)), request(2, (6,)), request(3, (5,)))
    engine.step(2)
    assert [each.group for each in engine.engine.hand_over([3, 1, 99])] == [1, 3]
    assert engine.engine.hand_over([3]) == [] and not call.done()
    engine.step(4)
    call.result(5)
    assert list(engine.done) == [2]


def test_a_request_at_its_end_is_finished(start: Callable[..., Engine]) -> None:
    """Hand-over right after the step in which groups end: by a stop token for sample 0, by `max_tokens` for group 2."""
    engine, other = start(0), start(0)
    first = engine.begin(request(1, (3, 5)), request(2, (3,)))
    engine.step(3)
    (moved,) = engine.engine.hand_over()
    first.result(5)
    assert list(engine.done) == [2]
    assert [(len(each.tokens), each.finish_reason) for each in moved.partials] == [(3, "stop"), (3, None)]
    call = other.begin(moved)
    assert len(other.backend.admitted) == 1
    other.step(2)
    call.result(5)
    assert [len(each.tokens) for each in other.done[1]] == [3, 5]


def test_a_copy_changes_nothing(start: Callable[..., Engine]) -> None:
    engine = start(2)
    call = engine.begin(request(1, (3, 6)), request(2, (4,)))
    engine.step(3)
    copies = engine.engine.copy_running(1)
    assert [[len(each.tokens) for each in copied.partials] for copied in copies] == [[3, 3], [3]]
    engine.step(3)
    call.result(5)
    assert_parts(engine.done[1][1], sampled(2, 101, 6))
    assert engine.done[1][1].spans == (Span(0, 2),)
    assert_parts(copies[0].partials[1], sampled(2, 101, 3))


def test_a_request_without_tokens_starts_as_any_other(start: Callable[..., Engine]) -> None:
    """It is one request with its own seed, so it samples the same as if it had never moved."""
    first, second = start(0), start(1)
    plain = request(1, (3, 6))
    first.begin(plain)
    (moved,) = first.engine.hand_over()
    assert [partial.spans for partial in moved.partials] == [(), ()]
    call = second.begin(moved)
    assert second.backend.admitted == [plain]
    second.step(6)
    call.result(5)
    assert_parts(second.done[1][1], sampled(1, 101, 6))


def test_a_group_whose_samples_have_finished_returns_at_once(start: Callable[..., Engine]) -> None:
    engine = start(5)
    ended = Partial(np.arange(3, dtype=np.int32), np.ones(3, np.float32), (Span(0, 4),), "stop")
    call = engine.begin(replace(request(1, (3,)), partials=(ended,)), request(2, (2,)))
    engine.step(2)
    call.result(5)
    assert engine.done[1][0].tokens is ended.tokens and engine.done[1][0].spans == (Span(0, 4),)
    assert_parts(engine.done[2][0], sampled(5, 200, 2))


def test_a_group_has_its_greedy_sample_last(start: Callable[..., Engine]) -> None:
    """The engine samples it with the group, and another engine continues it, greedily."""
    first, second = start(0), start(0)
    plain = request(1, (3, 6), with_greedy=True)
    greedy = replace(plain.sampling, n=1, temperature=0.0)
    first.begin(plain)
    assert [each.sampling for each in first.backend.admitted] == [plain.sampling, greedy]
    first.step(4)
    (moved,) = first.engine.hand_over()
    assert [len(each.tokens) for each in moved.partials] == [3, 4, 4] and moved.with_greedy
    call = second.begin(moved)
    assert [each.sampling.temperature for each in second.backend.admitted] == [1.0, 0.0]
    second.step(2)
    call.result(5)
    assert [len(each.tokens) for each in second.done[1]] == [3, 6, 6]
    for index, sample in enumerate(second.done[1][1:], 1):
        assert np.array_equal(sample.tokens[:4], moved.partials[index].tokens)
    with pytest.raises(ValueError, match="2 partial samples, and needs 2 and a greedy one"):
        second.engine.generate([replace(moved, partials=moved.partials[:2])], print)


def partial(length: int, reason: str | None = None, version: int = 0) -> Partial:
    return Partial(np.full(length, 5, np.int32), np.zeros(length, np.float32), (Span(0, version),), reason)


@pytest.mark.parametrize(
    ("partials", "settings", "message"),
    [
        ([partial(2)], {}, "1 partial samples, and needs 2"),
        ([partial(2), partial(6)], {}, "6 tokens and finish reason None; max_tokens is 6"),
        ([partial(7, "stop"), partial(2)], {}, "7 tokens"),
        ([partial(2), replace(partial(3), tokens=np.zeros(4, np.int32))], {}, "4 tokens, and log-probs of 3"),
        ([partial(2), partial(2)], {"prompt_top_k": 3}, "log-probs of its prompt.*without partials"),
    ],
)
def test_partials_that_cannot_be_continued_are_refused(
    start: Callable[..., Engine], partials: Sequence[Partial], settings: dict[str, Any], message: str
) -> None:
    engine = start(1)
    with pytest.raises(ValueError, match=message):
        engine.engine.generate([request(1, (6, 6), partials=tuple(partials), **settings)], print)
    assert engine.backend.admitted == []


def test_recorded_experts_and_older_engines_are_refused(start: Callable[..., Engine]) -> None:
    """Experts of earlier tokens are not recorded again; versions of a sample must rise."""
    begun = request(1, (6,), partials=(partial(2, version=3),))
    with pytest.raises(ValueError, match="experts of its tokens"):
        start(4, return_routed_experts=True).engine.generate([begun], print)
    engine = start(2)
    with pytest.raises(EngineRefused, match="version 2 and cannot continue group 1, which has tokens of version 3"):
        engine.engine.generate([request(9, (1,)), begun], print)
    assert engine.backend.admitted == [], "no request of the call is admitted"
    engine.engine.update_weights(3)
    call = engine.begin(begun)
    engine.step(4)
    call.result(5)
    assert engine.done[1][0].spans == (Span(0, 3),)


def test_seeds_of_continued_samples_depend_on_seed_and_length() -> None:
    seeds = {continued_seed(seed, index, length) for seed in (0, 50) for index in range(4) for length in range(20)}
    assert len(seeds) == 2 * 4 * 20 and None not in seeds
    assert continued_seed(50, 3, 0) == 53 and continued_seed(50, 3, 7) == derived_seed(53, 7)
    assert continued_seed(None, 3, 7) is None


def test_joined_spans_tile_the_sample() -> None:
    first = (Span(0, 1), Span(4, 2))
    assert joined_spans(first, 6, (Span(0, 2), Span(3, 5))) == (Span(0, 1), Span(4, 2), Span(9, 5))
    assert joined_spans(first, 6, (Span(0, 3),)) == (Span(0, 1), Span(4, 2), Span(6, 3))
    assert joined_spans((), 0, (Span(0, 3),)) == (Span(0, 3),)


def move_around(tape: TapeSpec | None, seed: int, copies: Sequence[int] = (1, 2, 3)) -> Engine:
    """An engine samples eight groups; at random moments it copies all, hands two over, takes weights and continues the two."""
    engine, order = Engine(0, None, tape=tape), random.Random(seed)
    calls = [engine.pool.submit(generate, engine, request(number, (20 + number, 35))) for number in range(8)]
    for version in (1, 2, 3):
        time.sleep(order.random() * 0.01)
        if version in copies:
            engine.copies[version] = engine.engine.copy_running(version)
        moved = engine.engine.hand_over([version, version + 3])
        engine.engine.update_weights(version)
        calls += [engine.pool.submit(generate, engine, each) for each in moved]
    for number in copies:
        if number not in engine.copies:
            engine.copies[number] = engine.engine.copy_running(number)
    for call in calls:
        call.result(20)
    engine.close()
    return engine


def tokens(requests: Sequence[GenerationRequest]) -> list[Any]:
    return [(each.group, [partial.tokens.tolist() for partial in each.partials]) for each in requests]


def samples_of(engine: Engine) -> list[Any]:
    return [(group, [each.tokens.tolist() for each in engine.done[group]]) for group in sorted(engine.done)]


def generate(engine: Engine, each: GenerationRequest) -> None:
    engine.engine.generate([each], lambda group, samples: engine.done.update({group: samples}))


def test_a_replay_repeats_hand_overs_and_copies(tmp_path: Path) -> None:
    recorded, repeated = tmp_path / "recorded.jsonl", tmp_path / "repeated.jsonl"
    first = move_around(TapeSpec(str(recorded), 0), seed=1)
    events = [record["event"].split()[0] for record in read_segments(recorded)[0][1:]]
    assert events.count("copy") == 3 and events.count("hand") == 3 and events.count("requests") > 10
    for seed in (2, 3):
        again = move_around(TapeSpec(str(repeated), seed, str(recorded), 0), seed)
        assert samples_of(again) == samples_of(first)
        assert [tokens(again.copies[number]) for number in (1, 2, 3)] == [tokens(first.copies[n]) for n in (1, 2, 3)]
        assert read_segments(repeated)[seed][1:] == read_segments(recorded)[0][1:]


def test_a_replay_may_take_other_copies(tmp_path: Path) -> None:
    """Copies 1 to 3 are never requested, and copy 9 is not on the tape: the engine waits for none of them."""
    recorded, repeated = tmp_path / "recorded.jsonl", tmp_path / "repeated.jsonl"
    first = move_around(TapeSpec(str(recorded), 0), seed=1)
    again = move_around(TapeSpec(str(repeated), 2, str(recorded), 0), seed=5, copies=(9,))
    assert samples_of(again) == samples_of(first)


def test_events_of_partials_differ_by_their_tokens() -> None:
    first, other = partial(4), partial(4)
    other.tokens[3] = 6
    plain = request(1, (6,))
    events = [requests_event([replace(plain, partials=partials)]) for partials in ((), (first,), (other,))]
    assert len(set(events)) == 3
