"""Latent attention in torch for vLLM versions without it on the CPU, so that their engines run tiny DeepSeek-V3 models.

Only the attention kernel is replaced; vLLM's layers, loader and reload are used. Imported in vLLM's workers.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms.cpu import CpuPlatform

_REFUSAL = "MLA is not supported on CPU"


def install() -> None:
    """Use `latent_kernel.Backend` where vLLM's CPU platform refuses latent attention. Call before the model is built."""
    if _REFUSAL not in inspect.getsource(CpuPlatform.get_attn_backend_cls):
        return
    from vllm.model_executor.layers.attention import mla_attention

    original = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *args, **kwargs):
        if attn_selector_config.use_mla:
            return "tests.support.latent_kernel.Backend"
        return original(cls, selected_backend, attn_selector_config, *args, **kwargs)

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    process = UnquantizedLinearMethod.process_weights_after_loading

    def process_weights_after_loading(self, layer):
        if getattr(layer, "keeps_weight", False):  # repacked for a CPU it would be empty when attention reads it
            layer.cpu_linear = torch.nn.functional.linear
        else:
            process(self, layer)

    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading
    if hasattr(mla_attention, "get_mla_prefill_backend"):  # 0.23; its prefill is never called
        mla_attention.get_mla_prefill_backend = lambda config: SimpleNamespace
