"""Continue samples that another engine, or this one before a restart, has begun (`GenerationRequest.partials`).

The engine receives prompt and tokens so far as the prompt of a request for one sample, and computes their KV cache with its
weights. A sample with k tokens continues with the seed derived_seed(its seed, k): its remaining tokens are a function of its
seed, of its tokens so far and of their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.engines.base import EngineRefused, EngineSpec
from megarl.types import Completion, GenerationRequest, Partial, Span, derived_seed


def is_begun(request: GenerationRequest) -> bool:
    """Return whether a sample of `request` has tokens."""
    return any(len(partial.tokens) or partial.finish_reason for partial in request.partials)


def library_requests(request: GenerationRequest) -> list[tuple[int | None, GenerationRequest]]:
    """Split a request into requests to the inference library, which has neither partials nor greedy samples in a group.

    Each has the index of its sample; None: it samples all but the greedy one. A begun request is one for the rest of each
    unfinished sample.
    """
    whole, count = replace(request, with_greedy=False, partials=()), request.sampling.n
    greedy = greedy_request(whole)
    if not is_begun(request):
        return [(None, whole), *([(count, greedy)] if request.with_greedy else [])]
    parts: list[tuple[int | None, GenerationRequest]] = []
    for index, partial in enumerate(request.partials):
        if partial.finish_reason is None:
            sampled = replace(whole, seed=continued_seed(request.seed, index, len(partial.tokens)))
            parts.append((index, _rest(greedy if index == count else sampled, partial.tokens)))
    return parts


def greedy_request(request: GenerationRequest) -> GenerationRequest:
    """Return a request for the greedy sample of `request`."""
    sampling = replace(request.sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1)
    return replace(request, sampling=sampling, with_greedy=False)


def _rest(request: GenerationRequest, tokens: np.ndarray) -> GenerationRequest:
    """Return a request for one sample that begins after `tokens` of a response."""
    return replace(
        request,
        prompt=replace(request.prompt, tokens=(*request.prompt.tokens, *tokens.tolist())),
        sampling=replace(request.sampling, n=1, max_tokens=request.sampling.max_tokens - len(tokens)),
    )


def continued_seed(seed: int | None, index: int, length: int) -> int | None:
    """Return the seed of sample `index` of a request with `seed`, after `length` tokens. None without a seed."""
    if seed is None or length == 0:
        return None if seed is None else seed + index
    return derived_seed(seed + index, length)


def check_partials(request: GenerationRequest, spec: EngineSpec) -> None:
    """Raise ValueError if an engine of `spec` cannot continue a begun request."""
    uid, sampling = request.prompt.uid, request.sampling
    if request.prompt_top_k is not None or spec.return_routed_experts:
        requested = "the log-probs of its prompt" if request.prompt_top_k is not None else "the experts of its tokens"
        raise ValueError(
            f"prompt {uid!r} has partial samples, and {requested} are requested: an engine computes these for whole samples. "
            "Send the request without partials"
        )
    if len(request.partials) != sampling.n + request.with_greedy:
        greedy = " and a greedy one" if request.with_greedy else ""
        raise ValueError(f"prompt {uid!r} has {len(request.partials)} partial samples, and needs {sampling.n}{greedy}")
    for index, partial in enumerate(request.partials):
        length, ended = len(partial.tokens), partial.finish_reason is not None
        if len(partial.log_probs) != length:
            raise ValueError(
                f"prompt {uid!r}, partial sample {index}: {length} tokens, and log-probs of {len(partial.log_probs)}"
            )
        if length > sampling.max_tokens or (length == sampling.max_tokens and not ended):
            raise ValueError(
                f"prompt {uid!r}, partial sample {index} has {length} tokens and finish reason {partial.finish_reason!r}; "
                f"max_tokens is {sampling.max_tokens}"
            )


def check_versions(requests: Sequence[GenerationRequest], version: int, engine: str) -> None:
    """Raise EngineRefused if a partial sample has newer weights than `version`, so that its versions would not rise."""
    for request in requests:
        newest = max((span.version for partial in request.partials for span in partial.spans), default=version)
        if newest > version:
            raise EngineRefused(
                f"engine {engine!r} has weights of version {version} and cannot continue group {request.group}, which has "
                f"tokens of version {newest}; update its weights first"
            )


def continued(partial: Partial, rest: Completion) -> Completion:
    """Return the whole sample of `partial` and of what an engine has sampled after it."""
    length = len(partial.tokens)
    return replace(
        rest,
        tokens=np.concatenate([partial.tokens, rest.tokens]).astype(np.int32),
        log_probs=np.concatenate([partial.log_probs, rest.log_probs]).astype(np.float32),
        spans=joined_spans(partial.spans, length, rest.spans),
    )


def joined_spans(spans: tuple[Span, ...], length: int, rest: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return the spans of a sample: `spans` for its first `length` tokens, then `rest`."""
    moved = [Span(length + span.start, span.version) for span in rest]
    if spans and moved and moved[0].version == spans[-1].version:
        del moved[0]
    return (*spans, *moved)


def finished(partial: Partial) -> Completion:
    """Return a finished sample as an engine returns it."""
    assert partial.finish_reason is not None
    return Completion(partial.tokens, partial.log_probs, partial.finish_reason, spans=partial.spans)


def as_partial(sample: Completion) -> Partial:
    return Partial(sample.tokens, sample.log_probs, sample.spans, sample.finish_reason)
