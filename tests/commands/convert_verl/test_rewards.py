"""Reward models that verl serves itself: the scorer `reward_model`, or arguments of a function that asks the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import load_recipe
from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError, RecipeError
from tests.commands.convert_verl.test_whole_scripts import PPO

OLD, NEW = "reward_model", "reward.reward_model"
MODEL = f"{PPO} {NEW}.enable=True {NEW}.model_path=/models/reward"
MODEL_OF_OLD = f"{PPO} {OLD}.enable=True {OLD}.model.path=/models/reward"
FUNCTION = "custom_reward_function.path=judge.py custom_reward_function.name=judged"


def reward(command: str) -> dict[str, Any]:
    return yaml.safe_load(convert(command).text).get("reward", {})


@pytest.mark.parametrize("command", [MODEL, MODEL_OF_OLD])
def test_its_output_is_the_reward(command: str, tmp_path: Path) -> None:
    section = reward(command)
    assert (section["function"], section["remote"]["model"]) == ("reward_model", "/models/reward")
    (tmp_path / "recipe.yaml").write_text(convert(command).text)
    with pytest.raises(RecipeError, match="leaves this value open"):
        load_recipe(tmp_path / "recipe.yaml")
    url = "http://10.0.0.1:8000/classify"
    assert load_recipe(tmp_path / "recipe.yaml", [f"reward.remote.url={url}"]).reward.remote.url == url


def test_a_note_has_the_command_that_serves_it() -> None:
    sizes = "rollout.tensor_model_parallel_size=2", "rollout.prompt_length=1024", "rollout.response_length=512"
    notes = convert(f"{MODEL} {' '.join(f'{NEW}.{size}' for size in sizes)} reward.num_workers=8").notes
    command = "`vllm serve /models/reward --tensor-parallel-size 2 --max-model-len 1536`"
    assert any(command in note and "reward.remote.url=http://HOST:8000/classify" in note for note in notes)
    assert any("vllm serve /models/reward --tensor-parallel-size 1`" in note for note in convert(MODEL).notes)


def test_a_path_from_the_environment_is_open() -> None:
    assert reward(MODEL.replace("/models/reward", "$RM"))["remote"]["model"] == "???"


@pytest.mark.parametrize("command", [MODEL, MODEL_OF_OLD])
def test_a_function_gets_what_verl_passes_to_it(command: str, tmp_path: Path) -> None:
    section = reward(f"{command} {FUNCTION}")
    arguments = {"reward_router_address": "???", "reward_model_tokenizer": "/models/reward"}
    assert (section["function"], section["arguments"], section["timeout"]) == ("judge.py:judged", arguments, 3600.0)
    (tmp_path / "recipe.yaml").write_text(convert(f"{command} {FUNCTION}").text)
    with pytest.raises(RecipeError, match="reward_router_address"):
        load_recipe(tmp_path / "recipe.yaml")
    loaded = load_recipe(tmp_path / "recipe.yaml", ["reward.arguments.reward_router_address=host:1"])
    assert loaded.reward.arguments == arguments | {"reward_router_address": "host:1"}


def test_without_enable_there_is_none() -> None:
    command = MODEL.replace("enable=True", "enable=False")
    assert reward(command) == {} and any("concerns the reward model's server" in note for note in convert(
        f"{command} {NEW}.rollout.name=vllm").notes)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"{PPO} {NEW}.enable=True", f"needs {NEW}.model_path"),
        (f"{PPO} {OLD}.enable=True", f"needs {OLD}.model.path"),
        (f"{MODEL_OF_OLD} {OLD}.overlong_buffer.enable=True {OLD}.overlong_buffer.len=8", "verl ignores overlong_buffer"),
        (f"{MODEL} {NEW}.new_option=1", f"--accept {NEW}.new_option"),
    ],
)  # fmt: skip
def test_what_verl_does_not_do_either_is_refused(command: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        convert(command)
    assert words in str(caught.value)


def test_another_reward_replaces_it() -> None:
    converted = convert(MODEL, ["reward.function=gsm8k"])
    assert yaml.safe_load(converted.text)["reward"] == {"function": "gsm8k"}
    assert any("reward.function is the reward" in note for note in converted.notes)
    accepted = convert(MODEL, accepted=[f"{NEW}.enable"])
    assert "reward" not in yaml.safe_load(accepted.text)
