"""Identity of a checkpoint: its model, initial weights and data, which a resumed run must share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from megarl.errors import RecipeError
from megarl.hf.config import text_fields
from megarl.hf.families.tables.family_table import FIELD, table_digest
from megarl.recipe.data import DataConfig
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import LoraConfig, ModelConfig

# Fields of config.json that identify a model: each determines the size or number of tensors.
_SIZES = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "n_routed_experts", "num_local_experts",
    "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace",
    "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "layer_types", "full_attention_interval", "mlp_only_layers",
    "decoder_sparse_step", "mlp_layer_types", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "moe_num_experts", "moe_num_shared_experts", "moe_layer_start_index",
    "moe_layer_end_index", "moe_layer_interval",
)  # fmt: skip

CONTENTS = "contents of the training data"  # key of `data_digest`; checkpoints of earlier versions do not have it
_START = "weights of lora.path"
_TABLE = "model.table"  # digest of the family's table; absent without one, and in checkpoints of earlier versions
_WHOLE_BYTES = 16 << 20  # weight files up to this size are hashed completely
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of larger files: evenly spaced samples, the header with names and shapes included


def identity_of(
    recipe: Recipe, model: dict[str, Any], critic: dict[str, Any] | None, rows: dict[str, int]
) -> dict[str, Any]:
    """Settings and digests that a checkpoint's data position, seeds and tensors depend on.

    `model`, `critic`: contents of config.json (no critic: None). `rows`: rows per training data set. Reads weight files.
    """
    return {
        "train.source": recipe.train.source,
        "train.seed": recipe.train.seed,
        "data.shuffle": recipe.data.shuffle,
        "data.prompts_per_step": recipe.data.prompts_per_step,
        "rollout.samples_per_prompt": recipe.rollout.samples_per_prompt,
        "data.curriculum": recipe.data.curriculum,
        "data.curriculum_epochs": recipe.data.curriculum_epochs,
        "data.train_files": [Path(file).name for file in recipe.data.train_files],
        "data.mix": {
            name: {"files": [Path(file).name for file in part.files], "weight": part.weight}
            for name, part in recipe.data.mix.items()
        },
        "rows of the training data": rows,
        "model": _model_identity(recipe.model, model),
        "critic": None if critic is None else _model_identity(critic_view(recipe).model, critic),
        "lora": _lora_identity(recipe.lora) if recipe.lora.rank else None,
    }


def data_digest(data: DataConfig) -> str:
    """Return the SHA-256, in hex, of the contents of the training files in order, and of `data.columns`.

    Raises OSError for unreadable files.
    """
    digest = hashlib.sha256(repr(sorted(data.columns.items())).encode() if data.columns else b"")
    for file in [*data.train_files, *(file for part in data.mix.values() for file in part.files)]:
        digest.update(f"{Path(file).stat().st_size}/".encode())
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def weights_digest(directory: Path) -> str:
    """SHA-256, in hex, of the directory's *.safetensors: names, sizes, and complete or sampled contents.

    Training changes nearly every weight, so samples distinguish the weights of two models. They cannot detect a change
    of a few numbers. 160 files of a large model take 2,600 reads. Raises OSError for unreadable files.
    """
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_BYTES:
                digest.update(stream.read())
                continue
            for sample in range(_SAMPLES):
                stream.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def saved_identity(checkpoint: Path) -> dict[str, Any]:
    """Identity of the run that wrote the checkpoint."""
    return json.loads((checkpoint / "controller.json").read_text())["identity"]


def saved_provenance(checkpoint: Path) -> dict[str, Any]:
    """Provenance of the start that wrote the checkpoint; empty for checkpoints of earlier versions of megarl."""
    provenance: dict[str, Any] = json.loads((checkpoint / "controller.json").read_text()).get("provenance", {})
    return provenance


def check_identity(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Raise RecipeError, with the key that differs, if `checkpoint` does not have the run's `identity`."""
    saved = saved_identity(checkpoint)
    if not {*identity} - {CONTENTS} <= {*saved} or "weights" not in saved["model"]:
        raise RecipeError(
            "train.resume",
            f"the checkpoint {checkpoint} was written by an earlier megarl and lacks a part of its identity",
            "export it with that version, and start a new run (another name) from the exported weights",
        )
    _check_model(checkpoint, saved["model"], identity["model"], "model.path")
    if bool(saved["critic"]) != bool(identity["critic"]):
        before, now = ("a critic (algorithm.advantage=gae)", "none") if saved["critic"] else ("no critic", "one")
        raise RecipeError(
            "algorithm.advantage",
            f"the checkpoint {checkpoint} was written with {before}, and this run has {now}",
            "set it back, or start a new run (another name) from exported weights",
        )
    if identity["critic"]:
        _check_model(checkpoint, saved["critic"], identity["critic"], "critic.model_path")
    starts = [(each["lora"] or {}).get(_START) for each in (saved, identity)]
    if saved["lora"] and identity["lora"] and starts[0] != starts[1]:
        raise RecipeError(
            "lora.path",
            f"the checkpoint {checkpoint} started from {'other' if starts[0] else 'new'} adapters, which are its reference policy",
            "set it back" if starts[0] else "leave it out, or start a new run (another name)",
        )
    if saved["lora"] != identity["lora"]:
        settings = " ".join(f"lora.{name}={value}" for name, value in (saved["lora"] or {"rank": 0}).items())
        raise RecipeError(
            "lora.rank",
            f"the checkpoint {checkpoint} was trained with {settings}",
            f"set {settings}, or start a new run (another name) from exported weights",
            value=(identity["lora"] or {"rank": 0})["rank"],
        )
    if saved.get(CONTENTS, identity.get(CONTENTS)) != identity.get(CONTENTS):
        raise RecipeError(
            "data.train_files",
            f"the rows of {', '.join(identity['data.train_files']) or 'data.mix'} have changed since {checkpoint} was "
            "written, so its data position would refer to other rows",
            "restore the files, or start a new run (another name) from exported weights",
        )
    for key, value in identity.items():
        if key not in ("model", "critic", "lora", CONTENTS) and saved[key] != value:
            raise RecipeError(
                key,
                f"the checkpoint {checkpoint} was written with {saved[key]!r}: its data position would refer to other rows",
                "set it back, or start a new run (another name) from exported weights",
                value=value,
            )


def check_base(checkpoint: Path, model: ModelConfig) -> None:
    """Raise RecipeError if the weights at `model.path` are not the base of the adapters in `checkpoint`."""
    saved, digest = saved_identity(checkpoint)["model"], weights_digest(Path(model.path))
    _check_model(checkpoint, saved, {**saved, "path": model.path, "weights": digest}, "model.path")


def _lora_identity(lora: LoraConfig) -> dict[str, Any]:
    """Settings of the adapters, and a digest of the adapters in `lora.path`, if set."""
    settings = {name: value for name, value in dataclasses.asdict(lora).items() if name != "path"}
    return settings | ({_START: weights_digest(Path(lora.path))} if lora.path else {})


def _model_identity(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    text = text_fields(config)
    sizes = {name: text[name] for name in _SIZES if name in text}
    table = {_TABLE: table_digest(config[FIELD])} if FIELD in config else {}
    return {"path": model.path, "weights": weights_digest(Path(model.path)), "dtype": model.dtype, **sizes, **table}


def _check_model(checkpoint: Path, saved: dict[str, Any], model: dict[str, Any], key: str) -> None:
    """Raise RecipeError if the checkpoint belongs to another model, before a process loads tensors of wrong shapes.

    `key`: recipe key of the model. Its path may differ.
    """
    compared = [name for name in {**saved, **model} if name not in ("path", _TABLE)]
    names = [name for name in compared if saved.get(name) != model.get(name)]
    if names == ["dtype"]:
        raise RecipeError(
            "model.dtype",
            f"the checkpoint {checkpoint} was written with {saved.get('dtype')!r}",
            "set it back, or start a new run (another name) from exported weights",
            value=model["dtype"],
        )
    if names == ["weights"]:
        raise RecipeError(
            key,
            f"the checkpoint {checkpoint} started from other weights, at that time in {saved['path']}: its adapters, "
            "reference policy and untrained layers belong to those weights",
            "set the path of the model with those weights, or start a new run (another name)",
            value=model["path"],
        )
    if names:
        sizes = [name for name in names if name != "weights"]
        differences = ", ".join(f"{name} {saved.get(name)!r} there and {model.get(name)!r} here" for name in sizes)
        raise RecipeError(
            key,
            f"the checkpoint {checkpoint} belongs to another model: {differences}",
            "set the path of that model, or choose another checkpoint (train.resume)",
            value=model["path"],
        )
    if _TABLE in saved and saved[_TABLE] != model.get(_TABLE):
        raise RecipeError(
            _TABLE,
            f"the checkpoint {checkpoint} was written with another table of the model's family, by which its tensors were read",
            "set it to the table of that run (in its recipe.resolved.yaml), or start a new run (another name) from exported weights",
        )
