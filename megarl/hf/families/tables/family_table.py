"""A family's table in a JSON file: rows, settings, and the config.json for which they were read.

The table travels inside the model's configuration, in the field `FIELD`: every process that reads config.json for a recipe puts
it there (`with_table`), and `family_of` makes the family from it. Only the recipe may name a table: readers of config.json
drop a field of that name (`without_table`), since the file may come with a downloaded model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from megarl.hf.config import CHOSEN, DENSE_FIRST, EXPERTS, SHARED
from megarl.hf.families.family import Family, Refusals
from megarl.hf.families.rows import TableRow
from megarl.hf.families.settings import latent_attention, mixture, shared_width
from megarl.hf.families.slices import Config
from megarl.hf.families.tables.contents import KINDS, LAYERS, check_table

FIELD = "megarl_table"  # in a model's configuration
COMPARE = "python -m benchmarks.numerics.family_table"

FREE = {
    # Sizes: megarl computes Megatron's fields and shapes from them.
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "moe_intermediate_size", "num_nextn_predict_layers", "kv_lora_rank", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", *EXPERTS, *CHOSEN, *SHARED, *DENSE_FIRST,
    # megarl reads these for every family, and refuses unsupported values.
    "model_type", "tie_word_embeddings", "layer_types", "mlp_layer_types", "max_window_layers", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "attention_dropout", "quantization_config", "compression_config", FIELD,
    # No influence on log-probs.
    "_attn_implementation", "_experts_implementation", "_name_or_path", "architectures", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
    "return_dict", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Fields of config.json that may differ from the ones that a table was read for."""


@dataclass(frozen=True)
class FamilyTable:
    """The contents of a file: what a `Family` needs, as values. `contents.check_table` checks them."""

    model_type: str
    source: str  # for people: the package, its version and its class
    rows: list[list[Any]]  # [kind, Megatron's parameter, checkpoint tensors]
    layers: str  # a name in LAYERS
    settings: dict[str, Any]
    latent: bool
    ties: bool
    biased: bool
    config: dict[str, Any]
    """Fields of config.json, with transformers' defaults, that must have these values: all except `FREE`."""

    unread: list[str]
    """Fields of `config` that Megatron-Bridge did not read: its model is the same for every value."""


def read_table(value: str) -> dict[str, Any]:
    """Return the table that a value of `model.table` names, checked. `value`: a JSON file, or its text.

    Raises ValueError that names the file and the fault.
    """
    is_text = value.lstrip().startswith("{")
    try:
        content = json.loads(value if is_text else Path(value).expanduser().read_text(encoding="utf-8"))
        check_table(content)
    except (OSError, ValueError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{'its text' if is_text else value} is not a family table: {cause}") from error
    return dict(content)


def table_text(value: str) -> str:
    """Return the text of the table that a value of `model.table` names, in one line. Raises ValueError as `read_table` does."""
    return json.dumps(read_table(value))


def to_json(table: FamilyTable) -> str:
    """Return the text of the file, with a row in each line."""
    content = asdict(table)
    rows = ",\n  ".join(json.dumps(row) for row in content.pop("rows"))
    return json.dumps(content, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'


def without_table(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the field `FIELD`."""
    return {name: value for name, value in hf_config.items() if name != FIELD}


def with_table(hf_config: dict[str, Any], table: dict[str, Any] | None) -> dict[str, Any]:
    """Return config.json with the table in it, in place of one that the file brings. `table`: of the recipe; None: no table.

    Raises ValueError if the table is of another model type.
    """
    if table is None:
        return without_table(hf_config)
    if hf_config.get("model_type") != table["model_type"]:
        raise ValueError(
            f"model.table is the table of {table['model_type']} models, and this is a {hf_config.get('model_type')!r} model. "
            "Leave the key out, or write the table of this model: `megarl model table MODEL --out FILE`"
        )
    return {**hf_config, FIELD: table}


def with_critic_table(hf_config: dict[str, Any], table: dict[str, Any] | None) -> dict[str, Any]:
    """Return a critic's config.json, with the policy's table in it if that is the table of the critic's model type."""
    fits = table is not None and table["model_type"] == hf_config.get("model_type")
    return with_table(hf_config, table if fits else None)


def table_notice(table: Mapping[str, Any]) -> str:
    """Return the notice at the start of a run with a table from a file."""
    fields = ", ".join(f"{name}={table['config'].get(name)!r}" for name in table["unread"])
    return (
        f"model.table: the table of {table['model_type']} models is from {table['source']}. megarl has not compared it with "
        f"transformers: `{COMPARE} MODEL --table FILE` does, in a clone of megarl"
        + (f". Of config.json, neither reads {fields}" if fields else "")
    )


def table_digest(table: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of what a table says about the model: all fields but `source` and `unread`, which are for people."""
    content = {name: value for name, value in table.items() if name not in ("source", "unread")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def family_of_table(table: Mapping[str, Any]) -> Family:
    """Return the family that a table describes. Raises ValueError for a table that is not well formed."""
    return _family(json.dumps(table, sort_keys=True))


@lru_cache(maxsize=8)
def _family(text: str) -> Family:
    content = json.loads(text)
    check_table(content)
    table = FamilyTable(**content)
    return Family(
        tuple(TableRow(KINDS[kind], parameter, tuple(tensors)) for kind, parameter, tensors in table.rows),
        partial(_settings, table),
        sparse=LAYERS[table.layers],
        unsupported=partial(_unsupported, table),
        rotary=("default", "yarn") if table.latent else ("default", "linear", "llama3", "yarn"),
        latent=table.latent,
        ties=table.ties,
        biased=table.biased,
        carried=(),
        origin=f"the table from {table.source}",
    )


def _settings(table: FamilyTable, config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if table.layers != "never":
        settings |= mixture(config)
    if width := shared_width(config):
        settings["moe_shared_expert_intermediate_size"] = width
    if table.latent:
        settings |= latent_attention(config)
    return {**settings, **table.settings}


def _unsupported(table: FamilyTable, config: Config) -> Refusals:
    """Refuse values of config.json for which the table was not read."""
    sparse = LAYERS[table.layers]
    kinds = [sparse(config, layer) for layer in range(config["num_hidden_layers"])]
    other = {*(config.get("layer_types") or ())} - {
        "full_attention",
        "sliding_attention",
    }  # check.py refuses the latter
    yield bool(other), f"layer_types: {', '.join(sorted(other))}"
    listed = config.get("mlp_layer_types")
    yield (
        listed is not None and [kind == "sparse" for kind in listed] != kinds,
        f"mlp_layer_types: {listed} (layers: {table.layers})",
    )
    for name, value in config.items():
        if name not in FREE:
            known = f"{table.config[name]!r} in its table" if name in table.config else "absent from its table"
            yield name not in table.config or table.config[name] != value, f"{name}: {value!r} ({known})"
    yield config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"
