"""The multi-token-prediction layer of a tiny model's checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_mtp_layer(file: Path, number: int, *, ernie: bool = False) -> None:
    """Add DeepSeek-V3's multi-token-prediction layer after the last layer, or `ernie`'s; transformers writes neither.

    A decoder layer like the last, two norms and the projection of their outputs, the shared head's norm, and copies of
    embedding and output layer.
    """
    tensors = load_file(file)
    if ernie:
        save_file({**tensors, **_of_ernie(tensors)}, file, metadata={"format": "pt"})
        return
    last, prefix = f"model.layers.{number - 1}.", f"model.layers.{number}."
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(last)}
    tensors.update({name.replace(last, prefix): torch.randn_like(tensor) for name, tensor in layer.items()})
    embedding, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = torch.randn_like(norm)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(len(norm), 2 * len(norm))
    tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})


def _of_ernie(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ERNIE 4.5's prediction layer: a dense decoder layer like the first, two norms and a projection."""
    first, norm = "model.layers.0.", tensors["model.norm.weight"]
    block = {
        name.replace(first, "model.mtp_block.0."): torch.randn_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(first)
    }
    norms = {f"model.mtp_{part}_norm.0.weight": torch.randn_like(norm) for part in ("emb", "hidden")}
    return {**block, **norms, "model.mtp_linear_proj.0.weight": torch.randn(len(norm), 2 * len(norm))}
