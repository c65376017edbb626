"""Build models of a family through mbridge; load Hugging Face weights without a conversion, and export them, by its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mbridge.core import LLMBridge
from mbridge.core.util import unwrap_model
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.hf.config import text_fields
from megarl.hf.families.family import Family, sparse_layers
from megarl.hf.families.rows import TableRow
from megarl.hf.families.settings import rotary_base, rotary_scaling, rotated_part
from megarl.hf.families.sizes import head_size
from megarl.hf.families.slices import ParameterShard, Stored, as_matrix, copy
from megarl.hf.families.stacks import in_parameter_order, in_stored_order
from megarl.megatron.model import gated_delta_net, post_norms, rotary_kinds, sparse_attention, wide_norms
from megarl.megatron.model.tensor_reader import TensorReader
from megarl.megatron.moe import biased_softmax

_EXPERTS = ".mlp.experts.linear_fc"
_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""By the word in a family's settings."""

PartialTensors = dict[str, tuple[torch.Tensor, int]]
"""Partial expert stacks by name, and their number of missing elements."""


class TableWeights:
    """The part of an mbridge bridge that knows names and places of weights, from a family's table.

    mbridge's bridges read and gather weights in code for each model. Here the family's table locates each parameter in the
    checkpoint, and load, export and weight sync follow it.
    """

    family: Family
    fields: dict[str, Any]  # config.json, from `text_fields`
    mpu: Any  # mbridge's ParallelStates: sizes, ranks and groups
    critic_head: TableRow | None = None  # in place of the output layer's row

    def row_of(self, parameter: str) -> TableRow:
        """Return the row of a Megatron parameter with global numbers. Raises ValueError if the table has none."""
        row = self.family.row_of(parameter)
        if parameter.endswith("output_layer.weight"):
            if self.critic_head is not None:
                return self.critic_head
            if self.fields.get("tie_word_embeddings"):
                embedding = f"{self.family.prefix}embedding.word_embeddings.weight"
                return TableRow(row.kind, parameter, self.family.by_parameter[embedding].tensors)
        return row

    def shard_of(self, parameter: str, weight: Any) -> ParameterShard:
        """Return this rank's part of a parameter."""
        dim = _shard_dim(parameter, weight)
        if dim is None:
            return ParameterShard()
        if _EXPERTS in parameter:
            return ParameterShard(self.mpu.etp_rank, self.mpu.etp_size, dim, _expert_number(parameter))
        return ParameterShard(self.mpu.tp_rank, self.mpu.tp_size, dim)

    def slices_of(self, parameter: str, weight: torch.Tensor) -> list[tuple[str, Stored]]:
        """Return (checkpoint tensor, the slices of it that `weight` holds) for each of a parameter's tensors."""
        row = self.row_of(parameter)
        places = row.kind(self.fields, tuple(weight.shape), self.shard_of(parameter, weight))
        return list(zip(row.tensors, places, strict=True))

    def global_names(self, model: Any, *, experts: bool = True) -> dict[str, str]:
        """Return the global name of each parameter of a chunk; with `experts`, with global expert numbers too."""
        model = unwrap_model(model)
        renamed = _layer_prefixes(model)
        names = {}
        for name in model.state_dict():
            if "_extra_state" in name:
                continue
            layer = next((prefix for prefix in renamed if name.startswith(prefix)), None)
            names[name] = renamed[layer] + name.removeprefix(layer) if layer else name
            if experts and _EXPERTS in name:
                names[name] = self._with_expert(names[name], self.mpu.ep_rank)
        return names

    def _with_expert(self, name: str, rank: int) -> str:
        """Return `name` with its local expert number replaced by the global one of expert-parallel rank `rank`."""
        experts_of_rank: int = self.config.num_moe_experts // self.mpu.ep_size  # type: ignore[attr-defined]
        prefix, number = _split_number(name)
        return f"{prefix}{int(number) + rank * experts_of_rank}"

    def load_weights(self, models: Sequence[Any], weights_path: str) -> None:
        """Read this rank's slices of a Hugging Face directory. Needs no other rank.

        Raises ValueError if a tensor is missing or has another shape than the model.
        """
        # The names are read first: Megatron makes routing biases float32 when a router's state_dict is read.
        with TensorReader(Path(weights_path)) as reader, torch.no_grad():
            for model in map(unwrap_model, models):
                names = self.global_names(model)
                for name, weight in checkpoint_parameters(model):
                    self._load(reader, names[name], weight)

    def _load(self, reader: TensorReader, parameter: str, weight: torch.Tensor) -> None:
        kind = self.row_of(parameter).kind
        # Rows that pad the vocabulary stay 0.
        loaded = in_stored_order(kind, torch.zeros(weight.shape, dtype=weight.dtype)).contiguous()
        flat = loaded.view(-1)
        for tensor, place in self.slices_of(parameter, weight):
            reader.check_shape(tensor, place.shape)
            for row, column, rows, columns, offset, stride in place.slices:
                target = flat.as_strided((rows, columns), (stride, 1), offset)
                target.copy_(reader.matrix(tensor, row, column, rows, columns))
        weight.data.copy_(in_parameter_order(kind, loaded))

    def export_weights(self, models: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the checkpoint, on every rank. Collective: exhaust it on every rank.

        Raises RuntimeError if the parameters have only a part of a tensor.
        """
        models = list(map(unwrap_model, models))
        partial: PartialTensors = {}
        for weight, description in _over_stages(self.mpu, models, self._descriptions(models)):
            yield from self._gather_parameter(description, weight, partial)
        for name, (tensor, missing) in partial.items():
            raise RuntimeError(
                f"{name} lacks {missing} of its {tensor.numel()} elements: no parameter of the model has them, so the table of "
                "the model's family does not fit its checkpoint (docs/add_a_model.md)"
            )

    def _descriptions(self, models: Sequence[Any]) -> list[_Description]:
        descriptions = []
        for model in models:
            names = self.global_names(model, experts=False)
            # Reading a weight merges its adapter: skip the merge, since descriptions need only shapes.
            unmerged = model.without_merging() if hasattr(model, "without_merging") else model
            for name, weight in checkpoint_parameters(unmerged):
                dim = _shard_dim(names[name], weight)
                descriptions.append(_Description(names[name], tuple(weight.shape), weight.dtype, dim))
        return descriptions

    def _gather_parameter(
        self, description: _Description, weight: torch.Tensor, partial: PartialTensors
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the shards of a parameter and yield its checkpoint tensors."""
        name, dim = description.name, description.dim or 0
        if _EXPERTS not in name:
            group, ranks = (None, 1) if description.dim is None else (self.mpu.tp_group, self.mpu.tp_size)
            yield from self._merge_shards(name, _gather(weight, group, ranks), dim, partial)
            return
        for rank, of_rank in enumerate(_gather(weight, self.mpu.ep_group, self.mpu.ep_size)):
            shards = _gather(of_rank, self.mpu.etp_group, self.mpu.etp_size)
            yield from self._merge_shards(self._with_expert(name, rank), shards, dim, partial)

    def _merge_shards(
        self, parameter: str, shards: list[torch.Tensor], dim: int, partial: PartialTensors
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Copy the shards of a parameter into its checkpoint tensors, and yield the complete ones. Updates `partial`."""
        row = self.row_of(parameter)
        of_shards = [
            row.kind(self.fields, tuple(shard.shape), ParameterShard(rank, len(shards), dim, _expert_number(parameter)))
            for rank, shard in enumerate(shards)
        ]
        for tensor, places in zip(row.tensors, zip(*of_shards, strict=True), strict=True):
            if row.kind is copy and len(shards) == 1:
                yield tensor, shards[0]
                continue
            whole, missing = partial.pop(tensor, (None, 0))
            if whole is None:
                whole = torch.empty(places[0].shape, dtype=shards[0].dtype, device=shards[0].device)
                missing = whole.numel()
            matrix = whole.view(as_matrix(whole.shape))
            for shard, place in zip(shards, places, strict=True):
                flat = in_stored_order(row.kind, shard.detach()).reshape(-1)
                for first, column, rows, columns, offset, stride in place.slices:
                    part = flat.as_strided((rows, columns), (stride, 1), flat.storage_offset() + offset)
                    matrix[first : first + rows, column : column + columns] = part
                    missing -= rows * columns
            if missing:  # a stack of experts, until the last expert
                partial[tensor] = whole, missing
            else:
                yield tensor, whole


class FamilyBridge(TableWeights, LLMBridge):
    """mbridge's bridge for text models of a family: it builds GPTModels from the family's settings."""

    # Fields that some models do not have: the width of a dense layer (experts alone), dropout (check.py refuses others than 0).
    _CONFIG_MAPPING: ClassVar[dict[str, Any]] = {
        **LLMBridge._CONFIG_MAPPING,
        "ffn_hidden_size": ("intermediate_size", None),
        "attention_dropout": ("attention_dropout", 0.0),
    }

    def __init__(self, family: Family, hf_config: Any, **arguments: Any) -> None:
        self.family, self.fields = family, text_fields(hf_config.to_dict())
        self.TransformerConfigClass = MLATransformerConfig if family.latent else TransformerConfig
        super().__init__(hf_config, **arguments)

    def _build_config(self) -> Any:
        settings = self.family.settings(self.fields)
        if "num_moe_experts" in settings:
            settings["moe_layer_freq"] = sparse_layers(self.family, self.fields)
        if (name := settings.get("activation_func")) is not None:
            settings["activation_func"] = _ACTIVATIONS[name]
        if (factor := self._rotary()[1]) != 1.0:
            settings["softmax_scale"] = factor**2 * head_size(self.fields) ** -0.5
        section = "text_config" if hasattr(self.hf_config, "text_config") else None
        config = self._build_base_config(text_config_key=section, **settings)
        if self.family.latent:
            # The field's name before Megatron 0.14. A platform that replaces latent attention may read it: see RELIED in the
            # platform's recorded calls.
            config.max_position_embeddings = config.original_max_position_embeddings
        return config

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.fields["vocab_size"],
            "max_sequence_length": self.fields["max_position_embeddings"],
            "position_embedding_type": "rope",
            "rotary_base": rotary_base(self.fields),
            "rotary_percent": 1.0 if self.family.latent else rotated_part(self.fields),
        }

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        spec = super()._get_transformer_layer_spec(vp_stage)
        if self.family.biased_softmax:
            biased_softmax.install(spec.layer_specs)
        if self.family.wide_norms:
            wide_norms.install(spec.layer_specs)
        if self.family.rotary_kinds:
            rotary_kinds.install(spec.layer_specs)
        if self.family.post_norms:
            post_norms.install(spec.layer_specs, gpt_layer_specs.TESpecProvider())
        if self.family.indexer:
            sparse_attention.install(self.fields, spec.layer_specs, interleaved=self.family.indexer == "interleaved")
        if self.family.delta_nets:
            first = get_transformer_layer_offset(self.config, vp_stage)
            gated_delta_net.install(self.fields, spec.layer_specs, first, gpt_layer_specs.TESpecProvider())
        return spec

    def _model_provider(self, post_model_creation_callbacks: list[Callable[..., None]]) -> Any:
        callbacks = [self._scale_rotary, self._scale_embeddings, *post_model_creation_callbacks]
        return super()._model_provider(callbacks)

    def _scale_rotary(self, model: Any, **_: Any) -> None:
        """Give the model the rotary frequencies of its scaling, from transformers' functions."""
        frequencies, _factor = self._rotary()
        if frequencies is not None:
            rotary = model.rotary_pos_emb
            rotary.inv_freq = frequencies.to(rotary.inv_freq)

    def _scale_embeddings(self, model: Any, **_: Any) -> None:
        """Multiply embeddings by the square root of the hidden size, rounded to the model's dtype, if the family does."""
        if self.family.scaled_embeddings and model.pre_process:
            scale = torch.tensor(self.fields["hidden_size"] ** 0.5, dtype=self.dtype, device="cpu").item()
            model.embedding.register_forward_hook(lambda _module, _inputs, output: output * scale)

    def _rotary(self) -> tuple[torch.Tensor | None, float]:
        """Return scaled rotary frequencies [rotated size / 2], and the factor by which scaling stretches cosines and sines.

        The frequencies are None where Megatron's own are right.

        Megatron has llama3's frequencies with fixed constants, and does not apply the factor. We multiply `softmax_scale` by
        its square instead, which is the same where the whole head is rotated.
        """
        kind = rotary_scaling(self.fields)["rope_type"]
        if self.family.rotary_kinds:
            with torch.device("cpu"):
                return rotary_kinds.frequencies(self.fields), 1.0
        if kind == "default" or self.family.latent:
            return None, 1.0
        with torch.device("cpu"):  # the planner's tensors hold no values
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](self.hf_config, device="cpu")
        return frequencies, factor


@dataclass(frozen=True)
class _Description:
    """A parameter of one pipeline stage, as all stages need to know it."""

    name: str  # with global layer and local expert numbers
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None  # see `_shard_dim`


def _shard_dim(parameter: str, weight: Any) -> int | None:
    """Return the dimension in which tensor-parallel ranks shard a parameter; None if each rank has all of it."""
    if _EXPERTS in parameter:
        return int("linear_fc2" in parameter)
    return weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None


def _split_number(parameter: str) -> tuple[str, str]:
    """Split a parameter's name before the number of its expert, which is "" if it has none."""
    prefix = parameter.rstrip("0123456789")
    return prefix, parameter[len(prefix) :]


def _expert_number(parameter: str) -> int:
    """Return the number of the expert in a parameter's name, 0 if it has none."""
    return int(_split_number(parameter)[1] or 0)


def checkpoint_parameters(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an unwrapped chunk that a checkpoint stores: parameters, and buffers (routing biases, indexers)."""
    names = set()
    for name, weight in chunk.named_parameters():
        names.add(name)
        yield name, weight
    for name, value in chunk.state_dict().items():
        stored = "expert_bias" in name or ".indexer." in name
        if stored and "_extra_state" not in name and name not in names:
            yield name, value


def _layer_prefixes(model: Any) -> dict[str, str]:
    """Return prefix of a layer in this chunk -> prefix with the layer's number in the whole model."""
    language = getattr(model, "language_model", None)
    decoder, prefix = (model.decoder, "") if language is None else (language.decoder, "language_model.")
    return {
        f"{prefix}decoder.layers.{number}.": f"{prefix}decoder.layers.{layer.layer_number - 1}."
        for number, layer in enumerate(decoder.layers)
    }


def _over_stages(
    mpu: Any, models: Sequence[Any], descriptions: list[_Description]
) -> Iterator[tuple[torch.Tensor, _Description]]:
    """Yield each stage's parameters on all stages, in the same order."""
    of_stages: list[list[_Description]] = [descriptions]
    if mpu.pp_size > 1:
        of_stages = [[]] * mpu.pp_size
        dist.all_gather_object(of_stages, descriptions, group=mpu.pp_group)
    weights = (weight for model in models for _, weight in checkpoint_parameters(model))
    for stage, of_stage in enumerate(of_stages):
        for description in of_stage:
            if stage == mpu.pp_rank:
                weight = next(weights).detach()
            else:
                weight = torch.empty(description.shape, dtype=description.dtype, device=torch.cuda.current_device())
            if mpu.pp_size > 1:
                dist.broadcast(weight, dist.get_global_rank(mpu.pp_group, stage), group=mpu.pp_group)
            yield weight, description


def _gather(weight: torch.Tensor, group: Any, ranks: int) -> list[torch.Tensor]:
    if ranks == 1:
        return [weight]
    parts = [torch.empty_like(weight) for _ in range(ranks)]
    dist.all_gather(parts, weight.contiguous(), group=group)
    return parts
