"""Compare megarl's models with the recorded calls of MindSpeed (tests/fixtures/mindspeed_calls) without MindSpeed."""

from __future__ import annotations

from typing import Any

from tests.support.mindspeed_calls import RELIED, recorded_calls

NEWEST = "0.16.0"


def check_config(chunks: list[Any]) -> None:
    """Assert that the model's configuration has every field that MindSpeed's replacement modules read."""
    config = chunks[0].config
    if config.multi_latent_attention:
        (read,) = (
            recorded_calls(NEWEST)[r.key] for r in RELIED if r.reads and r.name == "multi_latent_attention_init_impl"
        )
        missing = [name for name in read if not hasattr(config, name)]
        assert not missing, f"MindSpeed's latent attention reads {missing}, which {type(config).__name__} lacks"
        assert config.max_position_embeddings == config.original_max_position_embeddings
    for layer in (module for chunk in chunks for module in chunk.modules() if hasattr(module, "core_attention")):
        # MindSpeed's attention takes the mask type from this field alone, and "causal" where it is absent.
        of_layer, of_config = (
            layer.core_attention.mask_type.name,
            getattr(layer.config, "attention_mask_type", "causal"),
        )
        assert of_config == of_layer or of_layer == "padding_causal", (of_layer, of_config)
