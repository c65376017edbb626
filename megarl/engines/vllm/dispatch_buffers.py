"""HCCL_BUFFSIZE of engines that spread experts over Ascend devices.

vllm-ascend sends tokens to experts with `npu_moe_distribute_dispatch` where they fit its capacity
(vllm_ascend/ascend_forward_context.py: set_mc2_tokens_capacity, select_moe_comm_method, 0.18 and 0.23). The operator lays its
windows out in the communicator's buffer, whose size only the environment sets for this group (vllm_ascend/utils.py:1099,
get_hccl_config_for_pg_options: None for mc2), and refuses to start where they do not fit (error 561002).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.engines.base import EngineSpec
from megarl.hf.config import number_of_experts, text_fields

DEFAULT_MB = 200
"""HCCL's own, which CANN's documentation of HCCL_BUFFSIZE gives; a communicator takes twice as much."""
_CAPACITY = 512  # tokens of a tensor-parallel rank at most
_SEQUENCES, _BATCHED_TOKENS = 128, 2048  # vLLM's own, where its arguments leave them out


@dataclass(frozen=True)
class DispatchBuffer:
    """The smallest HCCL_BUFFSIZE, in MB, and its arithmetic."""

    megabytes: int
    arithmetic: str


def dispatch_buffer(config: Mapping[str, Any], spec: EngineSpec) -> DispatchBuffer | None:
    """The buffer that engines of `spec` need; `config`: the model's config.json. None where experts are not spread.

    2 x (E x B x W x align512(align32(2 H) + 64) + (K + S) x B x align512(2 H)) bytes, with E experts of a rank, B tokens of
    a rank at most, W ranks, hidden size H, K experts a token, S shared experts: CANN, aclnnMoeDistributeDispatchV3 and
    CombineV3 on Atlas A3 (cann/ops-transformer; releases before wrote 44 in place of 64). Those of Atlas A2 (fullmesh and
    hierarchy) ask for less wherever they ask for more than HCCL's default.
    """
    text = text_fields(dict(config))
    experts, ranks = number_of_experts(text), spec.data_parallel * spec.tensor_parallel
    if not experts or not spec.expert_parallel or ranks == 1:
        return None
    hidden, chosen, shared = int(text["hidden_size"]), _chosen(text), int(text.get("n_shared_experts") or 0)
    local, tokens = math.ceil(experts / ranks), _tokens_of_a_rank(spec)
    window, back = _align(_align(2 * hidden, 32) + 64, 512), _align(2 * hidden, 512)
    size = 2 * (local * tokens * ranks * window + (chosen + shared) * tokens * back)
    arithmetic = (
        f"2 x ({local} experts x {tokens} tokens x {ranks} ranks x {window} bytes + ({chosen} + {shared}) experts of a token "
        f"x {tokens} tokens x {back} bytes) = {size / 2**20:.0f} MB for the dispatch of tokens to experts"
    )
    return DispatchBuffer(math.ceil(size / 2**20), arithmetic)


def _tokens_of_a_rank(spec: EngineSpec) -> int:
    """Tokens that a tensor-parallel rank dispatches at a time: what graphs capture, or one for each sequence."""
    given = spec.engine_args
    batched = int(given.get("max_num_batched_tokens") or _BATCHED_TOKENS)
    compiled = given.get("compilation_config")
    compiled = compiled if isinstance(compiled, Mapping) else {}
    captured = compiled.get("cudagraph_capture_sizes") or given.get("cudagraph_capture_sizes") or ()
    most = (
        compiled.get("max_cudagraph_capture_size")
        or given.get("max_cudagraph_capture_size")
        or max(captured, default=None)
    )
    if (given.get("additional_config") or {}).get("enable_prefill_mc2"):
        tokens = batched
    elif most and not given.get("enforce_eager"):
        tokens = min(int(most), batched)
    else:
        tokens = int(given.get("max_num_seqs") or _SEQUENCES)
    return min(math.ceil(tokens / spec.tensor_parallel), _CAPACITY)


def _chosen(text: Mapping[str, Any]) -> int:
    return int(text.get("num_experts_per_tok") or text.get("top_k_experts") or 1)


def _align(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
