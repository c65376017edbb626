"""A configuration file that --config-name names counts as if the command had its options first."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.commands.convert_verl.command import Converted, convert
from megarl.commands.convert_verl.shell.values import ScriptContext
from megarl.errors import InputError

OPTIONS = (
    "actor_rollout_ref.model.path=m data.train_files=a.parquet algorithm.adv_estimator=grpo "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=1 trainer.total_training_steps=3"
)
# As verl's examples/sglang_multiturn/config/gsm8k_multiturn_grpo.yaml.
MULTI_TURN = """
hydra:
  searchpath: [file://verl/trainer/config]
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, max_response_length: 768, train_batch_size: 8}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 8, optim: {lr: 5e-7}}
  rollout:
    n: 4
    multi_turn: {enable: true, max_assistant_turns: 5, tool_config_path: tools.yaml}
"""


def converted(folder: Path, flags: str, more: str = "") -> Converted:
    """Convert a script in FOLDER/scripts that was written for the current folder FOLDER."""
    command = f"python3 -m verl.trainer.main_ppo {flags} {OPTIONS} {more}"
    return convert(command, context=ScriptContext(str(folder / "scripts" / "run.sh"), str(folder)))


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_its_options_come_before_the_commands(tmp_path: Path) -> None:
    write(tmp_path / "config", "mine.yaml", MULTI_TURN)
    result = converted(tmp_path, f"--config-path={tmp_path}/config --config-name=mine", "data.max_response_length=512")
    recipe = yaml.safe_load(result.text)
    assert recipe["agent"]["max_turns"] == 5 and recipe["agent"]["tools"] == ["tools.yaml"]
    assert recipe["rollout"]["max_response_length"] == 512 and recipe["rollout"]["samples_per_prompt"] == 4
    assert recipe["data"]["prompts_per_step"] == 8
    assert recipe["actor"]["optimizer"]["lr"] == 5e-7
    assert f"line 1: --config-name=mine: the options of {tmp_path}/config/mine.yaml" in result.notes


@pytest.mark.parametrize(
    "flags",
    [
        "--config-path=conf --config-name mine.yaml",
        "-cp conf -cn mine",
        "--config-dir={root}/conf --config-name=mine",
        "--config-path={root}/elsewhere/../conf --config-name=mine",
    ],
)
def test_the_folder_is_found_from_the_current_folder_and_from_the_scripts(tmp_path: Path, flags: str) -> None:
    write(tmp_path / "conf", "mine.yaml", "defaults: [ppo_megatron_trainer]\ndata: {train_batch_size: 16}\n")
    (tmp_path / "elsewhere").mkdir()
    recipe = yaml.safe_load(converted(tmp_path, flags.format(root=tmp_path)).text)
    assert recipe["data"]["prompts_per_step"] == 16
    assert "recompute" not in recipe.get("megatron", {})  # FSDP has recomputation: the file's base is Megatron's


def test_a_script_of_another_current_folder_brings_its_project(tmp_path: Path) -> None:
    """The path begins with $(pwd), which is another folder at the conversion than in the script's project."""
    write(tmp_path / "project" / "conf", "mine.yaml", "data: {train_batch_size: 16}\n")
    here = tmp_path / "here"
    here.mkdir()
    text = f'D="$(pwd)"\npython3 -m verl.trainer.main_ppo --config-path="$D/conf" --config-name=mine {OPTIONS}'
    context = ScriptContext(str(tmp_path / "project" / "scripts" / "run.sh"), str(here))
    assert yaml.safe_load(convert(text, context=context).text)["data"]["prompts_per_step"] == 16


def test_a_file_of_yours_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"--config-name=mine is a configuration file of yours.*/conf/mine\.yaml does not exist"
    ):
        converted(tmp_path, f"--config-path={tmp_path}/conf --config-name=mine")
    with pytest.raises(InputError, match=r"add NAME=VALUE after the file"):
        converted(tmp_path, "--config-path=conf --config-name=$NAME")


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_trainer.yaml", "ppo_megatron_trainer"])
def test_verls_own_files_are_the_tables_defaults(tmp_path: Path, name: str) -> None:
    assert not [
        note
        for note in converted(tmp_path, f"--config-path=config --config-name={name}").notes
        if "config-name" in note
    ]


def test_defaults_name_further_files_and_groups(tmp_path: Path) -> None:
    write(
        tmp_path / "conf", "base.yaml", "defaults: [ppo_trainer]\ndata: {train_batch_size: 16, max_prompt_length: 99}\n"
    )
    write(
        tmp_path / "conf",
        "mine.yaml",
        "defaults: [base, model_engine: megatron, _self_]\ndata: {train_batch_size: 48}\n",
    )
    recipe = yaml.safe_load(converted(tmp_path, "--config-path=conf --config-name=mine").text)
    assert (recipe["data"]["prompts_per_step"], recipe["data"]["max_prompt_length"]) == (48, 99)
    assert "recompute" not in recipe.get("megatron", {})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("data: {train_batchsize: 16}", "mine.yaml: data.train_batchsize=16: unknown option; nearest: data.train_batch_size"),
        ("data: {train_batch_size: '${oc.env:SIZE}'}", r"mine.yaml: data.train_batch_size=\$\{oc.env:SIZE\} refers to"),
        ("data: {train_batch_size: '${data.size}'}", r"mine.yaml: data.train_batch_size=\$\{data.size\} refers to"),
        ("defaults: [absent]", "its defaults name 'absent'"),
        ("defaults: [mine]", "its defaults name the file itself"),
        ("- 1", "has no options, but list"),
        ("a: [", "cannot be read as YAML"),
        ("actor_rollout_ref: {actor: {fsdp_config: {qat: {enable: true}}}}", "qat.enable=True: no counterpart"),
    ],
)  # fmt: skip
def test_contents_that_cannot_be_converted_are_errors(tmp_path: Path, content: str, words: str) -> None:
    write(tmp_path / "conf", "mine.yaml", content)
    with pytest.raises(InputError, match=words):
        converted(tmp_path, "--config-path=conf --config-name=mine")


def test_references_to_options_are_their_values(tmp_path: Path) -> None:
    content = (
        "data: {gen_batch_size: '${data.train_batch_size}', max_prompt_length: '${data.max_response_length}'}\n"
        "algorithm: {filter_groups: {_target_: verl.trainer.config.FilterGroupsConfig, enable: true, metric: acc, max_num_gen_batches: 4}}"
    )
    write(tmp_path / "conf", "mine.yaml", content)
    recipe = yaml.safe_load(
        converted(
            tmp_path, "--config-path=conf --config-name=mine", "data.train_batch_size=64 actor_rollout_ref.rollout.n=2"
        ).text
    )
    assert recipe["algorithm"]["dynamic_sampling"]["max_attempts"] == 4  # batches of 64
    assert recipe["data"]["max_prompt_length"] == 512  # verl's default of max_response_length


def test_a_file_beside_the_script_counts_if_the_path_does_not_exist(tmp_path: Path) -> None:
    """As in verl-recipe's deepeyes, where each user replaces BASEDIR=base_dir. Of several folders the one with the longest common end is read."""
    write(tmp_path / "scripts" / "configs", "mine.yaml", MULTI_TURN)
    flags = "--config-path=base_dir/recipe/scripts/configs --config-name=mine"
    result = converted(tmp_path, flags)
    assert yaml.safe_load(result.text)["agent"]["max_turns"] == 5
    file = tmp_path / "scripts" / "configs" / "mine.yaml"
    note = f"line 1: --config-name=mine: the options of {file}, because base_dir/recipe/scripts/configs does not exist here: "
    assert f"{note}check that it is the same file" in result.notes
    write(
        tmp_path / "recipe" / "scripts" / "configs",
        "mine.yaml",
        MULTI_TURN.replace("assistant_turns: 5", "assistant_turns: 6"),
    )
    assert yaml.safe_load(converted(tmp_path, flags).text)["agent"]["max_turns"] == 6
    write(
        tmp_path / "base_dir" / "recipe" / "scripts" / "configs",
        "mine.yaml",
        MULTI_TURN.replace("turns: 5", "turns: 7"),
    )
    exact = converted(tmp_path, flags)
    assert yaml.safe_load(exact.text)["agent"]["max_turns"] == 7 and not any(
        "does not exist" in note for note in exact.notes
    )
