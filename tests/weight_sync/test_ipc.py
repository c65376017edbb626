"""Buckets in a sender's device memory, mapped by engine ranks on the same machine: handles and the order of writes."""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import mmap
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.cluster.failures import CallFailed
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import weight_sync as weight_sync_stage
from megarl.platform import environment, select
from megarl.platform.cpu import CPUPlatform
from megarl.platform.ipc import DeviceMemory, HostMemory, open_device_memory, without_expandable_segments
from megarl.platform.npu import NPUPlatform
from megarl.preflight.environment import environment_notices
from megarl.recipe.schema import Recipe
from megarl.weight_sync import fingerprint, incoming
from megarl.weight_sync.fingerprint import word_sums
from megarl.weight_sync.mailbox import AckWriter
from megarl.weight_sync.outgoing import OutgoingBuckets
from megarl.weight_sync.process_group import BroadcastGroup
from megarl.weight_sync.sharded.receiver import ShardedReceiver
from tests.support.sharded_ranks import open_cluster
from tests.support.upstream_sources import missing, torch_npu

TORCH_NPU = torch_npu()
FILE = "memfd:megarl-weights"  # files in /dev/shm, which other tests may still map, are called otherwise
HERE = ["here"] * 4
RELAYED = ["here", "b", "b", "c"]


def descriptors() -> int:
    """Count the unlinked files that this process has open or mapped."""
    held = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held += FILE in os.readlink(f"/proc/self/fd/{name}")
    gc.collect()
    return held + Path("/proc/self/maps").read_text().count(FILE)


# --- a weight sync -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [HERE, RELAYED, ["b", "b", "c", "c"]])
def test_every_element_arrives_and_no_file_has_a_name(tmp_path, places):
    with open_cluster(tmp_path, places, transport="ipc") as cluster:
        cluster.connect()
        needed = sum(rank.description.nbytes for rank in cluster.engines)
        for version in (3, 4, 5):
            _, received = cluster.update(version)
            assert received.bytes == needed
        assert os.listdir(tmp_path) == []
        assert descriptors() > 0
    assert descriptors() == 0


@pytest.mark.parametrize("places", [HERE, RELAYED])
def test_slots_do_not_depend_on_torchs_default_device(tmp_path, monkeypatch, places):
    """vLLM sets its device as torch's default around a receiver."""
    begin = ShardedReceiver.begin

    def elsewhere(self, version):
        with torch.device("meta"):
            return begin(self, version)

    monkeypatch.setattr(ShardedReceiver, "begin", elsewhere)
    with open_cluster(tmp_path, places, transport="ipc") as cluster:
        cluster.connect()
        cluster.update(1)


@pytest.mark.parametrize("transport", ["ipc", "auto"])
def test_device_buckets_are_fingerprinted_on_the_device(tmp_path, monkeypatch, transport):
    """Sender, relay and receiver use sums of words: XXH3 would copy every bucket to host memory."""
    read: list[int] = []
    monkeypatch.setattr(fingerprint, "word_sums", lambda memory: read.append(len(memory)) or word_sums(memory))
    with open_cluster(tmp_path, RELAYED, transport=transport) as cluster:
        cluster.connect()
        sent, received = cluster.update(1)
    assert len(read) == (sent.buckets + received.buckets if transport == "ipc" else 0)


def test_gloo_transfers_only_host_memory(tmp_path, monkeypatch):
    """gloo cannot read NPU memory. Holds also for an engine rank that relays its buckets only within its host."""
    on_device: list[HostMemory] = []
    moved: list[int] = []
    packed: list[int] = []
    share, start, claim = CPUPlatform.shareable_memory, BroadcastGroup.start, OutgoingBuckets.claim

    def shareable_memory(self, size):
        on_device.append(share(self, size))
        return on_device[-1]

    def started(self, memory):
        moved.append(memory.untyped_storage().data_ptr())
        return start(self, memory)

    def claimed(self, size, **options):
        held = claim(self, size, **options)
        packed.append(held.memory.untyped_storage().data_ptr())
        return held

    monkeypatch.setattr(CPUPlatform, "shareable_memory", shareable_memory)
    monkeypatch.setattr(BroadcastGroup, "start", started)
    monkeypatch.setattr(OutgoingBuckets, "claim", claimed)
    with open_cluster(tmp_path, ["b"] * 4, transport="ipc") as cluster:
        cluster.connect()
        cluster.update(1)
        slots = {shared.memory.untyped_storage().data_ptr() for shared in on_device}
    assert moved and on_device
    assert not slots & set(moved)
    assert packed and not set(packed) & set(moved), "trainers pack on their device, where sums are taken"


def test_a_changed_word_is_detected(tmp_path, monkeypatch):
    """A reader gets other bytes than were packed, as after an incomplete device copy."""
    open_shared = CPUPlatform.open_shared
    monkeypatch.setattr(CPUPlatform, "open_shared", lambda self, handle: open_shared(self, handle).clone())
    with open_cluster(tmp_path, HERE, transport="ipc") as cluster:
        cluster.connect()
        sending, receiving = cluster.start(1)
        errors = [future.exception(30) for future in (*sending, *receiving)]
    assert all("got other bytes than trainer" in str(error) for error in errors), errors


def test_an_acknowledgement_follows_the_devices_copies(tmp_path, monkeypatch):
    """The sender packs the next bucket into the slot after the acknowledgement."""
    order: list[str] = []
    publish = AckWriter.publish

    class Device(CPUPlatform):
        def synchronize(self) -> None:
            order.append("synchronized")

    def published(self, *arguments):
        order.append("answered")
        publish(self, *arguments)

    monkeypatch.setattr(AckWriter, "publish", published)
    monkeypatch.setattr(incoming, "select", lambda name: Device())
    with open_cluster(tmp_path, HERE, transport="ipc") as cluster:
        cluster.connect()
        cluster.update(1)
    assert order.count("answered") == order.count("synchronized") > 0
    waiting = 0
    for event in order:  # events of four concurrent ranks: each acknowledgement needs an earlier synchronize
        waiting += 1 if event == "synchronized" else -1
        assert waiting >= 0


def test_unmappable_memory_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    def refused(self, handle):
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(CPUPlatform, "open_shared", refused)
    with open_cluster(tmp_path, HERE, transport="ipc") as cluster:
        cluster.connect()
        sending, receiving = cluster.start(1)
        errors = [str(future.exception(30)) for future in (*sending, *receiving)]
    assert all(
        "cannot map the device memory of trainer" in error and "weight_sync.transport=auto" in error for error in errors
    )
    assert descriptors() == 0


@pytest.mark.parametrize(
    ("read", "verdict", "cause"),
    [
        (list(range(256)), None, ""),
        ([0] * 256, "FAIL", "255 of 256 bytes wrong"),
        (CallFailed("pidfd_getfd: Operation not permitted"), "NOT RUN", "pidfd_getfd"),
    ],
)
def test_accept_distinguishes_wrong_bytes_from_unmappable_memory(tmp_path, monkeypatch, read, verdict, cause):
    def called(method, *arguments):
        call: Future[object] = Future()
        (call.set_exception if method == "read" and isinstance(read, Exception) else call.set_result)(read)
        return call

    service = SimpleNamespace(call=called, stop=lambda: None)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(
        weight_sync_stage, "LocalService", lambda *arguments, env, **options: started.append(env) or service
    )
    monkeypatch.setattr(weight_sync_stage, "visible", lambda context, devices: {"VISIBLE": str(devices)})
    context = StageContext(Settings("cpu", 4), tmp_path, tmp_path, 1e9)
    mapped = weight_sync_stage._maps_memory(context, "dense: sharded by ipc", SimpleNamespace(services=[service]))  # type: ignore[arg-type]
    assert mapped == (verdict is None)
    assert [env["VISIBLE"] for env in started] == ["[3]"], "the device of an engine, not the trainer's"
    assert [check.verdict for check in context.checks] == ([verdict] if verdict else [])
    assert all(cause in check.cause for check in context.checks)


# --- memory --------------------------------------------------------------------------------------------------------

READER = """
import json, sys
from megarl.platform import select
memory = select("cpu").open_shared(json.loads(sys.argv[1]))
assert memory.tolist() == list(range(100))
memory[7] = 77
"""


def test_another_process_maps_a_cpus_memory():
    shared = select("cpu").shareable_memory(100)
    shared.memory.copy_(torch.arange(100, dtype=torch.uint8))
    handle = json.dumps(shared.handle())
    subprocess.run([sys.executable, "-c", READER, handle], check=True)
    assert shared.memory[7] == 77
    shared.close()
    shared.close()
    with pytest.raises(OSError):
        select("cpu").open_shared(json.loads(handle))


def test_a_full_memory_is_an_error_with_the_remedy(monkeypatch):
    def full(descriptor, start, size):
        raise OSError(28, "no room")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"no memory for a weight bucket of 1,000 bytes; lower weight_sync.bucket_mb"):
        HostMemory(1000)
    assert descriptors() == 0


class _Storage:
    """torch's calls for device memory over an unlinked file. A handle has eight values, as reductions.py unpacks them."""

    def __init__(self) -> None:
        self.host = HostMemory(64)
        self.counts: list[bytes] = []

    def share(self, storage):
        assert storage.data_ptr() == self.host.memory.data_ptr()
        handle = self.host.handle()
        self.counts.append(f"count {len(self.counts)}".encode())
        name = f"/proc/{handle['process']}/fd/{handle['descriptor']}"
        return 5, name.encode(), 64, 0, self.counts[-1], 8, b"event", True

    def rebuild(self, device, handle, size, offset, count, count_offset, event, waits):
        assert (device, offset, count_offset, event, waits) == (2, 0, 8, b"event", True)
        self.counts.remove(count)
        descriptor = os.open(handle.decode(), os.O_RDWR)
        mapped = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        os.close(descriptor)
        return mapped.untyped_storage()


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_device_memory_is_described_once_per_reader(monkeypatch, device):
    storage = _Storage()
    monkeypatch.setattr(torch.UntypedStorage, f"_share_{device}_", lambda self: storage.share(self), raising=False)
    monkeypatch.setattr(torch.UntypedStorage, f"_new_shared_{device}", staticmethod(storage.rebuild), raising=False)
    shared = DeviceMemory(storage.host.memory, f"_share_{device}_")
    handles = [json.loads(json.dumps(shared.handle())) for _ in range(2)]
    assert len(storage.counts) == 2, "readers are counted"
    first, second = (open_device_memory(handle, torch.device("cuda", 2), f"_new_shared_{device}") for handle in handles)
    assert storage.counts == []
    shared.memory[3] = 9
    assert first[3] == second[3] == 9 and len(first) == 64
    shared.close()
    assert len(shared.memory) == 0


def test_a_torch_without_the_ipc_calls_is_an_error_with_the_remedy():
    with pytest.raises(RuntimeError, match=r"no _share_xpu_.*set weight_sync.transport=auto"):
        DeviceMemory(torch.zeros(4, dtype=torch.uint8), "_share_xpu_").handle()


EIGHT = [
    "device", "handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle", "ref_counter_offset",
    "event_handle", "event_sync_required",
]  # fmt: skip


def described(source: Path, share: str, rebuild: str) -> None:
    """Assert the order of the eight values in torch's code for both sides."""
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign) and isinstance(value, ast.Call) and getattr(value.func, "attr", "") == share:
            assert isinstance(node.targets[0], ast.Tuple)
            assert [name.id for name in node.targets[0].elts if isinstance(name, ast.Name)] == EIGHT
            break
    else:
        raise AssertionError(f"nothing calls {share}")
    calls = [
        call for call in ast.walk(tree) if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == rebuild
    ]
    names = [argument.id for argument in calls[0].args if isinstance(argument, ast.Name)]
    assert names == ["storage_device", "storage_handle", *EIGHT[2:]]


def test_cuda_ipc_calls_exist_in_torch():
    described(Path(torch.__file__).parent / "multiprocessing/reductions.py", "_share_cuda_", "_new_shared_cuda")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.skipif(TORCH_NPU is None, reason=missing("torch-npu"))
def test_npu_ipc_calls_exist_in_torch_npu():
    package = TORCH_NPU / "torch_npu"
    described(package / "multiprocessing/reductions.py", "_share_npu_", "_new_shared_npu")
    methods = (package / "utils/storage.py").read_text()
    assert 'setattr(torch.UntypedStorage, "_share_npu_"' in methods
    assert 'setattr(torch.UntypedStorage, "_new_shared_npu"' in methods
    assert "def _set_allocator_settings(settings)" in (package / "npu/memory.py").read_text()


ON, OFF = "expandable_segments:True", "expandable_segments:False"


@pytest.mark.parametrize(
    ("environment", "changes"),
    [
        ({}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": OFF}, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": ON}, [OFF, ON]),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:64, {ON},roundup_power2_divisions:[256:1,512:2]"},
            [f"max_split_size_mb:64, {setting},roundup_power2_divisions:[256:1,512:2]" for setting in (OFF, ON)],
        ),
        ({"PYTORCH_ALLOC_CONF": ON}, [OFF, ON]),
        ({"PYTORCH_ALLOC_CONF": OFF, "PYTORCH_CUDA_ALLOC_CONF": ON}, [OFF, ON]),
        ({"PYTORCH_ALLOC_CONF": ON, "PYTORCH_CUDA_ALLOC_CONF": OFF}, []),
    ],
)
def test_slots_are_allocated_without_expandable_segments(monkeypatch, environment, changes):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done: list[str] = []
    with without_expandable_segments("PYTORCH_CUDA_ALLOC_CONF", done.append, whole=True):
        done.append("allocated")
    assert [entry for entry in done if entry != "allocated"] == changes
    assert done.index("allocated") == len(changes) // 2, "between both changes"
    done.clear()
    with (
        pytest.raises(ZeroDivisionError),
        without_expandable_segments("PYTORCH_CUDA_ALLOC_CONF", done.append, whole=False),
    ):
        raise ZeroDivisionError
    assert done == ([OFF, ON] if changes else []), "also after an error; an allocator that keeps the rest gets no more"


def test_torch_gives_cudas_variable_precedence():
    """`without_expandable_segments` reads the variables in the same order."""
    code = """
import torch
print(torch._C._accelerator_getAllocatorSettings())
"""
    names = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:111", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:222"}
    shown = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **names}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "max_split_size_mb:222"


@pytest.mark.parametrize(
    ("transport", "name", "value", "expected"),
    [
        ("ipc", "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,roundup_power2_divisions:4", True),
        ("ipc", "PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2],expandable_segments:True", True),
        ("auto", "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,roundup_power2_divisions:4", False),
        ("ipc", "PYTORCH_NPU_ALLOC_CONF", "roundup_power2_divisions:4", False),  # the bucket changes no setting
        ("ipc", "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", False),
    ],
)
def test_a_setting_that_shared_buckets_reset_is_noticed(transport, name, value, expected, monkeypatch) -> None:
    monkeypatch.setitem(environment._SHELL, name, value)
    recipe = Recipe()
    recipe.weight_sync.transport = transport
    notices = [notice for notice in environment_notices(recipe, NPUPlatform()) if "transport=ipc" in notice]
    assert len(notices) == expected
    assert all(f"{name}={value}" in notice and "roundup_power2_divisions" in notice for notice in notices)
