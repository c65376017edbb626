"""Token limits of micro batches, and losses with groups that exceed them."""

from __future__ import annotations

import pytest

from megarl.batching.limits import group_size_notice, largest_micro_batch, samples_together, token_limit
from megarl.platform.cpu import CPUPlatform
from megarl.preflight.environment import environment_notices
from megarl.recipe.schema import Recipe


def recipe(loss: str, source: str = "rollout") -> Recipe:
    config = Recipe()
    config.algorithm.loss, config.rollout.samples_per_prompt = loss, 16
    config.train.source = source  # type: ignore[assignment]
    config.data.max_prompt_length, config.rollout.max_response_length = 1000, 2000
    config.actor.max_tokens_per_micro_batch = 16384
    return config


def test_a_group_that_stays_together_may_exceed_the_limit() -> None:
    config = recipe("gvpo")
    assert samples_together(config) == 16 and largest_micro_batch(config) == 48000
    notice = group_size_notice(config)
    assert notice is not None
    assert notice in environment_notices(config, CPUPlatform())
    assert "16 x 3,000 = 48,000 tokens, and 16,384 are its limit" in notice and "2.9 times the memory" in notice
    config.megatron.context_parallel = 3
    assert token_limit(config) == largest_micro_batch(config) == 3 * 16384 and group_size_notice(config) is None


@pytest.mark.parametrize(
    ("loss", "source", "together"), [("ppo_clip", "rollout", 1), ("dpo", "preferences", 2), ("sft", "sft", 1)]
)
def test_samples_that_stay_together(loss: str, source: str, together: int) -> None:
    config = recipe(loss, source)
    assert samples_together(config) == together and group_size_notice(config) is None
    config.data.max_prompt_length = 15000  # 17,000 tokens: a sample alone exceeds the limit
    assert largest_micro_batch(config) == together * 17000
    assert (group_size_notice(config) is None) == (together == 1)
