"""Needed slices equal the copies of the loader, for loaders with the operations of vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from megarl.engines.vllm.needed_slices import is_unused, needed_slices


class Model(torch.nn.Module):
    """Rank 1 of 2, fused and cut as vLLM has it."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.fused = torch.nn.Linear(6, 8, device=device)
        self.down = torch.nn.Linear(3, 4, bias=False, device=device)
        self.experts = torch.nn.Module()
        self.experts.weight = torch.nn.Parameter(torch.empty(2, 4, 6, device=device))
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.empty(6, dtype=torch.bfloat16, device=device))
        self.odd = torch.nn.Linear(6, 6, device=device)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "up":
                self.fused.weight.data.narrow(0, 4, 4).copy_(weight.narrow(0, 4, 4))
            elif name == "bias":
                self.fused.bias.data[4:].copy_(weight.chunk(2)[1])
                self.fused.bias.data[:4].fill_(0)
            elif name == "down":
                self.down.weight.data.copy_(weight[:, 3:])
            elif name == "expert":
                self.experts.weight.data[1].copy_(weight)
            elif name == "norm":
                self.norm.weight.data.copy_(weight)
            elif name == "transposed":
                self.odd.weight.data.copy_(weight.t())
            elif name == "beside":
                self.odd.bias.data.copy_(weight)
            elif name == "cleared":  # a bias that only rank 0 adds
                self.odd.bias.data.copy_(weight.zero_())
            elif name == "scaled":
                self.odd.bias.data.copy_(weight * 2)
            elif name == "renamed":
                dict(self.named_parameters())["of another name"].data.copy_(weight)
            elif name == "read":
                self.odd.bias.data.fill_(weight.max().item())


TENSORS = [
    ("up", (8, 6), "float32"),
    ("bias", (8,), "float32"),
    ("down", (4, 6), "float32"),
    ("expert", (4, 6), "float32"),
    ("norm", (6,), "float32"),
    ("unknown", (2, 2), "float32"),
]


def test_needed_slices_equal_the_loaders_copies() -> None:
    """Copying the slices gives the loader's parameters."""
    expected, got = Model("cpu"), Model("cpu")
    values = {name: torch.randn(shape) for name, shape, _ in TENSORS}
    with torch.no_grad():
        for parameter in [*expected.parameters(), *got.parameters()]:
            parameter.zero_()
        expected.load_weights(values.items())
    described = needed_slices(Model(), TENSORS)
    assert "unknown" not in described.tensors and not described.whole
    assert dict(zip(described.parameters, described.dtypes, strict=True))["norm.weight"] == "bfloat16"
    parameters = dict(got.named_parameters())
    for tensor, row, column, rows, columns, parameter, offset, stride in described.slices.tolist():
        matrix = values[described.tensors[tensor]]
        matrix = matrix if matrix.dim() == 2 else matrix[None]
        part = parameters[described.parameters[parameter]].data.as_strided((rows, columns), (stride, 1), offset)
        part.copy_(matrix[row : row + rows, column : column + columns])
    for name, value in expected.named_parameters():
        assert torch.equal(parameters[name], value), name


@pytest.mark.parametrize(
    "odd", [("transposed", (6, 6), "float32"), ("scaled", (6,), "float32"), ("cleared", (6,), "float32")]
)
def test_layers_that_the_loader_transforms_are_sent_whole(odd: tuple) -> None:
    described = needed_slices(Model(), [*TENSORS, ("beside", (6,), "bfloat16"), odd])
    assert described.whole == {odd[0], "beside"}
    assert {"up", "down"} <= set(described.tensors)
    number = described.parameters.index("beside")
    assert described.dtypes[number] == "bfloat16", "the loader receives the trainer's dtype"


def test_a_loader_that_reads_values_is_refused() -> None:
    with pytest.raises(ValueError, match="at read it needs tensor values"):
        needed_slices(Model(), [*TENSORS, ("read", (6,), "float32")])


def test_a_parameter_that_the_model_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="has no parameter 'of another name', into which renamed is loaded"):
        needed_slices(Model(), [*TENSORS, ("renamed", (6,), "float32")])


class Strict(Model):
    """A model with a loader that looks a parameter up before it reads the first tensor."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        dict(self.named_parameters())["rotary"]


@pytest.mark.parametrize("tensors", [[], TENSORS])
def test_a_parameter_that_is_missing_before_the_first_tensor_is_named(tensors: list) -> None:
    with pytest.raises(ValueError, match="has no parameter 'rotary', which its loader looks up at its start"):
        needed_slices(Strict(), tensors)


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("model.layers.2.eh_proj.weight", True),  # a prediction layer after the last
        ("model.language_model.layers.2.enorm.weight", True),
        ("model.layers.1.mlp.gate.weight", False),
        ("model.vision_model.encoder.layers.5.mlp.fc1.weight", False),  # the tower's layers are others
        ("lm_head.weight", True),
        ("model.embed_tokens.weight", False),
    ],
)
def test_unused_tensors_are_text_layers_after_the_last_and_a_tied_output_layer(name: str, unused: bool) -> None:
    config = SimpleNamespace(num_hidden_layers=2, tie_word_embeddings=True)
    assert is_unused(name, config) is unused
