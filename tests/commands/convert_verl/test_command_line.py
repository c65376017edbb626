"""The command `megarl convert-config`, and scripts that verl publishes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml

from megarl import load_recipe
from megarl.cli import app
from megarl.commands.convert_verl.command import convert
from megarl.commands.convert_verl.open_settings import next_command
from megarl.exit_status import guarded
from tests.commands.convert_verl.test_convert import DOCUMENTS, GRPO, SCRIPT, VALUES


@pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="verl's documents are not on this machine (MEGARL_VERL_DOCS)")
class TestPublishedScripts:
    @staticmethod
    def scripts() -> list[str]:
        """Cut scripts from each `set -x` to the end of the training command."""
        scripts = []
        for path in sorted(DOCUMENTS.glob("*.txt")):
            for text in path.read_text().split("set -x\n")[1:]:
                script: list[str] = []
                for line in text.splitlines():
                    script.append(line)
                    if "trainer." in " ".join(script[-6:]) and not line.rstrip().endswith("\\") and len(script) > 20:
                        break
                scripts.append("\n".join(script))
        return scripts

    def test_each_script_becomes_a_recipe_that_loads(self, tmp_path: Path) -> None:
        scripts = self.scripts()
        assert len(scripts) == 5
        recipes = []
        for number, script in enumerate(scripts):
            path = tmp_path / f"{number}.yaml"
            values = [] if "model.path" in script or "partial" in script else ["model.path=m"]
            values += ["1=8", "2=out"] if "$1" in script else []  # elsewhere `$@` would make them overrides
            path.write_text(convert(script, values, rows=7473).text)
            recipes.append(load_recipe(path))
        sft = next(recipe for recipe in recipes if recipe.train.source == "sft")
        assert (sft.lora.rank, sft.lora.alpha, sft.data.prompts_per_step, sft.cluster.trainers) == (32, 16, 512, 8)
        assert sft.train.steps == 14 and sft.actor.optimizer.warmup_steps == 1 and sft.actor.optimizer.decay == "cosine"
        first, large = recipes[0], next(recipe for recipe in recipes if "Qwen2-7B" in recipe.model.path)
        assert (first.actor.mini_batches, first.rollout.engines, first.algorithm.kl_coef) == (2, 4, 0.001)
        assert (large.actor.mini_batches, large.cluster.trainers, large.rollout.tensor_parallel) == (1, 16, 4)
        assert large.train.steps == 15 * (7473 // 16)


def test_the_next_command_works_once_what_is_open_is_given() -> None:
    plan, out = "python -m megarl plan 'a b.yaml'", Path("a b.yaml")
    assert next_command("# Hardware: H100, 1 x 8\nmodel: {path: m}", out) == plan
    assert next_command("# a: ???\n# Hardware: MACHINE, 1 x 8\n", out) == f"{plan} --device NAME (such as H100 or 910B)"
    assert next_command("model:\n  path: ???\n", out) == f"write the values that are ???, then {plan}"


class TestCommandLine:
    def run(self, *words: str) -> int:
        return guarded(lambda: app(args=["convert-config", *words], standalone_mode=False), debug=False)

    def test_file_to_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        script, out = tmp_path / "run.sh", tmp_path / "recipe.yaml"
        script.write_text(SCRIPT)
        assert self.run(str(script), *VALUES, "--rows", "100", "--out", str(out)) == 0
        assert load_recipe(out).train.steps == 18
        output = capsys.readouterr()
        assert "data.truncation=left" in output.err and "# Converted from run.sh" in out.read_text()
        assert output.err.endswith(
            f"wrote {out}\nnext: python -m megarl plan {out} --device NAME (such as H100 or 910B)\n"
        )
        assert all(f"#   {line}" in out.read_text() for line in output.err.splitlines() if line.startswith("line "))
        assert self.run(str(script), *VALUES, "--out", str(out)) == 2
        assert "exists and would be overwritten" in capsys.readouterr().err
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["recipe.yaml", "run.sh"]

    def test_a_missing_folder_is_refused_before_the_conversion(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run("no/such.sh", "--out", str(tmp_path / "none" / "recipe.yaml")) == 2
        error = capsys.readouterr().err
        assert "none does not exist" in error and "such.sh" not in error

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(GRPO))
        assert self.run("-") == 0
        assert yaml.safe_load(capsys.readouterr().out)["model"]["path"] == "m"

    def test_errors_are_printed_as_one_block(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("no/such.sh") == 2
        assert "input error: no/such.sh cannot be read" in capsys.readouterr().err
