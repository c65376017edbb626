"""Contradicting MindSpeed settings: combinations that MindSpeed rejects or ignores.

MindSpeed asserts or warns when the model is built, in a trainer process. Each rule mirrors one of its checks, with the file of
core_r0.16.0 under `mindspeed/features_manager/`. The rules for `moe_shared_expert_overlap` and `context_parallel_size` concern
defects without a check, reproduced by `tests/support/mindspeed_ranks.py`; `reuse_fp32_param`, `quant_states` and `quant_grads`
do not fit megarl's updates and checkpoints; `virtual_optimizer` needs a process of Megatron's training script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]  # of a model, by Megatron's and MindSpeed's names


@dataclass(frozen=True)
class MindSpeedRule:
    """A rule for the setting `name`. `broken` is evaluated only if this setting is on."""

    name: str
    broken: Callable[[Settings], bool]
    problem: str
    remedy: str
    file: str


def contradiction(settings: Settings) -> MindSpeedRule | None:
    """Return the first rule that `settings` break, or None."""
    return next((rule for rule in RULES if is_on(settings, rule.name) and rule.broken(settings)), None)


def is_on(settings: Settings, name: str) -> bool:
    return settings.get(name) not in (None, False, 0, "disable")


def _always(settings: Settings) -> bool:
    return True


def _on(*names: str) -> Callable[[Settings], bool]:
    return lambda settings: any(is_on(settings, name) for name in names)


def _off(*names: str) -> Callable[[Settings], bool]:
    return lambda settings: not any(is_on(settings, name) for name in names)


def _dispatcher_is(*kinds: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.get("moe_token_dispatcher_type") in kinds


def _parts(settings: Settings) -> int:
    """Number of parts of a sequence (context-parallel size)."""
    return int(settings["context_parallel_size"])


def _ring(settings: Settings) -> int:
    """Devices per ring; hybrid_cp_algo has several rings. 0 if ulysses_degree_in_cp does not divide the context parallel size."""
    if settings.get("context_parallel_algo") != "hybrid_cp_algo":
        return _parts(settings)
    degree = settings.get("ulysses_degree_in_cp") or 0
    return 0 if degree < 1 or _parts(settings) % degree else _parts(settings) // degree


def _cut_with(algorithm: str) -> Callable[[Settings], bool]:
    return lambda settings: _parts(settings) > 1 and settings["context_parallel_algo"] == algorithm


def _ring_too_small(settings: Settings) -> bool:
    return _cut_with("hybrid_cp_algo")(settings) and _ring(settings) < 2


def _heads_do_not_divide(settings: Settings) -> bool:
    degree = (settings.get("ulysses_degree_in_cp") or 1) * settings["tensor_model_parallel_size"]
    return _cut_with("hybrid_cp_algo")(settings) and settings["num_attention_heads"] % degree != 0


def _window_does_not_fit(settings: Settings) -> bool:
    window, ring = settings["cp_window_size"], _ring(settings)
    rings = settings.get("context_parallel_algo", "megatron_cp_algo") in ("megatron_cp_algo", "hybrid_cp_algo")
    return rings and _parts(settings) > 1 and ring > 1 and (not 1 <= window < ring or ring % window != 0)


_SWAP, _MC2 = "optimizer/swap_optimizer_feature.py", "tensor_parallel/mc2.py"
_PERMUTE, _MEMORY = "fusions/fused_moe_permute.py", "moe/moe_zero_memory.py"
_CUT, _OVERLAP, _BOTH = (
    "context_parallel/context_parallel_feature.py",
    "moe/moe_alltoall_overlap.py",
    "moe/fb_overlap.py",
)
_LENGTH = "it divides a fixed length (seq_length), but megarl's sequences vary in length"
_RINGS = "use megatron_cp_algo, hybrid_cp_algo or kvallgather_cp_algo"
_PERMUTES = ("moe_permute_fusion", "use_fused_moe_token_permute_and_unpermute")

RULES = (
    MindSpeedRule("swap_optimizer", _off("use_distributed_optimizer"), "it moves the states of the distributed optimizer, which is off", "set megatron.distributed_optimizer=true", _SWAP),
    MindSpeedRule("reuse_fp32_param", _always, "weights and master weights share memory, which skipped updates, megatron.offload and checkpoints corrupt", "use swap_optimizer instead", "memory/reuse_fp32_param.py"),
    MindSpeedRule("virtual_optimizer", _always, "it reads the arguments of Megatron's training script, which megarl does not set", "use swap_optimizer instead", "optimizer/virtual_optimizer.py"),
    *(MindSpeedRule(name, _always, "MindSpeed's AdamW of lower precision keeps its states in formats that megarl's checkpoints do not read or write", "leave it out; swap_optimizer saves device memory", "optimizer/low_precision_optimizer_feature.py") for name in ("quant_states", "quant_grads")),
    MindSpeedRule("gemm_gradient_accumulation_fusion", _off("moe_grouped_gemm"), "it is part of moe_grouped_gemm, which is off", "set moe_grouped_gemm: true", "moe/gmm.py"),
    *(MindSpeedRule(name, _dispatcher_is("allgather"), "it is incompatible with moe_token_dispatcher_type allgather", "use alltoall", _PERMUTE) for name in _PERMUTES),
    MindSpeedRule("use_ascend_mc2", _on("fp8"), "it is incompatible with fp8", "leave one out", "megatron_basic/transformer_engine_basic.py"),
    MindSpeedRule("use_ascend_mc2", _on("use_ascend_coc", "unaligned_linear"), "it is incompatible with use_ascend_coc or unaligned_linear", "leave one out", _MC2),
    MindSpeedRule("use_ascend_mc2", _on("moe_alltoall_overlap_comm", "moe_allgather_overlap_comm"), "it is incompatible with moe_alltoall_overlap_comm or moe_allgather_overlap_comm", "leave one out", _OVERLAP),
    MindSpeedRule("use_ascend_mc2", lambda settings: settings["tensor_model_parallel_size"] == 1 or not is_on(settings, "sequence_parallel"), "without tensor parallel > 1 and sequence parallel it has no effect", "leave it out, or set megatron.tensor_parallel", _MC2),
    MindSpeedRule("use_ascend_coc", lambda settings: settings.get("transformer_impl", "transformer_engine") == "transformer_engine", "it replaces the linears of transformer_impl local, which the model does not have", "leave it out", "megatron_basic/transformer_engine_basic.py"),
    MindSpeedRule("context_parallel_algo", _cut_with("ulysses_cp_algo"), _LENGTH, _RINGS, "context_parallel/ulysses_context_parallel.py"),
    MindSpeedRule("context_parallel_algo", _cut_with("adaptive_cp_algo"), _LENGTH, _RINGS, "context_parallel/adaptive_context_parallel.py"),
    MindSpeedRule("context_parallel_algo", _cut_with("hybrid_adaptive_cp_algo"), _LENGTH, _RINGS, "context_parallel/adaptive_context_parallel.py"),
    MindSpeedRule("context_parallel_algo", _ring_too_small, "hybrid_cp_algo needs ulysses_degree_in_cp, a divisor of megatron.context_parallel that leaves rings of 2 or more", "set ulysses_degree_in_cp", _CUT),
    MindSpeedRule("context_parallel_algo", _heads_do_not_divide, "ulysses_degree_in_cp x megatron.tensor_parallel does not divide the model's attention heads", "lower ulysses_degree_in_cp", _CUT),
    MindSpeedRule("context_parallel_algo", lambda settings: _cut_with("kvallgather_cp_algo")(settings) and settings.get("attention_mask_type", "causal") != "causal", "kvallgather_cp_algo needs attention_mask_type causal", "leave attention_mask_type out", _CUT),
    MindSpeedRule("cp_window_size", _window_does_not_fit, "it must be smaller than a ring of context-parallel devices, and divide it", "leave it out", _CUT),
    MindSpeedRule("context_parallel_kv_cache_policy", lambda settings: _parts(settings) == 1, "it needs megatron.context_parallel > 1", "leave it out", "context_parallel/context_parallel_kv_cache.py"),
    MindSpeedRule("use_fused_rotary_pos_emb", lambda settings: settings.get("position_embedding_type") != "rope", "it needs plain rotary positions, but this model uses another position embedding", "leave it out", "fusions/fused_rope.py"),
    MindSpeedRule("use_flash_attn", lambda settings: settings.get("sparse_mode", 0) not in (0, 2), "it supports sparse_mode 0 and 2", "leave sparse_mode out", "transformer/flash_attention/fusion_attention_v1_feature.py"),
    MindSpeedRule("moe_zero_memory", _off("moe_alltoall_overlap_comm", "moe_fb_overlap"), "it is part of moe_alltoall_overlap_comm and of moe_fb_overlap, which are off", "set one of them", _MEMORY),
    MindSpeedRule("moe_zero_memory_num_layers", _off("moe_zero_memory"), "it sets the number of layers for moe_zero_memory, which is off", "set moe_zero_memory: level1", _MEMORY),
    MindSpeedRule("moe_alltoall_overlap_comm", _dispatcher_is("allgather", "flex"), "it needs moe_token_dispatcher_type alltoall or alltoall_seq", "use alltoall", _OVERLAP),
    MindSpeedRule("moe_alltoall_overlap_comm", _off("moe_grouped_gemm"), "it needs moe_grouped_gemm", "set moe_grouped_gemm: true", _OVERLAP),
    MindSpeedRule("moe_allgather_overlap_comm", lambda settings: settings.get("moe_token_dispatcher_type") != "allgather", "it needs moe_token_dispatcher_type allgather", "use moe_alltoall_overlap_comm", "moe/moe_allgather_overlap.py"),
    MindSpeedRule("moe_shared_expert_overlap", lambda settings: settings["tensor_model_parallel_size"] > 1, "with tensor parallel > 1, MindSpeed's linear layers gather the sequence twice for overlapped shared experts, which changes the model", "leave it out", "megatron_basic/transformer_engine_basic.py"),
    MindSpeedRule("moe_fb_overlap", _off("moe_grouped_gemm"), "it needs moe_grouped_gemm", "set moe_grouped_gemm: true", _BOTH),
    MindSpeedRule("moe_fb_overlap", _on("moe_alltoall_overlap_comm", "recompute_in_bubble", "recompute_in_advance", "swap_attention", "automated_pipeline"), "it is incompatible with moe_alltoall_overlap_comm, recompute_in_bubble, recompute_in_advance, swap_attention or automated_pipeline", "leave one out", _BOTH),
    MindSpeedRule("moe_fb_overlap", lambda settings: settings["expert_model_parallel_size"] == 1 or settings["expert_tensor_parallel_size"] != 1, "it needs megatron.expert_parallel > 1 and megatron.expert_tensor_parallel 1", "change these, or leave it out", _BOTH),
    MindSpeedRule("moe_fb_overlap", _on("overlap_grad_reduce"), "it is incompatible with megatron.ddp.overlap_grad_reduce", "leave one out", _BOTH),
    MindSpeedRule("moe_unperm2_mem_optim_swap", _off("moe_fb_overlap"), "it is part of moe_fb_overlap, which is off", "set moe_fb_overlap: true", _BOTH),
    MindSpeedRule("multi_head_latent_attention", lambda settings: not (is_on(settings, "qk_rope_head_dim") and is_on(settings, "qk_nope_head_dim")), "it needs qk_rope_head_dim and qk_nope_head_dim too; models with latent attention are built with it anyway", "leave it out", "transformer/multi_head_latent_attention/mla_feature.py"),
    MindSpeedRule("context_parallel_size", lambda settings: _parts(settings) > 1 and settings.get("position_embedding_type") == "mrope", "MindSpeed's context-parallel attention fails in vision towers, because images are not split over context-parallel ranks", "set megatron.context_parallel=1, and raise megatron.tensor_parallel to save memory", _CUT),
)  # fmt: skip
