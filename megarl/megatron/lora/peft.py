"""Adapters as a directory that PEFT reads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.atomic_files import atomic_directory, give_default_mode
from megarl.megatron.lora.attach import Lora, matrices, trained_modules
from megarl.recipe.training import LoraConfig

_MLP = ("gate_proj", "up_proj", "down_proj")


def save_adapter(directory: Path, lora: Lora, base: str) -> None:
    """Write the adapters to `directory` atomically, on rank 0.

    Collective; rank 0's host memory holds all matrices meanwhile. `base`: path of the base model, for PEFT.
    """
    modules = trained_modules(lora)
    tensors = gather_adapters(lora)
    if torch.distributed.get_rank() == 0:
        named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        config = adapter_config(modules, lora.settings, base)
        with atomic_directory(directory) as partial:
            save_file(named, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            give_default_mode(partial / "adapter_model.safetensors")
            (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.distributed.barrier()


def gather_adapters(lora: Lora) -> dict[str, torch.Tensor]:
    """Return all adapter matrices under PEFT's names in rank 0's host memory; {} on other ranks. Collective."""
    return _on_first_rank(dict(matrices(lora)))


def adapter_config(modules: list[str], lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return PEFT's adapter_config.json for adapters on `modules` (names within a layer: "mlp.experts.up_proj").

    transformers 5 stores the experts of a mixture as one tensor. PEFT 0.20 and later rewrites expert adapters and the
    same names in target_modules accordingly. Linears outside the experts must not be rewritten, so they are listed by
    their weight in target_parameters.
    """
    mixture = any(".experts." in module or ".shared_experts." in module for module in modules)
    outside = [
        module for module in modules if mixture and module.rsplit(".", 1)[-1] in _MLP and ".experts." not in module
    ]
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


def _on_first_rank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Send every rank's tensors to rank 0's host: all adapters of a large mixture of experts do not fit a device."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shapes: list[Any] = [None] * world
    torch.distributed.all_gather_object(shapes, [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
    if rank != 0:
        for tensor in tensors.values():
            torch.distributed.send(tensor.cpu().contiguous(), 0)
        return {}
    gathered = {name: tensor.cpu() for name, tensor in tensors.items()}
    for source in range(1, world):
        for name, shape, dtype in shapes[source]:
            assert name not in gathered, f"{name} comes from two ranks"
            gathered[name] = torch.empty(shape, dtype=dtype, device="cpu")
            torch.distributed.recv(gathered[name], source)
    return gathered
