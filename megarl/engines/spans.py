"""The weight versions of the tokens of running requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.types import Completion, Span


@dataclass(frozen=True)
class _Update:
    version: int
    lengths: Mapping[int, int]  # tokens of each unfinished sample at the update, by index in the request


class RequestSpans:
    """Spans of the running requests of an engine. Call from the engine's thread."""

    def __init__(self) -> None:
        self.version = 0  # of the engine's weights
        self._updates: dict[str, list[_Update]] = {}  # by request; the first is its admission

    def admit(self, key: str) -> None:
        self._updates[key] = [_Update(self.version, {})]

    def update(self, version: int, lengths: Mapping[str, Mapping[int, int]]) -> None:
        """Record an update between two steps. `lengths`: by request, the tokens so far of each unfinished sample."""
        self.version = version
        for key, of_samples in lengths.items():
            self._updates[key].append(_Update(version, of_samples))

    def cancel(self, key: str) -> None:
        del self._updates[key]

    def so_far(self, key: str, index: int, length: int) -> tuple[Span, ...]:
        """Return the spans of a running request's sample with `length` tokens; () without tokens."""
        return tuple(span for span in _spans(self._updates[key], index) if span.start < length)

    def finish(self, key: str, completions: Sequence[Completion]) -> list[Completion]:
        """Return the samples of a finished request, in seed order, with their spans."""
        updates = self._updates.pop(key)
        return [replace(sample, spans=_spans(updates, index)) for index, sample in enumerate(completions)]


def _spans(updates: Sequence[_Update], index: int) -> tuple[Span, ...]:
    spans = [Span(0, updates[0].version)]
    for update in updates[1:]:
        length = update.lengths.get(index)
        if length is None:  # the sample had finished
            break
        if length == spans[-1].start:  # no token was sampled since the update before
            spans.pop()
        spans.append(Span(length, update.version))
    return tuple(spans)
