"""Process groups for buckets between hosts: the library, its options, and the abort of transfers in flight."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.platform.cpu import CPUPlatform
from megarl.platform.cuda import CUDAPlatform
from megarl.platform.npu import NPUPlatform
from megarl.weight_sync.fingerprint import Fingerprinter, fingerprint
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.sender import start_session
from megarl.weight_sync.session import WeightSyncError
from megarl.weight_sync.store import StoreChannel
from tests.support.upstream_sources import missing, torch_npu

TORCH_NPU = torch_npu()
MINUTE = timedelta(seconds=60)


class _Work:
    def __init__(self, done: bool, error: str = "") -> None:
        self.done, self.error = done, error

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


class _Group:
    def __init__(self, works: list[_Work]) -> None:
        self.works, self.broadcasts = works, 0

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> _Work:
        self.broadcasts += 1
        return self.works.pop(0)


class _Library(CPUPlatform):
    """A library that connects in the first broadcast and can abort transfers in flight."""

    def __init__(self, works: list[_Work]) -> None:
        self.group, self.aborted = _Group(works), []

    def collective(self, store, rank, size, timeout):
        return self.group

    def abort_collective(self, group):
        self.aborted.append(group)


@pytest.fixture
def channel():
    options = {
        "transport": "device",
        "sharded": True,
        "bucket_bytes": 64,
        "timeout": 60.0,
        "check_every": 0,
        "heartbeat_timeout": 8.0,
    }
    session, store = start_session("127.0.0.1", ["a"], [("e0/0", "a")], **options)
    return StoreChannel(session, store)


def test_a_group_connects_before_the_first_bucket(channel):
    library = _Library([_Work(True), _Work(True)])
    group = BroadcastGroup(channel, 0, 2, library)
    assert library.group.broadcasts == 1
    group.finish(group.start(torch.zeros(4, dtype=torch.uint8)), "a bucket")
    group.close()
    group.close()
    assert library.aborted == []


@pytest.mark.parametrize(
    ("first", "words"),
    [(_Work(False), "waited 2 s for the gloo group"), (_Work(True, "no route"), "could not form .* no route")],
)
def test_a_group_that_does_not_connect_is_aborted(channel, first, words):
    channel.session = dataclasses.replace(channel.session, timeout=2.0)
    library = _Library([first])
    with pytest.raises(WeightSyncError, match=words):
        BroadcastGroup(channel, 0, 2, library)
    assert len(library.aborted) == (not first.done), "a group that still connects is aborted"


def test_close_aborts_transfers_in_flight(channel):
    """Without the abort, NCCL's kernel would keep running on the device, and its watchdog would end the process."""
    library = _Library([_Work(True), _Work(True), _Work(False)])
    group = BroadcastGroup(channel, 0, 2, library)
    group.start(torch.zeros(4, dtype=torch.uint8))
    group.start(torch.zeros(4, dtype=torch.uint8))
    group.close()
    assert library.aborted == [library.group]


def test_nccl_options_exist_in_torch(monkeypatch):
    """Checks signatures in torch/_C/_distributed_c10d.pyi; only CUDA builds of torch have the library."""

    class Options:
        def __init__(self) -> None:
            self._timeout, self.config = None, SimpleNamespace(max_ctas=None)

    def group(store, rank, size, options):
        handling.append(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
        return SimpleNamespace(given=(store, rank, size, options), abort=lambda: aborted.append(rank))

    aborted: list[int] = []
    handling: list[str] = []  # "0": a peer's death does not end this process
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    group.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    collective = CUDAPlatform().collective("store", 1, 2, MINUTE)
    store, rank, size, options = collective.given
    assert (store, rank, size, options._timeout, options.config.max_ctas) == ("store", 1, 2, MINUTE, 2)
    assert handling == ["0"] and os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3", "training's own groups keep it"
    CUDAPlatform().abort_collective(collective)
    assert aborted == [1]
    stub = (torch.__path__[0] + "/_C/_distributed_c10d.pyi").replace("//", "/")
    with open(stub) as file:
        text = file.read().partition("class ProcessGroupNCCL(Backend):")[2].partition("\nclass ")[0]
    for name in ("max_ctas: int", "config: ProcessGroupNCCL.NCCLConfig", "options: Options,", "def abort(self)"):
        assert name in text, name


def test_hccl_group_gets_torch_npus_options(monkeypatch):
    """The calls to torch_npu's binding; `test_hccl_library_has_the_names` checks that its library has these names."""

    class Options:
        _timeout = hccl_config = None

    def group(store, rank, size, options):
        return SimpleNamespace(
            given=(store, rank, size, options),
            abort_hccl_comm=lambda reason: aborted.append(reason),
            clear_workmeta_list=lambda: aborted.append("forgotten"),
        )

    aborted: list[str] = []
    group.Options = Options  # type: ignore[attr-defined]
    binding = ModuleType("torch_npu._C._distributed_c10d")
    binding.ProcessGroupHCCL = group  # type: ignore[attr-defined]
    for name in ("torch_npu", "torch_npu._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, binding.__name__, binding)
    collective = NPUPlatform().collective("store", 0, 2, MINUTE)
    store, rank, size, options = collective.given
    assert (store, rank, size, options._timeout) == ("store", 0, 2, MINUTE)
    assert options.hccl_config == {"hccl_buffer_size": 16, "hccl_op_expansion_mode": 1}
    assert options.global_ranks_in_group == [0, 1], "without ranks it would be torch_npu's default group"
    assert NPUPlatform().collective("store", 0, 2, MINUTE).given[3].group_id != options.group_id
    NPUPlatform().abort_collective(collective)
    assert aborted[0] == "forgotten" and len(aborted) == 2


@pytest.mark.skipif(TORCH_NPU is None, reason=missing("torch_npu"))
def test_hccl_library_has_the_names():
    assert TORCH_NPU is not None
    libraries = [path.read_bytes() for path in TORCH_NPU.glob("torch_npu/**/*.so")]
    names = ["abort_hccl_comm", "clear_workmeta_list", "global_ranks_in_group", "group_id", "hccl_config"]
    for name in [*names, "hccl_buffer_size", "hccl_op_expansion_mode"]:
        assert any(name.encode() in library for library in libraries), name


def test_device_memory_is_read_after_its_write(monkeypatch):
    """Device memory is read on a separate stream, after the event of the write."""
    order: list[object] = []
    memory = torch.zeros(48, dtype=torch.uint8)
    expected = torch.arange(48, dtype=torch.uint8)

    class Stream:
        def wait_event(self, written):
            order.append(written)
            memory.copy_(expected)

        def synchronize(self):
            order.append("copied")

    @contextlib.contextmanager
    def stream(copy_stream):
        order.append("beside")
        yield

    devices = SimpleNamespace(set_device=order.append, Stream=Stream, stream=stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    fingerprints = Fingerprinter()
    fingerprints._host = torch.full((64,), 7, dtype=torch.uint8)  # pinned, where there is a device
    assert fingerprints._of_device(memory, "written") == fingerprint(expected.numpy())
    assert order == [memory.device, "beside", "written", "copied"]
    assert fingerprints.start(memory).result() == fingerprint(expected.numpy())
    fingerprints.close()
