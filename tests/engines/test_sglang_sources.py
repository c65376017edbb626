"""Assumptions about SGLang, and the names of its stand-in, compared with SGLang's source in MEGARL_SGLANG (an unpacked wheel of
0.5.23)."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
from pathlib import Path

import pytest

from megarl import load_recipe
from megarl.engines.base import EngineSpec
from megarl.engines.sglang import args
from megarl.engines.sglang.args import build_engine_args
from megarl.types import Sampling
from tests.support import fake_sglang

ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("MEGARL_SGLANG")
needs_sources = pytest.mark.skipif(not SOURCES, reason="MEGARL_SGLANG names no unpacked wheel of SGLang")


@functools.cache
def tree(file: str) -> ast.Module:
    assert SOURCES is not None
    return ast.parse(Path(SOURCES, "sglang", "srt", file).read_text(encoding="utf-8"))


def text(file: str) -> str:
    assert SOURCES is not None
    return " ".join(Path(SOURCES, "sglang", "srt", file).read_text(encoding="utf-8").split())


def parameters(file: str, owner: str, name: str) -> list[str]:
    (definition,) = [node for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef) and node.name == owner]
    (method,) = [node for node in definition.body if getattr(node, "name", "") == name]
    return [argument.arg for argument in [*method.args.args, *method.args.kwonlyargs]]


@needs_sources
def test_methods_of_the_stand_in_exist_in_sglang() -> None:
    """Every method of the stand-in exists in SGLang with its parameters."""
    names = [name for name, value in vars(fake_sglang.Engine).items() if inspect.isfunction(value) and name[0] != "_"]
    assert {"async_generate", "begin_weight_update", "shutdown", "resume_memory_occupation"} <= set(names)
    for name in names:
        real = parameters("entrypoints/engine.py", "Engine", name)
        assert set(inspect.signature(getattr(fake_sglang.Engine, name)).parameters) <= set(real), name
    assert "self.loop = " in text("entrypoints/engine.py")
    assert "obj" in parameters("managers/tokenizer_manager.py", "TokenizerManager", "pause_generation")
    assert "obj" in parameters("managers/tokenizer_manager.py", "TokenizerManager", "continue_generation")
    assert "rid" in parameters("managers/tokenizer_manager.py", "TokenizerManager", "abort_request")
    assert 'mode: Literal["abort", "retract", "in_place"]' in text("managers/io_struct.py")
    assert "class ContinueGenerationReqInput" in text("managers/io_struct.py")
    assert "def get_parallel()" in text("runtime_context.py")


@needs_sources
def test_arguments_exist_in_sglang(tmp_path: Path) -> None:
    assert SOURCES is not None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": fake_sglang.END}))
    spec = EngineSpec("e0", str(tmp_path), "bfloat16", 40, load_weights=False, sleep_mode=True)
    fields = args.fields_in(Path(SOURCES, "sglang/srt/arg_groups/field_order.py").read_text())
    assert len(fields) > 300 and {*args._OWNED, *build_engine_args(spec, "npu")} <= set(fields)
    recipe = load_recipe(ROOT / "recipes" / "grpo_qwen3_8b_sglang.yaml")
    assert set(recipe.rollout.engine_args) <= set(fields)
    params = [node for node in ast.walk(tree("sampling/sampling_params.py")) if isinstance(node, ast.AnnAssign)]
    parameters = {getattr(node.target, "id", "") for node in params}
    from megarl.engines.sglang.engine import _sampling_params

    assert set(_sampling_params(Sampling(1, 1), 0)) <= parameters
    for name in ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT"):
        assert f"{name} = EnvBool" in text("environ.py")
    assert "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN = EnvBool" in text("environ.py")


@needs_sources
def test_sglangs_sources_have_the_behaviour_that_the_adapter_needs() -> None:
    """Any difference would make samples, log-probs or weights wrong without an error."""
    updater = text("model_executor/model_runner_components/weight_updater.py")
    assert "custom_loader = dynamic_import(load_format) custom_loader(self.get_model(), named_tensors)" in updater
    assert "if self._session is None" in text("managers/scheduler_components/weight_updater.py")
    request = text("managers/schedule_batch.py")
    assert "if self.sampling_params.ignore_eos: return False" in request, "stop tokens apply with ignore_eos, too"
    assert "self.finished_len = matched_pos + 1" in request, "the response excludes its stop token"
    assert "self.max_req_len - input_len - 1" in text("managers/scheduler.py"), "how long a response may be"
    sampler = text("layers/sampler.py")
    assert "logits.div_(sampling_info.temperatures)" in sampler
    assert "logprobs = torch.log_softmax(logits, dim=-1) return batch_next_token_ids, logprobs" in sampler
    batch = text("sampling/sampling_batch_info.py")
    assert "if enable_deterministic" in batch and "r.sampling_params.sampling_seed" in batch
    assert (
        '"ascend"'
        in text("arg_groups/choices.py").split("DETERMINISTIC_ATTENTION_BACKEND_CHOICES = [")[1].split("]")[0]
    )
    assert 'view.sampling_backend != "ascend"' in text("arg_groups/overrides.py")
    assert 'elif is_npu(): dispatch_key = "NPU"' in text("utils/common.py"), "no deterministic mode on an NPU"
    assert "import batch_invariant_ops" in text("hardware_backend/npu/batch_invariant_ops/npu_batch_invariant_ops.py")
    vocabulary = text("layers/vocab_parallel_embedding.py")
    assert "param[loaded_weight.shape[0] :].data.fill_(0)" in vocabulary, "padding would stay NaN"
    constants = text("constants.py")
    for name in ('WEIGHTS = "weights"', 'KV_CACHE = "kv_cache"', 'CUDA_GRAPH = "cuda_graph"'):
        assert f"GPU_MEMORY_TYPE_{name}" in constants
    eos = text("configs/model_config.py")
    assert 'eos_ids = getattr(self.hf_config, "eos_token_id", None)' in eos
    assert "if envs.SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT.get(): return tensor" in text("hardware_backend/npu/utils.py")
