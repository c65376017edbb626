"""The requests that run in an engine, with their samples so far.

A request is one or several of the inference library (`library_requests`): a begun one has one for each unfinished sample.
Its samples are gathered when the last one is finished.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from megarl.engines.partials import as_partial, continued, finished, joined_spans, library_requests
from megarl.engines.spans import RequestSpans
from megarl.types import Completion, GenerationRequest, Partial

J = TypeVar("J")
PartialsOf = Callable[[str], list[Partial] | None]
"""Returns the samples so far of one of the library's requests, without spans; None if they cannot be continued."""


@dataclass(eq=False)
class Running(Generic[J]):
    """A request of the `generate` call `job`. `keys`: the library's requests that run for it, with their sample's index, or
    None for all but the greedy sample. `samples`: its finished samples, by index."""

    job: J
    request: GenerationRequest
    keys: dict[str, int | None] = field(default_factory=dict)
    samples: dict[int, Completion] = field(default_factory=dict)


class RunningRequests(Generic[J]):
    """State machine of the module's docstring. Call from the engine's thread."""

    def __init__(self) -> None:
        self.spans = RequestSpans()
        self._by_key: dict[str, Running[J]] = {}
        self._finished: list[Running[J]] = []  # not yet taken
        self._counter = itertools.count()

    def __len__(self) -> int:
        """Return the number of the library's requests."""
        return len(self._by_key)

    def add(self, job: J, request: GenerationRequest) -> list[tuple[str, GenerationRequest]]:
        """Add a request; returns the library's requests for it, by key."""
        running = Running(job, request)
        ended = {index: each for index, each in enumerate(request.partials) if each.finish_reason is not None}
        running.samples = {index: finished(partial) for index, partial in ended.items()}
        parts = library_requests(request)
        admitted = []
        for index, part in parts:
            key = f"{request.group}-{next(self._counter)}"
            self.spans.admit(key)
            self._by_key[key] = running
            running.keys[key] = index
            admitted.append((key, part))
        if not parts:
            self._finished.append(running)
        return admitted

    def finish(self, key: str, completions: Sequence[Completion]) -> None:
        """Record that one of the library's requests has finished."""
        running, samples = self._by_key.pop(key), self.spans.finish(key, completions)
        index = running.keys.pop(key)
        if index is None:
            running.samples |= dict(enumerate(samples))
        elif index < len(running.request.partials):
            running.samples[index] = continued(running.request.partials[index], samples[0])
        else:
            running.samples[index] = samples[0]
        if not running.keys:
            self._finished.append(running)

    def take_finished(self) -> list[tuple[J, int, list[Completion]]]:
        """Return the requests that have finished since the last call: call, group, and samples in seed order."""
        finished_requests, self._finished = self._finished, []
        return [
            (each.job, each.request.group, [each.samples[i] for i in sorted(each.samples)])
            for each in finished_requests
        ]

    def of_groups(self, groups: Collection[int] | None) -> list[Running[J]]:
        """Return the running requests of `groups` (None: all), in the order of their admission."""
        distinct = dict.fromkeys(self._by_key.values())
        return [each for each in distinct if groups is None or each.request.group in groups]

    def of_jobs(self, is_chosen: Callable[[J], bool]) -> list[Running[J]]:
        """Return the running requests of the chosen `generate` calls."""
        return [each for each in self.of_groups(None) if is_chosen(each.job)]

    def keys_of(self, chosen: Sequence[Running[J]] | None = None) -> list[str]:
        """Return the keys of the library's requests that run for `chosen`; None: for all."""
        return list(self._by_key) if chosen is None else [key for each in chosen for key in each.keys]

    def remove(self, chosen: Sequence[Running[J]]) -> list[J]:
        """Forget running requests; returns the call of each."""
        for key in self.keys_of(chosen):
            del self._by_key[key]
            self.spans.cancel(key)
        return [each.job for each in chosen]

    def copy(self, partials_of: PartialsOf, chosen: Sequence[Running[J]] | None = None) -> list[GenerationRequest]:
        """Return running requests (None: all) with their samples so far."""
        chosen = self.of_groups(None) if chosen is None else chosen
        return [replace(each.request, partials=self._partials(each, partials_of)) for each in chosen]

    def _partials(self, running: Running[J], partials_of: PartialsOf) -> tuple[Partial, ...]:
        so_far = dict(enumerate(running.request.partials))
        so_far.update({index: as_partial(sample) for index, sample in running.samples.items()})
        for key, index in running.keys.items():
            samples = partials_of(key)
            if samples is None:
                return ()
            for place, sample in enumerate(samples):
                spans = self.spans.so_far(key, place, len(sample.tokens))
                partial, place = replace(sample, spans=spans), place if index is None else index
                so_far[place] = _longer(so_far[place], partial) if place in so_far else partial
        return tuple(so_far[index] for index in sorted(so_far))


def _longer(partial: Partial, rest: Partial) -> Partial:
    """Return `partial`, followed by what an engine has sampled after it."""
    whole = continued(partial, Completion(rest.tokens, rest.log_probs, ""))
    spans = joined_spans(partial.spans, len(partial.tokens), rest.spans)
    return Partial(whole.tokens, whole.log_probs, spans, rest.finish_reason)
