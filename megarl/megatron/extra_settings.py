"""Check names in `megatron.extra` before a process starts, and build the settings of the device adaptor.

Valid names are fields of Megatron's configuration classes and settings of the adaptor (the package that adapts Megatron
to the device).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl import platform
from megarl.errors import RecipeError
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.families import (
    find_family,
    has_biased_softmax,
    has_delta_nets,
    has_indexer,
    has_sinks,
    has_tower,
    has_windows,
    has_zero_centered_norms,
)
from megarl.hf.families.settings import rotary_scaling, yarn_fields
from megarl.hf.families.sizes import head_size
from megarl.megatron.layout import uses_sequence_parallel
from megarl.platform import transformer_engine
from megarl.platform.adaptor import Adaptor, adaptor
from megarl.platform.kinds import kind_of
from megarl.platform.transformer_engine import AttentionNeeds
from megarl.recipe.derived.megatron_ddp import ddp_settings
from megarl.recipe.library_fields import Fields, fields_of, problem
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig
from megarl.registry import nearest

_CLASSES = {
    "core/model_parallel_config.py": ("ModelParallelConfig",),
    "core/transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
}
_MORE_CLASSES = {
    "core/distributed/distributed_data_parallel_config.py": "DistributedDataParallelConfig",
    "core/optimizer/optimizer_config.py": "OptimizerConfig",
}

_RECIPE_KEYS = {"context_parallel_size": "context_parallel"}
"""Megatron's names of keys in a recipe's `megatron` section that are called differently."""


# Fused kernels and the first Transformer Engine with them: transformer_config.py (__post_init__), moe_utils.py.
_ENGINE_SINCE = {"moe_permute_fusion": "2.1.0", "moe_router_fusion": "2.6.0", "apply_rope_fusion": "1.4.0"}


def check_extra_names(recipe: Recipe, section: str) -> None:
    """Refuse names in `section`'s extra that neither Megatron nor the device adaptor has, and values of another type.

    Needs only the recipe, so it runs before the model's config.json is read. Megatron's source is parsed, not imported:
    an import takes seconds and needs a prepared platform. Checks nothing if Megatron is not installed on this machine;
    trainers repeat the check. Raises RecipeError or ValueError.
    """
    fields, extra = _annotations(), recipe.megatron.extra
    if fields is None:
        return
    _check_declared(recipe.megatron.ddp, f"{section}.ddp", "core/distributed/distributed_data_parallel_config.py")
    optimizer = section.replace("megatron", "actor.optimizer" if section == "megatron" else "optimizer")
    _check_declared(recipe.actor.optimizer.extra, f"{optimizer}.extra", "core/optimizer/optimizer_config.py")
    check_installed_for(recipe, section, optimizer)
    adapts = adaptor(platform.kind(recipe.cluster.device))
    for name, value in extra.items():
        wrong = adapts.problem(name, value) if name in adapts.settings or name not in fields else None
        # The adaptor may accept more words for a field, but a switch stays a switch.
        if name in fields and (name not in adapts.settings or ast.unparse(fields[name]) == "bool"):
            wrong = wrong or problem("Megatron", fields[name], value)
        if wrong is not None:
            raise RecipeError(f"{section}.extra.{name}", *wrong, value=value)
    check_names(extra, fields, section, adapts)


def check_installed_for(recipe: Recipe, section: str, optimizer: str) -> None:
    """Refuse settings that need Transformer Engine on a device without it. Raises RecipeError.

    The installed version is only checked if this machine has devices of the recipe's kind; other machines may have
    another version. `section` and `optimizer`: names of the recipe's sections, for messages.
    """
    extra, name = recipe.megatron.extra, platform.kind(recipe.cluster.device)
    needed = [(f"{section}.extra.{field}", since) for field, since in _ENGINE_SINCE.items() if extra.get(field) is True]
    kind = kind_of(name)
    if needed and not kind.ray_resource:
        reason = f"the fused kernel needs an accelerator, which {kind.plural} are not"
        raise RecipeError(needed[0][0], reason, "leave it out", value=True)
    if adaptor(name).label or not kind.is_here():
        return
    if recipe.actor.optimizer.extra.get("optimizer_cpu_offload"):
        needed.append((f"{optimizer}.extra.optimizer_cpu_offload", "1.0"))
    for key, since in needed:
        installed = transformer_engine.version_of_whole()
        if not transformer_engine.is_at_least(installed, since):
            state = "is not installed" if installed is None else f"is {installed}"
            reason = f"Megatron needs Transformer Engine {since} or later for it, and here it {state}"
            raise RecipeError(key, reason, "install it, or leave the key out", value=True)


def _check_declared(settings: Mapping[str, Any], key: str, file: str) -> None:
    """Refuse names in `settings` that no class in Megatron's `file` declares, and values of another type."""
    fields = _fields_in(file)
    for name, value in settings.items():
        if name not in fields:
            near = nearest(name, fields)
            remedy = f"write {near}" if near else "leave it out"
            raise RecipeError(
                f"{key}.{name}", f"the installed Megatron has no such field in {file}", remedy, value=value
            )
        if wrong := problem("Megatron", fields[name], value):
            raise RecipeError(f"{key}.{name}", *wrong, value=value)


def check_extra(recipe: Recipe, hf_config: dict[str, Any], section: str) -> None:
    """Run `check_extra_names`, and refuse settings that contradict each other, the layout or the model.

    Also refuses a model that the device adaptor would compute differently. `hf_config`: the model's config.json.
    Raises RecipeError or ValueError.
    """
    check_extra_names(recipe, section)
    try:
        ddp_settings(recipe, with_images=has_tower(hf_config))
    except RecipeError as error:
        key = error.key.replace("megatron", section, 1)
        raise RecipeError(key, error.problem, error.remedy, value=error.value) from None
    extra, adapts = recipe.megatron.extra, adaptor(platform.kind(recipe.cluster.device))
    if fields_of_megatron() is None:
        return
    contradiction = adapts.contradiction(adaptor_settings(recipe, hf_config))
    if contradiction is not None:
        name, problem = contradiction
        recipe_key = _RECIPE_KEYS.get(name)
        if recipe_key and name not in extra:
            raise RecipeError(f"{section}.{recipe_key}", *problem, value=getattr(recipe.megatron, recipe_key))
        raise RecipeError(f"{section}.extra.{name}", *problem, value=extra.get(name))
    text = text_fields(hf_config)
    scaling = rotary_scaling(text)
    key = "model.path" if section == "megatron" else "critic.model_path"
    unfit = adapts.zero_centered_norm_problem()
    if unfit is not None and has_zero_centered_norms(hf_config):
        raise RecipeError(key, *unfit, value=recipe.model.path)
    if (unfit := adapts.sparse_attention_problem()) is not None and has_indexer(hf_config):
        raise RecipeError(key, *unfit, value=recipe.model.path)
    if (unfit := adapts.biased_softmax_problem()) is not None and has_biased_softmax(hf_config):
        raise RecipeError(key, *unfit, value=recipe.model.path)
    kind = kind_of(platform.kind(recipe.cluster.device))
    if recipe.train.deterministic and not kind.deterministic_cumsum and has_delta_nets(hf_config):
        reason = f"gated delta nets use torch.cumsum, which has no deterministic kernel for {kind.plural}"
        raise RecipeError("train.deterministic", reason, "set it to false", value=True)
    # An adaptor's stand-in of Transformer Engine exists only in trainers.
    native = not adapts.label and kind.is_here() and not transformer_engine.is_importable()
    if kind.ray_resource and not native:
        if has_sinks(hf_config):
            check_sinks(recipe, section)
        elif has_windows(hf_config):
            check_windows(recipe.megatron, section)
    if text.get("kv_lora_rank") and scaling["rope_type"] == "yarn":
        fields = yarn_fields(scaling)
        unfit = adapts.latent_attention_problem(fields["mscale"], fields["mscale_all_dim"])
        if unfit is not None:
            raise RecipeError(key, *unfit, value=recipe.model.path)


def attention_needs(recipe: Recipe, hf_config: dict[str, Any]) -> AttentionNeeds | None:
    """Return a model's attention as it selects a kernel of Transformer Engine; None if it uses none, or not in 16 bits."""
    family, text = find_family(hf_config), text_fields(hf_config)
    if family is None or family.indexer or recipe.model.dtype == "float32":
        return None
    query = value = head_size(text)
    if family.latent:
        query, value = text["qk_nope_head_dim"] + text["qk_rope_head_dim"], text["v_head_dim"]
    settings = {**family.settings(text), **recipe.megatron.extra}
    return AttentionNeeds(
        query,
        value,
        packed=recipe.megatron.packing,
        sinks=family.sinks,
        deterministic=recipe.train.deterministic,
        backend=str(settings.get("attention_backend", "auto")),
    )


def check_sinks(recipe: Recipe, section: str = "megatron") -> None:
    """Refuse attention sinks where a device's attention has none, and settings with which it has none. Raises RecipeError.

    For devices with Transformer Engine, or what replaces it; from get_attention_backend of its releases 2.9 to 2.11
    (attention/dot_product_attention/utils.py): no flash attention, no packed sequences, and over context-parallel ranks only
    cp_comm_type a2a, which megarl does not set.
    """
    unfit = adaptor(platform.kind(recipe.cluster.device)).sinks_problem()
    if unfit is not None:
        key = "model.path" if section == "megatron" else "critic.model_path"
        raise RecipeError(key, *unfit, value=recipe.model.path)
    megatron, reason = recipe.megatron, "Transformer Engine 2.9 to 2.11 has no attention with sinks"
    if megatron.packing:
        raise RecipeError(f"{section}.packing", f"{reason} for packed sequences", "set it to false", value=True)
    if megatron.context_parallel > 1:
        problem = f"{reason} over context-parallel ranks"
        raise RecipeError(f"{section}.context_parallel", problem, "set it to 1", value=megatron.context_parallel)
    if megatron.extra.get("attention_backend") == "flash":
        key = f"{section}.extra.attention_backend"
        raise RecipeError(key, f"{reason} in its flash attention", "leave it out", value="flash")


def check_windows(megatron: MegatronConfig, section: str = "megatron") -> None:
    """Refuse sliding windows over context-parallel ranks, for devices with Transformer Engine. Raises RecipeError.

    Its releases 2.9 to 2.11 assert cp_comm_type a2a or all_gather for them (context_parallel.py), which megarl does not set.
    """
    if megatron.context_parallel > 1:
        problem = "Transformer Engine 2.9 to 2.11 has no sliding windows over context-parallel ranks"
        raise RecipeError(f"{section}.context_parallel", problem, "set it to 1", value=megatron.context_parallel)


def check_names(extra: Iterable[str], fields: Iterable[str], section: str, adapts: Adaptor) -> None:
    """Raise ValueError, with the nearest valid name, for a name in `section`'s extra that is not valid.

    Valid are `fields` (of Megatron) and the settings of the device adaptor.
    """
    valid = {*fields, *adapts.settings}
    for name in extra:
        if name not in valid:
            near = nearest(name, valid)
            hint = f" Nearest: {near}." if near else ""
            also = f", nor a setting of {adapts.label}" if adapts.label else ""
            raise ValueError(f"{section}.extra.{name} is not a field of Megatron's TransformerConfig{also}.{hint}")


def adaptor_settings(recipe: Recipe, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that `Platform.adapt` receives: Megatron's command-line names, then `megatron.extra`."""
    megatron, text = recipe.megatron, text_fields(hf_config)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": megatron.tensor_parallel,
        "sequence_parallel": uses_sequence_parallel(megatron),
        "pipeline_model_parallel_size": megatron.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": megatron.virtual_pipeline,
        "context_parallel_size": megatron.context_parallel,
        "expert_model_parallel_size": megatron.expert_parallel,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel or 1,
        "use_distributed_optimizer": megatron.distributed_optimizer,
        "bf16": recipe.model.dtype == "bfloat16",
        "fp16": recipe.model.dtype == "float16",
        "num_attention_heads": text["num_attention_heads"],
        "multi_latent_attention": bool(text.get("kv_lora_rank")),
        "position_embedding_type": "mrope" if has_tower(hf_config) else "rope",
        **recompute_settings(megatron),
    }
    if experts := number_of_experts(text):
        # mbridge sets these for models with experts unless `extra` does.
        settings |= {"num_experts": experts, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
    return settings | ddp_settings(recipe, with_images=has_tower(hf_config)) | megatron.extra


def recompute_settings(megatron: MegatronConfig) -> dict[str, Any]:
    """Translate `megatron.recompute` to Megatron's fields."""
    if megatron.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if megatron.recompute == "selective" else {}


def fields_of_megatron() -> frozenset[str] | None:
    """Return fields of Megatron's TransformerConfig and MLATransformerConfig; None if Megatron is not installed."""
    annotations = _annotations()
    return None if annotations is None else frozenset(annotations)


def _annotations() -> Fields | None:
    """Return the annotation of each field of `_CLASSES`; None if Megatron is not installed."""
    place = _place()
    return None if place is None else _annotations_in(place)


@cache
def _annotations_in(place: Path) -> Fields:
    files = ((place / file, classes) for file, classes in _CLASSES.items())
    return {name: kind for file, classes in files for name, kind in fields_of(file, *classes).items()}


@cache
def _fields_in(file: str) -> Fields:
    """Return fields of the dataclass in one of Megatron's files in `_MORE_CLASSES`."""
    place = _place()
    assert place is not None, "check `_annotations` first"
    return fields_of(place / file, _MORE_CLASSES[file])


def _place() -> Path | None:
    """Return the folder of the installed Megatron's sources; None if it is not installed."""
    spec: Any = importlib.util.find_spec("megatron")
    for place in spec.submodule_search_locations if spec else ():
        if all((Path(place) / file).is_file() for file in (*_CLASSES, *_MORE_CLASSES)):
            return Path(place)
    return None
