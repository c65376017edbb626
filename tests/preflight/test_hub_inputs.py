"""Models and data sets of the hub in a recipe: fetched before the start, recorded, and the same in a resumed run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import RecipeError, engines, load_recipe
from megarl.data import load_tokenizer
from megarl.engines.specs import policy_spec
from megarl.errors import RecipeErrors
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.findings import Available
from megarl.preflight.hub_inputs import evaluation_inputs, fetch_inputs, training_inputs
from megarl.preflight.models import config_of, read_hf_config
from megarl.preflight.survey import check_without_weights, prepare_training, survey
from megarl.recipe import to_yaml
from megarl.recipe.hub_inputs import with_cached_inputs, with_local_model
from megarl.recipe.paths import with_absolute_paths
from megarl.recipe.schema import Recipe
from tests.support.fake_hub import FakeHub, folder_files, running_hub, use_hub

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
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


def fetched(recipe: Recipe) -> tuple[Recipe, list[str]]:
    inputs = fetch_inputs(recipe, training_inputs(recipe))
    return inputs.recipe, inputs.notices


def started(recipe: Recipe, folder: Path) -> Recipe:
    """Record the recipe's commits in runs/first, and return the recipe with local files."""
    inputs = fetch_inputs(recipe, training_inputs(recipe))
    run = RunDirectory(folder / "runs" / "first")
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_hub_commits(inputs.commits)
    return inputs.recipe


def test_names_are_no_paths() -> None:
    recipe = recipe_of("model.tokenizer=hf://org/tiny")
    assert (recipe.model.path, recipe.model.tokenizer) == ("hf://org/tiny", "hf://org/tiny")
    assert recipe.data.train_files == [TRAIN]
    assert with_absolute_paths(recipe) == recipe


def test_the_command_for_a_model_that_is_not_in_the_cache_names_the_revision() -> None:
    with pytest.raises(RecipeError) as error:
        read_hf_config("hf://org/tiny@v1")
    assert "run `hf download org/tiny --revision v1`" in error.value.remedy
    with pytest.raises(RecipeError, match="does not name a model on the hub"):
        read_hf_config("hf://tiny")


def test_a_recipe_of_the_hub_is_prepared_like_one_of_folders(server: FakeHub, home: Path) -> None:
    recipe, notices = fetched(recipe_of())
    model, words = (server.repositories[name].refs["main"] for name in ("models/org/tiny", "datasets/org/words"))
    assert notices == [
        f"model.path: org/tiny from the hub, at commit {model[:12]}",
        f"data.train_files: org/words from the hub, at commit {words[:12]}",
        f"data.eval_files: org/words from the hub, at commit {words[:12]}",
        "models from the hub: each node reads them from its own cache (HF_HOME), and downloads missing files",
    ]
    prepared = prepare_training(recipe)
    assert prepared.prompts is not None and prepared.evaluation is not None and len(prepared.prompts) > 100
    resolved = yaml.safe_load(to_yaml(recipe))
    assert resolved["model"]["path"] == f"hf://org/tiny@{model}"
    assert resolved["data"]["train_files"] == [f"hf://org/words@{words}/train.parquet"]
    assert resolved["data"]["eval_files"] == [f"hf://org/words@{words}/test.parquet"]


def test_rows_without_a_data_source_have_the_name_of_the_data_set(server: FakeHub) -> None:
    server.dataset("org/plain").commit({"train.jsonl": b'{"question": "1+1?", "answer": "2"}\n'})
    columns = "data.columns={prompt: question, ground_truth: answer}"
    names = [f"data.{split}_files=hf://org/plain/train" for split in ("train", "eval")]
    recipe, _ = fetched(recipe_of(*names, columns, "reward.function=math", "reward.functions={}"))
    prepared = prepare_training(recipe)
    assert prepared.prompts is not None
    assert prepared.data_sources == ["org/plain"] and prepared.prompts[0].uid == "org/plain/0"


@pytest.mark.parametrize("overrides", [["train.resume=auto"], ["train.resume=runs/first/checkpoints/step-000001"]])
def test_a_resumed_run_has_the_recorded_commits(server: FakeHub, overrides: list[str], tmp_path: Path) -> None:
    first = started(recipe_of("name=first"), tmp_path)
    for repository in server.repositories.values():  # new commits of both
        repository.commit({**repository.commits[repository.refs["main"]], "README.md": b"new"})
    again, notices = fetched(recipe_of("name=first", *overrides))
    assert (again.model, again.data) == (first.model, first.data)
    assert all("as recorded in the run" in notice for notice in notices[:3])
    for other in (recipe_of("name=first"), recipe_of("name=second", "train.resume=auto")):
        assert fetched(other)[0].model.path != first.model.path
    commit = server.repositories["models/org/tiny"].refs["main"]
    named, _ = fetched(recipe_of("name=first", *overrides, f"model.path=org/tiny@{commit}"))
    assert named.model.path.endswith(commit)


def test_a_changed_revision_is_refused_at_a_resume(server: FakeHub, tmp_path: Path) -> None:
    model = server.repositories["models/org/tiny"]
    first, files = model.refs["main"], model.commits[model.refs["main"]]
    second = model.commit({**files, "README.md": b"new"}, "v2")
    started(recipe_of("name=first"), tmp_path)
    with pytest.raises(RecipeError) as caught:
        fetched(recipe_of("name=first", "train.resume=auto", "model.path=org/tiny@v2"))
    assert f"recorded hf://org/tiny (commit {first[:12]}), and the recipe now names hf://org/tiny@v2" in str(
        caught.value
    )
    pinned = started(recipe_of("name=first", "train.resume=auto", f"model.path=org/tiny@{first}"), tmp_path)
    model.commit({**files, "README.md": b"newer"})
    assert fetched(recipe_of("name=first", "train.resume=auto"))[0].model == pinned.model  # either name
    changed = started(recipe_of("name=first", "train.resume=auto", f"model.path=org/tiny@{second}"), tmp_path)
    assert changed.model.path.endswith(second)
    with pytest.raises(RecipeError, match="the recipe now names hf://org/tiny"):
        fetched(recipe_of("name=first", "train.resume=auto"))


def test_commits_are_recorded_for_each_setting(server: FakeHub, tmp_path: Path) -> None:
    words = server.repositories["datasets/org/words"]
    files = words.commits[words.refs["main"]]
    words.commit({**files, "README.md": b"of v1"}, "v1")
    both = ("name=first", f"data.train_files=[{TRAIN}]", "data.eval_files=[hf://org/words@v1/test]")
    first = started(recipe_of(*both), tmp_path)
    assert len({Path(file).parent for file in [*first.data.train_files, *first.data.eval_files]}) == 2
    words.commit({**files, "README.md": b"newer"}, "main", "v1")
    assert fetched(recipe_of(*both, "train.resume=auto"))[0].data == first.data


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    started(recipe_of("name=first"), tmp_path)
    file = tmp_path / "runs/first/hub.json"
    for text in (file.read_text()[:20], "[]", '{"model.path": 1}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"runs/first/hub\.json is damaged"):
            fetched(recipe_of("name=first", "train.resume=auto"))


def test_an_unreadable_record_is_named(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(recipe_of("name=first"), tmp_path)
    resumed, read_text = recipe_of("name=first", "train.resume=auto"), Path.read_text

    def refuse(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "hub.json":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refuse)  # a test that runs as root can read any file
    with pytest.raises(ValueError, match=r"runs/first/hub\.json cannot be read \(Permission denied\), so the commits"):
        fetched(resumed)


def test_a_record_that_no_name_needs_is_not_read(server: FakeHub, tmp_path: Path) -> None:
    first = started(recipe_of("name=first"), tmp_path)
    (tmp_path / "resolved.yaml").write_text(to_yaml(first))
    (tmp_path / "runs/first/hub.json").write_text("damaged")
    pinned = with_absolute_paths(load_recipe(tmp_path / "resolved.yaml", ["train.resume=auto"]))
    inputs = fetch_inputs(pinned, ["model.path", "model.tokenizer"])  # as `megarl export`
    assert inputs.recipe.model == first.model
    with pytest.raises(ValueError, match="is damaged"):  # a training records them again, with their earlier names
        _ = inputs.commits


def test_rows_of_one_setting_at_two_commits_are_refused(server: FakeHub, tmp_path: Path) -> None:
    """Only one of two splits is among the files that the hub has converted: a run records one commit."""
    extra = {"default/extra/0000.parquet": b"rows"}
    converted = server.dataset("org/words").commit(extra, "refs/convert/parquet")
    main = server.repositories["datasets/org/words"].refs["main"]
    with pytest.raises(RecipeError) as caught:
        fetched(recipe_of(f"data.train_files=[{TRAIN}, hf://org/words/extra]"))
    text = str(caught.value)
    assert f"its rows are at commit {converted[:12]}, and other rows of hf://org/words at {main[:12]}" in text
    named = "hf://org/words@refs/convert/parquet/extra"
    assert named in text
    local = started(recipe_of("name=first", f"data.train_files=[{TRAIN}, {named}]"), tmp_path)
    server.dataset("org/words").commit(extra | {"README.md": b""}, "refs/convert/parquet")
    again = fetched(recipe_of("name=first", "train.resume=auto", f"data.train_files=[{TRAIN}, {named}]"))[0]
    assert again.data == local.data and len(local.data.train_files) == 2


def test_a_branch_that_moves_during_the_checks(server: FakeHub) -> None:
    model = server.repositories["models/org/tiny"]
    first = model.refs["main"]
    recipe = recipe_of()
    checked: list[str] = []

    def move(recipe: Recipe) -> None:
        checked.append(recipe.model.path)
        model.commit({**model.commits[first], "README.md": b"new"})

    local = fetch_inputs(recipe, training_inputs(recipe), move).recipe
    assert local.model.path == checked[0] and local.model.path.endswith(first)


def test_settings_are_checked_if_only_rows_are_on_the_hub(server: FakeHub, quickstart_data: Path) -> None:
    recipe = recipe_of(f"model.path={quickstart_data / 'model'}", "rollout.engine=vlm")
    inputs = evaluation_inputs(asks_judge=False)
    with pytest.raises(ValueError, match="did you mean 'vllm'"):
        fetch_inputs(recipe, inputs, partial(check_without_weights, training=False))
    assert not [name for name in server.downloads() if name.endswith(".parquet")]


def test_a_recorded_recipe_is_read_back(server: FakeHub, tmp_path: Path) -> None:
    first, _ = fetched(recipe_of())
    (tmp_path / "resolved.yaml").write_text(to_yaml(first))
    again, _ = fetched(with_absolute_paths(load_recipe(tmp_path / "resolved.yaml")))
    assert again == first
    server.requests.clear()
    assert (
        fetch_inputs(with_absolute_paths(load_recipe(tmp_path / "resolved.yaml")), ["model.path"]).recipe.model
        == first.model
    )


def test_another_node_fetches_the_same_commit(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    recipe, _ = fetched(recipe_of())
    home.rename(tmp_path / "elsewhere")
    use_hub(monkeypatch, server.url, tmp_path / "node 2")
    local = with_local_model(recipe)
    assert Path(local.model.path).is_relative_to(tmp_path / "node 2")
    assert Path(local.model.path).name == Path(recipe.model.path).name


def test_engines_and_tokenizers_of_another_node(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    recipe, _ = fetched(recipe_of())
    home.rename(tmp_path / "elsewhere")
    use_hub(monkeypatch, server.url, tmp_path / "node 2")
    server.requests.clear()
    assert load_tokenizer(recipe.model.path).directory.is_relative_to(tmp_path / "node 2")
    assert "model.safetensors" not in server.downloads()
    monkeypatch.setitem(engines._ENGINES, "vllm", "copy:copy")  # in place of an engine that loads
    spec: Any = engines.create("vllm", policy_spec(recipe, "engine0", updated=False))
    assert (Path(spec.model_path) / "model.safetensors").is_file()
    assert Path(spec.model_path).is_relative_to(tmp_path / "node 2")


def test_only_what_a_command_reads_is_fetched(server: FakeHub) -> None:
    server.model("org/other").commit({"config.json": b"{}"})
    recipe = recipe_of()
    recipe.teacher.path, recipe.critic.model_path = "hf://org/other", "hf://org/none"
    local, _ = fetched(recipe)
    assert (local.teacher.path, local.critic.model_path) == ("hf://org/other", "hf://org/none")
    local = fetch_inputs(recipe, evaluation_inputs(asks_judge=False)).recipe
    assert local.data.train_files == [TRAIN] and local.data.eval_files[0].endswith("/test.parquet")


def test_weights_are_downloaded_after_the_checks_of_settings_and_configs(server: FakeHub) -> None:
    recipe = recipe_of("megatron.tensor_parallel=3", "cluster.trainers=3", "megatron.expert_parallel=1")
    with pytest.raises(ValueError, match="tensor_parallel=3 does not divide"):
        fetch_inputs(recipe, training_inputs(recipe), check_without_weights)
    assert "config.json" in server.downloads()
    assert not [name for name in server.downloads() if name.endswith((".safetensors", ".parquet"))]


def test_all_names_that_cannot_be_had_are_reported_together() -> None:
    with pytest.raises(RecipeErrors) as caught:
        fetched(recipe_of("model.path=org/none", "data.eval_files=[hf://org/words/dev]"))
    assert [error.key for error in caught.value.all if isinstance(error, RecipeError)] == [
        "model.path",
        "data.eval_files",
    ]
    assert "hf://org/words/default/train" in str(caught.value)


def test_wrong_names_are_refused_when_the_recipe_is_read() -> None:
    with pytest.raises(RecipeError, match=r"hf://org does not name rows on the hub"):
        load_recipe(QUICKSTART, ["data.train_files=[hf://org]"])
    with pytest.raises(RecipeError, match=r"hf://tiny does not name a model on the hub"):
        fetched(recipe_of("model.path=hf://tiny"))


class TestPlan:
    """`plan` uses the cache, and fetches no weights and no rows."""

    def test_without_a_cache(self, server: FakeHub) -> None:
        result = survey(recipe_of(), Available(recipe_file=QUICKSTART))
        assert not result.errors
        absent = " ".join(result.texts("unavailable"))
        assert "hf://org/tiny is not on this machine" in absent and f"{TRAIN} is not on this machine" in absent
        assert not [name for name in server.downloads() if name.endswith((".safetensors", ".parquet"))]

    def test_with_a_cache(self, server: FakeHub) -> None:
        local, _ = fetched(recipe_of())
        server.requests.clear()
        result = survey(recipe_of(), Available(recipe_file=QUICKSTART))
        assert not result.errors and not result.texts("unavailable") and result.rows
        assert result.recipe.model == local.model and result.recipe.data == local.data
        assert with_cached_inputs(recipe_of()).data == local.data
        assert not server.requests

    def test_published_models_need_no_hub(self, server: FakeHub) -> None:
        assert config_of("Qwen/Qwen3-8B", QUICKSTART)["hidden_size"] == 4096
        assert config_of("hf://Qwen/Qwen3-8B@main", QUICKSTART)["hidden_size"] == 4096
        assert not server.requests
        assert config_of("Qwen/Qwen3-8B", QUICKSTART, name="org/tiny")["hidden_size"] < 4096

    def test_a_name_that_is_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "without_shape.yaml").write_text("model: {path: org/none}\n")
        with pytest.raises(RecipeError, match=r"has no such model(.|\n)*# Shape: NAME"):
            config_of("org/none", tmp_path / "without_shape.yaml")
