"""Adapters as a directory that PEFT reads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.atomic_files import give_default_mode, written_whole
from megarl.megatron.lora.attach import Lora, matrices, trained_modules
from megarl.recipe.training import LoraConfig

_MLP = ("gate_proj", "up_proj", "down_proj")


def save_adapter(directory: Path, lora: Lora, base: str) -> None:
    """Write the adapters as `directory`, on rank 0; it is there when it is whole.

    All ranks together; rank 0's host holds all matrices meanwhile. `base` is the model that they were trained on; PEFT applies them to it.
    """
    modules = trained_modules(lora)
    tensors = gathered(lora)
    if torch.distributed.get_rank() == 0:
        named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        config = adapter_config(modules, lora.settings, base)
        with written_whole(directory) as partial:
            save_file(named, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            give_default_mode(partial / "adapter_model.safetensors")
            (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.distributed.barrier()


def gathered(lora: Lora) -> dict[str, torch.Tensor]:
    """Both matrices of every adapter, whole and under PEFT's names, on rank 0's host; elsewhere nothing. Collective."""
    return _on_first_rank(dict(matrices(lora)))


def adapter_config(modules: list[str], lora: LoraConfig, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json for adapters on `modules` (within a layer, as in "mlp.experts.up_proj").

    Mixtures of experts: transformers 5 holds experts as one tensor, and PEFT 0.20 and later rewrites expert adapters
    and each of these names in target_modules to fit. Linears outside the experts must not be rewritten; they are
    named by their weight instead.
    """
    mixture = any(".experts." in module or ".shared_experts." in module for module in modules)
    outside = [module for module in modules if mixture and _is_mlp(module) and ".experts." not in module]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules if module not in outside}),
        "target_parameters": [f"{module}.weight" for module in outside] or None,
    }


def _is_mlp(module: str) -> bool:
    return module.rsplit(".", 1)[-1] in _MLP


def _on_first_rank(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every rank's tensors, on rank 0's host: all adapters of a large mixture of experts outgrow a device."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shapes: list[Any] = [None] * world
    torch.distributed.all_gather_object(shapes, [(name, tuple(t.shape), t.dtype) for name, t in own.items()])
    if rank != 0:
        for tensor in own.values():
            torch.distributed.send(tensor.cpu().contiguous(), 0)
        return {}
    own = {name: tensor.cpu() for name, tensor in own.items()}
    for source in range(1, world):
        for name, shape, dtype in shapes[source]:
            assert name not in own, f"{name} comes from two ranks"
            own[name] = torch.empty(shape, dtype=dtype, device="cpu")
            torch.distributed.recv(own[name], source)
    return own
