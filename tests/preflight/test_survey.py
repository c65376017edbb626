"""All errors of a recipe are reported together: of its values, and of models, data and rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl import RecipeError, load_recipe
from megarl.cli import app
from megarl.errors import InputError, RecipeErrors, errors_of, independent, raise_all
from megarl.exit_status import guarded
from megarl.preflight.findings import Available
from megarl.preflight.survey import prepare_training, survey

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
VALUES = ["train.steps=0", "rollout.temprature=1", "algorithm.advantage=grpoo", "megatron.offload=1"]
KEYS = ["rollout.temprature", "megatron.offload", "train.steps", "algorithm.advantage"]


def here(data: Path, tmp_path: Path, *more: str) -> list[str]:
    files = [f"data.train_files=[{data}/data/train.parquet]", f"data.eval_files=[{data}/data/test.parquet]"]
    return [f"model.path={data}/model", *files, f"runs_dir={tmp_path}/runs", *more]


def output_of(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = guarded(lambda: app(args=[command, QUICKSTART, *arguments], standalone_mode=False), debug=False)
    captured = capsys.readouterr()
    return status, captured.err + captured.out


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)


def test_all_errors_of_values_are_raised_together() -> None:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(QUICKSTART, VALUES)
    assert [error.key for error in caught.value.all if isinstance(error, RecipeError)] == KEYS
    assert all(str(error) in str(caught.value) for error in caught.value.all)
    assert str(caught.value).endswith("\n4 errors")
    assert caught.value.key == KEYS[0] and caught.value.origin == "command line"


def test_a_single_error_is_raised_unchanged() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, ["train.steps=0"])
    lines = [
        "where  command line",
        "key    train.steps = 0",
        "what   must be at least 1",
        "do     set train.steps at least 1",
    ]
    assert str(caught.value) == "".join(f"\n  {line}" for line in lines)
    assert not isinstance(caught.value, RecipeErrors) and caught.value.all == (caught.value,)


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_every_command_prints_all_errors_of_values(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = output_of(command, VALUES, capsys)
    assert status == 2 and text.count("\n  key    ") == 4 and text.rstrip().endswith("4 errors")
    assert all(f"\n  key    {key} = " in text for key in KEYS)


@pytest.mark.parametrize("command", ["train", "plan", pytest.param("doctor", marks=pytest.mark.slow)])
def test_every_command_prints_errors_of_settings_and_models(
    command: str, quickstart_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown argument of the engine, and a context that the model does not have."""
    wrong = ["rollout.engine_args.max_num_sequences=4", "data.max_prompt_length=100000"]
    status, text = output_of(command, here(quickstart_data, tmp_path, *wrong), capsys)
    assert status == (1 if command == "doctor" else 2)
    assert "did you mean 'max_num_seqs'" in text and "max_position_embeddings of its config.json" in text, text


def test_training_also_reports_missing_files_scorers_and_the_run(quickstart_data: Path, tmp_path: Path) -> None:
    """Independent of the settings' error, and without reading a row."""
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "metrics.jsonl").write_text('{"step": 1}\n')
    wrong = ["rollout.engine=vlm", "data.eval_files=[gone.parquet]", "reward.function=gsm9k"]
    with pytest.raises(RecipeErrors) as caught:
        prepare_training(load_recipe(QUICKSTART, here(quickstart_data, tmp_path, *wrong)))
    text = str(caught.value)
    for words in ("did you mean 'vllm'", "gone.parquet: no such file", "did you mean 'gsm8k'", "already holds a run"):
        assert words in text, text
    assert text.endswith("\n4 errors")


def test_an_unreadable_model_is_the_only_error_of_the_model(quickstart_data: Path, tmp_path: Path) -> None:
    """Layout, tokenizer and weights need its config.json and are not checked."""
    with pytest.raises(RecipeError) as caught:
        prepare_training(load_recipe(QUICKSTART, here(quickstart_data, tmp_path, "model.path=nowhere")))
    assert caught.value.key == "model.path" and not isinstance(caught.value, RecipeErrors)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.prompts_per_step=0"], "data.prompts_per_step"),  # which mini batches divide
        (["rollout.samples_per_prompts=1", "algorithm.dynamic_sampling.enabled=true"], "rollout.samples_per_prompts"),
        (["algorithm.loss=ppo"], "algorithm.loss"),
        (["train.source=sft"], "algorithm.loss"),
        (["algorithm.modules=[no_such_module_of_mine]", "algorithm.loss=theirs"], "algorithm.modules"),
    ],
)
def test_consequences_of_an_error_are_omitted(overrides: list[str], key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, overrides)
    assert caught.value.key == key and len(caught.value.all) == 1, str(caught.value)
    hidden = "\n(1 more error may follow from this one and is not shown)"
    assert str(caught.value).endswith(hidden) == (key == "algorithm.modules")


def test_plan_reports_files_missing_on_this_machine(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "grpo_qwen3_8b.yaml", [f"runs_dir={tmp_path}"])
    result = survey(recipe, Available(recipe_file=ROOT / "recipes" / "grpo_qwen3_8b.yaml"))
    assert not result.errors and result.stages == ["settings", "model", "data"]
    assert any(
        text.startswith("model.path: models/Qwen3-8B is not on this machine") for text in result.texts("unavailable")
    )


def test_the_webhook_of_alerts_is_checked_without_showing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` may run on a machine that lacks the variable; `train` needs it."""
    file, variable, secret = ROOT / "recipes" / "grpo_qwen3_8b.yaml", "TEST_ALERT_URL", "T0KEN-s3cr3t"
    recipe = load_recipe(file, [f"runs_dir={tmp_path}", f"observe.alerts.url={variable}"])
    monkeypatch.delenv(variable, raising=False)
    result = survey(recipe, Available(recipe_file=file))
    assert not result.errors and any("observe.alerts.url" in text for text in result.texts("unavailable"))
    assert "observe.alerts.url" in [error.key for error in survey(recipe).errors if isinstance(error, RecipeError)]
    monkeypatch.setenv(variable, f"hooks.example.com/{secret}")
    (error,) = survey(recipe, Available(recipe_file=file)).errors
    assert f"observe.alerts.url = '{variable}'" in str(error) and secret not in str(error)
    monkeypatch.setenv(variable, f"https://hooks.example.com/{secret}")
    result = survey(recipe, Available(recipe_file=file))
    assert not result.errors and not any("observe.alerts" in text for text in result.texts("unavailable"))


def test_a_wrong_type_beside_a_misspelled_key_is_reported() -> None:
    """The suggestion for the unknown key names the key with the wrong type."""
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(QUICKSTART, ["rollout.engines=two", "rollout.enginess=3"])
    keys = {error.key: error.problem for error in caught.value.all if isinstance(error, RecipeError)}
    assert list(keys) == ["rollout.enginess", "rollout.engines"] and "did you mean rollout.engines?" in str(
        caught.value
    )
    assert "could not be converted to Integer" in keys["rollout.engines"]


def test_every_wrong_entry_of_a_mapping_of_sections_is_reported() -> None:
    """`data.mix` and `agent.mcp` are mappings of sections: an unknown key, and a wrong type in the same section."""
    wrong = ["data.mix={a: {files: [x.jsonl], weigth: 2, weight: many}}", "agent.mcp={s: {comand: [x]}}"]
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(QUICKSTART, wrong)
    problems = {error.key: error.problem for error in caught.value.all if isinstance(error, RecipeError)}
    assert {problems["data.mix.a.weigth"], problems["agent.mcp.s.comand"]} == {"unknown key"}
    assert "'many' of type 'str' could not be converted to Float" in problems["data.mix"]
    assert "did you mean agent.mcp.s.command?" in str(caught.value)


class TestIndependent:
    def test_an_error_that_names_the_key_of_another_is_dropped(self) -> None:
        first = RecipeError("data.prompts_per_step", "must be at least 1", "raise it", value=0)
        second = RecipeError("actor.mini_batches", "data.prompts_per_step = 0 does not divide", "choose a divisor")
        assert independent([first, second]) == [first] and independent([second, first]) == [second]

    def test_dropped_errors_are_counted(self) -> None:
        first = RecipeError("data.prompts_per_step", "must be at least 1", "raise it", value=0)
        follows = [RecipeError(f"actor.{name}", "data.prompts_per_step is 0", "raise it") for name in ("a", "b")]
        with pytest.raises(RecipeErrors, match=r"\n\(2 more errors may follow from this one and are not shown\)$"):
            raise_all([first, *follows, follows[0], first])
        other = RecipeError("train.steps", "must be at least 1", "raise it")
        with pytest.raises(RecipeErrors, match=r"\n2 errors \(1 more error may follow from these and is not shown\)$"):
            raise_all([first, other, follows[0]])

    def test_keys_are_compared_by_whole_sections(self) -> None:
        first = RecipeError("train.save_every", "wrong", "change it")
        second = RecipeError("train.save", "wrong", "change it")
        section = RecipeError("train", "wrong", "change it")
        assert independent([first, second]) == [first, second]
        assert independent([first, section]) == [first]

    def test_repeated_messages_are_dropped(self) -> None:
        assert len(independent([ValueError("a.parquet: no such file"), InputError("a.parquet: no such file")])) == 1

    def test_errors_without_a_key_have_a_block(self) -> None:
        errors = [
            ValueError("rows.jsonl is empty"),
            RecipeError("train.steps", "must be at least 1", "raise it", value=0),
        ]
        with pytest.raises(RecipeErrors) as caught:
            raise_all(errors)
        assert "\n  what   rows.jsonl is empty\n" in str(caught.value) and caught.value.key == "train.steps"
        assert list(errors_of(raise_all, errors)) == errors
