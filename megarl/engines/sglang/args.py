"""SGLang's arguments and environment for an EngineSpec, and checks before its start.

Based on SGLang 0.5.23 (file names are relative to sglang/srt/), which was run only on the CPU.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.engines import check_argument, package_folder
from megarl.engines.base import EngineLimits, EngineSpec
from megarl.engines.sglang import changing_weights
from megarl.errors import RecipeError
from megarl.hf.families import has_tower
from megarl.hf.families.tables.family_table import without_table
from megarl.platform.environment import Requirement
from megarl.platform.kinds import kind_of

LOADER = "megarl.engines.sglang.worker.receive"  # called in each of SGLang's scheduler processes
OVERRIDES = "json_model_override_args"  # argument that overrides fields of config.json, as JSON text
_SPARE_TOKENS = 2  # SGLang ends a response this many tokens before the end of its context (managers/scheduler.py)
_PREFILL_TOKENS, _SEQUENCES = 16384, 256  # per step: SGLang's default max_prefill_tokens; an assumption
# Arguments that other settings determine -> the setting, None if fixed.
_OWNED = {
    "model_path": "{section}.path",
    "dtype": "{section}.dtype",
    "tp_size": "{section}.tensor_parallel",
    "ep_size": "rollout.expert_parallel",
    "context_length": "data.max_prompt_length and rollout.max_response_length",
    "random_seed": "train.seed",
    "enable_memory_saver": "cluster.placement",
    "device": "cluster.device",
    "enable_return_routed_experts": "megatron.routing_replay",
    "load_format": None,
    "custom_weight_loader": None,
    "skip_tokenizer_init": None,
    "enable_deterministic_inference": None,
    "enable_fp32_lm_head": "megatron.fp32_head",
    "tokenizer_worker_num": None,
    "dp_size": None,
    "pp_size": None,
    "nnodes": None,
    "node_rank": None,
}


def captures_graphs(engine_args: Mapping[str, Any]) -> bool:
    """Return True if SGLang captures graphs with these arguments, as by default."""
    return not engine_args.get("disable_cuda_graph")


def required_environment(
    spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None
) -> dict[str, Requirement]:
    """Return no requirements: SGLang engines do not form groups."""
    del spec, device, config
    return {}


def process_env(threads: int) -> dict[str, str]:
    """Return the variables that SGLang needs before its process starts."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs at the sampling temperature (layers/sampler.py)
        # Experts' weights keep their layout on an NPU, so that they can be updated (hardware_backend/npu/utils.py).
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for _SPARE_TOKENS
    }


def check_engine_args(engine_args: Mapping[str, Any], section: str = "rollout") -> None:
    """Raise ValueError for arguments that SGLang's ServerArgs does not have, or that another setting determines.

    SGLang's source is read, not imported. Without SGLang on this machine, the engine's start checks argument names."""
    owned = dict(_OWNED)
    if section == "rollout":
        owned["model_path"] = "model.path"
    else:
        del owned["ep_size"]  # a fixed model may set it
    for name in engine_args:
        check_argument(name, section, "SGLang", fields(), owned)
    if section == "rollout":
        changing_weights.check(engine_args, section)


@cache
def fields() -> list[str]:
    """Return the fields of SGLang's ServerArgs (arg_groups/field_order.py); [] if SGLang is not installed."""
    folder = package_folder("sglang")
    file = folder / "srt" / "arg_groups" / "field_order.py" if folder else None
    return fields_in(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else []


def fields_in(source: str) -> list[str]:
    """Return the field names in the source of field_order.py."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "POSITIONAL_FIELD_ORDER":
            return list(ast.literal_eval(node.value))
    return []


def merged_because(spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None) -> str | None:
    """Return why an engine of `spec` on `device` needs merged weights instead of adapters."""
    return "SGLang loads adapters only from directories"


def expert_split(engine_args: Mapping[str, Any], tensor_parallel: int) -> tuple[int, str]:
    """Return over how many devices of an engine SGLang splits each expert, and the argument that keeps experts whole."""
    return max(1, tensor_parallel // int(engine_args.get("ep_size") or 1)), f"ep_size={tensor_parallel}"


def check_plan(spec: EngineSpec, device: str) -> None:
    """Raise RecipeError if SGLang does not support `spec` on `device`, before any engine starts."""
    section = spec.recipe_section
    use_vllm = f"set {section}.engine=vllm"
    if device == "cpu":
        problem = (
            "SGLang on a CPU needs kernels that are built from source and a CPU with AMX; megarl does not support it"
        )
        raise RecipeError(f"{section}.engine", problem, use_vllm, value="sglang")
    if spec.fp32_head and fields() and "enable_fp32_lm_head" not in fields():
        problem = "this version of SGLang computes logits in the model's dtype: it lacks enable_fp32_lm_head"
        raise RecipeError("megatron.fp32_head", problem, "set megatron.fp32_head=false", value=True)
    if spec.return_routed_experts:
        raise RecipeError(
            "megatron.routing_replay",
            "megarl does not read the routed experts of a token from SGLang",
            f"set megatron.routing_replay=old_log_probs or none, or {section}.engine=vllm",
            value="rollout",
        )
    if spec.prompt_top_k is not None:
        problem = "megarl does not read log-probs of prompt tokens from SGLang"
        raise RecipeError(f"{section}.engine", problem, use_vllm, value="sglang")
    if importlib.util.find_spec("sglang"):  # else a machine that starts engines checks it
        _check_packages(spec, device)
    config = Path(spec.model_path, "config.json")
    if config.is_file() and has_tower(without_table(json.loads(config.read_text()))):  # a missing file fails later
        problem = "megarl does not pass images of a vision-language model to SGLang"
        raise RecipeError(f"{section}.engine", problem, use_vllm, value="sglang")


def _check_packages(spec: EngineSpec, device: str) -> None:
    key, use_vllm = f"{spec.recipe_section}.engine", f"set {spec.recipe_section}.engine=vllm"
    if spec.seeded and device == "npu" and not importlib.util.find_spec("batch_invariant_ops"):
        problem = (
            "a seed for each sample needs SGLang's deterministic mode, which on an NPU imports batch_invariant_ops "
            "(hardware_backend/npu/batch_invariant_ops), and it is not installed"
        )
        raise RecipeError(key, problem, f"install it, set rollout.seeded=false, or {use_vllm}", value="sglang")
    if spec.sleep_mode and not importlib.util.find_spec("torch_memory_saver"):
        problem = "engines that sleep need the package torch_memory_saver in SGLang, and it is not installed"
        remedy = f"{kind_of(device).install_memory_saver}, set cluster.placement=disaggregated, or {use_vllm}"
        raise RecipeError(key, problem, remedy, value="sglang")


def build_engine_args(spec: EngineSpec, device: str) -> dict[str, Any]:
    """Return the keyword arguments of SGLang's ServerArgs for `spec` on `device` ("cuda", "npu")."""
    check_engine_args(spec.engine_args, spec.recipe_section)
    check_plan(spec, device)
    arguments: dict[str, Any] = {
        "model_path": spec.model_path,
        "dtype": spec.dtype,
        "tp_size": spec.tensor_parallel,
        # Whole experts on each device. SGLang's default, 1, splits every expert over the devices.
        **({"ep_size": spec.tensor_parallel} if spec.expert_parallel else {}),
        "context_length": spec.max_model_len + _SPARE_TOKENS,
        "random_seed": spec.seed,
        "device": device,
        "load_format": "auto" if spec.load_weights else "dummy",
        "custom_weight_loader": [LOADER],
        "skip_tokenizer_init": True,  # token in, token out
        # SGLang uses a request's seed only in this mode (sampling/sampling_batch_info.py), which also makes a sample
        # independent of the other requests in the batch.
        "enable_deterministic_inference": spec.seeded,
        "enable_memory_saver": spec.sleep_mode,
        **({"enable_fp32_lm_head": True} if spec.fp32_head else {}),
        **spec.engine_args,
    }
    if device == "npu":
        arguments.setdefault("attention_backend", "ascend")
        arguments.setdefault("sampling_backend", "ascend")
    return arguments


def limits(spec: EngineSpec) -> EngineLimits:
    """Return the step size and memory of an engine of `spec` on an accelerator."""
    args = spec.engine_args
    chunk = args.get("chunked_prefill_size")
    prefill = max(int(args.get("max_prefill_tokens") or _PREFILL_TOKENS), spec.max_model_len)
    share = args.get("mem_fraction_static")
    return EngineLimits(
        tokens=int(chunk) if chunk and chunk > 0 else prefill,
        sequences=int(args.get("max_running_requests") or _SEQUENCES),
        share=None if share is None else float(share),
        share_key="mem_fraction_static",
        covers_step=False,
        assumed=None
        if args.get("max_running_requests")
        else f"SGLang is assumed to step {_SEQUENCES} sequences at a time.",
    )


def eos_ids(model_path: str) -> set[int]:
    """Return the model's eos token ids, at which SGLang always ends a response (configs/model_config.py)."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = os.path.join(model_path, name)
        if os.path.isfile(file):
            with open(file) as text:
                value = json.load(text).get("eos_token_id")
            ids |= {value} if isinstance(value, int) else set(value or ())
    return ids
