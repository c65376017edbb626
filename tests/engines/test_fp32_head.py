"""`megatron.fp32_head` on the engines' side: the argument of each engine, or a refusal before anything starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megarl import load_recipe
from megarl.engines.base import EngineSpec
from megarl.engines.sglang import args as sglang
from megarl.engines.specs import policy_spec, teacher_specs
from megarl.engines.vllm import args as vllm
from megarl.engines.vllm import fp32_head
from megarl.errors import RecipeError
from megarl.types import GenerationRequest, Prompt, Sampling
from tests.support.engine_process import VOCABULARY, EngineProcess, build_model
from tests.support.engine_process import spec as engine_spec

ROOT = Path(__file__).resolve().parents[2]
BFLOAT16 = [f"{section}.dtype=bfloat16" for section in ("model", "rollout")]


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return EngineSpec(
        name="engine0", model_path=str(tmp_path), dtype="bfloat16", max_model_len=64, seeded=False, fp32_head=True
    )


class TestVLLM:
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_the_override(self, spec: EngineSpec, device: str) -> None:
        vllm.check_plan(spec, device)
        assert vllm.build_engine_args(spec, device)["hf_overrides"] == {"head_dtype": "float32"}
        off = dataclasses.replace(spec, fp32_head=False)
        assert "hf_overrides" not in vllm.build_engine_args(off, device)

    def test_overrides_of_the_recipe_stay(self, spec: EngineSpec) -> None:
        more = dataclasses.replace(spec, engine_args={"hf_overrides": {"rope_theta": 1e6}})
        assert vllm.build_engine_args(more, "cuda")["hf_overrides"] == {"rope_theta": 1e6, "head_dtype": "float32"}

    def test_a_second_head_dtype_is_refused(self, spec: EngineSpec) -> None:
        other = dataclasses.replace(spec, engine_args={"hf_overrides": {"head_dtype": "model"}})
        for refuse in (vllm.check_plan, vllm.build_engine_args):
            with pytest.raises(RecipeError, match=r"megatron\.fp32_head sets its head_dtype"):
                refuse(other, "cuda")

    def test_an_npu_is_refused(self, spec: EngineSpec) -> None:
        for refuse in (vllm.check_plan, vllm.build_engine_args):
            with pytest.raises(RecipeError, match="vllm-ascend") as refusal:
                refuse(spec, "npu")
            assert refusal.value.key == "megatron.fp32_head"

    @pytest.mark.parametrize("source", [None, "class LogitsProcessor: pass"])
    def test_a_version_without_it_is_refused(
        self, spec: EngineSpec, source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path.joinpath("vllm", *fp32_head._READER)
        file.parent.mkdir(parents=True)
        if source is not None:
            file.write_text(source)
        monkeypatch.setattr(fp32_head, "package_folder", lambda name: tmp_path / name)
        with pytest.raises(RecipeError, match="does not read head_dtype"):
            vllm.check_plan(spec, "cuda")

    def test_the_installed_version_reads_it(self) -> None:
        assert fp32_head.package_folder("vllm") is not None and fp32_head._problem("cuda") is None


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.parametrize("fp32_head", [False, True])
def test_a_real_vllm_rounds_its_logits_or_not(fp32_head: bool, tmp_path: Path) -> None:
    """bfloat16 has few numbers near a logit, so that likely tokens of a position have equal log-probs; float32 has many."""
    tokens = tuple(np.random.default_rng(0).integers(1, VOCABULARY, 40).tolist())
    request = GenerationRequest(0, Prompt("p", tokens, "", "x"), Sampling(1, 1, 0.0), 0, prompt_top_k=50)
    process = EngineProcess()
    try:
        process.start(engine_spec(build_model(tmp_path), dtype="bfloat16", prompt_top_k=50, fp32_head=fp32_head))
        _, scored = process.generate([request])
    finally:
        process.close()
    places = scored[0][0].prompt.top_log_probs[1:]
    assert places.shape == (39, 50)
    equal = sum(len(place) - len(np.unique(place)) for place in places)
    assert equal < 5 if fp32_head else equal > 100, equal


class TestSGLang:
    def test_the_argument(self, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sglang, "fields", lambda: ["enable_fp32_lm_head"])
        assert sglang.build_engine_args(spec, "cuda")["enable_fp32_lm_head"] is True
        assert "enable_fp32_lm_head" not in sglang.build_engine_args(dataclasses.replace(spec, fp32_head=False), "cuda")

    def test_a_version_without_it_is_refused(self, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sglang, "fields", lambda: ["model_path"])
        with pytest.raises(RecipeError, match="lacks enable_fp32_lm_head"):
            sglang.check_plan(spec, "cuda")


class TestRecipe:
    def test_the_policy_has_it_and_the_teacher_does_not(self) -> None:
        overrides = ["megatron.fp32_head=true", "teacher.path=t", *BFLOAT16]
        recipe = load_recipe(ROOT / "recipes" / "tiny" / "gkd.yaml", overrides)
        assert policy_spec(recipe, "engine0", updated=True).fp32_head
        assert policy_spec(recipe, "engine0", updated=False).fp32_head, "megarl eval"
        assert not teacher_specs(recipe)[0].fp32_head

    def test_a_model_in_float32_is_refused(self) -> None:
        path = ROOT / "recipes" / "tiny" / "grpo.yaml"
        with pytest.raises(RecipeError, match="no effect"):
            load_recipe(path, ["megatron.fp32_head=true", "model.dtype=float32", "rollout.dtype=null"])
        assert load_recipe(path, ["megatron.fp32_head=true", *BFLOAT16]).megatron.fp32_head
