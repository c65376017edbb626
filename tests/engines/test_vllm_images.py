"""Prepared images under both names that vLLM versions have for them: `mm_inputs` until 0.18, `mm_input` later."""

import sys
from types import ModuleType
from typing import Any

import pytest

from megarl.engines.vllm import images

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
