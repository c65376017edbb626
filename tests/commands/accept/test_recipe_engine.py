"""Stage 4 with the recipe's engine: arguments for both engines, and a real vLLM with dummy weights on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.accept.context import StageContext
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import engine
from megarl.commands.data.tiny_model import make_tiny_model
from megarl.engines.sglang import args as sglang
from megarl.engines.vllm import args as vllm
from megarl.recipe.schema import Recipe


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    return StageContext(Settings("cuda", 2), tmp_path, tmp_path, 1e9)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of six layers without weights."""
    folder = make_tiny_model("qwen3_moe", tmp_path / "model", 0, num_hidden_layers=6)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def recipe_of(model: Path, name: str, **engine_args: Any) -> tuple[Recipe, dict[str, Any]]:
    """Return a recipe with the engine `name`, and its model's config.json."""
    recipe = Recipe()
    recipe.model.path, recipe.rollout.engine, recipe.rollout.engine_args = str(model), name, engine_args
    recipe.data.max_prompt_length = recipe.rollout.max_response_length = 64
    return recipe, json.loads((model / "config.json").read_text())


class TestArguments:
    """The arguments with which each engine's adapter starts its library."""

    def test_vllm(self, context, model):
        recipe, config = recipe_of(model, "vllm", max_num_seqs=8, hf_overrides={"rope_theta": 5.0})
        args = vllm.build_engine_args(engine.recipe_spec(context, recipe, config, 0, 1), "cuda")
        assert args["load_format"] == "dummy" and args["max_num_seqs"] == 8
        assert args["hf_overrides"]["num_hidden_layers"] == engine.LAYERS and args["hf_overrides"]["rope_theta"] == 5.0

    def test_sglang(self, context, model, monkeypatch):
        names = ["max_running_requests", "json_model_override_args", "hf_overrides_of_another_library"]
        monkeypatch.setattr(sglang, "fields", lambda: names)
        overrides = json.dumps({"rope_theta": 5.0})
        recipe, config = recipe_of(model, "sglang", max_running_requests=8, json_model_override_args=overrides)
        args = sglang.build_engine_args(engine.recipe_spec(context, recipe, config, 0, 1), "cuda")
        assert args["load_format"] == "dummy" and args["max_running_requests"] == 8
        written = json.loads(args["json_model_override_args"])
        assert written["num_hidden_layers"] == engine.LAYERS and written["rope_theta"] == 5.0

    def test_drafts_of_the_checkpoint_are_left_out(self, context, model, monkeypatch):
        """They are read from the checkpoint, whose layers the engine does not have."""
        method = {"method": "mtp", "num_speculative_tokens": 1}
        recipe, config = recipe_of(model, "vllm", max_num_seqs=8, speculative_config=method)
        args = vllm.build_engine_args(engine.recipe_spec(context, recipe, config, 0, 1), "cuda")
        assert "speculative_config" not in args
        context.__dict__["recipe"] = recipe
        monkeypatch.setattr(engine, "_sample", lambda *_: None)
        engine._of_recipe(context)
        (check,) = context.checks
        assert check.verdict == "NOT RUN" and "drafts" in check.name

    def test_nested_fields_with_sglang_are_not_run(self, context, model, monkeypatch):
        recipe, config = recipe_of(model, "sglang")
        (model / "config.json").write_text(json.dumps({**config, "text_config": config}))
        context.__dict__["recipe"] = recipe
        monkeypatch.setattr(engine, "_sample", lambda *_: pytest.fail("an engine was started"))
        engine._of_recipe(context)
        (check,) = context.checks
        assert check.verdict == "NOT RUN" and "text_config" in check.cause


@pytest.mark.slow
@pytest.mark.stack
def test_the_recipe_s_engine_samples_with_dummy_weights(tmp_path, model):
    context = StageContext(Settings("cpu", 1), tmp_path, tmp_path, 1e9)
    recipe, config = recipe_of(model, "vllm", max_num_seqs=8, kv_cache_memory_bytes=1 << 26)
    recipe.model.dtype, recipe.cluster.device, recipe.cluster.threads = "float32", "cpu", 1
    recipe.data.max_prompt_length = 192
    engine._sample(context, recipe, config, 1)
    (samples,) = [check for check in context.checks if check.name.endswith("samples")]
    assert samples.verdict == "PASS" and samples.value == 32, samples.line()
