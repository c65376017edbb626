"""Inside every vLLM worker process: takes weights from the exchange and loads them.

vLLM repacks weights for its kernels after loading, in shapes that may look unchanged, so nothing is
written into live parameters. vLLM's layerwise reload lays out checkpoint-format parameters anew, loads,
repacks, and copies the result into the live ones. An engine whose vLLM lacks it refuses to take weights.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from megarl.engines.vllm import adapters, ascend, compat, cpu_collectives
from megarl.engines.vllm.layers import Filling, check_complete, describe
from megarl.weight_sync.full.receiver import FullReceiver
from megarl.weight_sync.session import ShardedSession, host_id, session_from_json
from megarl.weight_sync.sharded.receiver import ShardedReceiver
from megarl.weight_sync.sharded.slices import held_tensors

_SHOWN = 5  # names in an error

if current_platform.is_cpu():
    compat.fix_expert_parallel_on_cpu()  # before any model is built
    cpu_collectives.fix_uneven_collectives_on_cpu()
    compat.start_without_preloads_on_cpu()
    compat.keep_cache_size_on_cpu()
    compat.sample_without_compiling_on_cpu()


class WorkerExtension:
    """vLLM mixes this class into its workers; `collective_rpc` calls the methods by name.

    Arguments and results are strings and lists, which every vLLM executor can carry.
    """

    # what vLLM's worker has
    rank: int
    vllm_config: Any
    model_config: Any
    model_runner: Any
    device: torch.device | None

    def megarl_endpoint(self) -> list:
        """[rank, host id]: where weights must go."""
        return [self.rank, host_id()]

    def megarl_connect(self, session: str, engine: str) -> str | None:
        """Join the exchange `session` (JSON) as receiver "engine/rank"; leaves an earlier one. Returns why the model cannot
        be filled by a planned one, where it cannot."""
        self.megarl_disconnect()
        self._megarl_based = False  # whether this session has brought the weights that adapters stand beside
        joined, name = session_from_json(session), f"{engine}/{self.rank}"
        if not isinstance(joined, ShardedSession):
            self._megarl_alpha = joined.adapter_alpha
            self._megarl_receiver: FullReceiver | ShardedReceiver = FullReceiver(joined, name)
            return None
        receiver = self._megarl_receiver = ShardedReceiver(joined, name)  # from now on closed by `megarl_disconnect`
        tensors = held_tensors(receiver.collect_held())
        self._megarl_tensors = [name for name, _, _ in tensors]
        try:
            with self._megarl_context():
                self._megarl_need = describe(self.model_runner.model, tensors)
        except ValueError as error:
            return str(error)
        receiver.publish_needed(self._megarl_need)
        return None

    @contextlib.contextmanager
    def _megarl_context(self) -> Iterator[None]:
        with set_current_vllm_config(self.vllm_config), self._megarl_device(), torch.no_grad():
            yield

    def _megarl_device(self) -> torch.device:
        return self.device or torch.device(current_platform.device_type)  # 0.18's worker for CPUs names none

    def megarl_disconnect(self) -> None:
        receiver = getattr(self, "_megarl_receiver", None)
        if receiver is not None:
            receiver.close()

    def megarl_seed(self, seed: int) -> None:
        """Seed the generator that draws for requests without a seed, on all ranks of an engine alike."""
        torch.manual_seed(seed)

    def megarl_hold_parameters(self) -> None:
        """Before the engine wakes up, on an NPU."""
        self._megarl_held = ascend.hold_parameters(self.model_runner.model)

    def megarl_put_parameters_back(self) -> int:
        """After it woke up: how many parameters had been replaced."""
        held, self._megarl_held = self._megarl_held, []
        return ascend.put_back(held)

    def megarl_update(self, version: int) -> list:
        """Receive and load `version`: [report, names of all tensors, names of those that this rank's model did not read].

        The names are told in the first update, and must stay the same later. Raises
        ValueError where a parameter got no value or too little of one, or names changed.
        """
        receiver = self._megarl_receiver
        try:
            if isinstance(receiver, ShardedReceiver):
                names, unread = self._megarl_fill(receiver, version)
            else:
                names, unread = self._megarl_take(receiver.weights(version))
            return [receiver.finish().to_dict(), names, unread]
        except BaseException as error:
            receiver.fail(f"{type(error).__name__}: {error}")
            raise

    def _megarl_fill(self, receiver: ShardedReceiver, version: int) -> tuple[list[str], list[str]]:
        need = self._megarl_need
        with self._megarl_context():
            filling = Filling(self.model_runner.model, need, receiver.begin(version))
            receiver.receive(filling)
            filling.finish(self.model_config)
        told, self._megarl_tensors = self._megarl_tensors, []
        needed = set(need.tensors)
        return told, [name for name in told if name not in needed]

    def _megarl_take(self, weights: Iterator[tuple[str, torch.Tensor]]) -> tuple[list[str], list[str]]:
        """Whole weights; or adapters, behind whole weights in a session's first update."""
        if self._megarl_alpha is None:
            return self._megarl_load(weights)
        matrices: dict[str, torch.Tensor] = {}
        base = adapters.without_matrices(weights, matrices)
        found: tuple[list[str], list[str]] = ([], [])
        if not self._megarl_based:
            found = self._megarl_load(base)
        for name, _ in base:
            raise ValueError(f"{name} came again, where adapters alone were to come")
        with self._megarl_context():
            group = get_tp_group()
            adapters.put(self.model_runner.model, matrices, self._megarl_alpha, group.rank_in_group, group.world_size)
        self._megarl_based = True
        return found

    def _megarl_load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> tuple[list[str], list[str]]:
        known: list[str] | None = getattr(self, "_megarl_names", None)
        names: list[str] = []
        watch = _Reads() if known is None else None

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                names.append(name)
                if watch is not None:
                    watch.add(name, tensor)
                yield name, tensor

        with set_current_vllm_config(self.vllm_config), self._megarl_device(), watch or contextlib.nullcontext():
            load(self.model_runner.model, counted(), self.model_config)
        if watch is not None:
            self._megarl_names = names
            return names, watch.unread()
        if names != known:
            changed = sorted(set(names) ^ set(known or ()))[:_SHOWN]
            raise ValueError(f"the trainer exports other names or another order than before: {changed}")
        return [], []


def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], model_config: Any) -> None:
    """Load checkpoint-format `weights` into a live vLLM model. ValueError unless every parameter got all of its value."""
    with adapters.bare(model):
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
    """`loaded` is what the model's loader says that it loaded; some loaders say nothing (None)."""
    missing = sorted(parameters - loaded) if loaded is not None else []
    if missing:
        raise ValueError(
            f"{len(missing)} parameters of the engine's model got no weights: {', '.join(missing[:_SHOWN])}; "
            f"the trainer's export does not name them"
        )


class _Reads(TorchDispatchMode):
    """Notes which weights an operator read while it is active, views aside.

    A name that the model's loader does not know can vanish without a word; its tensor is then
    never read. The weights of a bucket share its memory, so an address tells whose bytes were read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buckets: dict[int, tuple[list[int], list[str]]] = {}  # address -> rising byte offsets, names
        self._unread: dict[str, None] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Watch `tensor`. Call in the order in which weights lie in their bucket."""
        address, offset = self._locate(tensor)
        offsets, names = self._buckets.setdefault(address, ([], []))
        if offsets and offset <= offsets[-1]:  # another bucket at the address of a freed one
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
