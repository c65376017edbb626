"""Distributions of response lengths, from options and from the samples of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.commands.simulate.lengths import DrawnLengths, LogNormal, Recorded, moments, parse_lengths, recorded
from megarl.errors import InputError
from megarl.observe.json_lines import json_line
from tests.support.estimate_cases import recipe


def test_three_figures_are_those_of_the_drawn_lengths() -> None:
    settings = recipe(rollout__max_response_length=32768, data__max_prompt_length=1000)
    distribution = parse_lengths("3000,30000,32768", None, settings)
    drawn = distribution.draw(np.random.default_rng(0), 20000, 4)
    assert distribution.prompt == 500 and drawn.max() == 32768 and drawn.min() >= 1
    assert np.median(drawn) == pytest.approx(3000, rel=0.03)
    assert np.quantile(drawn, 0.99) == pytest.approx(30000, rel=0.06)
    logs = np.log(LogNormal(3000, 30000, 10**9).draw(np.random.default_rng(0), 20000, 4))
    within = logs.var(axis=1, ddof=1).mean()
    assert within / logs.var() == pytest.approx(0.5, abs=0.03)  # half of the variance is between prompts


def test_moments_of_even_lengths() -> None:
    """Uniform from 1 to 1,000: the mean is 500; E[l^2] / 2 E[l] is a third of the longest."""
    mean, age = moments(parse_lengths(None, None, recipe(rollout__max_response_length=1000)), 0)
    assert mean == pytest.approx(500, rel=0.02) and age == pytest.approx(1000 / 3, rel=0.02)


def test_lengths_depend_on_seed_and_number_alone() -> None:
    distribution = LogNormal(300, 3000, 4000)
    first, second = DrawnLengths(distribution, 4, 7), DrawnLengths(distribution, 4, 7)
    late = second.of(900)
    assert first.of(3) == second.of(3) and first.of(900) == late
    assert DrawnLengths(distribution, 4, 8).of(3) != first.of(3)


def write_run(path: Path, lengths: list[list[int]]) -> None:
    folder = path / "samples"
    folder.mkdir(parents=True)
    records = [
        {"group": number, "response_length": length, "prompt_length": 40}
        for number, group in enumerate(lengths)
        for length in group
    ]
    (folder / "step_000001.jsonl").write_bytes(b"".join(json_line(record) for record in records))


def test_lengths_of_a_run_are_drawn_by_group(tmp_path: Path) -> None:
    groups = [[10 * (number + 1), 10 * (number + 1) + 1] for number in range(60)]
    write_run(tmp_path, groups)
    distribution = recorded(tmp_path)
    assert isinstance(distribution, Recorded) and distribution.prompt == 40 and len(distribution.groups) == 60
    drawn = distribution.draw(np.random.default_rng(0), 5000, 4)
    assert drawn.shape == (5000, 4) and set(np.unique(drawn)) == {length for group in groups for length in group}
    assert (drawn.max(axis=1) - drawn.min(axis=1)).max() == 1  # samples of a group stay together
    assert drawn.mean() == pytest.approx(np.mean(groups), rel=0.03)
    assert "120 samples of 60 groups" in distribution.assumed


@pytest.mark.parametrize("text", ["3000", "3000,30000", "a,b,c", "3000,2000,4000", "0,10,20", "10,20,5", "10,20,1025"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--lengths"):
        parse_lengths(text, None, recipe(rollout__max_response_length=1024))


def test_contradicting_and_impossible_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--lengths and --response"):
        parse_lengths("10,20,30", 5.0, recipe())
    with pytest.raises(InputError, match="--response"):
        parse_lengths(None, 5000.0, recipe(rollout__max_response_length=1024))
    write_run(tmp_path / "long", [[5, 60]] * 60)
    with pytest.raises(InputError, match=r"longest response has 60 tokens, and rollout.max_response_length is 50"):
        parse_lengths(str(tmp_path / "long"), None, recipe(rollout__max_response_length=50))
    write_run(tmp_path, [[5, 6]])
    with pytest.raises(InputError, match=r"2 samples .* at least 100"):
        recorded(tmp_path)
