"""Settings of the families with gated delta nets."""

from __future__ import annotations

import pytest

from megarl.hf import published
from megarl.hf.config import text_fields
from megarl.hf.families import family_of


@pytest.mark.parametrize("model", ["Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B-Instruct"])
def test_checkpoints_name_each_layer(model: str) -> None:
    """Otherwise Megatron stores a parameter of all layers as one tensor, which attention in some of them does not fill."""
    config = published.read(model)
    family = family_of(config)
    assert family.delta_nets and family.settings(text_fields(config))["hetereogenous_dist_checkpoint"] is True
