"""Adapters as a directory that PEFT reads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.atomic_files import atomic_directory, give_default_mode
from megarl.hf import hub
from megarl.hf.adapters import CONFIG, PREFIX, WEIGHTS
from megarl.megatron.lora.attach import Lora, matrices, trained_modules
from megarl.recipe.trainers import LoraConfig

_MLP = ("gate_proj", "up_proj", "down_proj")


def save_adapter(directory: Path, lora: Lora, base: str) -> None:
    """Write the adapters to `directory` atomically, on rank 0.

    Collective; rank 0's host memory holds all matrices meanwhile. `base`: path of the base model, for PEFT. A model of the hub
    is named there with its commit.
    """
    modules = trained_modules(lora)
    tensors = gather_adapters(lora)
    if torch.distributed.get_rank() == 0:
        named = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
        config = adapter_config(modules, lora.settings, base)
        with atomic_directory(directory) as partial:
            save_file(named, partial / WEIGHTS, metadata={"format": "pt"})
            give_default_mode(partial / WEIGHTS)
            (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    torch.distributed.barrier()


def load_adapter(lora: Lora, directory: Path) -> None:
    """Read this rank's shards of all adapters from a PEFT directory. Raises ValueError for a missing or unfitting matrix."""
    with safe_open(directory / WEIGHTS, framework="pt", device="cpu") as file:
        names = set(file.keys())

        def read(name: str) -> torch.Tensor:
            if name not in names:
                raise ValueError(f"lora.path: {directory / WEIGHTS} has no {name}, which lora.targets names")
            return file.get_tensor(name)

        for adapter in lora.adapters:
            for part in adapter.site.parts:
                for kind, matrices_of_kind in (("A", adapter.A), ("B", adapter.B)) if part.adapted else ():
                    of_modules = [read(f"{PREFIX}{module}.lora_{kind}.weight") for module in part.modules]
                    whole = torch.stack(of_modules) if adapter.site.experts else of_modules[0]
                    shard, matrix = adapter.shard(kind, whole), matrices_of_kind[part.name]
                    if shard.shape != matrix.shape:
                        raise ValueError(
                            f"lora.path: lora_{kind} of {part.modules[0]} in {directory / WEIGHTS} has shape "
                            f"{tuple(of_modules[0].shape)}, which does not fit the model: name an adapter of this model"
                        )
                    matrix.data.copy_(shard)


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
    on_hub = hub.name_of_folder(base)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if on_hub is None else on_hub.repo,
        "revision": None if on_hub is None else on_hub.revision,
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
