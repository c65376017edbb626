"""vLLM's arguments and environment for an EngineSpec, and checks before its start."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from packaging.version import Version

from megarl.engines import check_argument, package_folder
from megarl.engines.base import EngineLimits, EngineSpec, EngineTraces
from megarl.engines.vllm import ascend, changing_weights, fp32_head, lora, quantization
from megarl.engines.vllm.ascend import captures_graphs as captures_graphs
from megarl.engines.vllm.dispatch_buffers import DEFAULT_MB, dispatch_buffer
from megarl.engines.vllm.images import image_args
from megarl.engines.vllm.scheduling import needs_synchronous_scheduling
from megarl.errors import RecipeError
from megarl.hf.config import layer_kinds, text_fields
from megarl.hf.families import has_tower
from megarl.hf.families.tables.family_table import without_table
from megarl.platform.environment import Requirement, at_least
from megarl.recipe.library_fields import Fields, fields_of, problem
from megarl.types import Sampling

_CPU_KV_CACHE_BYTES = 256 << 20  # by default vLLM takes most of the machine's memory
_CPU_BATCHED_TOKENS = 8192  # no chunked prefill on a CPU, so the longest prompt must fit
_PROMPT_SCORES_TOKENS = 2048  # per step with prompt log-probs: 2.5 GB of float32 logits with a vocabulary of 150,000
# Defaults of vLLM's LLMEngine (config/scheduler.py, config/cache.py).
_BATCHED_TOKENS, _SEQUENCES, _SHARE = 2048, 128, 0.92
# Engines of a group get these from their environment (lockstep.py: group_env).
_DATA_PARALLEL = (
    "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
    "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend", "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
)  # fmt: skip
OVERRIDES = "hf_overrides"  # argument that overrides fields of config.json
# Each multiplies the devices of an engine, which has `tensor_parallel` of them. 1 is accepted.
_MORE_DEVICES = ("pipeline_parallel_size", "prefill_context_parallel_size")
# Arguments that other settings determine -> the setting, None if fixed.
_OWNED = {
    "model": "{section}.path",
    "dtype": "{section}.dtype",
    **dict.fromkeys(("tensor_parallel_size", *_MORE_DEVICES), "{section}.tensor_parallel"),
    **dict.fromkeys(_DATA_PARALLEL),
    "max_model_len": "data.max_prompt_length and rollout.max_response_length",  # also what a teacher reads
    "seed": "train.seed",
    "enable_sleep_mode": "cluster.placement",
    "load_format": None,
    "enable_return_routed_experts": "megatron.routing_replay",
    **dict.fromkeys(lora.OWNED, "lora and weight_sync.adapters"),
    "logprobs_mode": None,
    "max_logprobs": "algorithm.distill_top_k",
    "mm_device_do_normalize": None,
    "skip_tokenizer_init": None,
    "worker_extension_cls": None,
    "disable_log_stats": None,
    "use_tqdm_on_load": None,
}
# The same for single sections of the recipe.
_OWNED_IN: dict[str, dict[str, str | None]] = {
    "rollout": {
        "model": "model.path",
        "enable_expert_parallel": "rollout.expert_parallel",
        **dict.fromkeys(("quantization", "quantization_config"), "rollout.quantization"),
        **dict.fromkeys(_DATA_PARALLEL, "rollout.data_parallel"),
    },
    "judge": {"max_model_len": "judge.max_prompt_length and judge.max_tokens", "max_logprobs": None},
}


def process_env(threads: int) -> dict[str, str]:
    """Return the variables that vLLM needs before its process starts.

    Multiprocessing is off so that the engine core runs in the thread that admits requests: a list of requests then enters
    as a whole between two steps, which a queue between processes does not guarantee.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forked workers would hold this process's sockets open after its death
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all workers of a machine bind to the same cores
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # vLLM's imports of torch cause them
    }


def required_environment(
    spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None
) -> dict[str, Requirement]:
    """Return the variables of engines of `spec` with the minimum values that the model and the layout require."""
    if device != "npu" or (config is None and not os.path.isfile(os.path.join(spec.model_path, "config.json"))):
        return {}
    buffer = dispatch_buffer(config or _model_config(spec.model_path), spec)
    if buffer is None or buffer.megabytes <= DEFAULT_MB:
        return {}
    return {"HCCL_BUFFSIZE": at_least(buffer.megabytes, f"vllm-ascend needs {buffer.arithmetic}")}


def check_engine_args(engine_args: Mapping[str, Any], section: str = "rollout") -> None:
    """Raise ValueError for arguments that vLLM's EngineArgs does not have, or that another setting determines.

    `section`: the recipe's section with these arguments. vLLM's source is read, not imported, because an import takes many
    seconds and needs a prepared platform. Without vLLM on this machine (a controller), the engine's start checks names.
    """
    types, owned = fields(), {**_OWNED, **_OWNED_IN.get(section, {})}
    for name in _MORE_DEVICES:
        if engine_args.get(name) == 1:
            del owned[name]
    if (executor := engine_args.get("distributed_executor_backend")) in ("external_launcher", "ray"):
        raise ValueError(
            f"{section}.engine_args.distributed_executor_backend cannot be {executor}: megarl starts one process per engine, "
            "with its devices, and vLLM starts the workers as its children; leave it out"
        )
    if "additional_config" in engine_args:
        ascend.check_additional_config(engine_args["additional_config"], f"{section}.engine_args.additional_config")
    for name in engine_args:
        check_argument(name, section, "vLLM", types, owned)
        if types and (wrong := problem("vLLM", types[name], engine_args[name])):
            raise RecipeError(f"{section}.engine_args.{name}", *wrong, value=engine_args[name])
    _check_values(engine_args, section)


def expert_split(engine_args: Mapping[str, Any], tensor_parallel: int) -> tuple[int, str]:
    """Return over how many devices of an engine vLLM splits each expert, and the argument that keeps experts whole."""
    return 1 if engine_args.get("enable_expert_parallel") else tensor_parallel, "enable_expert_parallel=true"


def check_plan(spec: EngineSpec, device: str) -> None:
    """Raise RecipeError or ValueError if vLLM does not support `spec` on `device`, before any engine starts."""
    if package_folder("vllm") is not None:  # else the engine checks it at its start
        needs_synchronous_scheduling(spec)
    if spec.return_routed_experts and device == "cpu":
        raise RecipeError(
            "megatron.routing_replay",
            "vLLM on a CPU does not return the routed experts of a token",
            "set megatron.routing_replay=old_log_probs, or none",
            value="rollout",
        )
    if spec.quantization is not None:
        quantization.check(device)
    if spec.fp32_head:
        fp32_head.check(spec.engine_args, device)
    if device == "npu" and spec.deterministic:
        ascend.without_whole_graphs(spec.engine_args, spec.recipe_section)
    version = ascend.installed()
    readable = os.path.isfile(os.path.join(spec.model_path, "config.json"))  # a missing file fails later
    if device == "npu" and version is not None and readable:
        _check_npu(spec, version)
    if readable:
        _check_drafts(spec, device, _model_config(spec.model_path))


def _check_drafts(spec: EngineSpec, device: str, config: Mapping[str, Any]) -> None:
    if spec.recipe_section == "rollout":
        changing_weights.check_drafts(spec, device, config, limits(replace(spec, device=device)))


def merged_because(spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None) -> str | None:
    """Return why an engine of `spec` on `device` needs merged weights instead of its adapters; None if it can hold them.

    `config`: the model's config.json; None: read from the spec's path.
    """
    return lora.merged_because(spec, dict(config or _model_config(spec.model_path)), device)


def _check_npu(spec: EngineSpec, version: Version) -> None:
    if spec.return_routed_experts and not ascend.features(version).routed_experts:
        raise RecipeError(
            "megatron.routing_replay",
            f"vllm-ascend {version} does not return the routed experts of a token",
            "set megatron.routing_replay=old_log_probs or none, or install vllm-ascend 0.15 or later",
            value="rollout",
        )
    if not spec.load_weights:
        ascend.check_updates(spec.engine_args, _model_config(spec.model_path), version, spec.recipe_section)


def limits(spec: EngineSpec) -> EngineLimits:
    """Return the step size and memory of an engine of `spec`, on an accelerator unless `spec.device` is "cpu"."""
    args = spec.engine_args
    if spec.device == "cpu":
        args = {
            "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES,
            "max_num_batched_tokens": max(_CPU_BATCHED_TOKENS, spec.max_model_len),
            **args,
        }
    tokens = _BATCHED_TOKENS if spec.prompt_top_k is None else _PROMPT_SCORES_TOKENS
    if args.get("enable_chunked_prefill") is False:  # the longest prompt is a single step
        tokens = max(tokens, spec.max_model_len)
    return EngineLimits(
        tokens=int(args.get("max_num_batched_tokens") or tokens),
        sequences=int(args.get("max_num_seqs") or _SEQUENCES),
        share=float(args.get("gpu_memory_utilization") or _SHARE),
        share_key="gpu_memory_utilization",
        covers_step=True,
        cache=args.get("kv_cache_memory_bytes"),
    )


@cache
def fields() -> Fields:
    """Return the fields of vLLM's EngineArgs; {} if vLLM is not installed."""
    folder = package_folder("vllm")
    file = folder / "engine" / "arg_utils.py" if folder else None
    return fields_of(file, "EngineArgs") if file is not None and file.is_file() else {}


def _check_values(engine_args: Mapping[str, Any], section: str) -> None:
    """Raise RecipeError for values of common number arguments that vLLM would reject at its start."""
    for name, low, high in (
        ("gpu_memory_utilization", 0.0, 1.0),
        ("max_num_seqs", 0, None),
        ("max_num_batched_tokens", 0, None),
    ):
        value = engine_args.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise RecipeError(f"{section}.engine_args.{name}", "it must be a number", "give one", value=value)
        if value is not None and not (value > low and (high is None or value <= high)):
            bounds = f"above {low:g}" + (f", and at most {high:g}" if high is not None else "")
            raise RecipeError(f"{section}.engine_args.{name}", f"it must be {bounds}", f"set it {bounds}", value=value)
    tokens, sequences = engine_args.get("max_num_batched_tokens"), engine_args.get("max_num_seqs")
    if tokens is not None and sequences is not None and tokens < sequences:
        cause = f"it is below max_num_seqs = {sequences}, and each sequence needs a token per step"
        remedy = "raise it, or lower max_num_seqs"
        raise RecipeError(f"{section}.engine_args.max_num_batched_tokens", cause, remedy, value=tokens)
    if section == "rollout":
        changing_weights.check(engine_args, section)


def log_probs_mode(spec: EngineSpec) -> str:
    """Return vLLM's `logprobs_mode` that yields unfiltered log-probs at the sampling temperature.

    `raw_logprobs` are computed before the temperature, `processed_logprobs` after the filters. With a temperature other
    than 1 and a filter, neither is exact: ValueError.
    """
    if spec.temperature == 1.0:
        return "raw_logprobs"
    if spec.top_p == 1.0 and spec.top_k in (-1, 0):
        return "processed_logprobs"
    raise ValueError(
        f"vLLM cannot give exact log-probs at rollout.temperature {spec.temperature} together with a filter "
        f"(top_p {spec.top_p}, top_k {spec.top_k}); use temperature 1, or top_p 1 and top_k -1"
    )


def has_exact_log_probs(mode: str, sampling: Sampling) -> bool:
    """Return True if an engine in `mode` returns exact log-probs for `sampling` (see `Completion`)."""
    if mode == "raw_logprobs":
        return sampling.temperature == 1.0
    return sampling.temperature > 0 and sampling.top_p == 1.0 and sampling.top_k in (-1, 0)


def build_engine_args(spec: EngineSpec, device: str) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's EngineArgs for `spec` on `device` ("cpu", "cuda", "npu").

    Raises ValueError for invalid `engine_args`, and for sampling without exact log-probs.
    """
    check_engine_args(spec.engine_args, spec.recipe_section)
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel,
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
        "load_format": "auto" if spec.load_weights else "dummy",
        "logprobs_mode": log_probs_mode(spec),
        "skip_tokenizer_init": True,  # token in, token out
        "generation_config": "vllm",  # not the model's sampling defaults
        "worker_extension_cls": "megarl.engines.vllm.worker.WorkerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.quantization is not None:
        arguments.update(quantization.arguments())
    if spec.expert_parallel:
        arguments["enable_expert_parallel"] = True
    if (executor := _executor(spec)) is not None:
        arguments["distributed_executor_backend"] = executor
    if spec.return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    if spec.adapters is not None:
        arguments.update(lora.arguments(spec.adapters, fields()))
    if spec.traces is not None:
        arguments["profiler_config"] = _profiler_config(spec.traces)
    if spec.prompt_top_k is not None:
        arguments["max_logprobs"] = max(spec.prompt_top_k, 1)
        if device != "cpu":  # vLLM holds the logits of a step's prompt tokens twice, and reserves no memory for them
            arguments["max_num_batched_tokens"] = _PROMPT_SCORES_TOKENS
    config = _model_config(spec.model_path)
    arguments.update(image_args(config, device))
    arguments.update(spec.engine_args)
    _check_drafts(spec, device, config)
    arguments.update(changing_weights.speculation(spec))
    if needs_synchronous_scheduling(spec):
        arguments["async_scheduling"] = False
    if overrides := _config_overrides(spec, config, device):
        arguments[OVERRIDES] = overrides
    if device == "npu":
        version = ascend.running()
        _check_npu(spec, version)
        if spec.deterministic:
            arguments["compilation_config"] = ascend.without_whole_graphs(arguments, spec.recipe_section)
        arguments["additional_config"] = ascend.additional_config(arguments.get("additional_config", {}), version)
    if "vision_config" in config and not has_tower(config):
        arguments.setdefault("language_model_only", True)  # no image is sent, and no weight of the tower
    if device == "cpu":
        _set_cpu_arguments(arguments, spec, config)
    else:
        arguments["enable_sleep_mode"] = spec.sleep_mode
    return arguments


def _executor(spec: EngineSpec) -> str | None:
    """Return vLLM's `distributed_executor_backend`; None to keep its default."""
    if spec.tensor_parallel > 1:
        return "mp"  # in a Ray actor vLLM would choose Ray, whose workers wait for the devices that this actor holds
    return "uni" if spec.data_parallel > 1 else None  # vLLM would start a process for the only worker


def _set_cpu_arguments(arguments: dict[str, Any], spec: EngineSpec, config: dict[str, Any]) -> None:
    """Set the arguments of an engine on a CPU in `arguments`. `config`: the model's config.json.

    Raises ValueError for chunked prefill.
    """
    arguments.setdefault("enforce_eager", True)
    arguments.setdefault("kv_cache_memory_bytes", _CPU_KV_CACHE_BYTES)
    if arguments.setdefault("enable_chunked_prefill", False):
        raise ValueError(
            f"{spec.recipe_section}.engine_args.enable_chunked_prefill must be false on a CPU: samples are seeded, and vLLM "
            "rewinds the generator after an unfinished prompt, which a CPU generator does not support"
        )
    arguments.setdefault("max_num_batched_tokens", max(_CPU_BATCHED_TOKENS, spec.max_model_len))
    if "linear_attention" in layer_kinds(text_fields(config)):
        arguments.setdefault("enable_prefix_caching", False)  # vLLM caches prefixes of their states by chunks alone
    if config.get("kv_lora_rank") is not None:
        arguments["compilation_config"] = _without_rotary_op(arguments.get("compilation_config"), spec.recipe_section)


def _profiler_config(traces: EngineTraces) -> dict[str, Any]:
    """Return vLLM's ProfilerConfig for `traces` (vllm/config/profiler.py, 0.18 to 0.32).

    vllm-ascend only reads folder, memory and stack; there, stack adds module names.
    """
    if "profiler_config" not in fields():
        raise ValueError(
            "observe.profile_engines needs vLLM's profiler_config, which this version of vLLM lacks: leave it out"
        )
    options = traces.options
    return {
        "profiler": "torch",
        "torch_profiler_dir": traces.folder,
        "torch_profiler_record_shapes": options.records("shapes"),
        "torch_profiler_with_memory": options.records("memory"),
        "torch_profiler_with_stack": options.records("stack") or options.records("modules"),
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,  # the engine has no frontend: tokens in, tokens out
    }


def _model_config(model_path: str) -> dict[str, Any]:
    with open(os.path.join(model_path, "config.json")) as file:
        return without_table(json.load(file))


def _config_overrides(spec: EngineSpec, config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return fields of config.json with the values that vLLM must read instead: from the recipe, and required by megarl."""
    overrides = dict(spec.engine_args.get(OVERRIDES) or {})
    if config.get("model_type") in ("deepseek_v3", "kimi_k2"):
        overrides = {**_missing_routing(config), **overrides}
    if spec.fp32_head:
        fp32_head.check(spec.engine_args, device)
        overrides |= fp32_head.OVERRIDE
    return overrides


def _missing_routing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSeek-V3's routing fields that config.json lacks.

    transformers does not write them, because it implements no other routing. vLLM would then score experts by softmax, and
    its log-probs would silently be slightly wrong.
    """
    routing = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return {key: value for key, value in routing.items() if key not in config}


def _without_rotary_op(config: Any, section: str) -> dict[str, Any]:
    """Disable vLLM's rotary operator for the CPU, which computes wrong values with latent attention (MLA)."""
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"{section}.engine_args.compilation_config must be a mapping, not {config!r}")
    config = dict(config or {})
    config["custom_ops"] = [*config.get("custom_ops", []), "-rotary_embedding"]
    return config
