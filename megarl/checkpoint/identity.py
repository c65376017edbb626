"""What a checkpoint belongs to: the model, the weights it started from, the data. A resumed run must have the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from megarl.errors import RecipeError
from megarl.hf.config import text_fields
from megarl.recipe.critic import critic_view
from megarl.recipe.schema import Recipe
from megarl.recipe.training import ModelConfig

# What makes a model another one, of its config.json: everything that sizes a tensor, or numbers them.
_SIZES = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "n_routed_experts", "num_local_experts",
    "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace",
    "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip

_WHOLE_BYTES = 16 << 20  # files of weights up to this size are read whole
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of larger ones: places spread evenly, the tensors' names and shapes included


def identity_of(
    recipe: Recipe, model: dict[str, Any], critic: dict[str, Any] | None, rows: dict[str, int]
) -> dict[str, Any]:
    """What a checkpoint's cursor, seeds and tensors refer to.

    `model`, `critic`: their config.json (no critic: None). `rows`: of each set of the training data. Reads files of weights.
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
        "lora": dataclasses.asdict(recipe.lora) if recipe.lora.rank else None,
    }


def weights_digest(directory: Path) -> str:
    """SHA-256, in hex, of the directory's *.safetensors: names, sizes, and contents or samples of them.

    Training moves nearly every weight, so samples tell one model's weights from another's; that nobody changed a single
    number they do not prove. 160 files of a large model are 2,600 reads. Raises OSError for what cannot be read.
    """
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_BYTES:
                digest.update(stream.read())
                continue
            for place in range(_SAMPLES):
                stream.seek(place * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def saved_identity(checkpoint: Path) -> dict[str, Any]:
    """That of the run that wrote the checkpoint."""
    return json.loads((checkpoint / "controller.json").read_text())["identity"]


def check_identity(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Raise RecipeError, with the key that differs, where `checkpoint` is another run's than `identity`'s."""
    saved = saved_identity(checkpoint)
    if not {*identity} <= {*saved} or "weights" not in saved["model"]:
        raise RecipeError(
            "train.resume",
            f"the checkpoint {checkpoint} was written by an earlier megarl, which did not note all that it belongs to",
            "export it with that version, and start a new run (another name) from the exported weights",
        )
    _check_model(checkpoint, saved["model"], identity["model"], "model.path")
    if bool(saved["critic"]) != bool(identity["critic"]):
        had, has = ("a critic (algorithm.advantage=gae)", "none") if saved["critic"] else ("no critic", "one")
        raise RecipeError(
            "algorithm.advantage",
            f"the checkpoint {checkpoint} was written with {had}, and this run has {has}",
            "set it back, or start a new run (another name) from exported weights",
        )
    if identity["critic"]:
        _check_model(checkpoint, saved["critic"], identity["critic"], "critic.model_path")
    if saved["lora"] != identity["lora"]:
        had = " ".join(f"lora.{name}={value}" for name, value in (saved["lora"] or {"rank": 0}).items())
        raise RecipeError(
            "lora.rank",
            f"the checkpoint {checkpoint} holds what was trained with {had}",
            f"set {had}, or start a new run (another name) from exported weights",
            value=(identity["lora"] or {"rank": 0})["rank"],
        )
    for key, value in identity.items():
        if key not in ("model", "critic", "lora") and saved[key] != value:
            raise RecipeError(
                key,
                f"the checkpoint {checkpoint} was written with {saved[key]!r}: its place in the data would mean other rows",
                "set it back, or start a new run (another name) from exported weights",
                value=value,
            )


def check_base(checkpoint: Path, recipe: Recipe) -> None:
    """Raise RecipeError where `model.path` no longer holds the weights that the adapters of `checkpoint` belong to."""
    saved, digest = saved_identity(checkpoint)["model"], weights_digest(Path(recipe.model.path))
    _check_model(checkpoint, saved, {**saved, "path": recipe.model.path, "weights": digest}, "model.path")


def _model_identity(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    text = text_fields(config)
    sizes = {name: text[name] for name in _SIZES if name in text}
    return {"path": model.path, "weights": weights_digest(Path(model.path)), "dtype": model.dtype, **sizes}


def _check_model(checkpoint: Path, saved: dict[str, Any], model: dict[str, Any], key: str) -> None:
    """Another model's checkpoint is refused here, before a process starts and reads tensors that do not fit.
    `key` names the model. Where it lies does not matter."""
    names = [name for name in {**saved, **model} if name != "path" and saved.get(name) != model.get(name)]
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
            f"the checkpoint {checkpoint} started from other weights, which then lay in {saved['path']}: adapters, the "
            "reference policy and untrained layers belong to those",
            "name the model that has them, or start a new run (another name)",
            value=model["path"],
        )
    if names:
        sizes = [name for name in names if name != "weights"]
        said = ", ".join(f"{name} {saved.get(name)!r} there and {model.get(name)!r} here" for name in sizes)
        raise RecipeError(
            key,
            f"the checkpoint {checkpoint} is another model's: {said}",
            "name that model, or another checkpoint (train.resume)",
            value=model["path"],
        )
