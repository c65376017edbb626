"""Memory of one rank of vLLM's model, and an estimate for its largest step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

import torch

from megarl.commands.plan.count.types import EngineRank
from megarl.commands.plan.vllm_rank import RankModel
from megarl.engines.base import EngineLimits, EngineSpec
from megarl.engines.vllm.quantization import BLOCK
from megarl.platform.adaptor import asleep

# Copies of a sequence's logits: the model's output, then in float32 logits, log-probs, probabilities and random draws
# (vLLM 0.32, v1/sample/sampler.py and ops/topk_topp_sampler.py).
_IN_FLOAT32 = 4
_OF_A_LAYER = re.compile(r".*\.(?:layers|blocks)\.\d+(?=\.)")


def counted(built: RankModel, spec: EngineSpec, limits: EngineLimits) -> EngineRank:
    """Count the memory of a rank. Its `cache` is not known yet."""
    both = torch.nn.ModuleList([built.model, built.draft])
    parameters = {parameter.untyped_storage()._cdata: parameter for parameter in both.parameters()}
    buffers = {buffer.untyped_storage()._cdata: buffer for buffer in both.buffers()}
    copies = sum(module.kv_b_proj.weight.nbytes for module in _attention(built) if hasattr(module, "kv_b_proj"))
    tables = _bytes({key: tensor for key, tensor in buffers.items() if key not in parameters}) + copies
    quantized = _quantized(built)
    saved = sum(parameters[key].untyped_storage().nbytes() - size for key, size in quantized.items())
    return EngineRank(
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        weights=_bytes(parameters) - saved + tables,
        tables=tables,
        cache_per_token=_cache_per_token(built),
        working=_layers(built, limits) + _logits(built, spec, limits),
        largest=max(
            sum(
                tensor.nbytes + quantized.get(tensor.untyped_storage()._cdata, 0)
                for tensor in module.parameters(recurse=False)
            )
            for module in both.modules()
        ),
        recomputed=copies,
        received=sum(
            {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in built.model.parameters()}.values()
        ),
        asleep=asleep(
            quantized.get(key, tensor.untyped_storage().nbytes()) for key, tensor in {**buffers, **parameters}.items()
        ),
    )


def _quantized(built: RankModel) -> dict[int, int]:
    """Return the bytes of quantized weights with their scales, by storage. The model has them as in the checkpoint."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    sizes = {}
    for module in built.model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and getattr(method, "weight_block_size", None) is not None:
            for parameter in module.parameters(recurse=False):
                if parameter.dim() > 1:  # a bias is not quantized
                    *experts, rows, columns = parameter.shape
                    blocks = math.prod(experts) * -(-rows // BLOCK) * -(-columns // BLOCK)
                    sizes[parameter.untyped_storage()._cdata] = parameter.numel() + 4 * blocks
    return sizes


def _bytes(tensors: dict[int, Any]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def _attention(built: RankModel) -> list[Any]:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return list(get_layers_from_vllm_config(built.config, AttentionLayerBase).values())


def _cache_per_token(built: RankModel) -> float:
    specs = [layer.get_kv_cache_spec(built.config) for layer in _attention(built)]
    return sum(cache.page_size_bytes / cache.block_size for cache in specs if cache is not None)


def _logits(built: RankModel, spec: EngineSpec, limits: EngineLimits) -> int:
    """Return bytes of logits over the whole vocabulary, which every rank gathers. With prompt log-probs: a row per token."""
    rows = limits.tokens if spec.prompt_top_k is not None else limits.sequences
    vocabulary = built.config.model_config.get_vocab_size()
    return rows * vocabulary * (_itemsize(built) + 4 * _IN_FLOAT32)


def _layers(built: RankModel, limits: EngineLimits) -> int:
    """Return activation bytes of the widest layer, with its input, residual and norm."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

    widths: dict[str, float] = defaultdict(float)
    for name, module in built.model.named_modules():
        layer = _OF_A_LAYER.match(name)
        if layer is None:
            continue
        if isinstance(module, LinearBase):
            widths[layer[0]] += getattr(module, "output_size_per_partition", module.output_size)
            if isinstance(module, RowParallelLinear):  # the outputs of attention and activation functions
                widths[layer[0]] += module.input_size_per_partition
        elif isinstance(module, RoutedExperts):
            widths[layer[0]] += _of_experts(module)
    text = built.config.model_config.hf_text_config
    vision = getattr(built.config.model_config.hf_config, "vision_config", None)
    merged = getattr(vision, "spatial_merge_size", 1) ** 2
    most = max(width * (merged if "visual" in name else 1) for name, width in widths.items())
    return int(limits.tokens * (most + 3 * text.hidden_size) * _itemsize(built))


def _of_experts(experts: Any) -> float:
    """Return values per token of a step: tokens arriving at a rank's experts, their two products and the results."""
    parallel = experts.moe_config.moe_parallel_config
    share = experts.local_num_experts / experts.global_num_experts
    arriving = experts.top_k * share * (parallel.dp_size if parallel.use_ep else 1)
    return arriving * (2 * experts.hidden_size + 3 * experts.intermediate_size_per_partition)


def _itemsize(built: RankModel) -> int:
    dtype: torch.dtype = built.config.model_config.dtype
    return dtype.itemsize
