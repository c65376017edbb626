"""`accept --expect`: what each stage does with a recipe on the given devices, and its command."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from megarl.cli import app
from megarl.commands.accept import command
from megarl.commands.accept.catalogue import OF_ALL_NODES, STAGES, shares
from megarl.commands.accept.command import AcceptOptions
from megarl.commands.accept.result import stage_verdict, to_json
from megarl.commands.accept.runner import RESULTS, read_results
from megarl.commands.accept.settings import Settings, read_settings, write_settings
from megarl.commands.accept.stages.expected import expectation
from megarl.errors import InputError

RECIPES = Path(__file__).parents[3] / "recipes"


def lines(settings: Settings, word: str, resumed: Path | None = None) -> list[str]:
    """Return the lines of the text with this first word, one per stage."""
    text = expectation(settings, STAGES, shares(STAGES, settings.minutes), resumed)
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(f"  {word} ")]


def npus(recipe: str, nodes: int = 1, devices: int = 16) -> Settings:
    path = str(RECIPES / f"{recipe}.yaml")
    return Settings("npu", devices, nodes, 60.0, tuple(range(9)), path, ("train.steps=3",))


def test_each_stage_shows_what_it_takes_from_the_recipe() -> None:
    here = lines(npus("dapo_qwen3_30b"), "here")
    assert "weight_sync.route=auto" in here[0]
    assert "moe 1, TP2, PP2, EP2, TP2ETP2, CP2, TP2PP2" in here[2]
    assert here[3] == "TP4 PP2 EP2 ETP4 on 16 devices, the recipe's layout"
    assert "vllm: 1 of 1 in a group, each TP4, 4 layers" in here[4] and "enforce_eager=True" in here[4]
    assert "sharded by device" in here[5]
    assert "4 layers: TP4 PP2 EP2 ETP4 on 16 trainers (the recipe: 16); needs config.json" in here[6]
    assert here[7].startswith("rates of 8 devices")


def test_a_cpu_shows_other_work_than_devices() -> None:
    recipe = str(RECIPES / "dapo_qwen3_30b.yaml")
    here = lines(Settings("cpu", 2, recipe=recipe, stages=tuple(range(9))), "here")
    assert "NOT RUN" in here[4] and here[6] == "a tiny copy of the recipe" and "by device" not in here[5]
    assert not set(here[2:]) & set(lines(npus("dapo_qwen3_30b"), "here")[2:])


def test_a_recipe_for_more_devices_is_reduced() -> None:
    here = lines(npus("grpo_deepseek_v3"), "here")
    assert "8 of 128 in a group, each TP2" in here[4]
    assert "PP2 EP8 on 16 trainers (the recipe: 256)" in here[6]
    assert "the recipe has 256 trainers" in here[3]
    assert "rollout.tensor_parallel=4 of 2 devices" in lines(npus("dapo_qwen3_30b", devices=2), "here")[4]
    assert lines(npus("dapo_qwen3_30b", devices=1), "here")[3] == "NOT RUN: one device"


def test_the_command_of_a_stage_needs_the_launcher_only_for_all_nodes() -> None:
    alone = lines(npus("dapo_qwen3_30b_8_nodes", nodes=8), "alone")
    assert len(alone) == len(STAGES)
    for stage, text in zip(STAGES, alone, strict=True):
        launcher, _, words = text.rpartition("python -m megarl ")
        assert launcher == ("bash launch/multinode.sh -- " if stage.number in OF_ALL_NODES else "")
        assert ("--nodes 8" in words) == bool(launcher) and "train.steps=3" in words
        accept, *arguments = shlex.split(words)
        parsed = typer.main.get_command(app).commands[accept].make_context("accept", arguments).params
        assert parsed["stages"] == str(stage.number) and parsed["device"] == "npu"
    assert lines(npus("dapo_qwen3_30b"), "alone", Path("/d"))[3] == "python -m megarl accept --resume /d --stages 3"


def test_the_command_of_a_stage_keeps_the_options_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = AcceptOptions(device="cpu", minutes=12.5, stages="4", out=Path("my runs"), expect=True)
    assert command.accept(None, [], options) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  alone "))
    accept, *arguments = shlex.split(shown.rpartition(" megarl ")[2])
    parsed = typer.main.get_command(app).commands[accept].make_context("accept", arguments).params
    assert (parsed["minutes"], parsed["out"], parsed["stages"]) == (12.5, Path("my runs"), "4")
    assert command.accept(None, [], AcceptOptions(device="cpu", expect=True)) == 0
    assert not {"--minutes", "--out"} & set(capsys.readouterr().out.split()), "defaults are not shown"


def test_one_node_of_a_cluster_is_reported() -> None:
    """A folder of one node that is resumed under a launcher of many nodes would pass without the others."""
    one_node = Settings("npu", 16, stages=(0, 3, 4), ray_address="node0:6379")
    assert "leaves out other nodes of the Ray cluster at node0:6379" in command._one_node_notice(one_node)
    for settings in (replace(one_node, nodes=8), replace(one_node, ray_address=""), replace(one_node, stages=(4, 8))):
        assert command._one_node_notice(settings) == ""


def test_on_a_laptop_the_header_has_the_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = AcceptOptions(device="npu", expect=True, out=tmp_path)
    if command.kind_of("npu").is_here():
        pytest.skip("torch_npu is installed")
    assert (
        command.accept(RECIPES / "dapo_qwen3_30b_8_nodes.yaml", [], AcceptOptions(**{**vars(options), "nodes": 8})) == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("8 x 16 NPUs") and "TP4 EP16 on 128 devices, the recipe's layout" in text
    assert command.accept(None, [], options) == 0
    text = capsys.readouterr().out
    assert text.startswith("1 x all NPUs") and "depends on the devices of a node" in text
    assert command.accept(RECIPES / "cuda" / "grpo_qwen3_8b.yaml", [], options) == 0
    assert capsys.readouterr().out.startswith("1 x all NPUs"), "the header is of another kind of device"


def test_a_resumed_acceptance_shows_its_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_settings(tmp_path, Settings("cpu", 2, stages=(0,)))
    assert command.accept(None, [], AcceptOptions(resume=tmp_path, stages="1", expect=True)) == 0
    assert f"accept --resume {tmp_path} --stages 1" in capsys.readouterr().out


def test_stages_of_all_nodes_resume_in_the_cluster_of_this_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cluster of the first call has ended. Stages of one node need none."""
    write_settings(tmp_path, Settings("cpu", 2, nodes=2, stages=(0, 4), ray_address="old:6379"))
    (tmp_path / RESULTS).write_text(to_json([stage_verdict(number, "x", [], 1.0) for number in (0, 4)]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(InputError, match=r"needs a Ray cluster over 2 nodes"):
        command._resumed(AcceptOptions(resume=tmp_path, stages="0"))
    assert len(read_results(tmp_path)) == 2, "nothing is deleted before the refusal"
    assert command._resumed(AcceptOptions(resume=tmp_path, stages="4")).ray_address == ""
    monkeypatch.setenv("RAY_ADDRESS", "new:6379")
    assert command._resumed(AcceptOptions(resume=tmp_path, stages="0")).stages == (0, 4)
    assert read_settings(tmp_path).ray_address == "new:6379" and not read_results(tmp_path)
