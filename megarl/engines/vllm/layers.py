"""A live vLLM model's layers, filled box by box, and each finished by vLLM itself as soon as it is complete.

vLLM's layerwise reload lays a layer's parameters out anew, as checkpoints have them. Boxes are copied into these, never
into live ones. Then vLLM does with the layer what it does after its own loading: repacking, and copying into the live
parameters. Layers that its loader fills in another way than by boxes get whole tensors, through that loader.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform

from megarl.engines.vllm import compat
from megarl.engines.vllm.needed_slices import needs
from megarl.weight_sync.sharded.receiver import CompletedHook
from megarl.weight_sync.sharded.slices import SliceTable


def describe(model: torch.nn.Module, tensors: Sequence[tuple[str, Sequence[int], str]]) -> SliceTable:
    """What a live model needs of the checkpoint's `tensors` (name, shape, type). Leaves it as it was. ValueError where its
    loader does not fill it out of these, or cannot be followed."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    tied = compat.tied_layers(model)
    compat.start_reload(model)
    try:
        for module in model.modules():
            for tensor in get_layer_tensors(module).values():
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        need = needs(model, tensors)
        _check_filled(model, need, leave_out=tied)
    finally:
        for module in model.modules():
            info = layerwise.get_layerwise_info(module)
            if compat.is_loading(info):
                layerwise._place_kernel_tensors(module, info)
            info.reset()
        model._do_torchao_reload = model._original_do_torchao_reload
    return need


def _check_filled(model: torch.nn.Module, need: SliceTable, leave_out: Container[str]) -> None:
    """Layers are filled by boxes, but for the padding of vocabularies; or wholly by vLLM's loader, which is looked at in every
    update (`check_complete`). ValueError otherwise."""
    elements = dict.fromkeys(need.parameters, 0)
    for parameter, rows, columns in need.slices[:, [5, 3, 4]].tolist():
        elements[need.parameters[parameter]] += rows * columns
    given: dict[int, int] = {}  # by memory: two layers may share a tensor
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        given[_memory(tensor)] = given.get(_memory(tensor), 0) + elements.get(name, 0)
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        wanted = sum(parameter.numel() for parameter in parameters.values())
        there = sum(given.get(_memory(parameter), 0) for parameter in parameters.values())
        if name in leave_out or not wanted or (need.whole and not there):
            continue
        lacking = wanted - padded_rows(module) * (wanted // _rows(module)) - there
        if lacking > 0:
            raise ValueError(
                f"{name} of the engine's model lacks {lacking:,} of its {wanted:,} elements: the trainers do not hold all "
                "the weights that it is made of"
            )
        if lacking < 0 or compat.is_deferred_attention(module):
            raise ValueError(f"{name} of the engine's model is filled by its loader in a way that cannot be planned")


class Filling:
    """One update of a live model: where boxes go. Used under the engine's configuration and on its device.

    `complete` is shown the parameters of each layer once they have all their values, and before anything is made of them.
    """

    def __init__(self, model: torch.nn.Module, need: SliceTable, complete: CompletedHook | None = None) -> None:
        self._model, self._complete = model, complete
        if current_platform.is_cpu():
            compat.drop_packed_experts(model)
        self._tied = compat.tied_layers(model)
        compat.start_reload(model)
        modules = dict(model.named_modules())
        self._whole = {number: name for number, name in enumerate(need.parameters) if name in need.whole}
        shapes = dict(zip(need.tensors, need.shapes, strict=True))
        self._tensors: dict[int, torch.Tensor] = {
            number: torch.empty(shapes[name], dtype=getattr(torch, need.dtypes[number]), device="cpu")
            for number, name in self._whole.items()
        }
        self._layers: dict[int, _Layer] = {}
        layers: dict[str, _Layer] = {}
        for number, rows, columns in need.slices[:, [5, 3, 4]].tolist():
            if number not in self._whole:
                name, _, own = need.parameters[number].rpartition(".")
                layer = layers.setdefault(name, _Layer(modules[name]))
                layer.parameters[number] = own
                layer.left += rows * columns
                self._layers[number] = layer

    def tensor(self, parameter: int) -> torch.Tensor:
        if parameter not in self._tensors:
            layer = self._layers[parameter]
            self._tensors.update(layer.lay_out())
        return self._tensors[parameter]

    def mark_written(self, parameter: int, elements: int) -> None:
        if parameter in self._whole:
            return
        layer = self._layers[parameter]
        layer.left -= elements
        if layer.left == 0:
            if self._complete is not None:
                self._complete(layer.parameters, self.tensor)
            for number in layer.parameters:
                del self._tensors[number]
            layer.finish()

    def finish(self, model_config: Any) -> None:
        """All boxes are there: let vLLM load what it gets whole, and end. ValueError where a layer lacks anything."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._complete is not None:
            self._complete(self._whole, self.tensor)
        if self._whole:
            self._model.load_weights((name, self._tensors[number]) for number, name in self._whole.items())
        check_complete(self._model, leave_out=self._tied)
        finalize_layerwise_reload(self._model, model_config)
        compat.repack_tied(self._tied)


class _Layer:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.parameters: dict[int, str] = {}  # by number in the description
        self.left = 0  # elements that are still to come

    def lay_out(self) -> dict[int, torch.Tensor]:
        """Memory for the layer's parameters, as the checkpoint has them."""
        compat.materialize_layer(self.module)
        tensors = {number: getattr(self.module, own).data for number, own in self.parameters.items()}
        if padded_rows(self.module):
            for tensor in tensors.values():
                tensor.zero_()  # rows that belong to no token are never sent
        return tensors

    def finish(self) -> None:
        compat.process_layer(self.module)


def check_complete(model: torch.nn.Module, leave_out: Container[str]) -> None:
    """Every layer that has parameters was filled, but for those to `leave_out`; a fused one also by all of its parts.

    Layerwise reload finishes a layer when as many elements came as it holds. One that is left over
    lacks some, unless what it lacks is the padding of its vocabulary.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        elements = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if elements == 0 or name in leave_out or not compat.is_loading(info):
            continue
        lacking = elements - padded_rows(module) * (elements // _rows(module)) - info.load_numel
        if lacking > 0:
            raise ValueError(
                f"{name} of the engine's model lacks {lacking:,} of its {elements:,} elements: the trainer's export "
                f"does not have all the weights that it is made of"
            )


def padded_rows(module: torch.nn.Module) -> int:
    """Rows of an embedding or output layer that belong to no token and are never loaded."""
    return _rows(module) - module.num_org_embeddings_per_partition if _rows(module) > 1 else 0


def _rows(module: torch.nn.Module) -> int:
    """Of an embedding or output layer; 1 for any other."""
    return int(getattr(module, "num_embeddings_per_partition", 1))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
