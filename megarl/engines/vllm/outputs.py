"""Convert vLLM's outputs to megarl's types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.engines.partials import as_partial
from megarl.types import Completion, DraftCount, Partial, TokenScores


def completions(output: Any, prompt_top_k: int | None) -> list[Completion]:
    """Convert a finished RequestOutput of vLLM; samples are in seed order. `prompt_top_k`: from the request."""
    prompt = None
    if prompt_top_k is not None:
        prompt = _prompt_scores(output.prompt_logprobs, output.prompt_token_ids, prompt_top_k)
    samples = sorted(output.outputs, key=lambda sample: sample.index)
    return [_completion(sample, len(output.prompt_token_ids), prompt) for sample in samples]


def _completion(sample: Any, prompt_length: int, prompt: TokenScores | None) -> Completion:
    """Convert vLLM's CompletionOutput."""
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {sample.finish_reason!r}")
    tokens = np.asarray(sample.token_ids, np.int32)
    log_probs = _log_probs(sample.logprobs, sample.token_ids)
    experts = getattr(sample, "routed_experts", None)
    if experts is not None:
        experts = _experts_of_all(experts, prompt_length + len(tokens))
    return Completion(tokens, log_probs, sample.finish_reason, experts, prompt)


def partials(states: Sequence[Any]) -> list[Partial]:
    """Return the samples so far of a running request, in seed order, from the RequestState of each unfinished one."""
    parent = states[0].parent_req
    samples = {} if parent is None else {each.index: each for each in parent.output_aggregator if each is not None}
    finished = {index: as_partial(_completion(sample, 0, None)) for index, sample in samples.items()}
    running = {state.request_index: _unfinished(state) for state in states}
    both = finished | running
    return [replace(both[index], spans=()) for index in sorted(both)]


def _unfinished(state: Any) -> Partial:
    tokens = list(state.detokenizer.output_token_ids)
    log_probs = _log_probs(state.logprobs_processor.logprobs, tokens)
    return Partial(np.asarray(tokens, np.int32), log_probs, ())


def _log_probs(logprobs: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return the log-probs of sampled tokens, NaN if vLLM has none: float32 [tokens]."""
    if logprobs is None:
        return np.full(len(tokens), np.nan, np.float32)
    if hasattr(logprobs, "start_indices"):  # flat
        log_probs = np.array(logprobs.logprobs, np.float32)
    else:
        log_probs = np.array([p[t].logprob for p, t in zip(logprobs, tokens, strict=True)], np.float32)
    assert log_probs.shape == (len(tokens),), (log_probs.shape, len(tokens))
    return log_probs


def _experts_of_all(experts: np.ndarray, length: int) -> np.ndarray:
    """Pad vLLM's routed experts [length - 1, layers, topk] with -1 for the last token: int16 [length, layers, topk]."""
    if len(experts) not in (length - 1, length):
        raise RuntimeError(
            f"vLLM returned the experts of {len(experts)} of a sample's {length} tokens; they cannot be matched"
        )
    padded = np.full((length, *experts.shape[1:]), -1, np.int16)
    padded[: length - 1] = experts[: length - 1]
    return padded


def _prompt_scores(logprobs: Any, tokens: list[int], top_k: int) -> TokenScores:
    """Convert vLLM's prompt log-probs: per position the prompt's token and the `top_k` likeliest, flat or as dicts.

    The first position has none. A dict contains each token once, even if the prompt's token is among the likeliest.
    """
    length = len(tokens)
    scores = TokenScores(
        np.zeros(length, np.float32), np.zeros((length, top_k), np.int32), np.zeros((length, top_k), np.float32)
    )
    if len(logprobs) != length:
        raise RuntimeError(f"vLLM returned log-probs of {len(logprobs)} of a prompt's {length} tokens")
    if hasattr(logprobs, "start_indices"):  # flat
        shape = (length - 1, top_k + 1)
        ids = np.asarray(logprobs.token_ids, np.int32).reshape(shape)
        values = np.asarray(logprobs.logprobs, np.float32).reshape(shape)
        assert ids[:, 0].tolist() == list(tokens[1:]), "each position starts with the prompt's token"
        scores.log_probs[1:], scores.top_tokens[1:], scores.top_log_probs[1:] = values[:, 0], ids[:, 1:], values[:, 1:]
        return scores
    for position in range(1, length):
        candidates = logprobs[position]
        likeliest = sorted(candidates, key=lambda token: candidates[token].rank)[:top_k]
        scores.log_probs[position] = candidates[tokens[position]].logprob
        scores.top_tokens[position] = likeliest
        scores.top_log_probs[position] = [candidates[token].logprob for token in likeliest]
    return scores


class DraftCounts:
    """Counts of proposed and accepted tokens of drafts, by sample, from vLLM's scheduler. No sample has counts if this version
    of vLLM does not report them by request."""

    def __init__(self, scheduler: Any) -> None:
        self._names: dict[str, list[str]] = {}  # by request: vLLM's names of its samples, in seed order
        self._counts: dict[str, DraftCount] = {}  # by name
        self._is_reported = hasattr(scheduler, "make_spec_decoding_stats")
        if not self._is_reported:
            return
        original = scheduler.make_spec_decoding_stats

        def count(*args: Any, **kwargs: Any) -> Any:
            of_step = DraftCount(kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"])
            self._counts[kwargs["request_id"]] = self._counts.get(kwargs["request_id"], DraftCount()) + of_step
            return original(*args, **kwargs)

        scheduler.make_spec_decoding_stats = count

    def admit(self, key: str, states: Sequence[Any]) -> None:
        """`states`: the RequestState of each of the request's samples."""
        self._names[key] = [state.request_id for state in sorted(states, key=lambda state: state.request_index)]

    def finish(self, key: str, samples: Sequence[Completion]) -> list[Completion]:
        """Return the samples of a finished request, in seed order, with their counts."""
        names = self._names.pop(key)
        counts = [self._counts.pop(name, DraftCount()) for name in names]
        if not self._is_reported:
            return list(samples)
        return [replace(sample, drafts=count) for sample, count in zip(samples, counts, strict=True)]

    def cancel(self, key: str) -> None:
        for name in self._names.pop(key):
            self._counts.pop(name, None)
