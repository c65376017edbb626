"""From an EngineSpec to SGLang's own arguments and environment, and what SGLang is refused for before it starts.

Read in SGLang 0.5.23 (its files are named below sglang/srt/), which was run on the CPU alone.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.engines.base import EngineSpec
from megarl.engines.limits import Limits
from megarl.errors import RecipeError
from megarl.platform.environment import Requirement

LOADER = "megarl.engines.sglang.worker.receive"  # called in each of SGLang's scheduler processes
_SPARE_TOKENS = 2  # SGLang cuts a response that would come nearer to the end of its context (managers/scheduler.py)
_PREFILL_TOKENS, _SEQUENCES = 16384, 256  # of a step: SGLang's own max_prefill_tokens; and of sequences, assumed
# Arguments that follow from other settings, and which.
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
    "tokenizer_worker_num": None,
    "dp_size": None,
    "pp_size": None,
    "nnodes": None,
    "node_rank": None,
}


def task_queue(engine_args: Mapping[str, Any]) -> str:
    """TASK_QUEUE_ENABLE: see vllm_ascend.py."""
    return "2" if engine_args.get("disable_cuda_graph") else "1"


def required_environment(
    spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None
) -> dict[str, Requirement]:
    """None: megarl's SGLang engines do not spread experts over engines."""
    del spec, device, config
    return {}


def process_env(threads: int) -> dict[str, str]:
    """SGLang's own environment of a process; it must be set before the process starts."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs at the sampling temperature (layers/sampler.py)
        # Experts' weights keep their layout on an NPU, so that they can be updated (hardware_backend/npu/utils.py).
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for _SPARE_TOKENS
    }


def check_engine_args(engine_args: Mapping[str, Any], section: str = "rollout") -> None:
    """ValueError for names that SGLang's ServerArgs does not have, or that another setting decides.

    SGLang's source is read, not imported. Where it is not installed, unknown names are found when the engine starts."""
    known = fields()
    for name in engine_args:
        if name in _OWNED and (name, section == "rollout") != ("ep_size", False):  # a fixed model's is its own
            owner = _OWNED[name]
            if section == "rollout" and name == "model_path":
                owner = "model.path"
            instead = f"set {owner.format(section=section)} instead" if owner else "megarl sets it"
            raise ValueError(f"{section}.engine_args.{name} cannot be given: {instead}")
        if known and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise ValueError(
                f"{section}.engine_args.{name}: SGLang has no such engine argument; did you mean {near!r}?"
            )


@cache
def fields() -> list[str]:
    """The fields of SGLang's ServerArgs (arg_groups/field_order.py); none where SGLang is not installed."""
    found = importlib.util.find_spec("sglang")
    for place in (found.submodule_search_locations or ()) if found else ():
        file = Path(place) / "srt" / "arg_groups" / "field_order.py"
        if file.is_file():
            return fields_in(file.read_text(encoding="utf-8"))
    return []


def fields_in(source: str) -> list[str]:
    """The names in the text of field_order.py."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "POSITIONAL_FIELD_ORDER":
            return list(ast.literal_eval(node.value))
    return []


def merged_because(spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None) -> str | None:
    """Why an engine of `spec` on `device` must be given merged weights instead of adapters."""
    return "SGLang takes adapters from directories alone"


def check_plan(spec: EngineSpec, device: str) -> None:
    """RecipeError for what an SGLang engine of `spec` can never do on `device`, before any starts."""
    section = spec.recipe_section
    another = f"set {section}.engine=vllm"
    if device == "cpu":
        problem = "SGLang's engine for CPUs needs kernels that are built from source, and a CPU with AMX; megarl does not know it"
        raise RecipeError(f"{section}.engine", problem, another, value="sglang")
    if spec.return_routed_experts:
        raise RecipeError(
            "megatron.routing_replay",
            "megarl does not read from SGLang which experts a token went to",
            f"set megatron.routing_replay=old_log_probs or none, or {another[4:]}",
            value="rollout",
        )
    if spec.prompt_top_k is not None:
        problem = "megarl does not read log-probs of given tokens from SGLang"
        raise RecipeError(f"{section}.engine", problem, another, value="sglang")
    if (
        spec.seeded
        and device == "npu"
        and importlib.util.find_spec("sglang")
        and not importlib.util.find_spec("batch_invariant_ops")
    ):
        problem = (
            "a seed for each sample needs SGLang's deterministic mode, which on an NPU imports batch_invariant_ops "
            "(hardware_backend/npu/batch_invariant_ops), and it is not installed"
        )
        raise RecipeError(
            f"{section}.engine", problem, f"install it, set rollout.seeded=false, or {another}", value="sglang"
        )
    config = Path(spec.model_path, "config.json")
    if config.is_file() and "vision_config" in json.loads(config.read_text()):  # where not, reading the model says it
        problem = "megarl does not give SGLang the images of a vision-language model"
        raise RecipeError(f"{section}.engine", problem, another, value="sglang")


def build_engine_args(spec: EngineSpec, device: str) -> dict[str, Any]:
    """Keyword arguments of SGLang's ServerArgs for `spec` on `device` ("cuda", "npu")."""
    check_engine_args(spec.engine_args, spec.recipe_section)
    check_plan(spec, device)
    arguments: dict[str, Any] = {
        "model_path": spec.model_path,
        "dtype": spec.dtype,
        "tp_size": spec.tensor_parallel,
        # Whole experts on each device; 1, SGLang's own: a part of each.
        **({"ep_size": spec.tensor_parallel} if spec.expert_parallel else {}),
        "context_length": spec.max_model_len + _SPARE_TOKENS,
        "random_seed": spec.seed,
        "device": device,
        "load_format": "auto" if spec.load_weights else "dummy",
        "custom_weight_loader": [LOADER],
        "skip_tokenizer_init": True,  # token in, token out
        # A request's own seed counts in this mode alone (sampling/sampling_batch_info.py); and what a sample is, then
        # hangs on no other that runs beside it.
        "enable_deterministic_inference": spec.seeded,
        "enable_memory_saver": spec.sleep_mode,
        **spec.engine_args,
    }
    if device == "npu":
        arguments.setdefault("attention_backend", "ascend")
        arguments.setdefault("sampling_backend", "ascend")
    return arguments


def limits(spec: EngineSpec) -> Limits:
    """Of an engine of `spec` on an accelerator."""
    given = spec.engine_args
    chunk = given.get("chunked_prefill_size")
    whole = max(int(given.get("max_prefill_tokens") or _PREFILL_TOKENS), spec.max_model_len)
    share = given.get("mem_fraction_static")
    return Limits(
        tokens=int(chunk) if chunk and chunk > 0 else whole,
        sequences=int(given.get("max_running_requests") or _SEQUENCES),
        share=None if share is None else float(share),
        share_key="mem_fraction_static",
        covers_step=False,
        assumed=None
        if given.get("max_running_requests")
        else f"SGLang is taken to step {_SEQUENCES} sequences at a time.",
    )


def ends_of(model_path: str) -> set[int]:
    """Tokens with which SGLang ends a response on its own (configs/model_config.py): the model's ends of text."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = os.path.join(model_path, name)
        if os.path.isfile(file):
            with open(file) as text:
                given = json.load(text).get("eos_token_id")
            ends |= {given} if isinstance(given, int) else set(given or ())
    return ends
