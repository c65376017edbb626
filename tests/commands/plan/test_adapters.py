"""The weights that a plan sends to engines for a model with adapters."""

from __future__ import annotations

from megarl.commands.plan.build import _links
from megarl.platform.device_table import device_named
from megarl.recipe.schema import Recipe

# With a vocabulary of 2**24 the base weights take 4.0 GiB: two embeddings of 2**24 x 64 numbers with 2 bytes. The layers
# add less than 0.1 GiB.
MODEL = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
MODEL |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 2**24}


def test_a_plan_counts_the_bytes_of_adapters() -> None:
    """A plan gives the bytes of a later update as numbers; a note gives the first update's and the device memory."""
    recipe = Recipe()
    recipe.lora.rank, recipe.lora.targets = 12, ["k_proj", "down_proj"]
    recipe.rollout.engines, recipe.rollout.tensor_parallel, recipe.cluster.placement = 2, 2, "disaggregated"
    unavailable = {"counts": None, "client": None}  # no subprocess counts parameters
    links, (note,) = _links(recipe, MODEL, device=device_named("H100"), **unavailable)  # type: ignore[arg-type]
    size = 2 * 12 * 2 * (64 + 64 + 64 + 96)  # 2 layers, rank 12, 2 bytes, sides of both linears
    assert (links.route, links.sent, links.received, links.total) == ("adapters", size, size, 4 * size)
    in_engine = size / 12 * 16  # vLLM allocates rank 16, the next that it supports
    assert "to engines: 4.0 GiB to each" in note
    assert note.endswith(f"not counted: {in_engine / 2**20:.1f} MiB at most.")
    for changed, name in ((MODEL | {"num_experts": 8, "num_experts_per_tok": 2}, "H100"), (MODEL, "910B")):
        links, (note,) = _links(recipe, changed, device=device_named(name), **unavailable)  # type: ignore[arg-type]
        assert links.route == "full" and note.startswith("weight_sync.adapters=auto: engines are sent merged weights, ")
