"""Whether the names in `megatron.extra` are fields of Megatron's configuration, or settings of what adapts Megatron to the
device, before a process starts; and what the latter is told."""

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
from megarl.megatron.layout import uses_sequence_parallel
from megarl.megatron.model_checks import rotary_scaling, yarn_fields
from megarl.platform import transformer_engine
from megarl.platform.adaptor import Adaptor, adaptor
from megarl.platform.kinds import kind_of
from megarl.recipe.megatron_ddp import ddp_settings
from megarl.recipe.schema import Recipe
from megarl.recipe.source_fields import Fields, fields_of, problem
from megarl.recipe.training import MegatronConfig
from megarl.registry import nearest

_CLASSES = {
    "core/model_parallel_config.py": ("ModelParallelConfig",),
    "core/transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
}
_MORE_CLASSES = {
    "core/distributed/distributed_data_parallel_config.py": "DistributedDataParallelConfig",
    "core/optimizer/optimizer_config.py": "OptimizerConfig",
}

_OWN_KEYS = {"context_parallel_size": "context_parallel"}
"""Keys of a recipe's `megatron` section that Megatron calls otherwise."""


# Fused kernels, and the Transformer Engine from which Megatron has them: transformer_config.py (__post_init__), moe_utils.py.
_ENGINE_SINCE = {"moe_permute_fusion": "2.1.0", "moe_router_fusion": "2.6.0", "apply_rope_fusion": "1.4.0"}


def check_extra_names(recipe: Recipe, section: str) -> None:
    """Refuse names in `section`'s extra that neither the installed Megatron nor what adapts it to the recipe's device
    has, and values that they would not take. What this needs is the recipe alone: it comes before the model.

    Megatron's source is read, not imported: that takes seconds, and wants the platform prepared. Says nothing where
    Megatron is not installed on this machine; trainers ask again.
    """
    known, extra = _annotations(), recipe.megatron.extra
    if known is None:
        return
    _check_declared(recipe.megatron.ddp, f"{section}.ddp", "core/distributed/distributed_data_parallel_config.py")
    optimizer = section.replace("megatron", "actor.optimizer" if section == "megatron" else "optimizer")
    _check_declared(recipe.actor.optimizer.extra, f"{optimizer}.extra", "core/optimizer/optimizer_config.py")
    check_installed_for(recipe, section, optimizer)
    adapts = adaptor(platform.kind(recipe.cluster.device))
    for name, value in extra.items():
        wrong = adapts.problem(name, value) if name in adapts.settings or name not in known else None
        # What adapts Megatron may know further words, but no switch that is a number.
        if name in known and (name not in adapts.settings or ast.unparse(known[name]) == "bool"):
            wrong = wrong or problem("Megatron", known[name], value)
        if wrong is not None:
            raise RecipeError(f"{section}.extra.{name}", *wrong, value=value)
    check_names(extra, known, section, adapts)


def check_installed_for(recipe: Recipe, section: str, optimizer: str) -> None:
    """Refuse settings that need Transformer Engine on a device without one, and where this machine has devices of the
    recipe's kind and lacks the package or has an older one: other machines may have it.

    `section` and `optimizer`: names of the recipe's sections, for messages.
    """
    extra, name = recipe.megatron.extra, platform.kind(recipe.cluster.device)
    wanted = [(f"{section}.extra.{field}", since) for field, since in _ENGINE_SINCE.items() if extra.get(field) is True]
    kind = kind_of(name)
    if wanted and not kind.ray_resource:
        what = f"the fused kernel is one for accelerators, and there is none on {kind.plural}"
        raise RecipeError(wanted[0][0], what, "leave it out", value=True)
    if adaptor(name).label or not kind.is_here():
        return
    if recipe.actor.optimizer.extra.get("optimizer_cpu_offload"):
        wanted.append((f"{optimizer}.extra.optimizer_cpu_offload", "1.0"))
    for key, since in wanted:
        installed = transformer_engine.version_of_whole()
        if not transformer_engine.is_at_least(installed, since):
            state = "is not installed" if installed is None else f"is {installed}"
            what = f"Megatron needs Transformer Engine {since} or later for it, and here it {state}"
            raise RecipeError(key, what, "install it, or leave the key out", value=True)


def _check_declared(settings: Mapping[str, Any], key: str, file: str) -> None:
    """Refuse names in `settings` that no class in Megatron's `file` declares, and values of another type than declared."""
    known = _fields_in(file)
    for name, value in settings.items():
        if name not in known:
            near = nearest(name, known)
            remedy = f"write {near}" if near else "leave it out"
            raise RecipeError(
                f"{key}.{name}", f"the installed Megatron has no such field in {file}", remedy, value=value
            )
        if wrong := problem("Megatron", known[name], value):
            raise RecipeError(f"{key}.{name}", *wrong, value=value)


def check_extra(recipe: Recipe, hf_config: dict[str, Any], section: str) -> None:
    """As `check_extra_names`; and refuse settings in it that contradict each other, the layout, or the model, and a model
    that what adapts Megatron to the device computes in another way. `hf_config`: its config.json."""
    check_extra_names(recipe, section)
    try:
        ddp_settings(recipe, with_images="vision_config" in hf_config)
    except RecipeError as error:
        key = error.key.replace("megatron", section, 1)
        raise RecipeError(key, error.problem, error.remedy, value=error.value) from None
    extra, adapts = recipe.megatron.extra, adaptor(platform.kind(recipe.cluster.device))
    if fields_of_megatron() is None:
        return
    contradiction = adapts.contradiction(adaptor_settings(recipe, hf_config))
    if contradiction is not None:
        name, problem = contradiction
        own = _OWN_KEYS.get(name)
        if own and name not in extra:
            raise RecipeError(f"{section}.{own}", *problem, value=getattr(recipe.megatron, own))
        raise RecipeError(f"{section}.extra.{name}", *problem, value=extra.get(name))
    text = text_fields(hf_config)
    scaling = rotary_scaling(text)
    if text.get("kv_lora_rank") and scaling["rope_type"] == "yarn":
        fields = yarn_fields(scaling)
        unfit = adapts.latent_attention_problem(fields["mscale"], fields["mscale_all_dim"])
        if unfit is not None:
            key = "model.path" if section == "megatron" else "critic.model_path"
            raise RecipeError(key, *unfit, value=recipe.model.path)


def check_names(extra: Iterable[str], fields: Iterable[str], section: str, adapts: Adaptor) -> None:
    """Raise ValueError for a name in `section`'s extra that is neither in `fields`, Megatron's, nor a setting of what
    adapts Megatron, with the nearest that is."""
    known = {*fields, *adapts.settings}
    for name in extra:
        if name not in known:
            near = nearest(name, known)
            hint = f" Nearest: {near}." if near else ""
            also = f" and no setting of {adapts.label}" if adapts.label else ""
            raise ValueError(f"{section}.extra.{name} is no field of Megatron's TransformerConfig{also}.{hint}")


def adaptor_settings(recipe: Recipe, hf_config: dict[str, Any]) -> dict[str, Any]:
    """What `Platform.adapt` is told of the model that `recipe` lays out: under Megatron's names what Megatron's own
    command line would hold of it, then `megatron.extra`."""
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
        "num_attention_heads": text["num_attention_heads"],
        "multi_latent_attention": bool(text.get("kv_lora_rank")),
        "position_embedding_type": "mrope" if "vision_config" in hf_config else "rope",
        **recompute_settings(megatron),
    }
    if experts := number_of_experts(text):
        # As mbridge sets them of models with experts, where `extra` does not.
        settings |= {"num_experts": experts, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
    return settings | ddp_settings(recipe, with_images="vision_config" in hf_config) | megatron.extra


def recompute_settings(megatron: MegatronConfig) -> dict[str, Any]:
    """`megatron.recompute` under Megatron's names."""
    if megatron.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if megatron.recompute == "selective" else {}


def fields_of_megatron() -> frozenset[str] | None:
    """Fields of Megatron's TransformerConfig, and of the one for latent attention; None: Megatron is not installed."""
    annotations = _annotations()
    return None if annotations is None else frozenset(annotations)


@cache
def _annotations() -> Fields | None:
    """What each field is declared as."""
    place = _place()
    if place is None:
        return None
    files = ((place / file, classes) for file, classes in _CLASSES.items())
    return {name: kind for file, classes in files for name, kind in fields_of(file, *classes).items()}


@cache
def _fields_in(file: str) -> Fields:
    """Fields of the dataclass in one of Megatron's files in `_MORE_CLASSES`."""
    place = _place()
    assert place is not None, "ask `_annotations` first"
    return fields_of(place / file, _MORE_CLASSES[file])


def _place() -> Path | None:
    """Folder of the installed Megatron's sources; None if it is not installed."""
    found: Any = importlib.util.find_spec("megatron")
    for place in found.submodule_search_locations if found else ():
        if all((Path(place) / file).is_file() for file in (*_CLASSES, *_MORE_CLASSES)):
            return Path(place)
    return None
