"""Digests of the parameters in vLLM's workers, for tests."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from megarl.engines.vllm.worker import WorkerExtension
from tests.support import fp8_kernels, latent_attention
from tests.support.without_fingerprints import set_fingerprints

latent_attention.install()
fp8_kernels.install()


class Extension(WorkerExtension):
    def watch_layers(self) -> None:
        """Record each layer's parameters from now on before vLLM repacks them: kernels replace some of them."""
        self._before: dict[str, str] = {}
        for name, module in self.model_runner.model.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                self._watch(name, method)

    def _watch(self, name: str, method: Any) -> None:
        original = method.process_weights_after_loading

        def process(layer: torch.nn.Module, *args: Any) -> Any:
            for attribute, parameter in layer.named_parameters(recurse=False):
                self._before[f"{name}.{attribute} before repacking"] = digest(parameter)
            return original(layer, *args)

        method.process_weights_after_loading = process

    def storages(self) -> dict[str, tuple[str, int]]:
        """Return the data type and the address of each parameter."""
        named = self.model_runner.model.named_parameters()
        return {name: (str(parameter.dtype), parameter.data_ptr()) for name, parameter in named}

    def forget_names(self) -> None:
        """Forget the recorded names: other trainers may export in another order."""
        self._megarl_names = None

    def set_fingerprints(self, on: bool) -> None:
        set_fingerprints(on)

    def digests(self) -> dict[str, str]:
        """Return the digests; call `watch_layers` first."""
        model = self.model_runner.model
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        absorbed = [
            (f"{name}.{attribute}", getattr(module, attribute))
            for name, module in model.named_modules()
            for attribute in ("W_UV", "W_UK_T")  # latent attention makes them of kv_b_proj at the end of a reload
            if hasattr(module, attribute)
        ]
        return {name: digest(tensor) for name, tensor in [*tensors, *absorbed]} | self._before

    def draft_digests(self) -> dict[str, str]:
        """Return the digests of the draft's parameters."""
        return {name: digest(tensor) for name, tensor in self.model_runner.drafter.model.named_parameters()}


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest() if len(data) else ""
