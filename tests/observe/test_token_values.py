"""tokens/: texts, values and versions of the tokens of a few samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.observe.log import RunLog
from megarl.observe.run_dir import RunDirectory
from megarl.observe.token_values import (
    MAX_TOKENS,
    read_token_values,
    token_path,
    token_records,
    token_text,
    write_token_values,
)
from megarl.recipe.schema import Recipe
from megarl.trainer.token_recorder import recorded_samples
from megarl.types import Group, InlineData, Sample, SampleTokens, Span
from tests.support.log_recipe import make_recipe


class Pieces:
    """A tokenizer that writes a space before each word but the first, as sentencepiece does."""

    def decode(self, ids: list[int], special: bool = False) -> str:
        assert special, "special tokens are shown too"
        return " ".join(f"w{token}" for token in ids)


def group_of(response: int) -> Group:
    """A group of two samples with a prompt of 3 tokens; versions 4 and 6 sampled the response."""
    length = 3 + response
    vectors = [
        SampleTokens(
            np.arange(length, dtype=np.int32) + 10 * index,
            np.arange(length) % 5 != 4,
            np.linspace(-1, 0, length, dtype=np.float32),
        )
        for index in range(2)
    ]
    spans = (Span(0, 4), Span(response // 2, 6))
    samples = [Sample(7, i, InlineData(vectors), 3, response, response, spans=spans) for i in range(2)]
    return Group(7, "row", "source", samples)


def test_a_record_describes_the_response(tmp_path: Path) -> None:
    advantages = np.array([0, 0, 0, 0.5, np.nan, -0.123456789], dtype=np.float32)
    first, second = token_records(group_of(3), 2, {0: {"advantages": advantages}}, Pieces())  # type: ignore[arg-type]
    assert first["group"] == 7 and (first["index"], second["index"]) == (0, 1)
    assert first["tokens"] == [" w3", " w4", " w5"] and second["tokens"][0] == " w13"
    assert first["values"]["mask"] == [1, 0, 1] and first["values"]["versions"] == [4, 6, 6]
    assert first["values"]["rollout_log_probs"] == pytest.approx([-0.4, -0.2, 0.0])
    assert first["values"]["advantages"][0] == 0.5 and first["values"]["advantages"][2] == -0.12346
    assert "advantages" not in second["values"], "the trainers have recorded the first sample only"
    run_dir = RunDirectory(tmp_path)
    write_token_values(run_dir, 5, [first, second])
    read = read_token_values(run_dir, 5, {"group": 7, "index": 0})
    assert read is not None and read["values"]["advantages"] == [0.5, "NaN", -0.12346]
    assert read_token_values(run_dir, 5, {"group": 8, "index": 0}) is None
    assert read_token_values(run_dir, 6, {"group": 7, "index": 0}) is None
    path = run_dir.tokens / "step_000005.jsonl"
    path.write_bytes(path.read_bytes()[:40] + b"\n")
    with pytest.raises(ValueError, match=r"tokens/step_000005\.jsonl, line 1 is damaged"):
        read_token_values(run_dir, 5, {"group": 7, "index": 0})


def test_long_responses_are_cut() -> None:
    (record,) = token_records(group_of(MAX_TOKENS + 9), 1, {}, Pieces())  # type: ignore[arg-type]
    lengths = {len(record["tokens"]), *(len(column) for column in record["values"].values())}
    assert lengths == {MAX_TOKENS}


def test_a_token_keeps_its_leading_space() -> None:
    assert token_text(3, Pieces()) == " w3"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "kept", "tokens", "siblings", "count"),
    [
        ("rollout", 32, 2, 8, 2),
        ("rollout", 0, 2, 8, 0),
        ("rollout", 32, 9, 8, 8),
        ("rollout", 1, 2, 8, 1),
        ("sft", 32, 2, 1, 0),
    ],
)
def test_recorded_samples_are_among_the_written_ones(
    source: str, kept: int, tokens: int, siblings: int, count: int
) -> None:
    recipe = Recipe()
    recipe.train.source = source  # type: ignore[assignment]
    recipe.observe.samples_per_step, recipe.observe.token_samples_per_step = kept, tokens
    recipe.rollout.samples_per_prompt = siblings
    assert recorded_samples(recipe) == count


def test_a_resume_sets_the_tokens_of_later_steps_aside(tmp_path: Path) -> None:
    with RunLog(make_recipe(), tmp_path, 1, 3) as log:
        for step in (1, 2, 3):
            log.tokens(step, [{"group": step, "index": 0, "tokens": [], "values": {}}])
            log.step(step)
    with RunLog(make_recipe(), tmp_path, 3, 3):
        pass
    run_dir = RunDirectory(tmp_path)
    assert [token_path(run_dir, step).exists() for step in (1, 2, 3)] == [True, True, False]
    moved = run_dir.tokens / "discarded" / "step_000003.jsonl"
    assert json.loads(moved.read_text())["group"] == 3
