"""Gated delta net (arXiv 2412.06464) on packed sequences, in place of attention in some layers of Qwen3-Next and Qwen3.5.

Megatron's layer takes no packed sequences and needs flash-linear-attention; this one uses its rule, which is written in torch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from megarl.hf.config import layer_kinds
from megarl.hf.families.slices import Config, DeltaSizes, delta_sizes
from megarl.megatron.host_offsets import host_offsets
from megarl.megatron.native_layers.attention import plan_padding, sequence_order

_SHARDED = ("convolution", "A_log", "dt_bias")  # by heads, over tensor-parallel ranks


@dataclass
class DeltaNetSubmodules:
    """Classes of the input and the output projection."""

    in_proj: Any
    out_proj: Any


class PackedDeltaNet(MegatronModule):
    """A gated delta net. Each tensor-parallel rank has whole key heads with their value heads.

    Parameters hold their parts by key head; see `DeltaSizes`.
    """

    def __init__(
        self, config: Any, submodules: DeltaNetSubmodules, layer_number: int, sizes: DeltaSizes, kernel: int, **_: Any
    ) -> None:
        """`kernel`: tokens that the convolution spans. Other arguments are for attention layers and not used."""
        super().__init__(config)
        self.layer_number, self.sizes, self.kernel = layer_number, sizes, kernel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.cp_group = parallel_state.get_context_parallel_group()
        self.local_heads = sizes.heads // self.tp_group.size()
        self.value_width = sizes.value // sizes.per_key
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sizes.heads * sum(sizes.parts),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            sizes.heads * sizes.value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )
        self.convolution = self._parameter(self.local_heads * sum(sizes.parts[:3]), 1, kernel)
        self.A_log = self._parameter(self.local_heads * sizes.per_key)
        self.dt_bias = self._parameter(self.local_heads * sizes.per_key)
        self.norm = self._parameter(self.value_width)
        for name in _SHARDED:
            set_tensor_model_parallel_attributes(getattr(self, name), is_parallel=True, dim=0, stride=1)

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        """Return a parameter of ones: its values come from a checkpoint."""
        device = torch.cuda.current_device()
        return torch.nn.Parameter(torch.ones(shape, dtype=self.config.params_dtype, device=device))

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the output of a packed stream, as `hidden_states` [tokens, 1, hidden], and no bias.

        tokens: this context-parallel rank's; with sequence parallelism, this tensor-parallel rank's share of them. No state
        passes from one sequence to the next.
        """
        inputs = self.in_proj(hidden_states)[0].squeeze(1)  # [tokens, heads * parts]
        lengths = [end - start for start, end in pairwise(host_offsets(packed_seq_params.cu_seqlens_q_padded))]
        over_ranks = self.cp_group.size() > 1
        values = self._over_context_ranks(inputs, lengths) if over_ranks else self._sequences(inputs, lengths)
        out, bias = self.out_proj(values.unsqueeze(1))
        return out, bias

    def _over_context_ranks(self, inputs: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return the outputs of this context-parallel rank's tokens. Every rank computes all tokens of its heads.

        A state passes through all tokens of a sequence, and a rank has two chunks of each: see `plan_chunks`. Context
        parallelism divides neither this layer's time nor its memory.
        """
        ranks, rank, held = self.cp_group.size(), self.cp_group.rank(), len(inputs)
        gathered = gather_from_sequence_parallel_region(
            inputs.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        shares = tuple(length // ranks for length in lengths)
        in_order, back = sequence_order(shares, ranks, inputs.device)
        outputs = self._sequences(gathered.index_select(0, in_order), lengths)
        return outputs.index_select(0, back[rank * held : (rank + 1) * held])

    def _sequences(self, inputs: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return the outputs [tokens, heads * value] of whole sequences of `lengths`."""
        return plan_padding(tuple(lengths), inputs.device).apply(lambda _, part: self._rectangle(part), inputs)

    def _rectangle(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [sequences, length, heads * value] of inputs [sequences, length, heads * parts], padded on the right.

        Padding changes nothing: each token depends only on itself and earlier tokens.
        """
        sizes, (count, length, _) = self.sizes, inputs.shape
        by_head = inputs.view(count, length, self.local_heads, -1)
        channels = sum(sizes.parts[:3])
        convolved = F.conv1d(
            by_head[..., :channels].reshape(count, length, -1).transpose(1, 2),
            self.convolution,
            padding=self.kernel - 1,
            groups=self.local_heads * channels,
        )[..., :length]
        convolved = F.silu(convolved).transpose(1, 2).view(count, length, self.local_heads, channels)
        query, key, value = convolved.split(sizes.parts[:3], -1)
        gate, beta, decay = by_head[..., channels:].split(sizes.parts[3:], -1)
        value_shape = (count, length, self.local_heads * sizes.per_key)
        out, _state = torch_chunk_gated_delta_rule(
            _l2_normalized(query).repeat_interleave(sizes.per_key, 2),
            _l2_normalized(key).repeat_interleave(sizes.per_key, 2),
            value.reshape(*value_shape, self.value_width),
            g=-self.A_log.float().exp() * F.softplus(decay.reshape(value_shape).float() + self.dt_bias.float()),
            beta=beta.reshape(value_shape).sigmoid(),
        )
        # Each rank has the norm's whole weight and the gradient of its heads.
        weight = copy_to_tensor_model_parallel_region(self.norm)
        normed = F.rms_norm(out.float(), weight.shape, eps=self.config.layernorm_epsilon).to(inputs.dtype) * weight
        gated = normed * F.silu(gate.reshape(*value_shape, self.value_width).float())
        return gated.to(inputs.dtype).flatten(2)

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple, metadata: dict[str, Any]) -> dict[str, Any]:
        """Describe the parameters to Megatron's checkpoints. `metadata`: Megatron's, with its dp_cp_group."""
        parameters: dict[str, Any] = {}
        self._save_to_state_dict(parameters, "", keep_vars=True)  # the layer's own: the projections describe themselves
        described = make_sharded_tensors_for_checkpoint(
            parameters,
            prefix,
            dict.fromkeys(_SHARDED, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            described.update(sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata))
        return described


def install(config: Config, layers: list[Any], first: int, provider: Any) -> None:
    """Put delta nets in place of attention in the specs of a stage's `layers`, where config.json says so.

    `first`: number of the first layer, from 0. `provider`: Megatron's spec provider, for the projections.
    """
    submodules = DeltaNetSubmodules(provider.column_parallel_layer_norm_linear(), provider.row_parallel_linear())
    params = {"sizes": delta_sizes(config), "kernel": config["linear_conv_kernel_dim"]}
    kinds = layer_kinds(config)
    for number, spec in enumerate(layers):
        if kinds[first + number] == "linear_attention":
            layers[number] = copy.copy(spec)  # layers share their specs
            layers[number].submodules = copy.copy(spec.submodules)
            layers[number].submodules.self_attention = ModuleSpec(PackedDeltaNet, params, submodules)


def _l2_normalized(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(|x|^2 + 1e-6) along the last dimension, rounded once, as the kernel that engines run.

    The kernel is `l2norm_fwd` of flash-linear-attention. transformers' l2norm in torch does not round: it is given float32.
    """
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
