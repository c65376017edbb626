"""Adapters in a live vLLM model: out of the way while its own weights are loaded, put beside them out of memory, and held to
what arrived.

vLLM puts a wrapper around each linear that can have an adapter, and loads adapters from directories. Here they come as
tensors, whole; vLLM's own code cuts them for its ranks, joins those of one linear of its own (q, k and v), scales them and
copies them into the wrappers' memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

ID = 1  # of the one adapter that an engine has
_SHOWN = 5  # names in an error


def request() -> Any:
    """What vLLM wants with every prompt that adapters are for. It never reads the path: the adapter is there."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ID, "came through the weight exchange")


@contextlib.contextmanager
def bare(model: torch.nn.Module) -> Iterator[None]:
    """The model with its linears in the place of their wrappers: as its loader knows it."""
    wrappers = dict(model.lora_manager.modules) if hasattr(model, "lora_manager") else {}
    for name, wrapper in wrappers.items():
        _replace(model, name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            _replace(model, name, wrapper)


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def without_matrices(
    weights: Iterable[tuple[str, torch.Tensor]], matrices: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of `weights` that are no adapters'; what is goes into `matrices`."""
    for name, tensor in weights:
        if name.endswith((".lora_A.weight", ".lora_B.weight")):
            matrices[name] = tensor
        else:
            yield name, tensor


def put(model: torch.nn.Module, matrices: dict[str, torch.Tensor], alpha: float, shard: int, shards: int) -> None:
    """Let `matrices`, by PEFT's names, be the model's adapters, in place of those it had. `shard`: this rank's number among
    `shards` tensor-parallel ranks. ValueError where vLLM would leave one out, or holds something else afterwards."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager: Any = model.lora_manager
    pairs = _pairs(matrices)
    parts = {name: manager.packed_modules.get(name) or [name] for name in manager.modules}
    unknown = sorted(set(pairs) - {part for own in parts.values() for part in own})
    if unknown:
        raise ValueError(f"vLLM has no place for the adapters of {len(unknown)} linears: {', '.join(unknown[:_SHOWN])}")
    rank = next(iter(pairs.values()))[0].shape[0]
    adapter = LoRAModel.from_lora_tensors(
        ID,
        {name: matrix.clone() for name, matrix in matrices.items()},  # vLLM scales them where they lie
        PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),  # of alpha it takes any number
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
    )
    manager.remove_adapter(ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ID)
    slot = manager.lora_index_to_id.index(ID)
    for name, own in parts.items():
        wrapper = manager.modules[name]
        for number, part in enumerate(own):
            a, b = (stack[number][slot, 0].cpu() for stack in (wrapper.lora_a_stacked, wrapper.lora_b_stacked))
            if part not in pairs:
                held = not b.any()
            else:
                wanted_a, wanted_b = (matrix.to(a.dtype) for matrix in pairs[part])
                wanted_b = _share(wanted_b, 0, b.shape[0], shard, shards) * (alpha / rank)
                wanted_a = _share(wanted_a, 1, a.shape[1], shard, shards)
                held = torch.equal(a[:rank], wanted_a) and torch.equal(b[:, :rank], wanted_b) and not b[:, rank:].any()
            if not held:
                raise ValueError(f"{name} of the engine's model does not hold the adapter of {part} that arrived")


def _pairs(matrices: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by linear. ValueError where one is missing, or ranks differ."""
    linears = dict.fromkeys(name.rsplit(".lora_", 1)[0] for name in matrices)
    try:
        pairs = {one: (matrices[f"{one}.lora_A.weight"], matrices[f"{one}.lora_B.weight"]) for one in linears}
    except KeyError as error:
        raise ValueError(f"of an adapter only one matrix came: {error} is missing") from error
    if len({size for a, b in pairs.values() for size in (a.shape[0], b.shape[1])}) != 1:
        raise ValueError(f"{len(pairs)} adapters came, which must be one at least, and all of one rank")
    return pairs


def _share(matrix: torch.Tensor, axis: int, length: int, shard: int, shards: int) -> torch.Tensor:
    """A tensor-parallel rank's part of `matrix`, which has `length` along `axis`. Where ranks are more than parts (key and
    value heads), neighbours hold the same; a matrix that is not cut is held by all."""
    copies = length * shards // matrix.shape[axis]
    return matrix.narrow(axis, shard // copies * length, length)
