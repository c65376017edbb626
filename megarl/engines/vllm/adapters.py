"""LoRA adapters of a live vLLM model: unwrap linears while base weights are loaded, load adapters from tensors, verify them.

vLLM wraps each linear that can have an adapter, but loads adapters only from directories. megarl passes full tensors to
vLLM's internal functions, which shard them, pack the adapters of a fused linear (q, k and v), scale them and copy them into
the wrappers' memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

ID = 1  # of the engine's only adapter
_SHOWN = 5  # names in an error


def request() -> Any:
    """Return the LoRARequest for every prompt. vLLM never reads its path, because the adapter is already loaded."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ID, "loaded by weight sync")


@contextlib.contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Replace the LoRA wrappers by their linears, as the model's loader expects; restore them at the end."""
    wrappers = dict(model.lora_manager.modules) if hasattr(model, "lora_manager") else {}
    for name, wrapper in wrappers.items():
        _replace(model, name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            _replace(model, name, wrapper)


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def split_off(
    weights: Iterable[tuple[str, torch.Tensor]], matrices: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base weights among `weights`; store adapter matrices in `matrices`."""
    for name, tensor in weights:
        if name.endswith((".lora_A.weight", ".lora_B.weight")):
            matrices[name] = tensor
        else:
            yield name, tensor


def load(model: torch.nn.Module, matrices: dict[str, torch.Tensor], alpha: float, shard: int, shards: int) -> None:
    """Replace the model's adapters by `matrices` (PEFT names), and verify the result.

    `shard`: this rank among `shards` tensor-parallel ranks. Raises ValueError if vLLM has no linear for an adapter, or holds
    other values afterwards.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager: Any = model.lora_manager
    pairs = _pairs(matrices)
    parts = {name: manager.packed_modules.get(name) or [name] for name in manager.modules}
    unknown = sorted(set(pairs) - {part for linears in parts.values() for part in linears})
    if unknown:
        raise ValueError(f"vLLM cannot load the adapters of {len(unknown)} linears: {', '.join(unknown[:_SHOWN])}")
    rank = next(iter(pairs.values()))[0].shape[0]
    adapter = LoRAModel.from_lora_tensors(
        ID,
        {name: matrix.clone() for name, matrix in matrices.items()},  # vLLM scales them in place
        PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),  # alpha may be a float despite its annotation
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
    )
    manager.remove_adapter(ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ID)
    slot = manager.lora_index_to_id.index(ID)
    for name, linears in parts.items():
        wrapper = manager.modules[name]
        for number, part in enumerate(linears):
            a, b = (stack[number][slot, 0].cpu() for stack in (wrapper.lora_a_stacked, wrapper.lora_b_stacked))
            if part not in pairs:
                correct = not b.any()
            else:
                expected_a, expected_b = (matrix.to(a.dtype) for matrix in pairs[part])
                expected_b = _shard(expected_b, 0, b.shape[0], shard, shards) * (alpha / rank)
                expected_a = _shard(expected_a, 1, a.shape[1], shard, shards)
                correct = torch.equal(a[:rank], expected_a) and torch.equal(b[:, :rank], expected_b)
                correct = correct and not b[:, rank:].any()
            if not correct:
                raise ValueError(f"{name} of the engine's model does not hold the adapter of {part} that arrived")


def _pairs(matrices: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (A, B) by linear. ValueError if a matrix is missing or ranks differ."""
    linears = dict.fromkeys(name.rsplit(".lora_", 1)[0] for name in matrices)
    try:
        pairs = {name: (matrices[f"{name}.lora_A.weight"], matrices[f"{name}.lora_B.weight"]) for name in linears}
    except KeyError as error:
        raise ValueError(f"an adapter is incomplete: {error} is missing") from error
    if len({size for a, b in pairs.values() for size in (a.shape[0], b.shape[1])}) != 1:
        raise ValueError(f"received {len(pairs)} adapters; at least one is required, and all must have the same rank")
    return pairs


def _shard(matrix: torch.Tensor, axis: int, length: int, shard: int, shards: int) -> torch.Tensor:
    """Return a tensor-parallel rank's part of `matrix`, with `length` along `axis`.

    If there are more ranks than parts (key and value heads), neighbouring ranks hold the same part; an unsharded matrix is
    the same on all ranks.
    """
    copies = length * shards // matrix.shape[axis]
    return matrix.narrow(axis, shard // copies * length, length)
