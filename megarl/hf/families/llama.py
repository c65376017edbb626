"""Llama 2 and 3, Mistral."""

from __future__ import annotations

from typing import Any

from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.rows import ATTENTION, DENSE, MODEL
from megarl.hf.families.slices import Config


def _settings(config: Config) -> dict[str, Any]:
    return {}


def _unsupported(config: Config) -> Refusals:
    yield bool(config.get("mlp_bias")), "mlp_bias: true"
    window = config.get("sliding_window", 4096) if config["model_type"] == "mistral" else None
    yield window is not None, f"sliding_window: {window}"


LLAMA = Family((*MODEL, *ATTENTION, *DENSE), _settings, unsupported=_unsupported, adapters=True)
