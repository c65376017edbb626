"""docs/rewards.md: its table is the registry, and its example does what it says."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from megarl.config import load_recipe
from megarl.rewards import Score, ScoreRequest, base
from megarl.rewards.weighted import terms_of
from megarl.scoring.scoring import Scoring

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "rewards.md").read_text()


def test_the_table_is_the_registry() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
    shown = {name: set(re.findall(r"`([^`]+)`", sources)) for name, sources in rows}
    known: dict[str, set[str]] = {name: set() for name in base._scorers}
    for source, scorer in base._sources.items():
        known[scorer.name].add(source)
    assert shown == known


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written: the module, the recipe's section, processes of their own, and the number in the text."""
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("python", "yaml"))
    assert code is not None and recipe is not None
    (tmp_path / "my_rewards.py").write_text(code[1])
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: some/model}}\n{recipe[1]}")
    settings = load_recipe(tmp_path / "recipe.yaml").reward
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    scoring = Scoring(terms_of(settings.function, settings.functions, ["mine"]), settings)
    scoring.start()
    rows = [ScoreRequest(response, "42", "mine") for response in ("It is 41", "no idea")]
    try:
        (near, _), (none, _) = asyncio.run(scoring.score(rows))
    finally:
        scoring.close()
    assert isinstance(near, Score) and isinstance(none, Score)
    assert near.value == pytest.approx(0.684) and near.answer == "41"
    assert near.parts == {"close": 0.5, "close/accuracy": 0.0, "brief": 0.92, "accuracy": 0.0}
    assert none.value == pytest.approx(0.2 * 0.93) and none.answer is None


def test_links_and_settings_exist() -> None:
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w.]+)`", PAGE))
    keys = (ROOT / "docs" / "recipes.md").read_text()
    assert all(f"`{key}`" in keys for key in re.findall(r"`(reward\.\w+)`", PAGE))
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in metrics for name in re.findall(r"`((?:rollout|eval)/\w+)`", PAGE))
