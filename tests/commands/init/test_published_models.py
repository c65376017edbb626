"""`megarl init` for published models: quantized weights, recipes of megarl, and engines that hold the weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.init.command import InitOptions, init
from megarl.commands.init.published_models import published_name, quantized_notice, recipes_notice
from megarl.commands.plan.preflight import checked
from megarl.errors import RecipeError
from megarl.hf import published
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def written(capsys: pytest.CaptureFixture[str], model: str, devices: str, **options: Any) -> tuple[Recipe, str]:
    init(Path("a.yaml"), InitOptions("grpo", model, None, devices, "rows")._replace(**options), ask=False)
    return load_recipe("a.yaml"), capsys.readouterr().out


def folder_of(name: str, folder: str) -> str:
    Path(folder).mkdir(parents=True)
    Path(folder, "config.json").write_text(json.dumps(published.read(name)))
    return folder


def test_deepseek_v3_on_too_few_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe is a start, and the notices have what the model needs: devices, bfloat16 weights, and a recipe."""
    recipe, output = written(capsys, "deepseek-ai/DeepSeek-V3", "2 x 8 H100")
    assert re.search(
        r"no layout fits 16 devices by arithmetic: .* take 11,249 GiB, at least 20 x 8 H100; an engine", output
    )
    assert (recipe.rollout.tensor_parallel, recipe.rollout.data_parallel) == (8, 2), "the most that 16 devices split"
    assert "no layout fits 16 devices" in Path("a.yaml").read_text(), "the recipe says it, too"
    assert "`hf download deepseek-ai/DeepSeek-V3 --local-dir models/DeepSeek-V3`" in output
    assert (
        "convert-weights models/DeepSeek-V3 --out models/DeepSeek-V3-BF16`" in output and "published in FP8" in output
    )
    assert f"{RECIPES / 'cuda' / 'grpo_deepseek_v3.yaml'} (16 x 8 H200)" in output


def test_a_folder_with_the_config_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, output = written(capsys, folder_of("DeepSeek-V3", "models/DeepSeek-V3"), "2 x 8 910B", task="sft", reward=None)
    assert "the weights of DeepSeek-V3 are published in FP8" in output and "an engine" not in output
    assert f"{RECIPES / 'grpo_deepseek_v3.yaml'} (16 x 16 Atlas 200T A2 Box16)" in output
    Path("models/DeepSeek-V3/model.safetensors").touch()
    assert quantized_notice("models/DeepSeek-V3") is None


@pytest.mark.parametrize("folder", ["gpt-oss-20b-BF16", "gpt-oss-20b"])
def test_a_copy_in_bfloat16_is_not_converted(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    """It has the shape of the quantized model, and another name."""
    _, output = written(capsys, folder_of("gpt-oss-20b", folder), "1 x 8 H200", task="sft", reward=None)
    assert ("published in MXFP4" in output) == (folder == "gpt-oss-20b")


def test_other_quantized_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("gpt-oss-20b", "mine")
    config = {**published.read("gpt-oss-20b"), "quantization_config": {"quant_method": "mxfp4"}}
    Path(folder, "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="convert-weights FOLDER"):
        written(capsys, folder, "1 x 8 H200", task="sft", reward=None)


def test_groups_of_engines_hold_the_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine on the devices of one machine does not hold the weights: a group spreads the experts."""
    recipe, output = written(capsys, "zai-org/GLM-4.5", "8 x 8 H200")
    assert "no layout fits" not in output and "published in" not in output
    assert 2 * 355e9 / 8 > 0.45 * 141 * 2**30, "an engine of a machine does not hold them"
    assert (recipe.rollout.engines, recipe.rollout.tensor_parallel, recipe.rollout.data_parallel) == (8, 8, 2)
    look = checked(recipe, Path("a.yaml"), None)
    assert look.errors == []


def test_names_and_shapes() -> None:
    config = published.read("Qwen3-8B")
    assert published_name("Qwen/Qwen3-8B@main", config) == "Qwen3-8B"
    assert published_name("some/folder", config) == "Qwen3-8B"
    assert published_name("some/folder", config | {"num_hidden_layers": 35}) is None
    assert recipes_notice("quickstart", "cuda", other_kinds=True) is None


def test_recipes_for_other_devices_are_named_if_the_layout_is_in_doubt() -> None:
    assert recipes_notice("Qwen3-4B", "cuda", other_kinds=True) is not None
    assert recipes_notice("Qwen3-4B", "cuda", other_kinds=False) is None
    notice = recipes_notice("Qwen3-30B-A3B", "npu", other_kinds=False)
    assert notice is not None and "dapo_qwen3_30b" in notice
    assert set(published.QUANTIZED) <= set(published.names())
