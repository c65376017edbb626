"""Update a live vLLM model slice by slice; vLLM processes each layer as soon as it is complete.

vLLM's layerwise reload allocates a layer's parameters in checkpoint format. Slices are copied into these, never into the
live parameters. For a complete layer, vLLM repacks the weights and copies them into the live parameters, as after its own
loading. Layers that its loader does not fill by copying slices receive whole tensors through that loader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform

from megarl.engines.vllm import compat, route_support
from megarl.engines.vllm.needed_slices import needed_slices, storage_id
from megarl.weight_sync.sharded.receiver import CompletedHook
from megarl.weight_sync.sharded.slices import SliceTable

_LOCAL_EXPERT = "_map_global_expert_id_to_local_expert_id"  # method of vLLM's layers of experts, which loaders call


def expert_tables(model: torch.nn.Module) -> list[tuple[torch.nn.Module, list[int]]]:
    """Return each module with a table of experts, and the table: this rank's number of each expert, -1 for other ranks'."""
    return [
        (module, module._expert_map.tolist())
        for module in model.modules()
        if hasattr(module, _LOCAL_EXPERT) and isinstance(getattr(module, "_expert_map", None), torch.Tensor)
    ]


@contextlib.contextmanager
def experts_from(tables: Iterable[tuple[torch.nn.Module, list[int]]]) -> Iterator[None]:
    """Let vLLM's loaders read `tables` (`expert_tables`) instead of device memory, which an engine that sleeps has released."""
    modules = []
    try:
        for module, table in tables:
            setattr(module, _LOCAL_EXPERT, table.__getitem__)
            modules.append(module)
        yield
    finally:
        for module in modules:
            delattr(module, _LOCAL_EXPERT)


def live_needed_slices(model: torch.nn.Module, tensors: Sequence[tuple[str, Sequence[int], str]]) -> SliceTable:
    """Return the slices that a live model needs of the checkpoint's `tensors` (name, shape, dtype); the model is unchanged.

    Raises ValueError if the tensors do not fill the model, or its loader cannot be traced.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    tied = compat.tied_layers(model)
    compat.start_reload(model)
    try:
        for module in model.modules():
            for tensor in layerwise.get_layer_tensors(module).values():
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        needed = needed_slices(model, tensors)
        _check_filled(model, needed, leave_out=tied)
    finally:
        for module in model.modules():
            info = layerwise.get_layerwise_info(module)
            if compat.is_loading(info):
                layerwise._place_kernel_tensors(module, info)
            info.reset()
        model._do_torchao_reload = model._original_do_torchao_reload
    return needed


def _check_filled(model: torch.nn.Module, needed: SliceTable, leave_out: Container[str]) -> None:
    """Check that slices fill every layer except for vocabulary padding, or none of it. Raises ValueError.

    vLLM's loader fills the layers without slices; `check_complete` checks these in every update.
    """
    elements = dict.fromkeys(needed.parameters, 0)
    for parameter, rows, columns in needed.slices[:, [5, 3, 4]].tolist():
        elements[needed.parameters[parameter]] += rows * columns
    filled: dict[int, int] = {}  # elements by storage: two layers may share a tensor
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        filled[storage_id(tensor)] = filled.get(storage_id(tensor), 0) + elements.get(name, 0)
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        total = sum(parameter.numel() for parameter in parameters.values())
        filled_here = sum(filled.get(storage_id(parameter), 0) for parameter in parameters.values())
        if name in leave_out or not total or (needed.whole and not filled_here):
            continue
        lacking = total - padded_rows(module) * (total // _rows(module)) - filled_here
        if lacking > 0:
            raise ValueError(
                f"{name} of the engine's model lacks {lacking:,} of its {total:,} elements: the trainers do not hold all of "
                "its weights"
            )
        if lacking < 0 or compat.is_deferred_attention(module):
            raise ValueError(f"{name} of the engine's model is loaded in a way that sharded updates do not support")


class LayerwiseUpdate:
    """One update of a live model, the target of its slices. Used under the engine's configuration and on its device.

    `completed` is called with the parameters of each layer when they are complete, before vLLM processes them.
    """

    def __init__(self, model: torch.nn.Module, needed: SliceTable, completed: CompletedHook | None = None) -> None:
        self._model, self._completed = model, completed
        if current_platform.is_cpu():
            compat.drop_packed_experts(model)
        self._tied = compat.tied_layers(model)
        compat.start_reload(model)
        modules = dict(model.named_modules())
        self._whole = {number: name for number, name in enumerate(needed.parameters) if name in needed.whole}
        shapes = dict(zip(needed.tensors, needed.shapes, strict=True))
        self._tensors: dict[int, torch.Tensor] = {
            number: torch.empty(shapes[name], dtype=getattr(torch, needed.dtypes[number]), device="cpu")
            for number, name in self._whole.items()
        }
        self._layers: dict[int, _Layer] = {}
        layers: dict[str, _Layer] = {}
        for number, rows, columns in needed.slices[:, [5, 3, 4]].tolist():
            if number not in self._whole:
                layer_name, _, parameter_name = needed.parameters[number].rpartition(".")
                layer = layers.setdefault(layer_name, _Layer(modules[layer_name]))
                layer.parameters[number] = parameter_name
                layer.missing += rows * columns
                self._layers[number] = layer

    def tensor(self, parameter: int) -> torch.Tensor:
        """Return the tensor to copy a parameter's slices into, in checkpoint format."""
        if parameter not in self._tensors:
            layer = self._layers[parameter]
            self._tensors.update(layer.allocate())
        return self._tensors[parameter]

    def mark_written(self, parameter: int, elements: int) -> None:
        """Count `elements` written elements of a parameter; process its layer when it is complete."""
        if parameter in self._whole:
            return
        layer = self._layers[parameter]
        layer.missing -= elements
        if layer.missing == 0:
            if self._completed is not None:
                self._completed(layer.parameters, self.tensor)
            for number in layer.parameters:
                del self._tensors[number]
            compat.process_layer(layer.module)

    def finish(self, model_config: Any) -> None:
        """Load whole tensors with vLLM's loader and end the update. ValueError if a layer is incomplete."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._completed is not None:
            self._completed(self._whole, self.tensor)
        self._load_whole()
        check_complete(self._model, leave_out=self._tied)
        finalize_layerwise_reload(self._model, model_config)
        compat.repack_tied(self._tied)

    def _load_whole(self) -> None:
        """Load whole tensors with vLLM's loader."""
        left = {name: self._tensors[number] for number, name in self._whole.items()}
        for prefix, layers in compat.directly_loaded(self._model).items():
            of_layers = {name: left.pop(name) for name in list(left) if name.startswith(prefix)}
            for layer in layers:
                compat.materialize_layer(layer)
            self._model.load_weights(of_layers.items())
            for layer in layers:
                compat.process_layer(layer)
        if left:
            self._model.load_weights(left.items())


class _Layer:
    """A layer that an update is filling."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.parameters: dict[int, str] = {}  # number in the slice table -> name in the module
        self.missing = 0  # elements that are not written yet

    def allocate(self) -> dict[int, torch.Tensor]:
        """Allocate the layer's parameters in checkpoint format."""
        compat.materialize_layer(self.module)
        tensors = {number: getattr(self.module, name).data for number, name in self.parameters.items()}
        if padded_rows(self.module):
            for tensor in tensors.values():
                tensor.zero_()  # padding rows of the vocabulary are never sent
        return tensors


def check_complete(model: torch.nn.Module, leave_out: Container[str]) -> None:
    """Raise ValueError if a layer with parameters is not completely loaded, except for layers in `leave_out`.

    Layerwise reload processes a layer once all of its elements are loaded, with all parts of a fused one. A layer that is
    still loading lacks elements, other than the padding of its vocabulary.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        elements = sum(
            parameter.numel()
            for parameter_name, parameter in module.named_parameters(recurse=False)
            if parameter_name != route_support.ROUTER_BIAS  # loaded in place and not counted by vLLM
        )
        if elements == 0 or name in leave_out or not compat.is_loading(info):
            continue
        lacking = elements - padded_rows(module) * (elements // _rows(module)) - info.load_numel
        if lacking > 0:
            raise ValueError(
                f"{name} of the engine's model lacks {lacking:,} of its {elements:,} elements: the trainer's export does not "
                "have all of its weights"
            )


def padded_rows(module: torch.nn.Module) -> int:
    """Return the padding rows of an embedding or output layer, which are never loaded; 0 for other layers."""
    return _rows(module) - module.num_org_embeddings_per_partition if _rows(module) > 1 else 0


def _rows(module: torch.nn.Module) -> int:
    """Return the rows of an embedding or output layer; 1 for other layers."""
    return int(getattr(module, "num_embeddings_per_partition", 1))
