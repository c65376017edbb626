"""Differences between versions of vllm-ascend, vLLM's plugin for Ascend NPUs.

Collected from the source of each version, not verified on a device. Each fact names its source file;
tests/engines/test_vllm_ascend.py lists the versions and checks the facts against sources in MEGARL_VLLM_ASCEND.
Versions before the first do not support vLLM 0.11; versions after the last are treated like it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from megarl.engines import package_folder
from megarl.errors import RecipeError
from megarl.platform.version_sets import version_of
from megarl.registry import nearest

if TYPE_CHECKING:
    import torch

# Keys of `additional_config` by the versions that read them: (first, end exclusive), mostly in
# vllm_ascend/ascend_config.py. Other keys are silently ignored.
_KEYS = {
    ("0.11.0rc1", None): "enable_cpu_binding enable_shared_expert_dp multistream_overlap_shared_expert refresh",
    ("0.11.0rc1", "0.12.0rc1"): "ascend_scheduler_config lmhead_tensor_parallel_size oproj_tensor_parallel_size "
    "torchair_graph_config",
    ("0.11.0rc1", "0.13.0"): "chunked_prefill_for_mla kv_cache_dtype",
    ("0.11.0rc1", "0.14.0rc1"): "dynamic_eplb eplb_policy_type expert_map_path expert_map_record_path gate_eplb "
    "init_redundancy_expert num_iterations_eplb_update num_wait_worker_iterations",
    ("0.11.0rc1", "0.24.0rc1"): "weight_prefetch_config",
    ("0.11.0rc1", "0.25.1rc1"): "recompute_scheduler_enable",
    ("0.12.0rc1", None): "ascend_compilation_config finegrained_tp_config xlite_graph_config",
    ("0.12.0rc1", "0.13.0"): "dump_config",
    ("0.12.0rc1", "0.14.0rc1"): "enable_npugraph_ex",
    ("0.12.0rc1", "0.24.0rc1"): "SLO_limits_for_dynamic_batch",
    ("0.13.0", None): "dump_config_path enable_kv_nz eplb_config pa_shape_list",
    ("0.13.0", "0.14.0rc1"): "mix_placement",
    ("0.13.0", "0.24.0rc1"): "layer_sharding multistream_overlap_gate",
    ("0.13.0", "0.25.1rc1"): "enable_async_exponential",
    ("0.14.0rc1", None): "ascend_fusion_config",
    ("0.14.0rc1", "0.16.0rc1"): "npugraph_ex_config",
    ("0.15.0rc1", "0.18.0rc1"): "sp_threshold",
    ("0.18.0rc1", None): "enable_mc2_hierarchy_comm",
    ("0.18.0rc1", "0.23.0rc1"): "enable_sparse_c8",
    ("0.19.1rc1", None): "mix_placement",
    ("0.19.1rc1", "0.25.1rc1"): "enable_hamming_sparse hamming_sparse profiling_chunk_config",
    ("0.20.2rc1", None): "dump_config enable_balance_scheduling enable_dsa_cp enable_flashcomm1 enable_fused_mc2 "
    "enable_mlapo enable_reduce_sample enable_transpose_kv_cache_by_block msmonitor_use_daemon "
    "multistream_dsv4_dsa_overlap weight_nz_mode",
    ("0.20.2rc1", "0.21.0rc1"): "enable_context_parallel",
    ("0.20.2rc1", "0.22.1rc1"): "multistream_dsa_preprocess prefill_comm_compute_overlap",
    ("0.20.2rc1", "0.25.1rc1"): "enable_flashcomm2_parallel_size enable_matmul_allreduce",
    ("0.21.0rc1", None): "c8_enable_reshape_optim rejection_sampler_config",
    ("0.21.0rc1", "0.25.1rc1"): "dp_allreduce_on_npu",
    ("0.22.1rc1", None): "ascend_log_path",
    ("0.23.0rc1", None): "enable_prefill_mc2 enable_sleep_mode_extra_cleanup mega_moe_max_tokens",
    ("0.23.0rc1", "0.24.0rc1"): "enable_sparse_li_c8 enable_sparse_sfa_c8",
    ("0.24.0rc1", None): "draft_window_size",
    ("0.24.0rc1", "0.25.1rc1"): "short_request_first_config",
    ("0.24.0rc1", "0.26.0rc1"): "enable_sparse_c8",
    ("0.25.1rc1", None): "scheduler_config",
    ("0.26.0rc1", None): "enable_sparse_li_c8 enable_sparse_sfa_c8 sparse_kv_offload_config",
}
# Replacements of removed keys.
_EPLB = "write it into eplb_config"
_INSTEAD = {
    "torchair_graph_config": "leave it out: engine_args.compilation_config.cudagraph_mode says which graphs are captured",
    "ascend_scheduler_config": "leave it out: vLLM's scheduler is used, with its arguments in engine_args",
    "chunked_prefill_for_mla": "leave it out, and set engine_args.enable_chunked_prefill",
    "kv_cache_dtype": "set engine_args.kv_cache_dtype",
    "lmhead_tensor_parallel_size": "write it into finegrained_tp_config",
    "oproj_tensor_parallel_size": "write it into finegrained_tp_config",
    "dynamic_eplb": _EPLB,
    "eplb_policy_type": _EPLB,
    "expert_map_path": _EPLB,
    "expert_map_record_path": _EPLB,
    "init_redundancy_expert": f"{_EPLB} as num_redundant_experts",
    "enable_npugraph_ex": "write it into ascend_compilation_config",
    "npugraph_ex_config": "write its settings into ascend_compilation_config",
    "enable_sparse_c8": "write enable_sparse_sfa_c8, enable_sparse_li_c8 or both",
    "recompute_scheduler_enable": "write it into scheduler_config",
    "profiling_chunk_config": "write it into scheduler_config",
    "short_request_first_config": "write it into scheduler_config",
}


@dataclass(frozen=True)
class Features:
    """Features of a version of vllm-ascend."""

    # additional_config.weight_nz_mode overrides VLLM_ASCEND_ENABLE_NZ (ascend_config.py); without it only the variable
    # exists (envs.py). Both must be off for weight updates.
    weight_nz_key: bool
    # A reload writes W_UV and W_UK_T of latent attention (MLA) into the existing tensors, which captured graphs read
    # (attention/mla_v1.py: process_weights_after_loading).
    mla_in_place: bool
    routed_experts: bool  # supports enable_return_routed_experts (worker/model_runner_v1.py)


def features(version: Version) -> Features:
    return Features(
        weight_nz_key="weight_nz_mode" in keys_of(version),
        mla_in_place=_since(version, "0.18.0rc1"),
        routed_experts=_since(version, "0.15.0rc1"),
    )


def installed() -> Version | None:
    """Return the version of vllm-ascend in this environment; None if not installed."""
    version = version_of("vllm-ascend")
    return None if version is None else Version(version)


def running() -> Version:
    """Return the version of vllm-ascend in a process on an NPU. RuntimeError if not installed."""
    version = installed()
    if version is None:
        raise RuntimeError("vLLM runs on an NPU, but the package vllm-ascend is not installed: pip install vllm-ascend")
    return version


def _since(version: Version, first: str) -> bool:
    """Return True if `version` is `first` or later. "0.23.1.dev5", a checkout of the 0.23.0 branch, is later than 0.23.0."""
    return version >= Version(first)


# --- additional_config --------------------------------------------------------------------------


def keys_of(version: Version | None) -> frozenset[str]:
    """Return the keys of `additional_config` in `version`; None: in any version."""
    return frozenset(
        key
        for (first, end), keys in _KEYS.items()
        if version is None or (_since(version, first) and not (end and _since(version, end)))
        for key in keys.split()
    )


_READERS = tuple(
    re.compile(pattern)
    for pattern in (
        r"additional_config(?:\)?\s+or\s+\{\}\))?\.(?:get|setdefault)\(\s*\"(\w+)\"",
        r"additional_config\[\s*\"(\w+)\"\s*\]",
        r"_get_config_value\(\s*additional_config,\s*\"(\w+)\"",
        r"\"(\w+)\" (?:not )?in (?:\w+\.)*additional_config",
    )
)


def keys_in(sources: Iterable[str]) -> frozenset[str]:
    """Return the keys of `additional_config` that vllm-ascend's Python files (texts) read."""
    return frozenset(key for text in sources for pattern in _READERS for key in pattern.findall(text))


@cache
def _keys_installed() -> frozenset[str]:
    folder = package_folder("vllm_ascend")
    return keys_in(file.read_text(encoding="utf-8") for file in folder.rglob("*.py")) if folder else frozenset()


def check_additional_config(config: Any, name: str) -> None:
    """Raise ValueError for a key that the installed vllm-ascend would silently ignore; if not installed, for a key that no
    version reads. `name`: the recipe's key of `config`."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{name} must be a mapping of vllm-ascend's settings, not {config!r}")
    version = installed()
    keys = keys_of(version) | (_keys_installed() if version else frozenset())  # sources may read a key in unseen ways
    for key in config:
        if not isinstance(key, str):
            raise ValueError(f"{name} has the key {key!r}, but vllm-ascend's keys are text")
        if key == "weight_nz_mode":
            raise ValueError(f"{name}.{key} cannot be set: megarl sets it to 0 if vllm-ascend has it")
        if key == "enable_reduce_sample" and config[key]:
            raise ValueError(
                f"{name}.{key} cannot be used: log-probs would be over the candidates of each device instead of the whole "
                "vocabulary. Leave it out"
            )
        if key not in keys:
            raise ValueError(_unknown(key, name, version, keys))


def _unknown(key: str, name: str, version: Version | None, keys: frozenset[str]) -> str:
    spans = [span for span, names in _KEYS.items() if key in names.split()]
    if version is None or not spans:
        which = f"vllm-ascend {version} reads no such key" if version else "no version of vllm-ascend reads such a key"
        near = nearest(key, keys)
        return f"{name}.{key}: {which}; {f'did you mean {near!r}?' if near else 'leave it out'}"
    read = " and ".join(f"from {first}" + (f" until before {end}" if end else " on") for first, end in spans)
    gone = all(end and _since(version, end) for _, end in spans)
    instead = _INSTEAD.get(key) if gone else None
    return (
        f"{name}.{key}: vllm-ascend {version} does not read it, versions {read} do; "
        f"{instead or 'leave it out, or install such a version'}"
    )


def additional_config(config: Mapping[str, Any], version: Version) -> dict[str, Any]:
    """Return the recipe's `config` with NZ layouts switched off, since weight updates need the plain layout."""
    return {**config, "weight_nz_mode": 0} if features(version).weight_nz_key else dict(config)


# --- graphs -------------------------------------------------------------------------------------


def captures_graphs(engine_args: Mapping[str, Any]) -> bool:
    """Return True if vLLM captures NPU graphs with these arguments, as by default (vllm_ascend/platform.py)."""
    compilation = engine_args.get("compilation_config")
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, Mapping) else None
    return not engine_args.get("enforce_eager") and str(mode or "graphs").upper() != "NONE"


# --- weights that change ------------------------------------------------------------------------


_FUSED = "VLLM_ASCEND_ENABLE_FUSED_MC2"


def check_updates(engine_args: Mapping[str, Any], model: Mapping[str, Any], version: Version, section: str) -> None:
    """Raise RecipeError or ValueError for settings that break weight updates: an engine would keep some old weights.

    `model`: its config.json. `section`: the recipe's section with these `engine_args`.
    """
    config = engine_args.get("additional_config") or {}
    eplb = {**config, **(config.get("eplb_config") or {})}
    fused = "experts' weights are kept in NZ format, or in copies that an update does not reach"
    from_environment = os.environ.get(_FUSED, "0").strip()
    if "enable_fused_mc2" not in config and from_environment not in ("", "0"):
        raise ValueError(
            f"the environment has {_FUSED}={from_environment}, which breaks weight updates: {fused}. Unset it"
        )
    unsafe = {
        "enable_fused_mc2": (config.get("enable_fused_mc2"), fused),
        "eplb_config": (
            eplb.get("dynamic_eplb") or eplb.get("expert_map_record_path"),
            "experts move between devices, and an update would load them into their old positions",
        ),
        "layer_sharding": (config.get("layer_sharding"), "updated weights are not sharded again"),
        # ops/fused_moe/fused_moe.py: _validate_shared_expert_consistency, called when experts' weights are repacked
        "multistream_overlap_shared_expert": (
            config.get("multistream_overlap_shared_expert"),
            "vllm-ascend runs the shared experts when it repacks the routed ones, and an update may not have loaded them yet",
        ),
    }
    for key, (value, why) in unsafe.items():
        if value:
            name = f"{section}.engine_args.additional_config.{key}"
            raise RecipeError(name, f"it breaks weight updates: {why}", "leave it out", value=value)
    latent = model.get("kv_lora_rank") is not None
    if latent and captures_graphs(engine_args) and not features(version).mla_in_place:
        raise RecipeError(
            f"{section}.engine_args.enforce_eager",
            f"on each update vllm-ascend {version} computes matrices of latent attention (MLA) into new tensors, and captured "
            "graphs would continue to read the old ones",
            "set it to true, or install vllm-ascend 0.18 or later",
            value=engine_args.get("enforce_eager"),
        )


def set_log_probs_mode(sampler: Any, mode: str) -> None:
    """Make the sampler of a model runner return log-probs as the engine's `logprobs_mode` says.

    vllm-ascend (0.18 to 0.25) makes its sampler without the mode, which it would obey, so engines returned the log-probs of
    temperature 1 (worker/model_runner_v1.py: `AscendSampler()`, sample/sampler.py).
    """
    sampler.logprobs_mode = mode
    if hasattr(sampler, "topk_topp_sampler"):
        sampler.topk_topp_sampler.logprobs_mode = mode


def hold_parameters(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Return every parameter of `model` as (module, name, parameter), to call `put_back` after the engine has woken up."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def put_back(held: Iterable[tuple[torch.nn.Module, str, torch.nn.Parameter]]) -> int:
    """Restore the parameters that waking up has replaced; returns their number.

    From 0.12 to 0.26, NPUWorker.wake_up (worker/worker.py, worker_v1.py) replaces experts' w13_weight and w2_weight by
    transposed views of the same memory. These have the checkpoint's layout, for loaders that write in place. Kernels would
    read them wrongly, and a layerwise reload, which copies into the live parameters, would fail.
    """
    replaced = 0
    for module, name, parameter in held:
        if module._parameters.get(name) is not parameter:
            setattr(module, name, parameter)
            replaced += 1
    return replaced


def without_whole_graphs(arguments: Mapping[str, Any], section: str) -> Any:
    """Return `compilation_config` for batch-invariant attention on an NPU, which full graphs cannot capture (vllm-ascend
    0.23, docs/source/user_guide/feature_guide/batch_invariance.md). ValueError if the recipe sets full graphs."""
    config = arguments.get("compilation_config")
    if arguments.get("enforce_eager"):
        return config
    if config is not None and not isinstance(config, dict):
        raise ValueError(
            f"{section}.engine_args.compilation_config must be a mapping with cudagraph_mode: PIECEWISE or NONE with "
            f"train.deterministic, not {config!r}"
        )
    mode = (config or {}).get("cudagraph_mode", "PIECEWISE")
    if str(mode).upper() not in ("PIECEWISE", "NONE"):
        raise ValueError(
            f"{section}.engine_args.compilation_config.cudagraph_mode is {mode}: with train.deterministic, engines on NPUs need "
            "PIECEWISE or NONE, since full graphs cannot capture batch-invariant attention"
        )
    return {**(config or {}), "cudagraph_mode": mode}
