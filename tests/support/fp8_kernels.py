"""FP8 kernels in torch for vLLM on CPUs, which has them only for AMX, so that tests can run engines with FP8 weights.

Only the kernels (matrix product, experts) are replaced; vLLM's quantization, layers, loader and reload are used. The product
dequantizes its weights, as vLLM's own CPU kernels do (W8A16). Imported in vLLM's workers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.platforms.interface import PlatformEnum

BLOCK = 128


def install() -> None:
    """Register the kernels for CPUs. Call before the model is built."""
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [BlockProduct]
    cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
    cpu_moe.fused_experts_cpu = experts


def dequantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return weight [rows, columns] with a scale per block of 128 x 128, in `dtype`."""
    rows, columns = weight.shape
    scales = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() * scales).to(dtype)


class BlockProduct(Fp8BlockScaledMMLinearKernel):
    """x @ dequantized(weight).T"""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        return torch.nn.functional.linear(A, dequantized(B, Bs, A.dtype))


def experts(
    output: torch.Tensor,
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    method: Any,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    *_: Any,
) -> None:
    """Write the weighted sum of each token's experts: vLLM's fused_experts_cpu with FP8 weights and the SiLU."""
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in range(len(w13)):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate, up = torch.nn.functional.linear(
            hidden[tokens], dequantized(w13[expert], w13_scale[expert], hidden.dtype)
        ).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        out = torch.nn.functional.linear(inner, dequantized(w2[expert], w2_scale[expert], hidden.dtype))
        total.index_add_(0, tokens, out.float() * weights[tokens, slots].float()[:, None])
    output.copy_(total.to(output.dtype))
