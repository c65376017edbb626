"""HCCL_BUFFSIZE for engines with expert parallelism on Ascend devices.

vllm-ascend dispatches tokens to experts with `npu_moe_distribute_dispatch` up to its capacity
(vllm_ascend/ascend_forward_context.py: set_mc2_tokens_capacity, select_moe_comm_method, 0.18 and 0.23). The operator
places its windows in the communicator's buffer and fails at the start if they do not fit (error 561002). For this group
only the environment sets the buffer's size (vllm_ascend/utils.py:1099, get_hccl_config_for_pg_options: None for mc2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.engines.base import EngineSpec
from megarl.hf.config import experts_per_token, number_of_experts, shared_experts, text_fields

DEFAULT_MB = 200
"""HCCL's default (CANN's documentation of HCCL_BUFFSIZE); a communicator takes twice as much."""
_CAPACITY = 512  # maximum tokens of a tensor-parallel rank
_SEQUENCES, _BATCHED_TOKENS = 128, 2048  # vLLM's defaults


@dataclass(frozen=True)
class DispatchBuffer:
    """The smallest sufficient HCCL_BUFFSIZE, in MB, and its arithmetic as text."""

    megabytes: int
    arithmetic: str


def dispatch_buffer(config: Mapping[str, Any], spec: EngineSpec) -> DispatchBuffer | None:
    """Return the buffer that engines of `spec` need; None without expert parallelism. `config`: the model's config.json.

    2 x (E x B x W x align512(align32(2 H) + 64) + (K + S) x B x align512(2 H)) bytes, with E experts per rank, at most B
    tokens per rank, W ranks, hidden size H, K experts per token, S shared experts: CANN, aclnnMoeDistributeDispatchV3 and
    CombineV3 on Atlas A3 (cann/ops-transformer; earlier releases have 44 instead of 64). The formulas of Atlas A2 (fullmesh
    and hierarchy) give less wherever they exceed HCCL's default.
    """
    text = text_fields(dict(config))
    experts, ranks = number_of_experts(text), spec.data_parallel * spec.tensor_parallel
    if not experts or not spec.expert_parallel or ranks == 1:
        return None
    hidden, shared = int(text["hidden_size"]), shared_experts(text)
    chosen = experts_per_token(text) or int(text.get("top_k_experts") or 1)
    local, tokens = math.ceil(experts / ranks), _tokens_per_rank(spec)
    window, back = _align(_align(2 * hidden, 32) + 64, 512), _align(2 * hidden, 512)
    size = 2 * (local * tokens * ranks * window + (chosen + shared) * tokens * back)
    arithmetic = (
        f"2 x ({local} experts x {tokens} tokens x {ranks} ranks x {window} bytes + ({chosen} + {shared}) experts per token "
        f"x {tokens} tokens x {back} bytes) = {size / 2**20:.0f} MB for the dispatch of tokens to experts"
    )
    return DispatchBuffer(math.ceil(size / 2**20), arithmetic)


def _tokens_per_rank(spec: EngineSpec) -> int:
    """Return the tokens that a tensor-parallel rank dispatches at a time: the largest captured graph, or max_num_seqs."""
    args = spec.engine_args
    batched = int(args.get("max_num_batched_tokens") or _BATCHED_TOKENS)
    compilation = args.get("compilation_config")
    compilation = compilation if isinstance(compilation, Mapping) else {}
    captured = compilation.get("cudagraph_capture_sizes") or args.get("cudagraph_capture_sizes") or ()
    largest_graph = (
        compilation.get("max_cudagraph_capture_size")
        or args.get("max_cudagraph_capture_size")
        or max(captured, default=None)
    )
    if (args.get("additional_config") or {}).get("enable_prefill_mc2"):
        tokens = batched
    elif largest_graph and not args.get("enforce_eager"):
        tokens = min(int(largest_graph), batched)
    else:
        tokens = int(args.get("max_num_seqs") or _SEQUENCES)
    return min(math.ceil(tokens / spec.tensor_parallel), _CAPACITY)


def _align(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
