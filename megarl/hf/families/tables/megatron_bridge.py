"""Make a family's table from what Megatron-Bridge knows about a model. Pure: `megarl.megatron.megatron_bridge` reads the package.

Source: megatron/bridge/models/conversion of megatron-bridge 0.3.1. Its mappings are code that moves tensors; a table has only
slices. So only the classes in `_KINDS` become rows, and only fields of `_SAME`, `_FIXED`, `_TRAINERS` and `SETTINGS` may differ
from Megatron's defaults. Everything else is a reason against the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megarl.hf.config import experts_per_token, number_of_experts, text_fields
from megarl.hf.families.check import size_faults, unsupported_settings
from megarl.hf.families.settings import rotary_base, rotated_part, shared_width
from megarl.hf.families.sizes import head_size, parameters
from megarl.hf.families.slices import Config
from megarl.hf.families.tables.contents import LAYERS, SETTINGS
from megarl.hf.families.tables.family_table import FREE, FamilyTable, family_of_table

_MODULE = "megatron.bridge.models.conversion.param_mapping"
_KINDS = {
    "AutoMapping": "copy",
    "ColumnParallelMapping": "copy",
    "DirectMapping": "copy",
    "ReplicatedMapping": "copy",
    "RowParallelMapping": "copy",
    "GatedMLPMapping": "gate_up",
    "QKVMapping": "qkv",
}
_ORDER = {"gate_up": ("gate", "up"), "qkv": ("q", "k", "v")}
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_JOINED = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")  # several projections in one
_OTHERS_LAYERS = re.compile(r"^mtp\.|\.local_experts\.")  # not trained; Megatron's experts without grouped matrices
_PROVIDE = "megatron.bridge.models.gpt_provider.GPTModelProvider"
_SPECS = ("megatron.bridge.models.gpt_provider.default_layer_spec", "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec")  # fmt: skip

_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_func": ("torch.nn.functional.silu",),
    "add_bias_linear": (False,),
    "gated_linear_unit": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope", "yarn"),
    "moe_router_num_groups": (None, 1),
    "moe_router_group_topk": (None, 1),
}
"""Fields that must have one of these values: megarl's builder knows no other."""

_SAME: dict[str, Callable[[Config], Any]] = {
    "num_layers": lambda config: config.get("num_hidden_layers"),
    "hidden_size": lambda config: config.get("hidden_size"),
    "ffn_hidden_size": lambda config: config.get("intermediate_size"),
    "num_attention_heads": lambda config: config.get("num_attention_heads"),
    "num_query_groups": lambda config: config.get("num_key_value_heads") or config.get("num_attention_heads"),
    "vocab_size": lambda config: config.get("vocab_size"),
    "layernorm_epsilon": lambda config: config.get("rms_norm_eps"),
    "share_embeddings_and_output_weights": lambda config: bool(config.get("tie_word_embeddings")),
    "rotary_base": rotary_base,
}
_SAME_OF_EXPERTS: dict[str, Callable[[Config], Any]] = {
    "num_moe_experts": number_of_experts,
    "moe_router_topk": experts_per_token,
    "moe_ffn_hidden_size": lambda config: config.get("moe_intermediate_size") or config["intermediate_size"],
    "moe_shared_expert_intermediate_size": lambda config: shared_width(config) or None,
}
_SAME_OF_HEADS: dict[str, Callable[[Config], Any]] = {"kv_channels": head_size, "rotary_percent": rotated_part}
_SAME_OF_LATENT = {
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim",
}  # fmt: skip
"""Fields that megarl computes from config.json. Megatron-Bridge's value must equal megarl's."""

_CHECKED = ("hidden_act", "use_sliding_window", "sliding_window")  # by megarl, for every family

_TRAINERS = {
    "apply_rope_fusion", "async_tensor_model_parallel_allreduce", "attention_backend", "attention_dropout",
    "attention_softmax_in_fp32", "autocast_dtype", "bf16", "bias_activation_fusion", "bias_dropout_fusion", "cp_comm_type",
    "cross_entropy_fusion_impl", "cross_entropy_loss_fusion", "deallocate_pipeline_outputs", "fp16",
    "gradient_accumulation_fusion", "hf_model_id", "hidden_dropout", "init_method_std", "make_vocab_size_divisible_by",
    "masked_softmax_fusion", "moe_aux_loss_coeff", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_bias_update_rate",
    "moe_router_load_balancing_type", "moe_token_dispatcher_type", "mtp_loss_scaling_factor", "mtp_num_layers", "params_dtype",
    "persist_layer_norm", "seq_length", "should_pad_vocab",
    # Rotary scaling: megarl has transformers' frequencies, from config.json.
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings", "rope_scaling",
    "rope_scaling_factor", "rope_type", "rotary_scaling_factor",
    # Read apart from the others.
    "moe_layer_freq", "multi_latent_attention", "transformer_layer_spec",
}  # fmt: skip
"""Fields that do not describe the model, or that megarl's trainer sets."""


@dataclass(frozen=True)
class Translation:
    """A table, and the reasons against its use: empty if megarl can train the model with it."""

    table: FamilyTable
    reasons: list[str]


def translate(dump: dict[str, Any], config: Config) -> Translation:
    """Return the table of a model.

    dump: the output of `megarl.megatron.megatron_bridge.dump` for a model with a bridge. config: its config.json, with
    transformers' defaults.
    """
    provider, config = dump["provider"], text_fields(config)
    fields, latent = provider["fields"], bool(provider["fields"].get("multi_latent_attention"))
    rows, reasons = _rows(dump["mappings"])
    reasons += [f"{dump['bridge']}.{hook} changes tensors in code" for hook in dump["hooks"]]
    layers = _layers(fields, config)
    reasons += _class_faults(provider)
    if "vision_config" in config:
        reasons.append("the model has a vision tower")
    else:
        reasons += [*_field_faults(provider, config, latent), *_layer_faults(layers, fields)]
    fixed = {name: value for name, value in config.items() if name not in FREE}
    table = FamilyTable(
        model_type=config["model_type"],
        source=f"Megatron-Bridge {dump['version']} ({dump['bridge']})",
        rows=rows,
        layers=layers or "never",
        settings=_settings(provider),
        latent=latent,
        ties=bool(config.get("tie_word_embeddings")),
        biased=bool(fields.get("add_qkv_bias")),
        config=fixed,
        unread=sorted(fixed.keys() - {*dump["read"], *_CHECKED}),
    )
    sizes = [*size_faults(config)]
    if layers is not None and "vision_config" not in config:
        reasons += sizes or _model_faults(table, config)
    return Translation(table, reasons)


def _rows(mappings: list[dict[str, Any]]) -> tuple[list[list[Any]], list[str]]:
    """Return the rows of the mappings, and a reason for each mapping that has no row."""
    rows, reasons = [], []
    for mapping in mappings:
        parameter = mapping["parameter"]
        if _OTHERS_LAYERS.search(parameter):
            continue
        names = mapping["tensors"]
        kind = _KINDS.get(mapping["type"]) if mapping["module"] == _MODULE else None
        if kind == "copy" and parameter in _VOCABULARY:
            kind = "vocabulary"
        tensors = [names[part] for part in _ORDER[kind]] if kind in _ORDER else [names]
        if kind is None or (kind in ("copy", "vocabulary") and not isinstance(names, str)):
            reasons.append(f"{parameter}: {mapping['type']} cannot be expressed as slices")
        elif mapping["options"]:
            reasons.append(f"{parameter}: {mapping['type']} with {mapping['options']} reorders the tensor")
        elif kind == "copy" and parameter.endswith(_JOINED):
            reasons.append(
                f"{parameter}: {mapping['type']} stores projections as one tensor, in an order that it does not state"
            )
        else:
            numbered = [_numbered(name) for name in (parameter, *tensors)]
            if len({*map(_numbers, numbered)}) > 1 or any("*" in name for name in numbered):
                reasons.append(f"{parameter}: its wildcards are not the numbers of a layer and an expert")
            else:
                rows.append([kind, numbered[0], numbered[1:]])
    return rows, reasons


def _numbered(name: str) -> str:
    """Return a name with placeholders for the layer's and the expert's number in place of `*`."""
    name = re.sub(r"\blayers\.\*(?=\.)", "layers.{layer}", name)
    return re.sub(r"(?<=experts\.)\*(?=\.)|(?<=\.weight)\*$", "{expert}", name)


def _numbers(name: str) -> tuple[bool, bool]:
    return "{layer}" in name, "{expert}" in name


def _class_faults(provider: dict[str, Any]) -> Iterator[str]:
    if provider["provide"] != _PROVIDE:
        yield f"{provider['type']} builds the model in code ({provider['provide']}.provide)"
    spec = provider["fields"].get("transformer_layer_spec")
    if spec not in _SPECS:
        yield f"{provider['type']} uses a custom layer spec ({spec})"


def _field_faults(provider: dict[str, Any], config: Config, latent: bool) -> Iterator[str]:
    """Yield a reason for each field that differs from megarl's, or that megarl does not know."""
    fields, defaults = provider["fields"], provider["defaults"]
    same = {**_SAME, **(_SAME_OF_EXPERTS if number_of_experts(config) else {})}
    if latent:
        same |= {name: lambda config, key=key: config.get(key) for name, key in _SAME_OF_LATENT.items()}  # type: ignore[misc]
    else:
        same |= _SAME_OF_HEADS
    for name, value in fields.items():
        if name in _FIXED:
            if value not in _FIXED[name]:
                yield f"{name} is {value!r}: megarl's tables have {' or '.join(map(repr, _FIXED[name]))}"
        elif name in same:
            expected = same[name](config)
            # Megatron computes these two from the heads. 0.3.1 leaves Megatron's default where config.json has null, as for the
            # rank of queries of DeepSeek-V2-Lite, which has none.
            derived = value is None and name in ("num_query_groups", "kv_channels")
            derived = derived or (name == "q_lora_rank" and expected is None and value == defaults.get(name))
            if (value or None) != (expected or None) and not derived:
                yield f"{name} is {value!r}, and megarl reads {expected!r} from config.json"
        elif (
            name not in _TRAINERS
            and name not in SETTINGS
            and value != defaults.get(name)
            and not _of_latent(name, latent)
        ):
            yield f"{name} is {value!r}, which megarl's tables do not have"
    if number_of_experts(config) == 0 and fields.get("num_moe_experts"):
        yield f"num_moe_experts is {fields['num_moe_experts']!r}, and megarl finds no number of experts in config.json"


def _of_latent(name: str, latent: bool) -> bool:
    """Return whether a field has no meaning with latent attention: the size of a head."""
    return latent and name in ("kv_channels", "rotary_percent")


def _layers(fields: dict[str, Any], config: Config) -> str | None:
    """Return the name in `LAYERS` of the layers that are mixtures of experts; None if there is none."""
    count = config.get("num_hidden_layers") or 0
    pattern = fields.get("moe_layer_freq") if fields.get("num_moe_experts") else [0] * count
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(count)]
    fitting = [
        name for name, sparse in LAYERS.items() if [int(sparse(config, layer)) for layer in range(count)] == pattern
    ]
    if "after_the_first" in fitting and "first_k_dense_replace" in config:
        return "after_the_first"
    return fitting[0] if fitting else None


def _layer_faults(layers: str | None, fields: dict[str, Any]) -> Iterator[str]:
    if layers is None:
        yield f"moe_layer_freq is {fields.get('moe_layer_freq')!r}: megarl's tables have {', '.join(LAYERS)}"


def _settings(provider: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `SETTINGS` that differ from Megatron's defaults."""
    fields, defaults = provider["fields"], provider["defaults"]
    return {
        name: float(fields[name]) if kind is float else fields[name]
        for name, kind in SETTINGS.items()
        if name in fields and fields[name] is not None and fields[name] != defaults.get(name)
    }


def _model_faults(table: FamilyTable, config: Config) -> Iterator[str]:
    """Yield a reason for each parameter without a row, and for each setting of config.json that megarl refuses."""
    try:
        family = family_of_table(asdict(table))
    except ValueError as error:
        yield f"its table is not valid: {error}"
        return
    try:
        for _ in parameters(family, config):
            pass
    except ValueError as error:
        yield str(error)
    yield from (f"config.json asks for {setting}" for setting in unsupported_settings(family, config))
