"""A small model with FP8 block-scaled weights, as DeepSeek-V3 is published."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
BLOCK = 4
ATTENTION = {
    "model.layers.0.q": (8, 12),
    "model.layers.0.kv": (6, 10),
    "model.layers.1.mlp": (1, 4),
    "model.layers.2.eh": (3, 13),
}


def quantized(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize by DeepSeek's description: each block divided by its largest absolute value over 448, rounded to e4m3."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block), -(-columns // block))
    codes = torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = weight[place] / scales[i, j]
    return codes.to(torch.float8_e4m3fn), scales


def write_fp8_model(folder: Path) -> None:
    """Write three files with a float32 bias and a multi-token-prediction layer.

    A matrix and its scales are in different files.
    """
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in ATTENTION.items():
        weight = torch.randn(shape, generator=generator) * 0.05
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantized(weight, BLOCK)
    tensors["model.embed_tokens.weight"] = torch.randn(5, 3, generator=generator).to(torch.bfloat16)
    tensors["model.layers.1.gate.bias"] = torch.randn(7, generator=generator)
    files = {name: 1 for name in tensors}
    files |= {name: 2 for name in tensors if ".1." in name or ".kv" in name}
    files |= {name: 3 for name in tensors if ".2." in name or name == "model.layers.0.kv.weight_scale_inv"}
    placed = {name: f"model-0000{number}-of-00003.safetensors" for name, number in files.items()}
    for file in {*placed.values()}:
        save_file({name: tensors[name] for name in tensors if placed[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    config = {"model_type": "deepseek_v3", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    config |= {"torch_dtype": "float8", "num_nextn_predict_layers": 1, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "configuration_deepseek.py", "consolidated.bin"):
        (folder / name).write_text(f"{name} as published")
