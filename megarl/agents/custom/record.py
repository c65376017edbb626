"""Match the response of a loop with the engine's answers: each token that the loss counts must be one that the engine sampled there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.agents.tool import ToolFault
from megarl.types import Completion, Span


@dataclass(frozen=True)
class EngineAnswer:
    """A request of the loop and the engine's answer. differs: settings that are not the recipe's, "" if there are none."""

    tokens: np.ndarray  # int32 [asked]
    completion: Completion
    differs: str = ""


@dataclass(frozen=True)
class Matched:
    """The response that is trained on, up to its last loss token; vectors cover it, [R].

    ends: index after the last token of each run of loss tokens.
    """

    tokens: np.ndarray  # int32 [R]
    log_probs: np.ndarray  # float32 [R]; 0 for tokens without loss
    sampled: np.ndarray  # bool [R]
    ends: tuple[int, ...]
    spans: tuple[Span, ...]
    finish_reason: str


def match(
    prompt: Sequence[int], tokens: Sequence[int], mask: Sequence[bool], records: Sequence[EngineAnswer], most: int
) -> Matched:
    """Return a response of at most `most` tokens with the log-probs and versions of the engine's answers.

    A token belongs to the answer that explains most of the response; of several to one with the recipe's settings, then the earliest.

    Raises:
        ToolFault: mask and tokens differ in length, no token has the mask, the engine did not sample one of them there, or with
            other settings than the recipe's.
    """
    if len(tokens) != len(mask):
        raise ToolFault(f"its response has {len(tokens)} tokens and {len(mask)} entries of the mask")
    sampled = np.asarray(mask[:most], dtype=bool)
    if not sampled.any():
        raise ToolFault(f"no token of its response has the mask, of {len(tokens)}: there is nothing to train on")
    length = int(np.flatnonzero(sampled)[-1]) + 1
    sampled, response = sampled[:length], np.asarray(tokens[:length], dtype=np.int32)
    owner, offset = _owners(np.asarray(prompt, dtype=np.int32), response, records)
    _check(sampled, owner, len(prompt), records)
    log_probs = np.zeros(length, np.float32)
    for index in np.flatnonzero(sampled):
        log_probs[index] = records[owner[index]].completion.log_probs[offset[index]]
    last = records[owner[-1]].completion
    is_cut = len(tokens) > most or length == most
    complete = offset[-1] == len(last.tokens) - 1
    return Matched(
        tokens=response,
        log_probs=log_probs,
        sampled=sampled,
        ends=tuple((np.flatnonzero(sampled & ~np.append(sampled[1:], False)) + 1).tolist()),
        spans=_spans(sampled, owner, offset, records),
        finish_reason=last.finish_reason if complete else "length" if is_cut else "stop",
    )


def _owners(prompt: np.ndarray, response: np.ndarray, records: Sequence[EngineAnswer]) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each token of the response, the index of its record, -1 without one, and the token's index in the answer."""
    whole = np.concatenate([prompt, response])
    candidates: list[
        tuple[int, bool, int, int, int]
    ] = []  # (- matching tokens, other settings, record, first token, end)
    for number, record in enumerate(records):
        length = len(record.tokens)
        start = length - len(prompt)
        if start < 0 or length > len(whole) or not np.array_equal(whole[:length], record.tokens):
            continue
        answer = record.completion.tokens[: len(whole) - length]
        different = np.flatnonzero(answer != whole[length : length + len(answer)])
        matching = int(different[0]) if len(different) else len(answer)
        candidates.append((-matching, bool(record.differs), number, start, start + matching))
    owner, offset = np.full(len(response), -1), np.zeros(len(response), int)
    for _, _, number, start, end in sorted(candidates):
        free = owner[start:end] < 0
        owner[start:end][free] = number
        offset[start:end][free] = np.arange(end - start)[free]
    return owner, offset


def _check(sampled: np.ndarray, owner: np.ndarray, prompt: int, records: Sequence[EngineAnswer]) -> None:
    unknown = np.flatnonzero(sampled & (owner < 0))
    if len(unknown):
        raise ToolFault(
            f"token {unknown[0]} of its response has the mask, and no request returned it after the {prompt + unknown[0]} tokens "
            "before it: they must be a request's tokens and its answer, unchanged and not tokenized again"
        )
    for number in sorted({*owner[sampled].tolist()}):
        if records[number].differs:
            raise ToolFault(
                f"tokens with the mask were sampled with {records[number].differs}: their probabilities are not the trainer's. "
                "Use the recipe's settings, or append these tokens without the mask"
            )


def _spans(
    sampled: np.ndarray, owner: np.ndarray, offset: np.ndarray, records: Sequence[EngineAnswer]
) -> tuple[Span, ...]:
    spans: list[Span] = []
    for index in np.flatnonzero(sampled).tolist():
        answer = records[owner[index]].completion
        version = [span.version for span in answer.spans if span.start <= offset[index]][-1]
        if not spans:
            spans.append(Span(0, version))
        elif version != spans[-1].version:
            spans.append(Span(index, version))
    if any(later.version < earlier.version for earlier, later in itertools.pairwise(spans)):
        raise ToolFault(
            "its response mixes answers of newer weights before answers of older ones: request them in order"
        )
    return tuple(spans)
