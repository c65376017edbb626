"""`megarl init`: the recipe loads, checks pass, each question comes once, and nothing is overwritten."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from megarl.cli import app
from megarl.commands.init.command import InitOptions, init, write_new
from megarl.commands.init.text import _RATES
from megarl.commands.plan.options import device_of
from megarl.commands.plan.preflight import checked
from megarl.errors import InputError, RecipeError
from megarl.hf import published
from megarl.preflight.load import load_recipe
from megarl.recipe.text import hardware_of
from tests.support.fake_hub import running_hub, use_hub

OPEN = InitOptions(None, None, None, None, None)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def written(**options: Any) -> dict[str, Any]:
    Path("a.yaml").unlink(missing_ok=True)
    init(Path("a.yaml"), OPEN._replace(**options), ask=False)
    content: dict[str, Any] = yaml.safe_load(Path("a.yaml").read_text())
    return content


@pytest.mark.parametrize("task", ["grpo", "dapo", "sft", "dpo"])
@pytest.mark.parametrize(
    ("devices", "model"),
    [("2 cpu", "Qwen/Qwen2.5-0.5B-Instruct"), ("8 H100", "Qwen/Qwen3-8B"), ("8 cuda", "org/unknown"), ("16 910C", "Qwen/Qwen3-30B-A3B")],
)  # fmt: skip
def test_recipes_have_no_error(task: str, devices: str, model: str) -> None:
    """The checks of `megarl plan` before it counts memory pass: settings, layout, engines, data."""
    content = written(task=task, devices=devices, model=model)
    recipe = load_recipe("a.yaml")
    look = checked(recipe, Path("a.yaml"), "Qwen3-8B" if model == "org/unknown" else None)
    assert look.errors == []
    assert ("rollout" if task in ("grpo", "dapo") else "sft" if task == "sft" else "preferences") == recipe.train.source
    assert content["name"] == "a" and recipe.model.path == model
    if recipe.train.source == "rollout":
        devices_of_engines = recipe.rollout.engines * recipe.rollout.tensor_parallel
        assert devices_of_engines == (1 if devices == "2 cpu" else recipe.cluster.trainers), "no device is idle"
        assert (recipe.train.steps > 1, recipe.train.epochs) == (True, None)


def test_larger_models_are_split_further() -> None:
    """A trainer that holds all of a model needs 18 bytes per parameter; the arithmetic leaves room for the rest."""
    written(devices="8 H100", model="Qwen/Qwen3-14B")
    small = parts_of_the_model()
    written(devices="16 x 8 H100", model="Qwen/Qwen3-235B-A22B", task="sft")
    assert 2 <= small < parts_of_the_model()


def parts_of_the_model() -> int:
    megatron = load_recipe("a.yaml").megatron
    assert megatron.recompute == "full"
    return megatron.tensor_parallel * megatron.pipeline_parallel * megatron.expert_parallel


def test_a_model_that_does_not_fit_has_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    written(devices="1 H100", model="Qwen/Qwen3-32B")
    output = capsys.readouterr().out
    assert "no layout fits 1 device by arithmetic" in output and "Not tried: optimizer states" in output
    written(devices="8 H100", model="org/unknown")
    assert "no config.json of org/unknown here" in capsys.readouterr().out
    written(devices="8 cuda")
    assert "the memory of cuda devices is unknown" in capsys.readouterr().out


def test_a_model_that_fits_tightly_has_the_smallest_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """recipes/cuda/grpo_qwen3_30b.yaml trains it on the same machine."""
    content = written(devices="8 H100", model="Qwen/Qwen3-30B-A3B")
    output = capsys.readouterr().out
    assert re.search(r"memory is tight: .* at least 8\d% of each H100", output) and "no layout fits" not in output
    assert content["megatron"]["expert_parallel"] == 8 and content["rollout"]["tensor_parallel"] == 2


@pytest.mark.parametrize(
    ("devices", "machine"), [("16 H100", ("H100", 2, 8)), ("2 x 8 910B", ("910B", 2, 8)), ("2 cpu", None)]
)
def test_plan_finds_the_device_in_the_head(devices: str, machine: tuple[str, int, int] | None) -> None:
    written(devices=devices)
    assert hardware_of(Path("a.yaml")) == machine
    device, _ = device_of(Path("a.yaml"), None, None)
    assert (device.name if device else None) == (machine[0] if machine else None)


@pytest.mark.parametrize(
    ("devices", "machine", "notice"),
    [
        ("16 910B", ("910B", 2, 8), "2 machines of 8: write '1 x 16 Atlas 200T A2 Box16' for machines of 16"),
        ("16 H100", ("H100", 2, 8), "2 machines of 8: write '1 x 16 H100' for one machine"),
        ("32 Atlas 200T A2 Box16", ("Atlas 200T A2 Box16", 2, 16), "2 machines of 16: write '1 x 32 Atlas"),
        ("16 Atlas 200T A2 Box16", ("Atlas 200T A2 Box16", 1, 16), None),
        ("2 x 8 910B", ("910B", 2, 8), None),
    ],
)
def test_assumed_machines_are_reported(
    devices: str, machine: tuple[str, int, int], notice: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    written(devices=devices)
    output = capsys.readouterr().out
    assert hardware_of(Path("a.yaml")) == machine
    assert f"--devices {devices!r} is taken as {notice}" in output if notice else "taken as" not in output


def test_lengths_fit_the_models_context(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = published.read("Qwen3-4B") | {"max_position_embeddings": 256}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    content = written(devices="2 cpu", model="model")
    assert (content["data"]["max_prompt_length"], content["rollout"]["max_response_length"]) == (128, 128)


def test_a_reward(capsys: pytest.CaptureFixture[str]) -> None:
    assert "reward" not in written(reward="rows")
    assert "data_source selects its scorer" in capsys.readouterr().out
    assert written(reward="rewards_of_init:close")["reward"] == {"function": "rewards_of_init:close"}
    assert "not found yet: rewards_of_init, which `plan` and `train` import" in capsys.readouterr().out
    Path("rewards_of_init.py").touch()
    written(reward="rewards_of_init:close")
    assert "not found yet: rewards_of_init," not in capsys.readouterr().out
    Path("data.jsonl").write_text('{"prompt": "1+1"}')
    written(reward="my dir/rewards.py:close", data="data.jsonl")
    assert load_recipe("a.yaml").reward.function == "my dir/rewards.py:close"
    assert "not found yet: my dir/rewards.py, which `plan` and `train` import" in capsys.readouterr().out
    Path("mine.py").touch()
    written(reward="mine.py:close", data="data.jsonl")
    assert "not found" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "config", "problem"),
    [
        ("8 H100", {"model_type": "qwen3"}, "no num_hidden_layers"),
        ("2 cpu", {"model_type": "bert", "hidden_size": 64}, "'bert' model"),
        ("2 cpu", None, r"config\.json is not valid JSON"),
    ],
)
def test_a_model_that_megarl_cannot_train_is_refused(devices: str, config: dict[str, Any] | None, problem: str) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{" if config is None else json.dumps(config))
    with pytest.raises(RecipeError, match=problem) as error:
        init(Path("a.yaml"), OPEN._replace(devices=devices, model="model"), ask=False)
    assert error.value.key == "model.path" and not Path("a.yaml").exists()


@pytest.mark.parametrize("devices", ["2 cpu", "8 H100"])
def test_an_unknown_model_has_a_notice(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(devices=devices, model="org/unknown")
    output = capsys.readouterr().out
    assert (
        "no config.json of org/unknown here, so the lengths and the layout are guesses, and `plan` needs it" in output
    )
    assert (
        "`hf download org/unknown config.json`" in output and "HF_ENDPOINT a mirror" in output and "Shape" not in output
    )
    assert (
        "# no config.json of org/unknown here, so the lengths and the layout are guesses" in Path("a.yaml").read_text()
    )


@pytest.mark.parametrize(
    ("gated", "problem", "remedy"),
    [(False, "has no such model", "correct the name"), (True, "org/mine is gated", "accept its terms")],
)
def test_a_model_that_the_hub_refuses_is_refused(
    gated: bool, problem: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A notice without the hub's answer would leave a typo in the recipe."""
    with running_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        if gated:
            server.model("org/mine").commit({"config.json": b"{}"})
            server.model("org/mine").gated = True
        with pytest.raises(RecipeError, match=problem) as error:
            written(devices="2 cpu", model="org/mine")
    assert error.value.key == "model.path" and error.value.value == "org/mine"
    assert error.value.remedy.startswith(remedy) and "Shape" not in error.value.remedy
    assert not Path("a.yaml").exists()


@pytest.mark.parametrize("status", [403, 503])
def test_a_hub_that_gives_no_definite_answer_has_a_notice(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """503: an overloaded server; 403: perhaps of a proxy. The model may exist."""
    with running_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        server.refuses = status
        written(devices="2 cpu", model="org/mine")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no config.json of org/mine" in line]
    assert "the layout are guesses" in line and f"HTTP status {status}" in line


def test_commands_can_be_pasted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's name may have spaces, and the user's command need not be `megarl`."""
    monkeypatch.setattr(sys, "argv", ["/some/megarl/__main__.py"])
    Path("my runs").mkdir()
    file = Path("my runs/a b.yaml")
    init(file, OPEN._replace(devices="2 cpu"), ask=False)
    printed = capsys.readouterr().out
    assert "next: python -m megarl plan 'my runs/a b.yaml', then python -m megarl train 'my runs/a b.yaml'\n" in printed
    for command in ("plan", "train"):
        assert f"#   python -m megarl {command} 'my runs/a b.yaml'" in file.read_text()


def test_an_error_of_the_recipe_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe is checked in a temporary folder, which is gone when the user reads the message."""
    monkeypatch.setitem(_RATES, "sft", -1.0)
    with pytest.raises(RecipeError, match=r"actor\.optimizer\.lr") as error:
        init(Path("a.yaml"), OPEN._replace(task="sft", devices="2 cpu"), ask=False)
    assert error.value.origin is not None and error.value.origin.startswith("a.yaml")
    assert "  a.yaml" in str(error.value) and "/tmp" not in str(error.value)


def test_an_existing_file_stays() -> None:
    Path("a.yaml").write_text("mine")
    with pytest.raises(InputError, match=r"a\.yaml exists"):
        init(Path("a.yaml"), OPEN, ask=False)
    assert Path("a.yaml").read_text() == "mine"


def test_a_folder_that_does_not_exist_is_refused_before_the_questions() -> None:
    result = CliRunner().invoke(app, ["init", "missing/a.yaml"], input="\n" * 9)
    assert isinstance(result.exception, InputError) and "the folder missing does not exist" in str(result.exception)
    assert "Task" not in result.output


def test_a_recipe_that_cannot_be_written_leaves_no_part() -> None:
    """A part would make the next try fail: the file exists."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"a\.yaml could not be written: File too large"):
            write_new(Path("a.yaml"), "name: a\n" * 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not Path("a.yaml").exists()
    write_new(Path("a.yaml"), "name: a\n")
    with pytest.raises(ValueError, match=r"a\.yaml exists"):  # written while the questions were asked
        write_new(Path("a.yaml"), "name: b\n")
    assert Path("a.yaml").read_text() == "name: a\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"task": "rlhf"}, "--task: the task 'rlhf' is unknown"),
        ({"devices": "many"}, "--devices: 'many' is not a number"),
        ({"devices": "16x8 A2"}, r"'A2' is unknown.* A2 machines have 910B devices: name 910B, 910B1, .* or 910B4"),
        ({"devices": "8 A3"}, "'A3' is unknown.* A3 machines have 910C devices: name 910C or 910C 20 cores"),
        ({"data": "a.csv"}, r"--data: a\.csv ends neither"),
        ({"reward": "gsm8"}, "--reward: the scorer 'gsm8' is unknown"),
        ({"reward": "remote"}, "--reward: the scorer 'remote' is unknown"),
        ({"task": "sft", "reward": "gsm8k"}, "--reward: the task sft has no reward"),
    ],
)
def test_wrong_options(options: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        init(Path("a.yaml"), OPEN._replace(**options), ask=False)
    assert not Path("a.yaml").exists()


def test_the_file_is_a_recipe() -> None:
    with pytest.raises(InputError, match=r"a\.txt: name it a\.yaml"):
        init(Path("a.txt"), OPEN, ask=False)


def test_groups_are_filtered_by_what_the_reward_reports() -> None:
    """A run ends at its first group if its reward lacks the part that dynamic sampling names."""
    assert written(task="dapo", reward="rewards:score")["algorithm"]["dynamic_sampling"]["metric"] == "reward"
    assert written(task="dapo", reward="math")["algorithm"]["dynamic_sampling"]["metric"] == "accuracy"


def test_five_questions() -> None:
    """Enter takes a default, a wrong answer repeats the question, and an option asks nothing."""
    answers = "nothing\ngrpo\n\n\n2 cpu\n\n"
    result = CliRunner().invoke(app, ["init", "a.yaml"], input=answers)
    assert result.exit_code == 0, result.output
    assert result.output.count("Task\n") == 2 and "the task 'nothing' is unknown" in result.output
    assert load_recipe("a.yaml").cluster.trainers == 2
    for question in ("Model", "Training rows", "Devices", "Reward"):
        assert result.output.count(f"{question} (") == 1
    fewer = CliRunner().invoke(app, ["init", "b.yaml", "--task", "sft", "--devices", "2 cpu"], input="\n\n")
    assert fewer.exit_code == 0 and "Task" not in fewer.output and "Reward (" not in fewer.output


@pytest.mark.parametrize(
    ("options", "problem"),
    [(["--task", "sft", "--reward", "gsm8k"], "--reward: the task sft"), (["--devices", "many"], "--devices: 'many'")],
)
def test_options_are_checked_before_the_first_question(options: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["init", "a.yaml", *options], input="\n" * 9)
    assert isinstance(result.exception, InputError) and problem in str(result.exception)
    assert "Model (" not in result.output


def test_a_reward_of_a_task_without_one_is_refused_at_the_answer() -> None:
    result = CliRunner().invoke(app, ["init", "a.yaml", "--reward", "gsm8k"], input="sft\n" + "\n" * 9)
    assert isinstance(result.exception, InputError) and "--reward: the task sft has no reward" in str(result.exception)
    assert "Model (" not in result.output


def test_ctrl_c_at_a_question_stops_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is 130; a wrong answer has 2."""

    def interrupted(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[typer.prompt.__module__], "visible_prompt_func", interrupted)
    with pytest.raises(typer.Abort):
        init(Path("a.yaml"), OPEN, ask=True)


def test_an_end_of_input_names_the_option() -> None:
    cut = CliRunner().invoke(app, ["init", "a.yaml", "--task", "sft"], input="")
    assert isinstance(cut.exception, InputError) and "no answer to --model" in str(cut.exception)
    assert not Path("a.yaml").exists()
