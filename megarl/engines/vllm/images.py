"""Images and videos as inputs of vLLM: prepared patches and expanded placeholder tokens.

An image of several time steps is a video for vLLM; one time step of a video is an image, which gives the same values.
megarl prepares each image once, so that engine and trainer read the same values. vLLM's multi-modal processing (image
processor, placeholder expansion) is bypassed: its values could differ from the trainer's in the last bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from megarl.hf.families import has_tower
from megarl.types import SampleImages

_NAMES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Names of patches and grids in vLLM's models."""


def has_prepared_inputs() -> bool:
    """Return True if the installed vLLM accepts processed inputs."""
    return _prepared_input() is not None


def _prepared_input() -> Any:
    """Return vLLM's function that wraps processed inputs, `mm_input` (until 0.18 `mm_inputs`); None if missing."""
    for module, name in (("vllm.inputs.engine", "mm_input"), ("vllm.multimodal.inputs", "mm_inputs")):
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return getattr(importlib.import_module(module), name)
    return None


def image_args(model_config: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return additional EngineArgs for a model that reads images; {} for other models.

    Raises RuntimeError if vLLM cannot load such models.
    """
    if not has_tower(model_config):
        return {}
    if importlib.util.find_spec("torchvision") is None:
        raise RuntimeError(
            f"vLLM imports torchvision for a {model_config.get('model_type')} model, and it is not installed. Install "
            "the torchvision that belongs to the installed torch (on a CPU: its CPU build; one made for CUDA breaks vLLM)"
        )
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,  # its processors need a tokenizer, although nothing is tokenized
        # Memory is not measured with vLLM's longest video. The limit does not hold for prepared inputs.
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,  # nothing is processed
    }
    if device == "cpu":
        arguments["skip_mm_profiling"] = True  # memory is an argument, not measured
    if "mm_device_do_normalize" in {field.name for field in dataclasses.fields(EngineArgs)}:
        arguments["mm_device_do_normalize"] = False  # patches are already normalized
    return arguments


def image_tokens(images: SampleImages, merge: int) -> list[int]:
    """Return the number of tokens of each image; `merge` x `merge` patches become a token."""
    return [int(count) // merge**2 for count in images.grids.prod(1)]


def check_images(images: SampleImages, tokens: tuple[int, ...], merge: int) -> None:
    """Raise ValueError if `tokens` lack the placeholders of `images`."""
    for start, count in zip(images.starts.tolist(), image_tokens(images, merge), strict=True):
        placeholders = tokens[start : start + count]
        if len(placeholders) != count or len(set(placeholders)) != 1:
            raise ValueError(
                f"an image takes {count} placeholder tokens from index {start} on; the prompt of {len(tokens)} has "
                f"{list(placeholders)} there"
            )


def engine_input(tokens: tuple[int, ...], images: SampleImages, merge: int) -> Any:
    """Return the input of vLLM's `add_request` for a prompt with images or videos."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    ends = np.cumsum(images.grids.prod(1))
    patches = [images.pixels[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    seconds = images.seconds_or_zeros
    counts, hashes = image_tokens(images, merge), _hashes(images, patches, seconds)
    fields: dict[str, Any] = {}
    values: dict[str, Any] = {}
    chosen = {
        "image": np.flatnonzero(images.grids[:, 0] == 1).tolist(),
        "video": np.flatnonzero(images.grids[:, 0] > 1).tolist(),
    }
    chosen = {kind: indices for kind, indices in chosen.items() if indices}
    for kind, indices in chosen.items():
        pixels, grids = _NAMES[kind]
        values[pixels] = torch.from_numpy(np.concatenate([patches[i] for i in indices]))
        values[grids] = torch.from_numpy(images.grids[indices])
        fields[pixels] = MultiModalFieldConfig.flat_from_sizes(kind, values[grids].prod(1))
        fields[grids] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
        if kind == "video":  # in double precision, as the trainer multiplies them
            values["second_per_grid_ts"] = torch.from_numpy(seconds[indices])
            fields["second_per_grid_ts"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
    starts = images.starts.tolist()
    return _prepared_input()(
        list(tokens),
        MultiModalKwargsItems.from_hf_inputs(values, fields),
        {kind: [hashes[i] for i in indices] for kind, indices in chosen.items()},
        {
            kind: [PlaceholderRange(offset=starts[i], length=counts[i]) for i in indices]
            for kind, indices in chosen.items()
        },
    )


def _hashes(images: SampleImages, patches: list[np.ndarray], seconds: np.ndarray) -> list[str]:
    """Return a hash of each image's content and times, the key of vLLM's caches."""
    return [
        hashlib.blake2b(part.tobytes() + grid.tobytes() + step.tobytes(), digest_size=16).hexdigest()
        for part, grid, step in zip(patches, images.grids, seconds, strict=True)
    ]
