"""Scripts as a new user has them: with placeholders, pasted with Markdown's fences, and with the machines of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.commands.convert_verl.command import Converted, convert
from megarl.commands.convert_verl.shell.values import ScriptContext
from megarl.commands.plan.options import device_of
from megarl.errors import InputError
from megarl.recipe.text import hardware_of
from tests.commands.convert_verl.test_whole_scripts import ASYNC, PPO, SFT

MACHINE = ScriptContext(script="scripts/run.sh", folder="/home/me/verl")


def converted(text: str, *arguments: str, **more: Any) -> Converted:
    return convert(text, arguments, context=MACHINE, **more)


@pytest.mark.parametrize(
    "model",
    [
        "/path/to/model", "path/to/your/model", "/PATH_TO/Qwen3-8B", "'<path/to/model>'", "<path to model>", "<MODEL>",
        "your_model_path", "/data/xxx/model", "/mnt/.../model", "/absolute/path/to/Qwen",
    ],
)  # fmt: skip
def test_a_placeholder_is_left_open(model: str) -> None:
    done = converted(f"{PPO.replace('/models/m', model)} data.seed=7")
    content = yaml.safe_load(done.text)
    assert content["model"]["path"] == "???" and content["train"]["seed"] == 7
    option = f"actor_rollout_ref.model.path={model.strip(chr(39))}"
    assert done.notes[0] == f"model.path=???: set it before the run; the script leaves it open: {option}"


@pytest.mark.parametrize("model", ["/models/m", "Qwen/Qwen3-8B", "/data/pathology/to", "~/yours/x", "/data/todo/m"])
def test_other_paths_are_kept(model: str) -> None:
    assert "???" not in converted(PPO.replace("/models/m", model)).text


def test_a_path_that_exists_is_no_placeholder(tmp_path: Path) -> None:
    (tmp_path / "path" / "to" / "model").mkdir(parents=True)
    assert "???" not in converted(PPO.replace("/models/m", f"{tmp_path}/path/to/model")).text


def test_placeholders_of_other_options() -> None:
    script = PPO.replace("a.parquet", "\"['/path/to/a.parquet', 'b.parquet']\"")
    done = converted(f"{script} custom_reward_function.path=/path/to/reward.py trainer.experiment_name=<name>")
    content = yaml.safe_load(done.text)
    assert content["data"]["train_files"] == content["reward"]["function"] == "???" and "name" not in content
    assert any(note.endswith("trainer.experiment_name=<name>: omitted, a placeholder; set name") for note in done.notes)


@pytest.mark.parametrize("quoted", ["'--x=<a> b'", '"--x=<a> b"'])
def test_quoted_text_stays(quoted: str) -> None:
    assert converted(f"X={quoted}\n{PPO}").text == converted(PPO).text


def test_verls_options_after_the_file_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"trainer\.nnodes is not a setting of a recipe.* change verl's options in the script"
    ):
        converted(PPO, "trainer.nnodes=4")


class TestFences:
    def test_fences_and_the_text_around_them_are_left_out_with_a_note(self) -> None:
        done = converted(f"```bash\n{PPO} \\\n  data.seed=7\n```\n")
        assert done.text.partition("model:")[2] == converted(f"{PPO} data.seed=7").text.partition("model:")[2]
        assert "line 1: Markdown's fences are not part of the script and were left out (lines 1, 4)" in done.notes
        done = converted(f"Run it with `ray`:\n\n~~~\n{PPO} x.y=1\n~~~\n", "algorithm.gamma=1", accepted=["x.y"])
        text = "line 3: Markdown's fences are not part of the script and were left out (lines 3, 5), and so was the text outside of them"
        assert f"{text} (lines 1)" in done.notes and any(note.startswith("line 4: x.y=1") for note in done.notes)

    def test_a_fence_at_the_end_alone(self) -> None:
        notes = converted(f"{PPO}\n```").notes
        assert "line 2: Markdown's fences are not part of the script and were left out (lines 2)" in notes

    def test_the_end_of_a_block_prose_and_a_block(self) -> None:
        done = converted(f"LR=3e-6\n```\n\nThen run `ray`:\n```bash\n{PPO} actor_rollout_ref.actor.optim.lr=$LR\n```")
        expected = converted(f"{PPO} actor_rollout_ref.actor.optim.lr=3e-6")
        assert done.text.partition("model:")[2] == expected.text.partition("model:")[2]
        text = "left out (lines 2, 5, 7), and so was the text outside of them (lines 4)"
        assert any(note.endswith(text) for note in done.notes)

    def test_a_script_may_write_fences(self) -> None:
        text = f"cat > notes.md <<'END'\n```bash\nls\n```\nEND\n{PPO}"
        assert converted(text).text == converted(PPO).text


class TestHardware:
    @pytest.mark.parametrize(
        ("script", "machines"),
        [
            (f"{PPO} trainer.nnodes=2 trainer.n_gpus_per_node=8", (2, 8)),
            (PPO, (1, 8)),
            (f"{ASYNC} trainer.nnodes=2 trainer.n_gpus_per_node=8 rollout.nnodes=1 rollout.n_gpus_per_node=8", (3, 8)),
            (f"{ASYNC} trainer.n_gpus_per_node=6 rollout.n_gpus_per_node=2", (1, 8)),
            (f"{ASYNC} trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=4", (1, 8)),
            (f"{ASYNC} trainer.n_gpus_per_node=12 rollout.n_gpus_per_node=4", (1, 16)),
            (f"{ASYNC} trainer.n_gpus_per_node=8 rollout.n_gpus_per_node=4", None),
            (f"{PPO} trainer.nnodes=$N", None),
            (SFT.replace("$1", "4 --nnodes=2"), (2, 4)),
            (SFT, None),
        ],
    )
    def test_the_head_has_the_machines(self, script: str, machines: tuple[int, int] | None, tmp_path: Path) -> None:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(converted(script, machine="H100").text)
        assert hardware_of(recipe) == (None if machines is None else ("H100", *machines))
        assert (device_of(recipe, None, None)[0] is not None) == (machines is not None)

    def test_a_machine_without_a_name_has_a_note(self) -> None:
        done = converted(f"{PPO} trainer.nnodes=2")
        assert "\n# Hardware: MACHINE, 2 x 8\n" in done.text
        assert done.notes[0].startswith("# Hardware: MACHINE: the script does not name its machines; write it there")
        assert not any("MACHINE" in note for note in converted(PPO, machine="Atlas 800T A3").notes)

    def test_an_unused_name_has_a_note(self) -> None:
        assert converted(SFT, machine="H100").notes[1].startswith("--machine H100: not used")

    def test_an_unknown_machine_is_refused(self) -> None:
        with pytest.raises(
            InputError, match=r"--machine H1000: plan has no such machine; did you mean 'H100'\? Give one of "
        ):
            converted(PPO, machine="H1000")
        with pytest.raises(InputError, match=r"--machine ZZZ: plan has no such machine\. Give one of \w.*\.$"):
            converted(PPO, machine="ZZZ")
