"""Receive and load weights in vLLM's worker processes.

vLLM repacks weights for its kernels after loading, possibly without changing shapes, so nothing may be written into live
parameters. vLLM's layerwise reload allocates parameters in checkpoint format, loads and repacks them, and copies the
result into the live ones. Without layerwise reload an engine rejects weight updates.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from megarl.engines.vllm import adapters, ascend, compat, cpu_collectives
from megarl.engines.vllm.layerwise_update import (
    LayerwiseUpdate,
    check_complete,
    expert_tables,
    experts_from,
    live_needed_slices,
)
from megarl.weight_sync.full.receiver import FullReceiver
from megarl.weight_sync.session import Session, host_id
from megarl.weight_sync.sharded.receiver import ShardedReceiver
from megarl.weight_sync.sharded.slices import held_tensors

_SHOWN = 5  # names in an error

if current_platform.is_cpu():
    compat.fix_expert_parallel_on_cpu()  # before any model is built
    compat.fix_rejection_of_drafts_on_cpu()
    cpu_collectives.fix_uneven_collectives_on_cpu()
    compat.fix_routing_biases_on_cpu()


class WorkerExtension:
    """Methods that vLLM adds to its workers; `collective_rpc` calls them by name.

    Arguments and results are strings and lists, which every vLLM executor can serialize.
    """

    # attributes of vLLM's worker
    rank: int
    vllm_config: Any
    model_config: Any
    model_runner: Any
    device: torch.device | None

    _megarl_staged: list[tuple[str, torch.Tensor]]  # weights of a full session that wait in host memory
    _megarl_experts: list[tuple[torch.nn.Module, list[int]]]  # `expert_tables`

    def megarl_start(self) -> list:
        """Prepare this rank while the engine is awake; return [rank, host id] of its weight receiver."""
        if current_platform.device_type == "npu":
            ascend.set_log_probs_mode(self.model_runner.sampler, self.model_config.logprobs_mode)
        self._megarl_experts = expert_tables(self.model_runner.get_model())
        return [self.rank, host_id()]

    def megarl_connect(self, session: str, engine: str) -> str | None:
        """Join the weight sync `session` (JSON) as receiver "engine/rank", and leave an earlier one.

        Returns why the model does not support a sharded session, or None.
        """
        self.megarl_disconnect()
        self._megarl_has_base = False  # True once this session has brought the base weights of the adapters
        joined, name = Session.from_json(session), f"{engine}/{self.rank}"
        if not joined.sharded:
            self._megarl_receiver: FullReceiver | ShardedReceiver = FullReceiver(joined, name)
            return None
        receiver = self._megarl_receiver = ShardedReceiver(joined, name)  # `megarl_disconnect` closes it
        tensors = held_tensors(receiver.collect_held())
        self._megarl_tensors = [name for name, _, _ in tensors]
        try:
            with self._megarl_context(), experts_from(self._megarl_experts):
                self._megarl_needed = live_needed_slices(self.model_runner.get_model(), tensors)
        except ValueError as error:
            return str(error)
        receiver.publish_needed(self._megarl_needed)
        return None

    @contextlib.contextmanager
    def _megarl_context(self) -> Iterator[None]:
        with set_current_vllm_config(self.vllm_config), self._megarl_device(), torch.no_grad():
            yield

    def _megarl_device(self) -> torch.device:
        return self.device or torch.device(current_platform.device_type)  # 0.18's CPU worker has device None

    def megarl_disconnect(self) -> None:
        receiver = getattr(self, "_megarl_receiver", None)
        if receiver is not None:
            receiver.close()

    def megarl_seed(self, seed: int) -> None:
        """Seed the generators of requests without a seed, equally on all ranks of an engine.

        vLLM's Model Runner V1 draws with torch. V2 (v1/worker/gpu) draws a seed for each request with numpy.
        """
        torch.manual_seed(seed)
        numpy.random.seed(seed)

    def megarl_hold_parameters(self) -> None:
        """Remember the parameters before an engine on an NPU wakes up."""
        self._megarl_held = ascend.hold_parameters(self.model_runner.get_model())

    def megarl_put_parameters_back(self) -> int:
        """Restore the parameters after waking up; returns how many vllm-ascend had replaced."""
        held, self._megarl_held = self._megarl_held, []
        return ascend.put_back(held)

    def megarl_update(self, version: int) -> list:
        """Receive and load `version`; returns [report, names of all tensors, names that this rank's model did not read].

        Names are returned in the first update only, and must not change later. Raises ValueError if a parameter is not
        completely loaded or names changed.
        """
        receiver: Any = self._megarl_receiver
        self.megarl_synchronize()
        with _failing(receiver):
            update = self._megarl_update_sharded if receiver.session.sharded else self._megarl_update_full
            names, unread = update(receiver, version)
            return [receiver.finish().to_dict(), names, unread]

    def megarl_synchronize(self) -> None:
        """Wait until the device has finished: with asynchronous scheduling, a step may still read the weights."""
        if not current_platform.is_cpu():
            getattr(torch, current_platform.device_type).synchronize()

    def megarl_stage(self, version: int) -> dict[str, Any]:
        """Receive `version` into host memory; returns the report. Not for the first update."""
        receiver: Any = self._megarl_receiver
        with _failing(receiver):
            if receiver.session.sharded:
                with self._megarl_context():
                    receiver.begin(version)
                    receiver.stage()
            else:
                self._megarl_staged = []  # first free the version that it kept before
                self._megarl_staged = list(receiver.weights(version))
            return receiver.finish().to_dict()

    def megarl_load_staged(self) -> None:
        """Load the version that `megarl_stage` received last."""
        receiver: Any = self._megarl_receiver
        self.megarl_synchronize()
        if not receiver.session.sharded:
            staged, self._megarl_staged = self._megarl_staged, []
            self._megarl_load_full(iter(staged), receiver.session.adapter_alpha)
            return
        with self._megarl_context():
            update = LayerwiseUpdate(self.model_runner.get_model(), self._megarl_needed)
            receiver.load_staged(update)
            update.finish(self.model_config)

    def _megarl_update_sharded(self, receiver: ShardedReceiver, version: int) -> tuple[list[str], list[str]]:
        with self._megarl_context():
            update = LayerwiseUpdate(self.model_runner.get_model(), self._megarl_needed, receiver.begin(version))
            receiver.receive(update)
            update.finish(self.model_config)
        names, self._megarl_tensors = self._megarl_tensors, []
        needed = set(self._megarl_needed.tensors)
        return names, [name for name in names if name not in needed]

    def _megarl_update_full(self, receiver: FullReceiver, version: int) -> tuple[list[str], list[str]]:
        return self._megarl_load_full(receiver.weights(version), receiver.session.adapter_alpha)

    def _megarl_load_full(
        self, weights: Iterator[tuple[str, torch.Tensor]], alpha: float | None
    ) -> tuple[list[str], list[str]]:
        """Load full weights; or adapters, which follow the base weights in a session's first update."""
        if alpha is None:
            return self._megarl_load(weights)
        matrices: dict[str, torch.Tensor] = {}
        base = adapters.split_off(weights, matrices)
        names: tuple[list[str], list[str]] = ([], [])
        if not self._megarl_has_base:
            names = self._megarl_load(base)
        for name, _ in base:
            raise ValueError(f"{name} came again, but later updates must contain only adapters")
        with self._megarl_context():
            group = get_tp_group()
            adapters.load(self.model_runner.get_model(), matrices, alpha, group.rank_in_group, group.world_size)
        self._megarl_has_base = True
        return names

    def _megarl_load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> tuple[list[str], list[str]]:
        expected: list[str] | None = getattr(self, "_megarl_names", None)
        names: list[str] = []
        watch = _Reads() if expected is None else None

        def recorded() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                names.append(name)
                if watch is not None:
                    watch.add(name, tensor)
                yield name, tensor

        with set_current_vllm_config(self.vllm_config), self._megarl_device(), watch or contextlib.nullcontext():
            load(self.model_runner.get_model(), recorded(), self.model_config)
        if watch is not None:
            self._megarl_names = names
            return names, watch.unread()
        if names != expected:
            changed = sorted(set(names) ^ set(expected or ()))[:_SHOWN]
            raise ValueError(f"the trainer exports other names or another order than before: {changed}")
        return [], []


@contextlib.contextmanager
def _failing(receiver: FullReceiver | ShardedReceiver) -> Iterator[None]:
    """End the update on all ranks if this one fails."""
    try:
        yield
    except BaseException as error:
        receiver.fail(f"{type(error).__name__}: {error}")
        raise


def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], model_config: Any) -> None:
    """Load checkpoint-format `weights` into a live vLLM model.

    ValueError if a parameter is not completely loaded, or if a reload would lose weights.
    """
    if layers := compat.directly_loaded(model):
        raise ValueError(
            f"vLLM's {type(model).__name__} writes {next(iter(layers))}experts without its weight loaders, which the full route "
            "needs: set weight_sync.route=sharded"
        )
    with adapters.unwrapped(model):
        _load(model, weights, model_config)


def _load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], model_config: Any) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    if current_platform.is_cpu():
        compat.drop_packed_experts(model)
    tied = compat.tied_layers(model)
    compat.start_reload(model)
    parameters = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in tied}
    loaded = model.load_weights(weights)
    _check_names(parameters, loaded)
    check_complete(model, leave_out=tied)
    finalize_layerwise_reload(model, model_config)
    compat.repack_tied(tied)


def _check_names(parameters: set[str], loaded: set[str] | None) -> None:
    """Raise ValueError for parameters that are not in `loaded`, the result of the model's loader (None for some loaders)."""
    missing = sorted(parameters - loaded) if loaded is not None else []
    if missing:
        raise ValueError(
            f"{len(missing)} parameters of the engine's model got no weights: {', '.join(missing[:_SHOWN])}; "
            f"the trainer's export does not name them"
        )


class _Reads(TorchDispatchMode):
    """Records which weights operators read while it is active; creating a view is not a read.

    A model's loader can silently skip an unknown name; its tensor is then never read. The weights of a bucket share its
    memory, so the address of an operand identifies the weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buckets: dict[int, tuple[list[int], list[str]]] = {}  # address -> rising byte offsets, names
        self._unread: dict[str, None] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Watch `tensor`. Tensors must be added in the order of their bucket."""
        address, offset = self._locate(tensor)
        offsets, names = self._buckets.setdefault(address, ([], []))
        if offsets and offset <= offsets[-1]:  # a new bucket reuses the address of a freed one
            offsets, names = self._buckets[address] = ([], [])
        offsets.append(offset)
        names.append(name)
        self._unread[name] = None

    def unread(self) -> list[str]:
        return list(self._unread)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            for leaf in torch.utils._pytree.arg_tree_leaves(*args, **(kwargs or {})):
                if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.device.type == "cpu":
                    self._mark(leaf)
        return func(*args, **(kwargs or {}))

    def _mark(self, tensor: torch.Tensor) -> None:
        address, offset = self._locate(tensor)
        if address in self._buckets:
            offsets, names = self._buckets[address]
            self._unread.pop(names[bisect.bisect_right(offsets, offset) - 1], None)

    @staticmethod
    def _locate(tensor: torch.Tensor) -> tuple[int, int]:
        return tensor.untyped_storage().data_ptr(), tensor.storage_offset() * tensor.element_size()
