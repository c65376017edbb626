"""`megarl init`: the recipe loads, checks pass, each question comes once, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megarl.cli import app
from megarl.commands.init.command import InitOptions, init
from megarl.commands.plan.options import device_of
from megarl.commands.plan.preflight import checked
from megarl.errors import InputError
from megarl.preflight.load import load_recipe
from megarl.recipe.header import hardware_of

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
    assert "no layout fits 1 devices by arithmetic" in capsys.readouterr().out
    written(devices="8 H100", model="org/unknown")
    assert "the config.json of org/unknown cannot be read here" in capsys.readouterr().out
    written(devices="8 cuda")
    assert "the memory of cuda devices is unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "machine"), [("16 H100", ("H100", 2, 8)), ("2 x 8 910B", ("910B", 2, 8)), ("2 cpu", None)]
)
def test_plan_finds_the_device_in_the_head(devices: str, machine: tuple[str, int, int] | None) -> None:
    written(devices=devices)
    assert hardware_of(Path("a.yaml")) == machine
    device, _ = device_of(Path("a.yaml"), None, None)
    assert (device.name if device else None) == (machine[0] if machine else None)


def test_lengths_fit_the_models_context(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 256}')
    content = written(devices="2 cpu", model="model")
    assert (content["data"]["max_prompt_length"], content["rollout"]["max_response_length"]) == (128, 128)


def test_a_reward(capsys: pytest.CaptureFixture[str]) -> None:
    assert "reward" not in written(reward="rows")
    assert "data_source selects its scorer" in capsys.readouterr().out
    assert written(reward="my_rewards:close")["reward"] == {"function": "my_rewards:close"}


def test_an_existing_file_stays() -> None:
    Path("a.yaml").write_text("mine")
    with pytest.raises(InputError, match=r"a\.yaml exists"):
        init(Path("a.yaml"), OPEN, ask=False)
    assert Path("a.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"task": "rlhf"}, "--task: the task 'rlhf' is unknown"),
        ({"devices": "many"}, "--devices: 'many' is not a number"),
        ({"data": "a.csv"}, r"--data: a\.csv ends neither"),
        ({"reward": "gsm8"}, "--reward: the scorer 'gsm8' is unknown"),
        ({"task": "sft", "reward": "gsm8k"}, "--reward: the task sft has no reward"),
    ],
)
def test_wrong_options(options: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        init(Path("a.yaml"), OPEN._replace(**options), ask=False)
    assert not Path("a.yaml").exists()


def test_the_file_is_a_recipe() -> None:
    with pytest.raises(InputError, match=r"ends in \.yaml"):
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


def test_an_end_of_input_names_the_option() -> None:
    cut = CliRunner().invoke(app, ["init", "a.yaml", "--task", "sft"], input="")
    assert isinstance(cut.exception, InputError) and "no answer to --model" in str(cut.exception)
    assert not Path("a.yaml").exists()
