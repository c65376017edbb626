"""The GSM8K data set of tests that need the whole of it. tests/fixtures/gsm8k has a sample for the other tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.data import PromptDataset
from megarl.preflight.data import check_rewards
from megarl.recipe import Recipe
from megarl.rewards import ScoreRequest, score

SAMPLE = (
    Path(__file__).parents[1] / "fixtures" / "gsm8k"
)  # rows in the form of openai/gsm8k: the answer is a worked solution
GSM8K = Path(os.environ.get("MEGARL_GSM8K", Path(__file__).parents[3] / "shared" / "data" / "gsm8k"))

needs_gsm8k = pytest.mark.skipif(
    not all((GSM8K / name).is_file() for name in ("train.jsonl", "test.jsonl")),
    reason="GSM8K is not here: set MEGARL_GSM8K to its folder of .jsonl files",
)


def rewards_of_solutions(recipe: Recipe, prompts: PromptDataset) -> list[float]:
    """Return the reward of each row's worked solution as a response; its column `answer` is the ground truth."""
    (term,) = check_rewards(recipe, prompts.data_sources)["openai/gsm8k"]
    requests = [ScoreRequest(row.ground_truth, row.ground_truth, row.data_source, uid=row.uid) for row in prompts]
    return [score(term.scorer, request).value for request in requests]
