"""Layers on torch's kernels for platforms without Transformer Engine (CPU, and CUDA without the package).

They use Transformer Engine's parameter names (``linear_qkv.layer_norm_weight``, ``experts.linear_fc1.weight0``), so
the tables of `megarl/hf/families/` apply unchanged. `install` registers them where Megatron looks for Transformer Engine.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megarl.megatron.adam import Adam
from megarl.megatron.native_layers.attention import NativeAttention
from megarl.megatron.native_layers.experts import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from megarl.megatron.native_layers.norm_rotary import rms_norm, rotate_packed


def _device() -> Any:
    """Return Megatron's allocation device: a torch.device on the CPU platform, an index on CUDA."""
    return torch.cuda.current_device()


def _norm_weight(config: Any, size: int, value: float = 1.0) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.full((size,), value, dtype=config.params_dtype, device=_device()))
    weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads sums its gradient over TP
    return weight


class Norm(torch.nn.Module):
    """RMSNorm; its weight is one less than the factor if `layernorm_zero_centered_gamma`."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"The native layers support RMSNorm, not {config.normalization}; install transformer_engine."
            )
        self.weight = _norm_weight(config, hidden_size)
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, or LayerNorm in vision towers, fused with the following column-parallel linear: one module with all weights."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = _norm_weight(config, input_size, value=0.0)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = self.layer_norm_weight
        if hasattr(self, "layer_norm_bias"):
            weight = weight + 1 if self.zero_centered else weight
            normed = F.layer_norm(x, weight.shape, weight, self.layer_norm_bias, self.eps)
        else:
            normed = rms_norm(x, weight, self.eps, zero_centered=self.zero_centered)
        return super().forward(normed, *args, **kwargs)


class Linear(torch.nn.Module):
    """A linear replicated on every tensor-parallel rank: the down projections of MLA."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        **_: Any,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=_device())
        )
        with torch.no_grad():
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class NativeSpecProvider(BackendSpecProvider):
    """Megatron's layer classes, resolved to the native layers."""

    def linear(self) -> type:
        return Linear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return NativeAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, Any]:
        return TEGroupedMLP, MLPSubmodules(linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear)

    def activation_func(self) -> None:
        return None


def install() -> None:
    """Make Megatron's Transformer Engine specs resolve to the native layers. Idempotent."""
    import megatron.core.models.common.embeddings.rope_utils as rope
    import megatron.core.models.gpt.gpt_layer_specs as layer_specs
    import megatron.core.models.gpt.moe_module_specs as moe_specs
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
    import megatron.core.transformer.multi_latent_attention as mla

    if layer_specs.HAVE_TE:  # already installed, or Transformer Engine is present
        return
    layer_specs.TESpecProvider = moe_specs.TESpecProvider = NativeSpecProvider
    layer_specs.TENorm, layer_specs.HAVE_TE = Norm, True
    mla.TELinear = Linear
    rope._apply_rotary_pos_emb_thd = rotate_packed
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = Adam, False
    distributed_optimizer.Adam = Adam
    distributed_optimizer.HAVE_APEX_OR_TE = distributed_optimizer.USING_APEX_OPTIMIZER = True
    _add_missing_names()
    _install_vision_layers()


def _install_vision_layers() -> None:
    """Replace the classes that vision towers name directly instead of asking a spec provider."""
    import megatron.core.extensions.transformer_engine as engine
    import megatron.core.models.vision.vit_layer_specs as vision

    engine.TEColumnParallelLinear, engine.TERowParallelLinear = ColumnParallelLinear, RowParallelLinear
    vision.TELayerNormColumnParallelLinear, vision.TERowParallelLinear = (
        LayerNormColumnParallelLinear,
        RowParallelLinear,
    )
    vision.TEDotProductAttention = NativeAttention


def _add_missing_names() -> None:
    """Define names that Megatron 0.16.1 uses without Transformer Engine but imports only with it."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(random, "FP8GlobalStateManager"):  # read when an output is recomputed: recompute_modules
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
        random.fp8_autocast = lambda **_: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):  # read when the router computes in float32
        moe_utils.te_general_gemm = None
