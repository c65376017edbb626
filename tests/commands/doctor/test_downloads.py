"""`megarl doctor RECIPE`: models and data that `train` would download from the hub, and remedies of errors without one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.cli.hf import app as hf_command

from megarl import load_recipe
from megarl.commands.doctor.finding import Finding
from megarl.commands.doctor.recipe import stages
from megarl.hf import hub
from megarl.hf.hub.files import files_in
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
    assert "`hf download org/tiny --include '*.json' --include '*.safetensors'`" in model.remedy
    assert "data.train_files: hf://org/words/train is" in train.text
    assert "`hf download --repo-type dataset org/words --include train.parquet`" in train.remedy
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


def commands_of(findings: list[Finding]) -> list[list[str]]:
    """Return the arguments of the `hf download` in each remedy."""
    return [shlex.split(finding.remedy.split("`")[1])[1:] for finding in findings]


def test_the_commands_download_what_train_reads_and_no_more(server: FakeHub, home: Path, quickstart_data: Path) -> None:
    copies = {
        "original/consolidated.safetensors": b"",
        "sub/config.json": b"{}",
        "pytorch_model.bin": b"",
        "run.py": b"",
    }
    server.model("org/tiny").commit({**folder_files(quickstart_data / "model"), **copies})
    rows = folder_files(quickstart_data / "data")
    shards = {f"data/train-0000{number}-of-00002.parquet": rows["train.parquet"] for number in (0, 1)}
    server.dataset("org/words").commit(
        {"README.md": b"", "test.parquet": rows["test.parquet"], "extra.jsonl": b"", **shards}
    )
    for words in commands_of(problems_of()):
        hf_command(words, standalone_mode=False)
    names = {*folder_files(quickstart_data / "model"), "README.md", "test.parquet", *shards}
    snapshots = [folder for folder in home.glob("hub/*/snapshots/*") if folder.is_dir()]
    assert len(snapshots) == 2 and {name for folder in snapshots for name in files_in(folder)} == names
    server.requests.clear()
    assert problems_of() == []
    recipe = recipe_of()
    fetch_inputs(recipe, training_inputs(recipe))
    assert not server.downloads(), "nothing is left to download"


def test_a_tokenizer_without_weights_is_in_the_cache(
    server: FakeHub, home: Path, quickstart_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("model.tokenizer=org/words-of")
    server.model("org/words-of").commit(folder_files(quickstart_data / "model"))
    hub.config_folder(hub.HubName("org/words-of"))
    (missing,) = [each for each in problems_of("model.tokenizer=org/words-of") if "org/words-of" in each.text]
    assert missing.status == "warning" and "*.safetensors" not in missing.remedy
    fetch_inputs(recipe, training_inputs(recipe))
    assert problems_of("model.tokenizer=org/words-of") == []
    use_hub(monkeypatch, server.url, home, offline=True)
    assert problems_of("model.tokenizer=org/words-of") == []


class TestSplits:
    def of(self, quickstart_data: Path, split: str) -> Finding:
        model, rows = quickstart_data / "model", quickstart_data / "data" / "test.parquet"
        (finding,) = problems_of(f"model.path={model}", f"data.train_files={split}", f"data.eval_files=[{rows}]")
        return finding

    @pytest.mark.parametrize("rows", ["tran", "tran.parquet"])
    def test_rows_that_do_not_exist_fail(self, quickstart_data: Path, rows: str) -> None:
        finding = self.of(quickstart_data, f"hf://org/words/{rows}")
        assert finding.status == "FAIL" and f"org/words has no rows '{rows}'" in finding.text
        assert "hf://org/words/default/test" in finding.remedy

    def test_a_split_that_the_readme_may_name_is_not_checked(self, server: FakeHub, quickstart_data: Path) -> None:
        server.dataset("org/words").commit({"README.md": b"", **folder_files(quickstart_data / "data")})
        finding = self.of(quickstart_data, "hf://org/words/tran")
        assert finding.status == "warning" and "so the split is not checked" in finding.text
        assert self.of(quickstart_data, "hf://org/words/tran.parquet").status == "FAIL", "the README names no files"

    def test_a_split_that_the_hub_has_converted(self, server: FakeHub, quickstart_data: Path) -> None:
        rows = folder_files(quickstart_data / "data")["train.parquet"]
        server.dataset("org/csv").commit({"train.csv": b""})
        server.dataset("org/csv").commit({"default/train/0000.parquet": rows}, hub.CONVERTED)
        finding = self.of(quickstart_data, "hf://org/csv/train")
        assert finding.status == "warning" and " MB)" in finding.text
        command = "--repo-type dataset org/csv --revision refs/convert/parquet --include 'default/train/*.parquet'`"
        assert command in finding.remedy

    def test_the_same_rows_are_in_one_line(self, quickstart_data: Path) -> None:
        """The address of a data set's page is another name of it."""
        assert self.of(quickstart_data, "hf://datasets/org/words/train").status == "warning"


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
