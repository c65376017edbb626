"""`megarl doctor RECIPE`: models and data that `train` would download from the hub, and remedies of errors without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.commands.doctor.finding import Finding
from megarl.commands.doctor.recipe import stages
from megarl.preflight.hub_inputs import fetch_inputs, training_inputs
from megarl.recipe.hub_inputs import with_cached_inputs
from megarl.recipe.paths import with_absolute_paths
from megarl.recipe.schema import Recipe
from tests.support.fake_hub import FakeHub, folder_files, running_hub, use_hub

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
TRAIN, TEST = "hf://org/words/train", "hf://org/words/test"


@pytest.fixture
def server(quickstart_data: Path) -> Iterator[FakeHub]:
    with running_hub() as server:
        server.model("org/tiny").commit(folder_files(quickstart_data / "model"))
        server.dataset("org/words").commit(folder_files(quickstart_data / "data"))
        yield server


@pytest.fixture(autouse=True)
def home(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    use_hub(monkeypatch, server.url, tmp_path / "home")
    return tmp_path / "home"


def recipe_of(*overrides: str) -> Recipe:
    names = ["model.path=org/tiny", f"data.train_files={TRAIN}", f"data.eval_files={TEST}"]
    return with_absolute_paths(load_recipe(QUICKSTART, [*names, *overrides]))


def findings_of(*overrides: str) -> list[Finding]:
    return list(stages(with_cached_inputs(recipe_of(*overrides))))


def problems_of(*overrides: str) -> list[Finding]:
    return [finding for finding in findings_of(*overrides) if finding.status != "ok"]


def test_names_that_are_not_in_the_cache_are_warnings_with_the_size(server: FakeHub, home: Path) -> None:
    model, train, test = problems_of()
    assert {finding.status for finding in (model, train, test)} == {"warning"}
    assert [finding.check for finding in (model, train, test)] == ["recipe: model", "recipe: data", "recipe: data"]
    assert model.text.startswith("model.path: hf://org/tiny is not in the cache")
    assert "`train` downloads it (" in model.text and " MB)" in model.text
    assert "`hf download org/tiny`" in model.remedy
    assert "data.train_files: hf://org/words/train is" in train.text
    assert "`hf download --repo-type dataset org/words`" in train.remedy
    assert test.text.endswith("(not reached: the rows, the scorers)"), "the last line names the checks that wait for it"
    assert not server.downloads() and not home.exists(), "the doctor downloads nothing"


def test_names_in_the_cache_are_read(home: Path) -> None:
    recipe = recipe_of()
    fetch_inputs(recipe, training_inputs(recipe))
    assert problems_of() == []


def test_only_data_is_missing(quickstart_data: Path) -> None:
    train, test = problems_of(f"model.path={quickstart_data / 'model'}")
    assert (train.status, test.status) == ("warning", "warning") and "(not reached: the scorers)" in test.text


def test_offline_a_missing_name_fails(server: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, server.url, home, offline=True)
    problems = problems_of()
    assert [finding.status for finding in problems] == ["FAIL"] * 3
    assert "HF_HUB_OFFLINE is set" in problems[0].text
    assert "`hf download org/tiny`" in problems[0].remedy and "unset HF_HUB_OFFLINE" in problems[0].remedy
    assert not server.requests


def test_a_hub_that_does_not_answer_is_named(server: FakeHub) -> None:
    server.fails = True
    model, *_ = problems_of()
    assert model.status == "warning" and "`train` downloads it, but" in model.text and "503" in model.text
    assert "HF_ENDPOINT" in model.remedy


def test_a_name_that_the_hub_does_not_have_fails() -> None:
    model, *_ = problems_of("model.path=org/none")
    assert model.status == "FAIL" and "no such model" in model.text and "correct the name" in model.remedy


def test_a_model_without_safetensors_fails(server: FakeHub) -> None:
    server.model("org/pickles").commit({"config.json": b"{}", "pytorch_model.bin": b""})
    model, *_ = problems_of("model.path=org/pickles")
    assert model.status == "FAIL" and "megarl reads no pickles" in model.text


class TestRemedies:
    """No finding tells the user only to correct what the message names."""

    def of(self, quickstart_data: Path, *overrides: str) -> list[Finding]:
        return problems_of(f"model.path={quickstart_data / 'model'}", *overrides)

    @pytest.mark.parametrize("model", [True, False], ids=["the model is here", "the model is missing, too"])
    def test_a_missing_file(self, quickstart_data: Path, *, model: bool) -> None:
        path = quickstart_data / "model" if model else Path("gone")
        rows = quickstart_data / "data"
        overrides = [f"model.path={path}", f"data.train_files=[{rows / 'tran.parquet'}]", f"data.eval_files=[{rows / 'test.parquet'}]"]  # fmt: skip
        *_, finding = problems_of(*overrides)
        assert "tran.parquet: no such file" in finding.text and "train.parquet" in finding.text
        assert finding.remedy == "correct the path"

    def test_a_missing_file_of_the_quickstart(self, quickstart_data: Path) -> None:
        rows = quickstart_data / "data" / "test.parquet"
        (finding,) = self.of(
            quickstart_data, "data.train_files=[data/quickstart/data/train.parquet]", f"data.eval_files=[{rows}]"
        )
        assert "`python -m megarl data quickstart --out data/quickstart`" in finding.remedy
        assert "correct the path" not in finding.text

    def test_rows_that_cannot_be_read(self, quickstart_data: Path, tmp_path: Path) -> None:
        rows = quickstart_data / "data" / "test.parquet"
        (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n')
        (finding,) = self.of(
            quickstart_data, f"data.train_files=[{tmp_path / 'rows.jsonl'}]", f"data.eval_files=[{rows}]"
        )
        assert "docs/data.md" in finding.remedy and "megarl keys data" in finding.remedy

    def test_a_scorer_that_is_not_there(self, quickstart_data: Path) -> None:
        rows = quickstart_data / "data"
        files = [f"data.train_files=[{rows / 'train.parquet'}]", f"data.eval_files=[{rows / 'test.parquet'}]"]
        (finding,) = self.of(quickstart_data, *files, "reward.function=nowhere.py:score")
        assert finding.remedy and "that the message names" not in finding.remedy
