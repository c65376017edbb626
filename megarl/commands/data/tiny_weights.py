"""Names and shapes of the checkpoint tensors of real architectures, and random values for them.

NumPy draws the values of a tensor from the seed and its name, so they are the same on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megarl.atomic_files import give_default_mode
from megarl.hf.config import text_fields
from megarl.hf.families import family_of, has_tower, has_zero_centered_norms
from megarl.hf.families.sizes import tensors

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_weights(path: Path, config: Config, seed: int, norm_spread: float) -> None:
    """Write random tensors for `config` to a safetensors file.

    The standard deviation is `initializer_range` for matrices, and `norm_spread` for norms and biases. Norms have the mean 1, or 0
    if the model adds 1 to their weights. Twice as large norms would enlarge rounding errors tenfold.
    Raises ValueError for an unsupported `model_type`.
    """
    from safetensors.numpy import save_file

    tensors = {}
    config = text_fields(config)
    adds_1 = has_zero_centered_norms(config)
    for name, shape in shapes(config):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) > 1:
            tensors[name] = noise * np.float32(config["initializer_range"])
        else:
            tensors[name] = noise * np.float32(norm_spread) + np.float32(_has_mean_1(name, adds_1))
    save_file(tensors, path, metadata={"format": "pt"})
    give_default_mode(path)


def _has_mean_1(name: str, adds_1: bool) -> bool:
    """Return whether a vector is a norm with a mean of 1. adds_1: the model adds 1 to its norms, except in delta nets."""
    norm = not name.endswith("bias") and ("norm" in name or name.endswith("ln_q.weight"))
    return norm and (not adds_1 or name.endswith("linear_attn.norm.weight"))


def shapes(config: Config) -> Shapes:
    """Iterate over the tensors of the checkpoint as (published name, shape [out, in])."""
    config = text_fields(config)
    family, layers = family_of(config), config["num_hidden_layers"]
    yield from tensors(family, config)
    predicted = (config.get("num_nextn_predict_layers") or 0) if family.numbered_prediction else 0
    for layer in range(layers, layers + predicted):
        last = f"model.layers.{layers - 1}."  # a multi-token prediction layer is a decoder layer with more tensors
        for name, shape in tensors(family, config):
            if name.startswith(last):
                yield name.replace(last, f"model.layers.{layer}."), shape
        yield from _token_prediction(config, f"model.layers.{layer}.")
    if has_tower(config):
        tower = _deepstack_tower if family.deepstack else _vision_tower
        yield from tower(config["vision_config"])


def _token_prediction(config: Config, prefix: str) -> Shapes:
    """Iterate over the additional tensors of a multi-token prediction layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}{name}.weight", (hidden,)
    yield f"{prefix}eh_proj.weight", (hidden, 2 * hidden)
    for name in ("embed_tokens", "shared_head.head"):
        yield f"{prefix}{name}.weight", (vocab, hidden)


def _vision_tower(vision: Config) -> Shapes:
    """Iterate over the tensors of Qwen2.5-VL's vision tower."""
    hidden, width, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    yield "visual.patch_embed.proj.weight", _patches(vision)
    for layer in range(vision["depth"]):
        prefix = f"visual.blocks.{layer}."
        yield from ((f"{prefix}{name}.weight", (hidden,)) for name in ("norm1", "norm2"))
        yield from _biased(f"{prefix}attn.qkv", hidden, 3 * hidden)
        yield from _biased(f"{prefix}attn.proj", hidden, hidden)
        yield from _biased(f"{prefix}mlp.gate_proj", hidden, width)
        yield from _biased(f"{prefix}mlp.up_proj", hidden, width)
        yield from _biased(f"{prefix}mlp.down_proj", width, hidden)
    yield "visual.merger.ln_q.weight", (hidden,)
    yield from _biased("visual.merger.mlp.0", merged, merged)
    yield from _biased("visual.merger.mlp.2", merged, out)


def _deepstack_tower(vision: Config) -> Shapes:
    """Iterate over the tensors of Qwen3-VL's vision tower."""
    hidden, width, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged, taps = hidden * vision["spatial_merge_size"] ** 2, range(len(vision["deepstack_visual_indexes"]))
    root = "model.visual."
    yield f"{root}patch_embed.proj.weight", _patches(vision)
    yield f"{root}patch_embed.proj.bias", (hidden,)
    yield f"{root}pos_embed.weight", (vision["num_position_embeddings"], hidden)
    norms = {f"{root}blocks.{layer}.norm{number}": hidden for layer in range(vision["depth"]) for number in (1, 2)}
    mergers = [f"{root}merger", *(f"{root}deepstack_merger_list.{tap}" for tap in taps)]
    norms |= {f"{merger}.norm": merged for merger in mergers[1:]} | {f"{mergers[0]}.norm": hidden}
    for name, size in norms.items():
        yield from ((f"{name}.{kind}", (size,)) for kind in ("weight", "bias"))
    for layer in range(vision["depth"]):
        block = f"{root}blocks.{layer}"
        yield from _biased(f"{block}.attn.qkv", hidden, 3 * hidden)
        yield from _biased(f"{block}.attn.proj", hidden, hidden)
        yield from _biased(f"{block}.mlp.linear_fc1", hidden, width)
        yield from _biased(f"{block}.mlp.linear_fc2", width, hidden)
    for merger in mergers:
        yield from _biased(f"{merger}.linear_fc1", merged, merged)
        yield from _biased(f"{merger}.linear_fc2", merged, out)


def _patches(vision: Config) -> tuple[int, ...]:
    """Return the shape of a tower's patch embedding."""
    size = vision["patch_size"]
    return vision["hidden_size"], vision.get("in_channels", 3), vision["temporal_patch_size"], size, size


def _biased(name: str, size_in: int, size_out: int) -> Shapes:
    yield f"{name}.weight", (size_out, size_in)
    yield f"{name}.bias", (size_out,)
