"""vLLM's model of any rank of any layout on tensors without memory, for planning on a machine without devices.

`prepare` patches the process, `build` makes it a rank. Tensors have shapes and types only, and collectives move nothing, since
the other ranks do not exist. Changes of weights by a device's kernels after loading are not modelled. Patches are
process-wide, so use a separate process.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megarl.commands.plan.meta_device import META, fake_collectives, join
from megarl.engines.base import EngineSpec
from megarl.engines.vllm.args import build_engine_args, process_env
from megarl.engines.vllm.changing_weights import has_draft_weights

# Engine arguments that change the memory of a rank. Others control how it runs, and may be specific to a device.
_OF_THE_MODEL = (
    "hf_overrides", "kv_cache_dtype", "limit_mm_per_prompt", "quantization", "num_redundant_experts", "speculative_config",
)  # fmt: skip
_SHARED_BY_DRAFT = ("embed_tokens", "lm_head", "head")  # with the policy (vllm/v1/spec_decode/llm_base_proposer.py)


@dataclass(frozen=True)
class RankModel:
    """A model with parameters on "meta", laid out for loading checkpoints."""

    model: torch.nn.Module
    config: Any  # vLLM's VllmConfig
    draft: torch.nn.Module  # layers for multi-token prediction, without the embedding and output layer, which the model shares; empty without a draft


def prepare() -> None:
    """Patch this process. Call before vLLM is imported."""
    os.environ.update(process_env(1), VLLM_PLUGINS="")  # "": plugins of other devices are not loaded
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Torchvision())
    fake_collectives()
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # the same on every machine
    import vllm.model_executor.model_loader.utils
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.model_executor.models import registry

    _without_fp8_kernels()
    # These query other ranks or another process.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * torch.distributed.get_world_size(group)
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )


def _without_fp8_kernels() -> None:
    """Let FP8 layers be built without a kernel: vLLM has none for most CPUs, and kernels do not change their weights."""
    try:
        from vllm.model_executor.layers.quantization.online import fp8
    except ImportError:  # an older vLLM, which cannot quantize at all (megarl/engines/vllm/quantization.py)
        return
    fp8.init_fp8_linear_kernel = lambda *_, **__: None
    fp8.select_fp8_moe_backend = lambda *_, **__: (None, None)


def build(spec: EngineSpec, rank: int) -> RankModel:
    """Build rank `rank` of an engine with `spec`, or of its engine group (ranks of an engine are neighbours). Once per
    process.

    `spec.model_path` needs only a config.json. Raises ValueError for a model that cannot be cut this way.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    engine, of_engine = divmod(rank, spec.tensor_parallel)
    os.environ.update(
        VLLM_DP_SIZE=str(spec.data_parallel),
        VLLM_DP_RANK=str(engine),
        VLLM_DP_RANK_LOCAL="0",
        VLLM_DP_MASTER_PORT="1",  # avoids the search for a free port; nothing connects
    )
    join(rank, spec.tensor_parallel * spec.data_parallel)
    config = EngineArgs(**_arguments(spec)).create_engine_config()
    with set_current_vllm_config(config), _default_dtype(config.model_config.dtype):
        parallel_state.init_distributed_environment(spec.tensor_parallel, of_engine, local_rank=0, backend="fake")
        parallel_state.ensure_model_parallel_initialized(spec.tensor_parallel, 1)
        with _FloatsWithoutMemory():
            model = initialize_model(config)
            draft = _draft(config) if has_draft_weights(spec.engine_args) else torch.nn.Module()
    return RankModel(model, config, draft)


def _draft(config: Any) -> torch.nn.Module:
    """Build the draft of an engine with this VllmConfig."""
    from vllm.config.utils import replace as replaced
    from vllm.model_executor.model_loader.utils import initialize_model

    of_draft = config.speculative_config.draft_model_config
    draft = initialize_model(replaced(config, model_config=of_draft), model_config=of_draft)
    for module in list(draft.modules()):
        for name in [name for name, _ in module.named_children() if name in _SHARED_BY_DRAFT]:
            delattr(module, name)
    return draft


def _arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the engine arguments on an accelerator that change the memory of a rank."""
    relevant = {name: value for name, value in spec.engine_args.items() if name in _OF_THE_MODEL}
    if not has_draft_weights(spec.engine_args):
        relevant.pop("speculative_config", None)
    # Without seeds, vLLM's default number of sequences, which takes the place of the recipe's, is not checked.
    plain = replace(
        spec, engine_args=relevant, sleep_mode=False, adapters=None, return_routed_experts=False, seeded=False
    )
    arguments = build_engine_args(plain, "cuda")
    return {**arguments, "enforce_eager": True, "load_format": "dummy", "distributed_executor_backend": None}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _FloatsWithoutMemory(TorchFunctionMode):
    """Creates new floating-point tensors on "meta". Integers stay on the host: a rank's expert numbers are computed."""

    _MAKE = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._MAKE and kwargs.get("device") is None:
            usual = torch.int64 if func is torch.arange else torch.get_default_dtype()
            if (kwargs.get("dtype") or usual).is_floating_point:
                kwargs["device"] = META
        return func(*args, **kwargs)


class _Torchvision:
    """Stand-in for torchvision: vLLM and transformers import names that building a model never uses."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0.28.0"  # type: ignore[attr-defined]  # transformers compares it


class _Names(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name)
