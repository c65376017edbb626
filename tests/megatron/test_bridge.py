"""The export of a bridge, with parameters of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.hf.families.family import Family
from megarl.hf.families.rows import TableRow
from megarl.hf.families.stacks import expert_stack
from megarl.megatron.model.bridge import TableWeights

PARAMETER = "decoder.layers.0.mlp.experts.linear_fc2.weight"
STACK = TableRow(
    expert_stack,
    "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
    ("model.layers.{layer}.mlp.experts.down_proj",),
)


def chunk(experts: int) -> Any:
    """Return a chunk of one layer; its expert n has the value n everywhere."""
    parameters = {f"{PARAMETER}{expert}": torch.full((3, 2), float(expert)) for expert in range(experts)}
    layers = [SimpleNamespace(layer_number=1)]
    return SimpleNamespace(
        decoder=SimpleNamespace(layers=layers),
        named_parameters=lambda: iter(parameters.items()),
        state_dict=lambda: parameters,
    )


def exported(chunk: Any, experts: int) -> dict[str, torch.Tensor]:
    bridge: Any = TableWeights()
    bridge.family, bridge.fields = Family((STACK,), lambda _: {}), {"num_experts": experts}
    bridge.config = SimpleNamespace(num_moe_experts=experts)
    bridge.mpu = SimpleNamespace(
        pp_size=1, pp_rank=0, tp_size=1, tp_group=None, ep_rank=0, ep_size=1, ep_group=None, etp_size=1, etp_group=None
    )
    return dict(bridge.export_weights([chunk]))


def test_a_stack_is_exported_when_its_last_expert_has_been_gathered() -> None:
    weights = exported(chunk(experts=4), experts=4)
    assert list(weights) == ["model.layers.0.mlp.experts.down_proj"]
    assert weights["model.layers.0.mlp.experts.down_proj"].tolist() == [[[n] * 2] * 3 for n in range(4)]


def test_a_tensor_of_which_the_model_has_only_a_part_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"experts\.down_proj lacks 6 of its 24 elements"):
        exported(chunk(experts=3), experts=4)
