"""`$HOME` and `~` in a script: this machine's folder with a note, or the user's value."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from megarl.commands.convert_verl.command import convert
from megarl.commands.convert_verl.shell.parser import Command, read_command
from megarl.commands.convert_verl.shell.values import ScriptContext
from megarl.errors import InputError

MAIN = "python3 -m verl.trainer.main_ppo"
NOTE = "$HOME is /home/me, as on the machine of this conversion; HOME=FOLDER after the file changes it"


def command(script: str, variables: Mapping[str, str]) -> Command:
    return read_command(f"{script}\n{MAIN} x=$X", variables, ScriptContext(home="/home/me"))


@pytest.mark.parametrize("script", ["X=$HOME/a", "X=~/a", "Y=${HOME}/\nexport X=${Y%/}/a"])
def test_the_home_folder_is_this_machines_or_the_users(script: str) -> None:
    default, set_by_user = command(script, {}), command(script, {"HOME": "/h"})
    assert [argument.text for argument in default.arguments] == ["x=/home/me/a"] and default.notes == [NOTE]
    assert [argument.text for argument in set_by_user.arguments] == ["x=/h/a"] and set_by_user.notes == []


def test_a_home_folder_that_the_command_does_not_use_has_no_note() -> None:
    assert command("Y=~/a\nX=1", {}).notes == []


def test_cd_without_a_folder_goes_home() -> None:
    assert command("cd\nX=$(pwd)", {}).arguments[0].text == "x=/home/me"
    assert command("HOME=/data\ncd\nX=$(pwd)", {}).arguments[0].text == "x=/data"


def test_a_script_that_sets_its_home_folder() -> None:
    read = command("HOME=/data\nX=~/a", {})
    assert read.arguments[0].text == "x=/data/a" and read.notes == []


def test_a_tilde_that_bash_leaves_in_an_argument_is_the_home_folder() -> None:
    options = "data.train_files=~/a.parquet actor_rollout_ref.model.path=~/m trainer.n_gpus_per_node=2 trainer.nnodes=1"
    text = f"{MAIN} {options} data.train_batch_size=8 trainer.total_training_steps=2"
    converted = convert(text, ["HOME=/h"])
    assert "- /h/a.parquet" in converted.text and "path: /h/m" in converted.text
    assert "data.train_files, model.path: ~ is /h, as on the machine of this conversion" in converted.notes


@pytest.mark.parametrize("name", ["nodes", "n_gpus_per_node", "NNODES", "model_engine"])
def test_a_part_of_an_option_is_no_variable(name: str) -> None:
    """`nodes=1` would be ignored."""
    with pytest.raises(InputError, match=f"{name}=...: the script has no such variable"):
        convert(f"NODES=2\n{MAIN} trainer.nodes=$NODES trainer.n_gpus_per_node=8 model_engine=fsdp", [f"{name}=1"])
