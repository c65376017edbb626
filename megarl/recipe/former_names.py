"""Names that the schema does not have.

Former names of keys and values are read as the present ones, with a warning that names both. Other unknown keys are refused: the
remedy names the nearest key, a key of the same name in another section, or the key for a name of another framework.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.errors import RecipeError, command_name
from megarl.recipe.key import section_types
from megarl.registry import nearest

SECTIONS = {"exchange": "weight_sync"}  # former section -> present one
REJECTION = {"mask": "none", "mask_low": 0.5, "mask_high": 5.0, "veto": None}  # former keys and their defaults
VALUES = {"weight_sync.route": {"planned": "sharded", "export": "full"}}  # key -> former value -> present one
_VERL = "actor_rollout_ref"  # the largest section of verl's configurations
_MOST = 3  # keys in a remedy
_NODES = ("nodes", "nnodes", "num_nodes", "n_gpus_per_node", "num_gpus_per_node", "devices_per_node")
_PARALLEL = {"t": "tensor", "p": "pipeline", "c": "context", "e": "expert", "et": "expert_tensor"}
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "actor_lr", "max_lr"), ("actor.optimizer.lr",)),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), ("actor.optimizer.clip_grad",)),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps", "warmup"), ("actor.optimizer.warmup_steps",)),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "lr_decay_style"), ("actor.optimizer.decay",)),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size"), ("data.prompts_per_step",)),
    **dict.fromkeys(("global_batch_size", "mini_batch_size", "ppo_mini_batch_size"), ("actor.mini_batches",)),
    **dict.fromkeys(
        ("micro_batch_size", "per_device_train_batch_size", "max_tokens_per_gpu", "ppo_max_token_len_per_gpu"),
        ("actor.max_tokens_per_micro_batch",),
    ),
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_completion_length", "rollout_max_response_len"),
        ("rollout.max_response_length",),
    ),
    **dict.fromkeys(
        ("n", "num_generations", "n_samples_per_prompt", "group_size", "num_samples"), ("rollout.samples_per_prompt",)
    ),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "total_epochs"), ("train.epochs",)),
    "ppo_epochs": ("actor.epochs",),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "total_training_steps"), ("train.steps",)),
    **{
        name: (f"megatron.{size}_parallel", *(["rollout.tensor_parallel"] if size == "tensor" else []))
        for short, size in _PARALLEL.items()
        for name in (f"{short}p", f"{short}p_size", f"{size}_parallel_size", f"{size}_model_parallel_size")
    },
    **dict.fromkeys(("sp", "use_sequence_parallel"), ("megatron.sequence_parallel",)),
    **dict.fromkeys(("recompute_granularity", "gradient_checkpointing"), ("megatron.recompute",)),
    **dict.fromkeys(("kl_coeff", "kl_loss_coef", "init_kl_coef", "use_kl_loss"), ("algorithm.kl_coef",)),
    "beta": ("algorithm.kl_coef", "algorithm.dpo_beta"),
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip", "cliprange"), ("algorithm.clip_low", "algorithm.clip_high")),
    "entropy_coeff": ("algorithm.entropy_coef",),
    "adv_estimator": ("algorithm.advantage",),
    **dict.fromkeys(("loss_type", "loss_mode"), ("algorithm.loss",)),
    **dict.fromkeys(("model_path", "model_name", "model_name_or_path"), ("model.path",)),
    **dict.fromkeys(("dataset", "dataset_name", "prompt_data"), ("data.train_files",)),
    **dict.fromkeys(("val_files", "eval_data", "eval_prompt_data"), ("data.eval_files",)),
    **dict.fromkeys(("reward_fn", "reward_funcs", "custom_reward_function"), ("reward.function",)),
    **dict.fromkeys(("lora_rank", "lora_r"), ("lora.rank",)),
    "lora_alpha": ("lora.alpha",),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), ("train.save_every",)),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval"), ("evaluation.every",)),
    **dict.fromkeys(("resume_from_checkpoint", "resume_mode"), ("train.resume",)),
    **dict.fromkeys(("output_dir", "default_local_dir"), ("runs_dir",)),
    **dict.fromkeys(("run_name", "experiment_name"), ("name",)),
    "project_name": ("observe.project",),
    **dict.fromkeys(("wandb", "use_wandb", "report_to", "logger"), ("observe.trackers",)),
    **dict.fromkeys(("world_size", "num_gpus", "n_gpus"), ("cluster.trainers",)),
    **dict.fromkeys(_NODES, ("cluster.trainers",)),
    **{
        name: (f"rollout.engine_args.{name}",)
        for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager")
    },
}
"""Names of settings in other frameworks (TRL, verl, slime, vLLM), and the keys that take their place."""

_REMARKS = {
    **dict.fromkeys(
        ("global_batch_size", "mini_batch_size", "ppo_mini_batch_size"), "the number of parts, not their size"
    ),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "tokens, not samples"),
    **dict.fromkeys(_NODES, "the devices of all nodes together"),
    "gradient_checkpointing": "none, selective or full",
    "use_kl_loss": "a number, 0 for none",
}
"""What differs in the value of the key for such a name."""


class FormerNameWarning(FutureWarning):
    """A recipe has a key or value under its former name."""


def with_present_names(content: dict[str, Any], origin: str | None) -> dict[str, Any]:
    """Return the settings of one layer of a recipe with present names. `origin`: the layer's file, or "command line".

    Warns about each former name, unless `origin` is None (a recipe that megarl wrote). Raises RecipeError if a layer sets a
    key under both names.
    """
    renamed = dict(content)
    for former, present in SECTIONS.items():
        if former not in renamed:
            continue
        section, other = renamed.pop(former), renamed.get(present)
        if present in renamed and section is None:  # an empty section
            continue
        if present in renamed and not (isinstance(section, dict) and isinstance(other, dict)):
            problem = f"{present} is the same section, and it is set too"
            raise RecipeError(former, problem, "delete one of them", value=section, origin=origin)
        if isinstance(section, dict) and isinstance(other, dict):
            for name in section.keys() & other.keys():
                problem = f"{present}.{name} is the same key, and it is set too"
                raise RecipeError(f"{former}.{name}", problem, "delete one of them", value=section[name], origin=origin)
            section = {**section, **other}
        _warn(f"the section {former} is now {present}", origin)
        renamed[present] = section
    for key, values in VALUES.items():
        section_name, name = key.split(".")
        section = renamed.get(section_name) or {}
        value = section.get(name) if isinstance(section, dict) else None
        if isinstance(value, str) and value in values:
            _warn(f"{key}={value} is now {key}={values[value]}", origin)
            renamed[section_name] = {**section, name: values[value]}
    algorithm = renamed.get("algorithm")
    if isinstance(algorithm, dict) and isinstance(algorithm.get("correction"), dict):
        correction = _with_reject(algorithm["correction"], origin)
        renamed["algorithm"] = {**algorithm, "correction": correction}
    return renamed


def _with_reject(section: dict[str, Any], origin: str | None) -> dict[str, Any]:
    """Return the settings of `algorithm.correction` with `reject` instead of `mask`, `mask_low`, `mask_high` and `veto`."""
    former = {name: section[name] for name in REJECTION if name in section}
    if not former:
        return section
    key, values = "algorithm.correction", {**REJECTION, **former}
    limits: dict[str, Any] = {}
    if values["mask"] != "none":
        span = {"geometric": "mean"}.get(str(values["mask"]), values["mask"])
        limits[f"{span}_ratio"] = [values["mask_low"], values["mask_high"]]
    elif "mask" not in former and former.keys() - {"veto"}:
        name = sorted(former.keys() - {"veto"})[0]
        problem = f"{key}.reject replaces it, and {key}.mask, which says what to reject, is not set here"
        remedy = f"set e.g. {key}.reject={{token_ratio: [0.5, 5.0]}}"
        raise RecipeError(f"{key}.{name}", problem, remedy, value=former[name], origin=origin)
    if values["veto"] is not None:
        limits["worst_ratio"] = [values["veto"], None]
    _warn(f"{', '.join(f'{key}.{name}' for name in former)} is now {key}.reject={limits}", origin)
    present = {name: value for name, value in section.items() if name not in REJECTION}
    return {**present, "reject": {**limits, **(section.get("reject") or {})}}


def _warn(change: str, origin: str | None) -> None:
    if origin is not None:
        warnings.warn(f"{origin}: {change}; the former name still works", FormerNameWarning, stacklevel=2)


# --- unknown keys ---------------------------------------------------------------------------------


def suggestion(name: str, prefix: str, types: Mapping[str, Any], keys: Sequence[str], value: Any) -> str:
    """Return the remedy for the unknown key `name` of the section `prefix`.

    types: of the section's keys. keys: all dotted keys of the schema. value: a mapping if `name` was used as a section.
    """
    if name == _VERL:
        return f"this is a section of verl: `{command_name()} convert-config FILE` converts verl's files to recipes"
    near = nearest(name, types)
    if near is not None and dataclasses.is_dataclass(types[near]) and not isinstance(value, Mapping):
        near = None  # a section cannot replace a value
    elsewhere = _named(name, keys)
    replaced = OTHER_NAMES.get(name.lower(), ())
    here = [f"{prefix}{leaf}" for leaf in map(_leaf, replaced) if leaf in types]
    if isinstance(value, Mapping) and near is None:
        meant = [*elsewhere[:_MOST], *_meant_within(name, value, keys)]
    elif replaced:
        meant = here or [*replaced, *elsewhere]
    else:
        meant = [*elsewhere[:_MOST], *(_near(near, prefix, types, value) if near else [])]
    meant = list(dict.fromkeys(meant))[: _MOST + 1]
    if not meant:
        return f"keys here: {', '.join(types)}"
    remarks = _remarks(name, value)
    shown = [f"{key} ({remarks[_leaf(key)]})" if _leaf(key) in remarks else key for key in meant]
    detail = f" `{command_name()} keys {meant[0]}` describes it" if replaced and meant[0] in keys else ""
    return f"did you mean {' or '.join(shown)}?{detail}"


def _near(name: str, prefix: str, types: Mapping[str, Any], value: Any) -> list[str]:
    """Return the key `name`; for a section, its keys that `value` means, or the section if it means none of them."""
    if not dataclasses.is_dataclass(types[name]):
        return [f"{prefix}{name}"]
    inner, meant = section_types(types[name]), list[str]()
    for each in value:
        replaced = OTHER_NAMES.get(str(each).lower(), ())
        meant += [f"{prefix}{name}.{leaf}" for leaf in (each, *map(_leaf, replaced)) if leaf in inner] or replaced
    return meant or [f"{prefix}{name}"]


def _remarks(name: str, value: Any) -> dict[str, str]:
    """Return remarks on the keys for the unknown `name` and, in a section, for the names in it, by the keys' last parts."""
    remarks = (
        {_leaf(key): _REMARKS[name.lower()] for key in OTHER_NAMES[name.lower()]} if name.lower() in _REMARKS else {}
    )
    for inner, content in value.items() if isinstance(value, Mapping) else ():
        remarks |= _remarks(str(inner), content)
    return remarks


def _meant_within(section: str, content: Mapping[Any, Any], keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys that the unknown `section` with this content may mean, first keys of a section with the same name."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _meant_within(str(name), value, keys)
            continue
        replaced = OTHER_NAMES.get(str(name).lower(), ())
        candidates = [key for leaf in (str(name), *map(_leaf, replaced)) for key in _named(leaf, keys)]
        within = [key for key in candidates if section in key.split(".")[:-1]]
        yield from within or [*replaced, *candidates]


def _named(leaf: str, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if _leaf(key) == leaf]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
