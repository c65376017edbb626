"""docs/rewards.md: the table equals the registry, and the examples give the printed results."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.cluster.process import free_port
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import RewardConfig
from megarl.rewards import Score, ScoreRequest, base, score
from megarl.rewards.scoring import Outcome, Scoring
from megarl.rewards.weighted import combine, terms_of, with_judgement
from megarl.rollout.judge.verdicts import JudgeTemplate, number_in
from megarl.types import Prompt, SampleFailure
from tests.support.docs_pages import broken_links, unknown_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text()


def test_the_table_equals_the_registry() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
    shown = {name: set(re.findall(r"`([^`]+)`", sources)) for name, sources in rows}
    listed_sources: dict[str, set[str]] = {name: set() for name in base.SCORERS.names()}
    for source, scorer in base._sources.items():
        listed_sources[scorer.name].add(source)
    assert shown == listed_sources


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example as written: the module, the recipe's section, separate processes, and the number in the text."""
    code, recipe = blocks("A scorer of your own")
    (tmp_path / "my_rewards.py").write_text(code)
    (tmp_path / "recipe.yaml").write_text(recipe)
    settings = load_recipe(tmp_path / "recipe.yaml").reward
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    rows = [ScoreRequest(response, "42", "mine") for response in ("It is 41", "no idea")]
    (near, _), (none, _) = outcomes(settings, rows)
    assert isinstance(near, Score) and isinstance(none, Score)
    assert near.value == pytest.approx(0.684) and near.answer == "41"
    assert near.parts == {"close": 0.5, "close/accuracy": 0.0, "brief": 0.92, "accuracy": 0.0}
    assert none.value == pytest.approx(0.2 * 0.93) and none.answer is None


def test_a_function_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, recipe = blocks("A reward function of verl")
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "brief.py").write_text(code)
    (tmp_path / "recipe.yaml").write_text(recipe)
    settings = load_recipe(tmp_path / "recipe.yaml").reward
    monkeypatch.chdir(tmp_path)
    rows = [ScoreRequest(response, "42", "mine") for response in ("It is 42", f"{'long ' * 20}42", "")]
    right, long, empty = (outcome for outcome, _ in outcomes(settings, rows))
    assert right == Score(1.0, {"acc": 1.0, "accuracy": 1.0}, "42")
    assert long == Score(0.0, {"acc": 1.0, "accuracy": 1.0}, "42"), "reward.arguments"
    assert empty == Score(0.0, {"acc": 0.0, "accuracy": 0.0}, None)


def test_the_judges_example(tmp_path: Path) -> None:
    """Run the example as written: the recipe, the judge's question, and the reward in the text."""
    part = PAGE.split("\n## A judge\n")[1]
    example = re.search(r"```yaml\n(.*?)```", part, re.DOTALL)
    match = re.search(
        r"To the question `(.*?)`, a response of `(.*?)` and a verdict of `(.*?)`.*?= ([\d.]+)\.", part, re.DOTALL
    )
    assert example is not None and match is not None
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: some/model}}\n{example[1]}")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.judge.prompt is not None
    row = Prompt("row", (), "", "openai/gsm8k", "5", question=match[1])
    question = JudgeTemplate(recipe.judge.prompt).render(row, match[2])
    assert question.startswith(f"Question: {match[1]}\nThe right answer: 5\nA student's answer:\n{match[2]}\n")
    (terms,) = terms_of(recipe.reward.function, recipe.reward.functions, ["openai/gsm8k"]).values()
    combined = combine(terms, [score(term.scorer, ScoreRequest(match[2], "5", "openai/gsm8k")) for term in terms])
    number = number_in(match[3], re.compile(recipe.judge.pattern))
    assert number is not None
    weight = recipe.reward.functions["judge"]
    reward, parts = with_judgement(combined.value, combined.parts, number / recipe.judge.scale, weight, None)
    assert reward == pytest.approx(float(match[4])) and parts["judge"] == 0.8


def test_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example as written, on another port: the service in a separate process, the recipe, the number in the text;
    and a wrong token, which the service rejects."""
    code, recipe = blocks("A service of your own")
    port = str(free_port())
    (tmp_path / "grader.py").write_text(code.replace("8700", port))
    (tmp_path / "recipe.yaml").write_text(recipe.replace("8700", port))
    settings = load_recipe(tmp_path / "recipe.yaml").reward
    row = ScoreRequest("It is 42", "42", "mine")
    with subprocess.Popen([sys.executable, tmp_path / "grader.py"], stderr=subprocess.DEVNULL) as judge:
        try:
            wait_for(int(port))
            monkeypatch.setenv("JUDGE_TOKEN", "Bearer open sesame")
            ((result, _),) = outcomes(settings, [row])
            monkeypatch.setenv("JUDGE_TOKEN", "Bearer open barley")
            ((refused, _),) = outcomes(settings, [row])
        finally:
            judge.kill()
    assert result == Score(0.97, {"accuracy": 1.0, "words": 3.0}, None, reason="3 words")
    assert isinstance(refused, SampleFailure) and "answered 401: '\"who are you?\"'" in refused.cause


def blocks(heading: str) -> tuple[str, str]:
    """Return the Python or the command, and the recipe, of a section."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    code, recipe = (re.search(rf"```(?:{kind})\n(.*?)```", section, re.DOTALL) for kind in ("python|bash", "yaml"))
    assert code is not None and recipe is not None
    return code[1], f"model: {{path: some/model}}\n{recipe[1]}"


def outcomes(settings: RewardConfig, rows: list[ScoreRequest]) -> list[Outcome]:
    scoring = Scoring(terms_of(settings.function, settings.functions, ["mine"]), settings)
    scoring.start()
    try:
        return asyncio.run(scoring.score(rows))
    finally:
        scoring.close()


def wait_for(port: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_links_and_settings_exist() -> None:
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w./]+)`", PAGE))
    assert re.search(r"`(?:reward|judge)\.(?!py`)[\w.]+`", PAGE) and not unknown_settings(PAGE)
    assert not broken_links(ROOT / "docs" / "rewards.md")
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in metrics for name in re.findall(r"`((?:rollout|eval|timing_s)/\w+)`", PAGE))


def test_the_reward_models_recipe_loads(tmp_path: Path) -> None:
    command, recipe = blocks("A reward model")
    (tmp_path / "recipe.yaml").write_text(recipe)
    settings = load_recipe(tmp_path / "recipe.yaml").reward
    assert settings.services == ["reward_model"] and str(settings.remote.model) in command
