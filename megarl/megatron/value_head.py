"""The critic's value head: one linear layer from hidden states to a number, in the place of the output layer.

Its weight [1, h] stands whole on each tensor-parallel rank of the last stage. Hugging Face knows it as the
`score.weight` of a token classification model with one label, which is what a critic is exported as.
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

from megarl.megatron.batch import PackedStream
from megarl.megatron.output_heads import at_predicted_tokens, language_model

WEIGHT, BIAS = "score.weight", "score.bias"  # names of a token classification model's head
_LAYER = "output_layer.weight"  # Megatron's name of the parameter
_SPREAD = 0.1  # of the first values, about: the last norm leaves states of length sqrt(h)


@dataclass(frozen=True)
class ValueHead:
    """Values, float32.

    Entry t is the value of the state in which token t was chosen: from the row one place before it, as for
    log-probs. The first token of a sequence was not chosen and has 0.
    """

    def __call__(self, model: Any, hidden: torch.Tensor, stream: PackedStream) -> tuple[torch.Tensor]:
        weight = model.output_layer.weight
        values = (_rows(hidden, model.config).float() @ weight.float().T).squeeze(1)
        return (at_predicted_tokens(values, stream),)


class ValueLayer(torch.nn.Module):
    """What stands in a GPTModel for its output layer. Like that, it lets hidden states out (`hidden_states_out`
    gives it its forward), and `ValueHead` uses the weight."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # No `tensor_model_parallel` and no `sequence_parallel` mark: each rank computes the whole gradient, and
        # the gradient norm counts it once.
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))


def put_head(model: Any, *, post_process: bool, config: Any, **_: Any) -> None:
    """mbridge's callback for a GPTModel that was just made: the head goes in, on the last stage."""
    if post_process:
        language_model(model).output_layer = ValueLayer(config)


def untie(hf_config: Any) -> None:
    """A critic has no output layer that its embedding could be tied to. Before the bridge is made."""
    hf_config.tie_word_embeddings = False


def name_head(bridge: Any) -> None:
    """Let a bridge export the head under its own name, and not pad it like a vocabulary."""
    to_hf_name, to_hf_format = bridge._weight_name_mapping_mcore_to_hf, bridge._weight_to_hf_format
    bridge._weight_name_mapping_mcore_to_hf = lambda name: [WEIGHT] if name.endswith(_LAYER) else to_hf_name(name)
    bridge._weight_to_hf_format = lambda name, weight: (
        ([WEIGHT], [weight]) if name.endswith(_LAYER) else to_hf_format(name, weight)
    )


def load_weights(bridge: Any, chunks: list[Any], path: str, seed: int) -> None:
    """Load a Hugging Face directory, and the head: the directory's own, or one drawn from `seed`.

    Raises ValueError where the directory has a head of another form.
    """
    with _heads_away(chunks):
        bridge.load_weights(chunks, path)
    for layer in _heads(chunks):
        width = layer.weight.shape[1]
        stored = _stored_head(Path(path), width)
        head = stored if stored is not None else _first_head(width, seed)
        with torch.no_grad():
            layer.weight.copy_(head)


def _rows(hidden: torch.Tensor, config: Any) -> torch.Tensor:
    """All rows of this context-parallel rank [share, h] on each tensor-parallel rank.

    Each of these computes the same values from them, so the gradient of a rank's own rows is whole as it is.
    """
    if config.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden


def _heads(chunks: list[Any]) -> list[ValueLayer]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, ValueLayer)]


@contextmanager
def _heads_away(chunks: list[Any]) -> Iterator[None]:
    """Without the heads, which most directories do not have."""
    models = [model for model in map(language_model, chunks) if model.post_process]
    layers = [model._modules.pop("output_layer") for model in models]
    try:
        yield
    finally:
        for model, layer in zip(models, layers, strict=True):
            model.output_layer = layer


def _first_head(width: int, seed: int) -> torch.Tensor:
    """Drawn on the host, and so the same on every device and in every layout."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, width, generator=generator) * (_SPREAD / width**0.5)


def _stored_head(directory: Path, width: int) -> torch.Tensor | None:
    """The head [1, h] of a Hugging Face directory, where it has one."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cpu") as reader:
            found.update({name: reader.get_tensor(name) for name in (WEIGHT, BIAS) if name in reader.keys()})  # noqa: SIM118
    if WEIGHT not in found:
        return None
    shape = list(found[WEIGHT].shape)
    if shape != [1, width]:
        raise ValueError(
            f"{directory} has a {WEIGHT} of shape {shape}, and a critic's is [1, {width}]: it was trained to tell "
            f"{shape[0]} labels apart. Name a critic, or a model without such a head (a new one is drawn then)."
        )
    if BIAS in found and found[BIAS].any():
        raise ValueError(
            f"{directory} has a {BIAS} of {found[BIAS].tolist()}, and a critic's head has none. Remove it from the "
            "directory where values may be off by that constant at the start; training corrects it."
        )
    return found[WEIGHT]
