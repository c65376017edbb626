"""Build Megatron model chunks from a Hugging Face directory through mbridge."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.errors import RecipeError
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.families import family_of, has_sinks, has_tower, has_windows
from megarl.hf.families.check import check_model
from megarl.hf.families.read import config_of_unknown_type
from megarl.hf.families.tables.family_table import FIELD, read_table, with_critic_table, with_table
from megarl.megatron.extra_settings import (
    adaptor_settings,
    attention_needs,
    check_names,
    check_sinks,
    check_windows,
    recompute_settings,
)
from megarl.megatron.images import ImageLayout
from megarl.megatron.layout import check_layout, uses_sequence_parallel, vocab_divisor
from megarl.megatron.lora.targets import check_lora
from megarl.platform import Platform
from megarl.platform.adaptor import adaptor
from megarl.recipe.derived.megatron_ddp import ddp_settings
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig, ModelConfig

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Model:
    """The model of this rank. `chunks` has one entry per virtual pipeline stage, DDP-wrapped if the model is trained."""

    bridge: Any
    chunks: list[Any]
    config: Any  # Megatron's TransformerConfig, shared by the chunks
    dtype: torch.dtype
    vocab_size: int  # without padding
    image_layout: ImageLayout | None  # None: a text-only model
    lora: Any  # megatron.lora.attach.Lora; None: full-parameter training

    @property
    def merged_chunks(self) -> list[Any]:
        """The chunks as export reads them, with adapter deltas merged into the weights."""
        return self.lora.merged() if self.lora else self.chunks


def build(recipe: Recipe, platform: Platform, *, value_head: bool = False, weights_only: bool = False) -> Model:
    """Initialize the process groups, build this rank's shard of the model, and load the weights of `recipe.model.path`.

    Weights are loaded unless the platform's tensors hold no values (meta device). `value_head`: build a critic, with a
    value head in place of the output layer (heads/value_head.py). `weights_only`: allocate no gradient buffers.

    Collective. Needs an initialized torch.distributed and a prepared platform. Raises ValueError for a layout that
    does not divide the model and for a model or setting that the trainer does not support.
    """
    hf_config = read_model_config(recipe.model, critic=value_head)
    with_adapters = recipe.lora.rank > 0 and not value_head  # LoRA applies to the actor only
    check_layout(hf_config.to_dict(), recipe.megatron, torch.distributed.get_world_size())
    if with_adapters:
        check_lora(hf_config.to_dict(), recipe.lora, recipe.megatron)
    platform.adapt(_with_enums(adaptor_settings(recipe, hf_config.to_dict())))
    initialize_parallel(recipe.megatron, recipe.cluster.timeout)
    seed_everything(recipe.train.seed)

    from megarl.megatron.heads import value_head as critic
    from megarl.megatron.lora.attach import Lora
    from megarl.megatron.model import upstream_fixes

    upstream_fixes.fix_megatron()
    if platform.uses_native_layers:
        _install_native_layers(recipe.model.dtype, platform, hf_config)
    else:
        _check_engine_attention(recipe, hf_config.to_dict(), platform, computes=not weights_only)
    if value_head:
        hf_config.tie_word_embeddings = False  # a critic has no output layer to tie
    bridge = _bridge(recipe, hf_config, platform)
    dtype = DTYPES[recipe.model.dtype]
    lora = Lora(recipe.lora, bridge, recipe.train.seed) if with_adapters else None
    with contextlib.redirect_stdout(None):  # mbridge prints counts
        chunks = bridge.get_model(
            wrap_with_ddp=not weights_only,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            post_model_creation_callbacks=[
                _mark_experts,
                _mark_duplicates,
                _mark_sinks,
                *([_freeze_tower] if recipe.model.freeze_vision_tower else []),
                *([critic.put_head] if value_head else []),
                *([lora.attach] if lora else []),
            ],
            ddp_config={
                "grad_reduce_in_fp32": True,
                "use_distributed_optimizer": recipe.megatron.distributed_optimizer,
                **ddp_settings(recipe, with_images=has_tower(hf_config.to_dict())),
            },
        )
    _install_hooks(chunks, replays_routing=recipe.megatron.routing_replay != "none")
    if value_head:
        critic.name_head(bridge)
    model = Model(bridge, chunks, bridge.config, dtype, bridge.fields["vocab_size"], _image_layout(hf_config), lora)
    if platform.holds_values:
        _load_weights(model, recipe, value_head=value_head, with_adapter=not weights_only)
    return model


def _load_weights(model: Model, recipe: Recipe, *, value_head: bool, with_adapter: bool) -> None:
    """Load the weights of `recipe.model.path`, and the adapter of `recipe.lora.path` into a model with adapters."""
    from megarl.megatron.heads import value_head as critic
    from megarl.megatron.lora.peft import load_adapter

    if value_head:
        critic.load_weights(model.bridge, model.chunks, recipe.model.path, recipe.train.seed)
    else:
        model.bridge.load_weights(model.lora.base() if model.lora else model.chunks, recipe.model.path)
        if model.lora and recipe.lora.path and with_adapter:
            load_adapter(model.lora, Path(recipe.lora.path))
    if model.dtype == torch.float16:
        _check_range(model.chunks, recipe.model.path)


def _check_range(chunks: list[Any], path: str) -> None:
    """Raise ValueError for a weight beyond float16's range, which loading has made infinite."""
    for name, weight in (item for chunk in chunks for item in chunk.named_parameters()):
        if not torch.isfinite(weight).all():
            largest = torch.finfo(torch.float16).max
            raise ValueError(
                f"model.dtype=float16: {name} of {path} has values beyond {largest:g}, float16's largest, or values that are not "
                "finite: set model.dtype=bfloat16"
            )


def _check_engine_attention(
    recipe: Recipe, hf_config: dict[str, Any], platform: Platform, *, computes: bool = True
) -> None:
    """Refuse attention that Transformer Engine, or what replaces it, does not have on this device. computes: runs passes."""
    needs = attention_needs(recipe, hf_config) if computes else None
    if needs is not None and (unfit := platform.attention_problem(needs)) is not None:
        raise RecipeError("model.path", *unfit, value=recipe.model.path)
    if has_sinks(hf_config):
        check_sinks(recipe)
    elif has_windows(hf_config):
        check_windows(recipe.megatron)


def _install_native_layers(dtype: str, platform: Platform, hf_config: Any) -> None:
    """Make Megatron build the native layers; rank 0 logs their kernels."""
    from megarl.megatron.native_layers import spec_provider
    from megarl.megatron.native_layers.fused_kernels import description

    spec_provider.install()
    if torch.distributed.get_rank() == 0:
        experts = bool(number_of_experts(text_fields(hf_config.to_dict())))
        logger.info(description(platform.device(), DTYPES[dtype], experts=experts))


def _install_hooks(chunks: list[Any], *, replays_routing: bool) -> None:
    """Make chunks track their packed stream, replay routing if `replays_routing`, and return hidden states."""
    from megarl.megatron.current_batch import track_current
    from megarl.megatron.heads.output_heads import hidden_states_out, language_model
    from megarl.megatron.moe import routing_replay

    for chunk in chunks:
        track_current(chunk)
        if replays_routing:
            routing_replay.install(chunk)
        if language_model(chunk).post_process:
            hidden_states_out(language_model(chunk))


def _image_layout(hf_config: Any) -> ImageLayout | None:
    if not has_tower(hf_config.to_dict()):
        return None
    vision = hf_config.vision_config
    return ImageLayout(
        merge=vision.spatial_merge_size,
        patch=vision.patch_size,
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        tokens_per_second=getattr(vision, "tokens_per_second", None),
    )


def read_model_config(model: ModelConfig, *, critic: bool = False) -> Any:
    """Read the model's configuration with transformers, with the table of `model.table` in it.

    `critic`: the model is a critic, which has the table if it is of the table's type. Raises ValueError if this machine has no config.json, or if the trainer does not support the model.
    """
    from transformers import AutoConfig

    directory, path = Path(model.path), model.path
    table = read_table(model.table) if model.table else None
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"model.path is {path!r}, which has no config.json on {socket.gethostname()}: every machine of the run "
            "needs the model's Hugging Face directory in the same place."
        )
    fields = (with_critic_table if critic else with_table)(json.loads((directory / "config.json").read_text()), table)
    check_model(fields)
    config = config_of_unknown_type(directory)
    if config is None:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    if hasattr(config, FIELD):  # from config.json, which may not bring a table
        delattr(config, FIELD)
    if FIELD in fields:
        setattr(config, FIELD, table)
    check_model(config.to_dict())  # with transformers' defaults for absent fields
    return config


def seed_everything(seed: int) -> None:
    """Seed every random generator of this process; Megatron offsets its generators by the rank's coordinates."""
    from megatron.core import tensor_parallel

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _with_enums(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert names in `settings` to Megatron's enums; mbridge does so only for the settings that it makes."""
    from megatron.core.transformer.enums import AttnBackend

    name = settings.get("attention_backend")
    if not isinstance(name, str):
        return settings
    if name not in AttnBackend.__members__:
        choices = ", ".join(AttnBackend.__members__)
        raise ValueError(f"megatron.extra.attention_backend is {name!r}; Megatron has {choices}.")
    return settings | {"attention_backend": AttnBackend[name]}


def initialize_parallel(megatron: MegatronConfig, timeout: float) -> None:
    """Create Megatron's process groups. `timeout`: seconds, for their collectives."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_parallel,
        pipeline_model_parallel_size=megatron.pipeline_parallel,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline,
        context_parallel_size=megatron.context_parallel,
        expert_model_parallel_size=megatron.expert_parallel,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel or 1,
        distributed_timeout_minutes=timeout / 60,  # annotated int, but only passed to timedelta
    )


def _mark_experts(chunk: Any, *, config: Any, **_: Any) -> None:
    """Mark expert parameters so that their gradients are summed over all ranks that hold the same experts.

    Without expert parallel, Megatron sums them over data-parallel ranks only. With expert-tensor parallel smaller than
    tensor parallel, tensor-parallel ranks hold the same experts too, and each has seen different tokens.
    """
    if config.num_moe_experts and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False


def _mark_duplicates(chunk: Any, **_: Any) -> None:
    """Mark weights that every tensor-parallel rank holds in full: their gradients count once in the norm, and export gathers nothing.

    Examples: the down projections of latent attention. Transformer Engine, and what replaces it, mark every weight as sharded.
    """
    for module in chunk.modules():
        if _is_duplicated(module):
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel = False


def _is_duplicated(module: Any) -> bool:
    """Return True for a linear that Megatron built with parallel_mode "duplicated".

    TELinear holds None in place of "duplicated". Two kinds of sharded linears hold None too, so the exact type is compared: experts
    have another class, and shared experts with overlapped communication a subclass.
    """
    from megatron.core.extensions import transformer_engine

    mode = getattr(module, "parallel_mode", "")
    return mode == "duplicated" or (mode is None and type(module) is transformer_engine.TELinear)


def _mark_sinks(chunk: Any, **_: Any) -> None:
    """Mark attention sinks as split over tensor-parallel ranks: each has its own heads. Transformer Engine leaves them unmarked."""
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    for name, parameter in chunk.named_parameters():
        if name.endswith(".softmax_offset") and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


def _freeze_tower(chunk: Any, **_: Any) -> None:
    """Exclude the vision tower's parameters, and its projection to the text's embeddings, from training."""
    for name, parameter in chunk.named_parameters():
        if "vision_model." in name:
            parameter.requires_grad_(False)


def _bridge_class(hf_config: Any) -> Any:
    if not has_tower(hf_config.to_dict()):
        from megarl.megatron.model.bridge import FamilyBridge

        return FamilyBridge
    if family_of(hf_config.to_dict()).deepstack:
        from megarl.megatron.model.qwen3_vl import DeepStackBridge

        return DeepStackBridge
    from megarl.megatron.model.qwen2_5_vl import VisionBridge

    return VisionBridge


def _bridge(recipe: Recipe, hf_config: Any, platform: Platform) -> Any:
    bridge = _bridge_class(hf_config)(
        family_of(hf_config.to_dict()),
        hf_config,
        dtype=DTYPES[recipe.model.dtype],
        make_vocab_size_divisible_by=vocab_divisor(text_fields(hf_config.to_dict()), recipe.megatron),
    )
    settings = _transformer_settings(recipe, hf_config, platform)
    fields = [field.name for field in dataclasses.fields(bridge.TransformerConfigClass)]
    check_names(recipe.megatron.extra, fields, "megatron", adaptor(platform.name))
    bridge.set_extra_args(**settings)
    return bridge


def _transformer_settings(recipe: Recipe, hf_config: Any, platform: Platform) -> dict[str, Any]:
    """Return fields of Megatron's TransformerConfig that do not follow from the model; `megatron.extra` takes precedence."""
    megatron = recipe.megatron
    settings: dict[str, Any] = {
        "sequence_parallel": uses_sequence_parallel(megatron),
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,  # DDP then sums gradients without scaling: see pipeline.py
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": platform.fuses_gradient_accumulation,
        "deterministic_mode": recipe.train.deterministic,
        "num_layers_in_first_pipeline_stage": megatron.first_stage_layers,
        "num_layers_in_last_pipeline_stage": megatron.last_stage_layers,
    }
    if platform.uses_native_layers:
        # Megatron's fused activation is only faster if compiled, which it is not here.
        settings["bias_activation_fusion"] = False
    settings |= recompute_settings(megatron)
    settings["fp16"] = recipe.model.dtype == "float16"  # mbridge sets bf16 from its dtype
    if number_of_experts(text_fields(hf_config.to_dict())):
        if recipe.model.dtype != "float32":
            settings["moe_router_dtype"] = "fp32"
        if megatron.tensor_parallel > 1 and not platform.overlaps_shared_experts:
            settings["moe_shared_expert_overlap"] = False  # mbridge turns it on; the sequence would be gathered twice
    return {**settings, **megatron.extra}


def parameters_on_rank(model: Model, *, trained: bool = False) -> int:
    """Count this rank's parameters; `trained`: only parameters that the optimizer updates."""
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad or not trained)
