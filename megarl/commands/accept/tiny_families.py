"""Four tiny models, one per family, and a batch for them. Their bits do not depend on versions of packages.

Weights and inputs are integer hashes of names and positions, not values of a library's random generator. Weights are
multiples of a power of two with at most seven significant bits, so float32 and bfloat16 have the same values. Head sizes
are the published ones, which the kernels of devices support.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.commands.data.tiny_model import COMMON, KINDS
from megarl.commands.data.tiny_tokenizer import EOS_ID, FIRST_IMAGE_ID, PAD_ID, VOCAB_LIMIT, make_tiny_tokenizer
from megarl.commands.data.tiny_weights import shapes

Config = dict[str, Any]

LENGTHS = (7, 13, 41, 5, 3, 15, 9, 3)  # uneven lengths of the batch's sequences
SKETCHES = 8  # random projections of a layer's output
IMAGE_START, IMAGE_END, IMAGE = FIRST_IMAGE_ID, FIRST_IMAGE_ID + 1, FIRST_IMAGE_ID + 2
IMAGES = {1: [(2, (4, 6))], 2: [(3, (8, 4)), (14, (6, 10))], 5: [(8, (4, 4))]}
"""Images of the VL family: index of the sequence -> (first token, (rows, columns) of patches) of each image."""
PATCH_VALUES, MERGE = 3 * 2 * 14 * 14, 2

_SIZES: Config = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1280,
    "bos_token_id": None,
}
_YARN: Config = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}


def _config(kind: str, **changed: Any) -> Config:
    """Return the tiny model of `megarl data` with larger sizes, and with the fields `changed`."""
    return {"model_type": kind, **COMMON, **KINDS.get(kind, {}), **_SIZES, **changed}


FAMILIES: dict[str, Config] = {
    "dense": _config("qwen3", head_dim=128),
    "moe": _config("qwen3_moe", head_dim=128, num_experts=8, moe_intermediate_size=128),
    "mla": _config(
        "deepseek_v3",
        q_lora_rank=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_scaling=_YARN,
    ),
    "vl": _config(
        "qwen2_5_vl",
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        hidden_size=256,
        num_attention_heads=2,
        rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
        use_sliding_window=False,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=IMAGE_END,
        image_token_id=IMAGE,
        video_token_id=FIRST_IMAGE_ID + 3,
        vision_config={
            "model_type": "qwen2_5_vl",
            "depth": 4,
            "hidden_size": 160,
            "intermediate_size": 192,
            "num_heads": 2,
            "out_hidden_size": 256,
            "patch_size": 14,
            "in_channels": 3,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
            "hidden_act": "silu",
            "tokens_per_second": 2,
        },
    ),
}


@dataclass(frozen=True)
class Picture:
    """One image of a sequence: `pixels` [patches, PATCH_VALUES] float32, `grid` (1, rows, columns) of patches."""

    start: int
    pixels: np.ndarray
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Sequence:
    """A sequence: tokens [L] int64, advantages [L] float32, and images."""

    tokens: np.ndarray
    advantages: np.ndarray
    images: tuple[Picture, ...] = ()


def hashed(name: str, count: int) -> np.ndarray:
    """Return `count` uint64 integers that only depend on `name` and position (splitmix64)."""
    state = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = state * np.uint64(0x9E3779B97F4A7C15) + np.uint64(zlib.crc32(name.encode()) << 20)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def exact_values(name: str, count: int) -> np.ndarray:
    """Return `count` float32 numbers: multiples of 1/64 in [-1, 1]."""
    return ((hashed(name, count) % np.uint64(129)).astype(np.int64) - 64).astype(np.float32) / np.float32(64)


def weights(family: str) -> dict[str, np.ndarray]:
    """Return the tensors of the family's checkpoint. Norms are about 1; a router's rows are large, so rounding does not
    change which experts are chosen."""
    tensors = {}
    for name, shape in shapes(FAMILIES[family]):
        values = exact_values(f"{family}:{name}", int(np.prod(shape))).reshape(shape)
        if "norm" in name or name.endswith("ln_q.weight"):
            tensors[name] = np.float32(1) + values * np.float32(0.5)
        elif len(shape) == 1:  # biases
            tensors[name] = values * np.float32(2**-6)
        elif name.endswith("mlp.gate.weight"):
            tensors[name] = values * np.float32(0.5)
        else:
            tensors[name] = values * np.float32(0.125)
    return tensors


def batch(family: str) -> list[Sequence]:
    """Return the sequences of the family's batch."""
    sequences = []
    for number, length in enumerate(LENGTHS):
        place = f"{family}:sequence {number}"
        tokens = 8 + (hashed(place, length) % np.uint64(VOCAB_LIMIT - 8)).astype(np.int64)
        advantages = exact_values(f"{place} advantages", length)
        pictures = []
        for start, (rows, columns) in IMAGES.get(number, []) if family == "vl" else []:
            count = rows * columns // MERGE**2
            tokens[start - 1], tokens[start : start + count], tokens[start + count] = IMAGE_START, IMAGE, IMAGE_END
            values = exact_values(f"{place} image {start}", rows * columns * PATCH_VALUES)
            pictures.append(Picture(start, values.reshape(rows * columns, PATCH_VALUES), (1, rows, columns)))
        sequences.append(Sequence(tokens, advantages, tuple(pictures)))
    return sequences


def sketch_signs(rows: np.ndarray, width: int) -> np.ndarray:
    """Return the signs [rows, SKETCHES, width] int8 that a layer's output is projected on, for these token indices."""
    bits = np.stack([hashed(f"sketch {row}", SKETCHES * width) for row in rows.tolist()]) >> np.uint64(17)
    return ((bits & np.uint64(1)).astype(np.int8) * 2 - 1).reshape(len(rows), SKETCHES, width)


def write_family(family: str, folder: Path) -> Path:
    """Write the family's Hugging Face directory below `folder`, unless it is there; returns it. Stages that run at a time
    may each call this: the directory appears whole."""
    from safetensors.numpy import save_file

    path = folder / family
    if (path / "config.json").exists():
        return path
    config = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=folder))
    make_tiny_tokenizer(partial, images="vision_config" in config)
    save_file(weights(family), partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}))
    (partial / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    partial.chmod(0o755)
    try:
        partial.rename(path)
    except OSError:  # another stage created it first
        if not (path / "config.json").exists():
            raise
        shutil.rmtree(partial)
    return path
