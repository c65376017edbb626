"""A stand-in for an inference library. Each token shows the version, the seed and the position with which it was sampled.

Sample i of a request gets a token per step. Token k is `token_of(version, seed + i, k)`, and its log-prob is the same for no
other version, seed or k. A request for one sample ends after `max_tokens`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.types import Completion, GenerationRequest, Partial, Prompt, Sampling
from megarl.weight_sync.session import UpdateReport


def token_of(version: int, seed: int, place: int) -> int:
    return 3 + _number(version, seed, place) % 40


def log_prob_of(version: int, seed: int, place: int) -> np.float32:
    return np.float32(-_number(version, seed, place) / 7)


def _number(version: int, seed: int, place: int) -> int:
    return (version * 1_000_003 + seed * 31 + place) % 1_000_000


def request(group: int, lengths: Sequence[int], **settings: Any) -> GenerationRequest:
    """Return a request with samples of these lengths: each ends by a stop, and the longest by `max_tokens`."""
    prompt = Prompt(f"p{group}", (1, 2, *lengths), "", "test")
    return GenerationRequest(group, prompt, Sampling(len(lengths), max(lengths)), 100 * group, **settings)


class CountingBackend:
    """Takes `steps` steps, and more with `let_step`. None: steps at any time. Accepts prompts of `request`."""

    unloaded = None
    staged = None
    asleep: tuple[str, ...] = ()

    def __init__(self, steps: int | None = None) -> None:
        self.version = 0
        self.allowed = threading.Semaphore(0) if steps is not None else None
        for _ in range(steps or 0):
            self.let_step()
        self.requests: dict[str, GenerationRequest] = {}
        self.lengths_of: dict[str, list[int]] = {}  # of each sample, to its end
        self.samples: dict[str, list[tuple[list[int], list[np.float32]]]] = {}
        self.admitted: list[GenerationRequest] = []
        self.ended = False

    def let_step(self, count: int = 1) -> None:
        assert self.allowed is not None
        self.allowed.release(count)

    def start(self) -> dict[str, Any]:
        return {}

    def check(self, request: GenerationRequest) -> None:
        assert not request.partials, "engines split requests with partials"

    def admit(self, key: str, request: GenerationRequest) -> None:
        self.admitted.append(request)
        self.requests[key], n = request, request.sampling.n
        self.samples[key] = [([], []) for _ in range(n)]
        self.lengths_of[key] = [*request.prompt.tokens[2 : 2 + n]] if n > 1 else [request.sampling.max_tokens]

    def _lacks(self, key: str, index: int) -> bool:
        return len(self.samples[key][index][0]) < self.lengths_of[key][index]

    def step(self) -> list[tuple[str, list[Completion]]]:
        if self.allowed is None:
            time.sleep(0.0005)
        elif not self.allowed.acquire(timeout=0.005):
            return []
        finished = []
        for key, request in list(self.requests.items()):
            for index, (tokens, log_probs) in enumerate(self.samples[key]):
                if self._lacks(key, index):
                    assert request.seed is not None
                    place = (self.version, request.seed + index, len(tokens))
                    tokens.append(token_of(*place))
                    log_probs.append(log_prob_of(*place))
            if not any(self._lacks(key, index) for index in range(len(self.samples[key]))):
                partials = self.partials(key)
                done = [Completion(each.tokens, each.log_probs, each.finish_reason or "") for each in partials]
                finished.append((key, done))
                self.cancel([key])
        return finished

    def lengths(self, key: str) -> dict[int, int]:
        return {i: len(tokens) for i, (tokens, _) in enumerate(self.samples[key]) if self._lacks(key, i)}

    def partials(self, key: str) -> list[Partial]:
        most = self.requests[key].sampling.max_tokens
        partials = []
        for index, (tokens, log_probs) in enumerate(self.samples[key]):
            reason = None if self._lacks(key, index) else "length" if len(tokens) == most else "stop"
            partials.append(Partial(np.array(tokens, np.int32), np.array(log_probs, np.float32), (), reason))
        return partials

    def cancel(self, keys: list[str]) -> None:
        for key in keys:
            del self.requests[key], self.samples[key], self.lengths_of[key]

    def hand_over(self, keys: list[str]) -> dict[str, list[Partial]]:
        partials = {key: self.partials(key) for key in keys}
        self.cancel(keys)
        return partials

    def update_weights(self, version: int, running: int) -> UpdateReport:
        self.version = version
        return UpdateReport(version, {}, 0, 0, 0, {})

    def shutdown(self) -> None:
        self.ended = True
