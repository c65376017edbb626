"""Prepared images as inputs of vLLM, under both names in vLLM's versions: `mm_inputs` until 0.18, `mm_input` later."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megarl.engines.vllm import images
from megarl.types import SampleImages

PLACES = {"0.18": ("vllm.multimodal.inputs", "mm_inputs"), "0.32": ("vllm.inputs.engine", "mm_input"), "older": None}


@pytest.mark.parametrize("version", PLACES)
def test_prepared_inputs_of_each_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name in ("vllm", "vllm.inputs", "vllm.multimodal", "vllm.multimodal.inputs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", None)  # cannot be imported
    place = PLACES[version]

    def wrap(*arguments: Any) -> Any:
        return arguments

    if place is not None:
        module = ModuleType(place[0])
        setattr(module, place[1], wrap)
        monkeypatch.setitem(sys.modules, place[0], module)
    assert images.has_prepared_inputs() is (place is not None)
    assert images._prepared_input() is (wrap if place else None)


def test_caches_distinguish_contents_and_times() -> None:
    """vLLM's prefix cache would otherwise reuse the keys of a video at other positions."""
    patches = [np.ones((4, 3), np.float32), np.ones((4, 3), np.float32), np.zeros((4, 3), np.float32)]
    grids = np.array([[2, 2, 1], [2, 2, 1], [2, 2, 1]])
    both = SampleImages(np.concatenate(patches), grids, np.arange(3))
    first, same, other = images._hashes(both, patches, np.array([0.5, 0.5, 0.5]))
    assert first == same != other
    slow, fast, _ = images._hashes(both, patches, np.array([0.5, 0.25, 0.5]))
    assert slow == first != fast
    reshaped = SampleImages(both.pixels, grids[:, [0, 2, 1]], both.starts)
    assert images._hashes(reshaped, patches, np.array([0.5, 0.5, 0.5]))[0] != first


def test_an_image_of_several_steps_is_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of each kind are in token order; a video of one step is an image."""
    monkeypatch.setattr(images, "_prepared_input", lambda: lambda *arguments: arguments)
    pixels = np.arange(28, dtype=np.float32)[:, None]
    grids = np.array([[1, 2, 2], [3, 2, 2], [1, 2, 4], [1, 2, 2]])
    shown = SampleImages(pixels, grids, np.array([1, 3, 7, 11]), np.array([0.0, 0.7, 0.0, 0.7]))
    tokens, items, hashes, places = images.engine_input(tuple(range(13)), shown, 2)
    assert tokens == list(range(13))
    of_images, of_videos = items["image"], items["video"]
    assert [item["image_grid_thw"].data.tolist() for item in of_images] == [[1, 2, 2], [1, 2, 4], [1, 2, 2]]
    assert [item["pixel_values"].data[0].item() for item in of_images] == [0.0, 16.0, 24.0]
    (video,) = of_videos
    assert video["video_grid_thw"].data.tolist() == [3, 2, 2] and video["second_per_grid_ts"].data.item() == 0.7
    assert video["pixel_values_videos"].data[:, 0].tolist() == list(range(4, 16))
    assert [(place.offset, place.length) for place in places["image"]] == [(1, 1), (7, 2), (11, 1)]
    assert [(place.offset, place.length) for place in places["video"]] == [(3, 3)]
    assert len(hashes["image"]) == 3 and len(hashes["video"]) == 1
