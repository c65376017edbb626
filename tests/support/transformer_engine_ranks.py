"""One trainer process of tests/megatron/test_transformer_engine.py: the cases of `megatron_worker`, with Megatron's modules for
Transformer Engine over the stand-in classes of stand_ins/nvidia/transformer_engine.

Usage, with the environment of torchrun: python -m tests.support.transformer_engine_ranks CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

from tests.support.preload_transformer_engine import devices

import torch  # isort: skip
from transformer_engine.pytorch.modules import CALLS  # isort: skip

from tests.support import megatron_training, megatron_worker  # isort: skip -- after the stand-ins are found

megatron_training.platform = devices


def check_attention() -> None:
    """Assert Transformer Engine's requirements on packed sequences, and that it need not read offsets from the device."""
    assert CALLS
    for call in CALLS:
        if "qkv_format" not in call:  # without packing
            continue
        offsets = call["cu_seqlens_q"]
        assert isinstance(offsets, torch.Tensor) and offsets.dtype == torch.int32
        assert call["qkv_format"] == "thd" and call["attn_mask_type"] == "padding_causal"
        assert type(call["max_seqlen_q"]) is type(call["max_seqlen_kv"]) is int
        # The same tensors: else it takes the stream for one with padding between sequences, and drops FlashAttention.
        assert call["cu_seqlens_q_padded"] is offsets and call["cu_seqlens_kv_padded"] is call["cu_seqlens_kv"]
        assert call["attention_mask"] is None


if __name__ == "__main__":
    megatron_worker.main()
    check_attention()
