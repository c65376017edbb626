"""The critic's value head: one linear layer from hidden states to a scalar, in place of the output layer.

Its weight [1, h] is replicated on the tensor-parallel ranks of the last stage. In Hugging Face format it is the
`score.weight` of a token classification model with one label; a critic is exported as such a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from safetensors import safe_open

from megarl.hf.families.rows import row
from megarl.hf.families.slices import copy
from megarl.megatron.batch import PackedStream
from megarl.megatron.heads.output_heads import at_predicted_tokens, language_model

WEIGHT, BIAS = "score.weight", "score.bias"  # names of a token classification model's head
_LAYER = "output_layer.weight"  # Megatron's parameter name
_SPREAD = 0.1  # approximate std of initial values: after the last norm, hidden states have length sqrt(h)


@dataclass(frozen=True)
class ValueHead:
    """Values V(s_t), float32.

    Entry t is the value of the state in which token t was chosen, from the row before it (as for log-probs). The first
    token of a sequence was not sampled: 0.
    """

    def __call__(self, model: Any, hidden: torch.Tensor, stream: PackedStream) -> tuple[torch.Tensor]:
        weight = model.output_layer.weight
        values = (_rows(hidden, model.config).float() @ weight.float().T).squeeze(1)
        return (at_predicted_tokens(values, stream),)


class ValueLayer(torch.nn.Module):
    """Replacement for a GPTModel's output layer.

    `hidden_states_out` sets its forward, which returns the hidden states; `ValueHead` reads the weight.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        # No `tensor_model_parallel` and no `sequence_parallel` mark: each rank computes the whole gradient, and
        # the gradient norm counts it once.
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))


def put_head(model: Any, *, post_process: bool, config: Any, **_: Any) -> None:
    """Replace the output layer of a newly built GPTModel on the last stage (an mbridge callback)."""
    if post_process:
        language_model(model).output_layer = ValueLayer(config)


def name_head(bridge: Any) -> None:
    """Make a bridge export the value head as `score.weight`."""
    bridge.critic_head = row(copy, _LAYER, WEIGHT)


def load_weights(bridge: Any, chunks: list[Any], path: str, seed: int) -> None:
    """Load a Hugging Face directory into a critic. The head comes from the directory, or is drawn from `seed`.

    Raises ValueError if the directory has a head of another shape, or one with a nonzero bias.
    """
    with _without_heads(chunks):
        bridge.load_weights(chunks, path)
    for layer in [module for chunk in chunks for module in chunk.modules() if isinstance(module, ValueLayer)]:
        width = layer.weight.shape[1]
        stored = _stored_head(Path(path), width)
        head = stored if stored is not None else _initial_head(width, seed)
        with torch.no_grad():
            layer.weight.copy_(head)


def _rows(hidden: torch.Tensor, config: Any) -> torch.Tensor:
    """Gather all rows of this context-parallel rank [share, h] on each tensor-parallel rank.

    All of them compute the same values, so the gradient of a rank's rows is already complete.
    """
    if config.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden


@contextmanager
def _without_heads(chunks: list[Any]) -> Iterator[None]:
    """Remove the value heads while loading: most directories have none."""
    models = [model for model in map(language_model, chunks) if model.post_process]
    layers = [model._modules.pop("output_layer") for model in models]
    try:
        yield
    finally:
        for model, layer in zip(models, layers, strict=True):
            model.output_layer = layer


def _initial_head(width: int, seed: int) -> torch.Tensor:
    """Draw the head [1, h] on the host, so it is equal on every device and in every layout."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, width, generator=generator) * (_SPREAD / width**0.5)


def _stored_head(directory: Path, width: int) -> torch.Tensor | None:
    """Return the head [1, h] of a Hugging Face directory; None if it has none."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cpu") as reader:
            tensors.update({name: reader.get_tensor(name) for name in (WEIGHT, BIAS) if name in reader.keys()})  # noqa: SIM118
    if WEIGHT not in tensors:
        return None
    shape = list(tensors[WEIGHT].shape)
    if shape != [1, width]:
        raise ValueError(
            f"{directory} has a {WEIGHT} of shape {shape}, and a critic's is [1, {width}]: it was trained to tell "
            f"{shape[0]} labels apart. Name a critic, or a model without such a head (a new head is drawn then)."
        )
    if BIAS in tensors and tensors[BIAS].any():
        raise ValueError(
            f"{directory} has a {BIAS} of {tensors[BIAS].tolist()}, and a critic's head has none. Remove it from the "
            "directory if values may be off by that constant at the start; training corrects it."
        )
    return tensors[WEIGHT]
