"""Compare the log-probs of a sample's spans with Hugging Face models of their versions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from megarl.types import Completion, GenerationRequest, Span
from tests.support.engine_process import gaps

EXACT = 5e-5  # largest gap of an engine's log-prob to Hugging Face's with the same weights


def span_gaps(
    models: Mapping[int, Any], request: GenerationRequest, sample: Completion
) -> Iterator[tuple[Span, np.ndarray, np.ndarray]]:
    """Yield each span, the gaps of its tokens to the weights of its version, and those to the version before.

    `models`: by version, 0 to the newest. A span of version 0 is compared with version 1 instead.
    """
    ends = [*(span.start for span in sample.spans[1:]), len(sample.tokens)]
    for span, end in zip(sample.spans, ends, strict=True):
        exact = gaps(models[span.version], request, sample)[span.start : end]
        other = gaps(models[abs(span.version - 1)], request, sample)[span.start : end]
        yield span, exact, other


@torch.no_grad()
def with_kept_cache(models: Mapping[int, Any], request: GenerationRequest, sample: Completion) -> np.ndarray:
    """Return Hugging Face's log-probs of the sample, where each version reads the KV cache of the versions before.

    The last token before an update is an input of the first step after it.
    """
    prompt, tokens = len(request.prompt.tokens), torch.tensor([[*request.prompt.tokens, *sample.tokens.tolist()]])
    starts = [0, *(prompt + span.start - 1 for span in sample.spans[1:]), tokens.shape[1]]
    cache, parts = DynamicCache(), []
    for span, (start, end) in zip(sample.spans, itertools.pairwise(starts), strict=True):
        model = models[span.version]
        parts.append(model(tokens[:, start:end], past_key_values=cache, use_cache=True).logits[0].float())
    log_probs = torch.log_softmax(torch.cat(parts), -1)[prompt - 1 : -1]
    return log_probs.gather(1, tokens[0, prompt:, None])[:, 0].numpy()
