"""Attention that Transformer Engine lacks on a device is refused before the first pass, with the ways out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.commands.doctor.recipe import needs_of
from megarl.errors import RecipeError
from megarl.hf import published
from megarl.megatron.extra_settings import attention_needs
from megarl.megatron.model import build as models
from megarl.platform import cuda
from megarl.platform.cpu import CPUPlatform
from megarl.platform.transformer_engine import attention_problem
from megarl.recipe.schema import Recipe

A100, L40S, H100, B200, RTX = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)


def recipe_with(extra: dict[str, Any] | None = None, packing: bool = True, deterministic: bool = False) -> Recipe:
    recipe = Recipe()
    recipe.megatron.extra, recipe.megatron.packing = extra or {}, packing
    recipe.train.deterministic = deterministic
    return recipe


@pytest.mark.parametrize(
    ("model", "capability", "installed", "words"),
    [
        # packed sequences
        ("Qwen3-8B", H100, None, ""),
        ("Qwen3-8B", B200, None, ""),
        ("Qwen3-8B", A100, None, "packed sequences on compute capability 8.0"),
        ("Qwen3-8B", RTX, None, "packed sequences on compute capability 12.0"),
        ("Qwen3-8B", A100, "2.8.3", ""),
        ("Qwen3-8B", L40S, "2.8.4", "2.8.4 is installed"),
        # heads of two sizes
        ("Moonlight-16B-A3B", H100, None, ""),
        ("Moonlight-16B-A3B", B200, None, ""),
        ("Moonlight-16B-A3B", A100, "2.8.3", "flash-attn does not have it either"),
        # heads of 256 elements
        ("gemma-3-1b-it", H100, None, ""),
        ("gemma-3-1b-it", B200, None, "heads of 256 and 256 elements"),
        ("gemma-3-1b-it", B200, "2.8.3", ""),
        ("gemma-3-1b-it", A100, "2.8.3", ""),
        ("gemma-3-1b-it", L40S, "2.8.3", "flash-attn does not have it either"),
        ("GLM-4.7-Flash", H100, None, ""),
        ("GLM-4.7-Flash", B200, "2.8.3", "heads of 256 and 256 elements"),
        # attention sinks
        ("gpt-oss-20b", A100, "2.8.3", "flash-attn does not have it either"),
    ],
)  # fmt: skip
def test_models_and_devices(model: str, capability: tuple[int, int], installed: str | None, words: str) -> None:
    needs = attention_needs(recipe_with(), published.read(model))
    assert needs is not None
    problem = attention_problem(needs, capability, installed)
    assert (problem is None) == (words == "")
    assert problem is None or words in problem[0]


def test_settings_decide() -> None:
    def problem(model: str, capability: tuple[int, int], installed: str | None = None, **settings: Any) -> Any:
        needs = attention_needs(recipe_with(**settings), published.read(model))
        return needs and attention_problem(needs, capability, installed)

    assert problem("Qwen3-8B", A100, packing=False) is None
    assert "; or set megatron.packing=false, or uninstall" in problem("Qwen3-8B", A100)[1]
    assert "train.deterministic" in problem("Qwen3-8B", B200, deterministic=True)[0]
    assert problem("Qwen3-8B", B200, "2.8.3", deterministic=True) is None
    assert problem("Qwen3-8B", H100, deterministic=True) is None
    assert problem("Qwen3-8B", A100, extra={"attention_backend": "unfused"}) is None
    assert problem("GLM-4.7-Flash", B200, "2.8.3")[1].startswith(
        "set megatron.extra.attention_backend=flash; or uninstall"
    )
    assert problem("GLM-4.7-Flash", B200, "2.8.3", extra={"attention_backend": "flash"}) is None
    assert problem("gpt-oss-20b", A100, packing=False) is None
    assert problem("DeepSeek-V3.2", A100) is None  # megarl's sparse attention


def test_trainers_refuse_at_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: A100)
    monkeypatch.setattr(cuda.CUDAPlatform, "device", lambda _: torch.device("cuda", 0))
    recipe, model = recipe_with(), published.read("Qwen3-8B")
    recipe.model.path = "models/Qwen3-8B"
    with pytest.raises(
        RecipeError, match=r"model\.path = [\s\S]*packed sequences[\s\S]*install flash-attn 2\.8\.3[\s\S]*native layers"
    ):
        models._check_engine_attention(recipe, model, cuda.CUDAPlatform())
    models._check_engine_attention(recipe, model, CPUPlatform())


def test_the_doctor_reads_the_model(tmp_path: Path) -> None:
    recipe = Recipe()
    recipe.model.path = str(tmp_path)
    assert needs_of(recipe, {}).attention is None
    (tmp_path / "config.json").write_text("{}")
    assert needs_of(recipe, {}).attention is None
    (tmp_path / "config.json").write_text(json.dumps(published.read("Moonlight-16B-A3B")))
    needs = needs_of(recipe, {}).attention
    assert needs is not None and (needs.query_size, needs.value_size, needs.backend) == (192, 128, "fused")
