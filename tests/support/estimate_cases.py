"""A device, a model and recipes with round numbers, for estimates checked by hand."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megarl.commands.plan.count.types import EngineRank
from megarl.hf.shape import Attention, ModelShape
from megarl.platform.device_table import Device
from megarl.recipe.schema import Recipe

DEVICE = Device(
    name="round",
    source="a test",
    memory=1.0,
    flops=2e12,
    bandwidth=2e9,
    link=2e9,
    network=2e8,
    host_link=2e9,
    per_node=4,
    host_memory=16,
    train_share=0.5,
    prefill_share=0.5,
    decode_share=0.5,
    link_share=0.5,
    layer_seconds=0.0,
    host_network=1e8,
)
"""1e12 FLOP/s, 1e9 bytes/s of memory, links and the host, 1e8 over the network, 5e7 between hosts."""

ATTENTION = Attention(weights=100, per_pair=4, per_cached_pair=6, cached=8, keys_and_values=8, pieces=2, least=100)
DENSE = ModelShape(
    hidden=10,
    output=1000,
    tied=False,
    attention=ATTENTION,
    dense=300,
    shared=0,
    expert=0,
    experts=0,
    chosen=0,
    sparse=(False,) * 4,
)
SPARSE = ModelShape(
    hidden=10,
    output=1000,
    tied=True,
    attention=ATTENTION,
    dense=0,
    shared=20,
    expert=50,
    experts=8,
    chosen=2,
    sparse=(True,) * 4,
)
QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}


def rank(cache: int) -> EngineRank:
    """An engine rank with a KV cache of `cache` bytes, 1,000 bytes per token."""
    return EngineRank(**{entry.name: 1 for entry in fields(EngineRank)} | {"cache_per_token": 1000.0, "cache": cache})


def recipe(**settings: Any) -> Recipe:
    """A recipe with these settings; __ in a keyword stands for a dot."""
    recipe = Recipe()
    for name, value in settings.items():
        section, _, key = name.rpartition("__")
        owner: Any = recipe
        for part in section.split("__") if section else ():
            owner = getattr(owner, part)
        assert hasattr(owner, key), name
        setattr(owner, key, value)
    return recipe
