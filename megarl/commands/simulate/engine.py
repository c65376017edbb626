"""One rollout engine under a virtual clock.

All running requests of an engine get a token in each decode step, so they share one counter of tokens (`_position`). A
request finishes when the counter has advanced by its length. An event (a start, a finish, an update of the weights) thus costs
O(log n) for n running requests, for any number of tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_SAME = 1e-6  # tokens: requests that are closer to their end than this are finished


@dataclass(frozen=True)
class Costs:
    """Seconds of a layout's operations.

    `decode[n]`: seconds of a decode step with n running requests, float64 [most running requests + 1]; entry 0 is not used.
    An engine runs at most len(decode) - 1 requests; others wait.
    """

    engines: int
    decode: np.ndarray
    prefill: float  # seconds per token, of one engine
    training: float  # seconds per token of a batch, of all trainers together
    weight_sync: float  # engines and trainers wait
    load: float = 0.0  # with finish: an engine loads weights from its host memory
    hand_over: float = 0.0  # per step, before training: trainers return to shared devices
    prompt: float = 0.0  # tokens of a prompt
    shares_prefix: bool = True  # the samples of a group need one prefill of their prompt


class FinishedSample(NamedTuple):
    """A sample that an engine has finished."""

    group: int
    length: int  # tokens of the response
    versions: float  # sum of the weight versions of its tokens
    oldest: int  # weight version of its first token


class VirtualEngine:
    """The state of one engine. `seconds` and `now` are seconds of the virtual clock."""

    def __init__(self, costs: Costs) -> None:
        self._decode: list[float] = costs.decode.tolist()
        self._prefill, self._prompt, self._shares_prefix = costs.prefill, costs.prompt, costs.shares_prefix
        self._most = len(self._decode) - 1
        # Running requests: (position of the end, group, length, position of the start, integral at the start, version).
        self._running: list[tuple[float, int, int, float, float, int]] = []
        self._waiting: deque[tuple[int, int, bool]] = deque()  # (group, length, needs a prefill of the prompt)
        self._position = 0.0  # tokens that a request would have if it had run since the start
        self._starts = 0.0  # sum of the start positions of running requests
        self._version = 0
        self._refreshed = 0  # version of the last update that recomputed KV caches
        self._integral = 0.0  # of the weight version over the position
        self._time = 0.0
        self._paused_until = 0.0  # no decode step before
        self.busy = 0.0  # seconds of decoding and prefill
        self.request_seconds = 0.0  # integral of the number of running requests
        self.recomputed = 0.0  # tokens of KV caches that were recomputed

    def advance(self, now: float) -> None:
        """Decode until `now`. No request may finish before."""
        begin = max(self._time, min(self._paused_until, now))
        self.request_seconds += len(self._running) * (now - self._time)
        self._time = now
        if now > begin and self._running:
            tokens = (now - begin) / self._decode[len(self._running)]
            self._position += tokens
            self._integral += tokens * self._version
            self.busy += now - begin

    def add(self, group: int, lengths: Sequence[int]) -> None:
        """Start a group's requests at the time of the last `advance`; they wait if the engine is full."""
        for index, length in enumerate(lengths):
            self._waiting.append((group, length, index == 0 or not self._shares_prefix))
        self._start_waiting()

    def _start_waiting(self) -> None:
        prefills = 0
        while self._waiting and len(self._running) < self._most:
            group, length, needs_prefill = self._waiting.popleft()
            prefills += needs_prefill
            position = self._position
            heapq.heappush(self._running, (position + length, group, length, position, self._integral, self._version))
            self._starts += position
        if prefills:
            self._compute(prefills * self._prompt)

    def _compute(self, tokens: float) -> None:
        """Delay decoding by a prefill of `tokens`."""
        seconds = tokens * self._prefill
        self._paused_until = max(self._paused_until, self._time) + seconds
        self.busy += seconds

    def next_finish(self) -> float | None:
        """Return the time at which the next request finishes; None if no request runs."""
        if not self._running:
            return None
        tokens = max(0.0, self._running[0][0] - self._position)
        return max(self._time, self._paused_until) + tokens * self._decode[len(self._running)]

    def finish(self) -> list[FinishedSample]:
        """Remove the requests that are finished at the time of the last `advance`, and start waiting ones."""
        finished = []
        while self._running and self._running[0][0] <= self._position + _SAME:
            _, group, length, start, integral, version = heapq.heappop(self._running)
            self._starts -= start
            finished.append(FinishedSample(group, length, self._integral - integral, version))
        self._start_waiting()
        return finished

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._version

    def oldest_cache(self) -> int:
        """Return the oldest weight version in the KV caches of the running requests, or the present one without any."""
        return max(self._refreshed, min((run[-1] for run in self._running), default=self._version))

    def pause(self, seconds: float) -> None:
        """Stop decoding for `seconds`, at the time of the last `advance`."""
        self._paused_until = max(self._paused_until, self._time) + seconds

    def update(self, version: int, seconds: float, *, refresh: bool) -> None:
        """Take the weights of `version` in `seconds`, at the time of the last `advance`.

        `refresh`: afterwards recompute the KV cache of the running requests, prompts included.
        """
        self._version = version
        self.pause(seconds)
        if refresh:
            self._refreshed = version
        if refresh and self._running:
            count = len(self._running)
            tokens = count * (self._prompt + self._position) - self._starts
            self.recomputed += tokens
            self._compute(tokens)
