"""Rows of a family's table."""

from __future__ import annotations

import pytest

from megarl.hf.families import FAMILIES


def test_a_missing_row_names_the_file_of_the_family() -> None:
    family = FAMILIES["minimax_m2"]
    assert family.row_of("decoder.layers.3.pre_mlp_layernorm.weight").tensors == (
        "model.layers.3.post_attention_layernorm.weight",
    )
    with pytest.raises(
        ValueError, match=r"families\.mixtral has no row for .* decoder\.layers\.3\.unknown: add one \(docs"
    ):
        family.row_of("decoder.layers.3.unknown")
