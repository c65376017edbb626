"""The reference policy of a rank: weights on the host that change places with the policy's for a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megarl.megatron.model.build import Model
from megarl.megatron.offload import copy_to_host, swap


class ReferencePolicy:
    """The policy after step `step`; 0: before training.

    With LoRA, only adapters are kept. Without `lora.path` none is kept for step 0: the model without adapters. Callers gather parameters first
    (`pipeline.finish_param_gather`).
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kept: list[torch.Tensor] = []  # in the order of `_weights`
        self.step = 0
        if _keeps_start(model):
            self.keep(0)

    def keep(self, step: int) -> None:
        """Copy the current weights, those after step `step`."""
        weights = list(_weights(self._model).values())
        if self._kept:
            for kept, weight in zip(self._kept, weights, strict=True):
                kept.copy_(weight)
        else:
            self._kept = [copy_to_host(weight) for weight in weights]
        self.step = step

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return the kept tensors by the id of their parameter or buffer."""
        return dict(zip(_weights(self._model), self._kept, strict=True)) if self._kept else {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the reference policy's weights in the block."""
        if not self._kept:
            assert self._model.lora is not None
            with self._model.lora.off():
                yield
            return
        current = list(_weights(self._model).values())
        swap(current, self._kept)
        try:
            yield
        finally:
            swap(current, self._kept)


def reference_sizes(model: Model, *, refreshed: bool) -> list[int]:
    """Return the bytes of each tensor that a reference policy keeps on the host. `refreshed`: after the first refresh."""
    return [] if not _keeps_start(model) and not refreshed else [weight.nbytes for weight in _weights(model).values()]


def _keeps_start(model: Model) -> bool:
    """Return whether the policy before training differs from the model without adapters, or has none."""
    return not model.lora or model.lora.settings.path is not None


def _weights(model: Model) -> dict[int, torch.Tensor]:
    """Return parameters and routing biases (buffers), with LoRA the adapters' parameters, by their id."""
    return {
        id(value): value.data
        for chunk in model.chunks
        for name, value in [*chunk.named_parameters(), *chunk.named_buffers()]
        if (
            value.requires_grad if model.lora else isinstance(value, torch.nn.Parameter) or name.endswith("expert_bias")
        )
    }
