"""Full weight sync: every tensor arrives with a verified fingerprint, or every process raises the cause."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl import load_recipe
from megarl.errors import RecipeError
from megarl.weight_sync.full import receiver as receiver_module
from megarl.weight_sync.full.buckets import BucketEntry
from megarl.weight_sync.full.files import BucketFiles
from megarl.weight_sync.full.receiver import FullReceiver
from megarl.weight_sync.full.sender import FullSender
from megarl.weight_sync.relay import full_relays
from megarl.weight_sync.session import (
    Session,
    WeightSyncError,
    check_transport,
    compare_reports,
    host_id,
    merge_reports,
)
from megarl.weight_sync.shared_memory import SharedSlot, remove_stale_files

KIB = 1024


def make_weights(seed):
    """Weights with odd shapes and types: one tensor larger than the bucket, one not contiguous, one empty."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "embed": torch.randn(30, 17, generator=generator),
        "transposed": torch.randn(9, 31, generator=generator).t(),
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "big": torch.randn(70, 64, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 4),
    }
    return weights | {f"layer.{i}": torch.randn(33, generator=generator) for i in range(60)}


@contextmanager
def full_sender(endpoints, shm_dir, transport="auto", bucket_bytes=4 * KIB, timeout=20.0, directory=None):
    sender = FullSender.open(
        "127.0.0.1",
        endpoints,
        transport=transport,
        bucket_bytes=bucket_bytes,
        timeout=timeout,
        heartbeat_timeout=8.0,
        shm_dir=str(shm_dir),
        directory=directory,
    )
    try:
        yield sender
    finally:
        sender.close()


def receive(receiver, version, slow=0.0):
    """Receive a version as an engine worker does, but keep every tensor until the last has arrived."""
    try:
        got = {}
        for name, tensor in receiver.weights(version):
            got[name] = tensor
            time.sleep(slow)
        return got, receiver.finish()
    except BaseException as error:
        receiver.fail(str(error))
        raise


def assert_same(got, weights):
    assert list(got) == list(weights)
    for name, tensor in weights.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("transport", ["auto", "collective", "mixed"])
def test_all_versions_arrive(tmp_path, transport):
    here = host_id(str(tmp_path))
    endpoints = [("e0/0", here), ("e1/0", "elsewhere" if transport == "mixed" else here)]
    setting = "auto" if transport == "mixed" else transport
    with full_sender(endpoints, tmp_path, setting) as sender, ThreadPoolExecutor(2) as pool:
        session = Session.from_json(sender.session.to_json())
        assert session == sender.session
        local = sum(len(relay.local) for relay in full_relays(session))
        assert local == {"auto": 2, "collective": 0, "mixed": 1}[transport]  # readers of shared memory
        receivers = [FullReceiver(session, name) for name, _ in endpoints]
        seen = []
        for version in (1, 2, 3):
            weights = make_weights(version)
            # the second engine holds its tensors for long: slots must not be reused under it
            waiting = [pool.submit(receive, r, version, slow) for r, slow in zip(receivers, (0.0, 0.002), strict=True)]
            sent = sender.send(version, weights.items)
            results = [w.result(20) for w in waiting]
            compare_reports(sent, merge_reports([report for _, report in results]))
            for got, _ in results:
                assert_same(got, weights)
            assert sent.buckets > 4
            seen.append(sent.streams["0 to e0/0"])
            assert os.listdir(tmp_path) == []  # every receiver has mapped the files, so they are unlinked
        assert len(set(seen)) == 3


def test_weight_files_are_readable_safetensors(tmp_path):
    """The last two versions are on disk as safetensors, one file per bucket, and nothing is in shared memory."""
    shm_dir, directory = tmp_path / "shm", tmp_path / "weights"
    shm_dir.mkdir()
    endpoints = [("e0/0", host_id(str(shm_dir))), ("e1/0", "elsewhere")]
    with full_sender(endpoints, shm_dir, "files", directory=str(directory)) as sender, ThreadPoolExecutor(2) as pool:
        receivers = [FullReceiver(Session.from_json(sender.session.to_json()), name) for name, _ in endpoints]
        for version in (1, 2, 3):
            weights = make_weights(version)
            waiting = [pool.submit(receive, r, version) for r in receivers]
            sent = sender.send(version, weights.items)
            for future in waiting:
                got, report = future.result(20)
                assert_same(got, weights)
                assert sent.streams.items() >= report.streams.items() and sent.bytes == report.bytes
        assert os.listdir(shm_dir) == []
    assert sorted(os.listdir(directory)) == ["version-00000002", "version-00000003"]
    assert (directory / "version-00000003" / "bucket-000000.safetensors").is_file()
    files = sorted((directory / "version-00000003").iterdir())
    assert len(files) == sent.buckets > 4
    assert_same({k: weight for file in files for k, weight in sorted_as(weights, load_file(file))}, weights)


def test_files_of_earlier_runs_are_removed(tmp_path):
    """Files of an earlier run with higher versions are removed too; the previous version is kept."""
    entries, memory = [BucketEntry("a", "float32", (2,), 0)], torch.zeros(64, dtype=torch.uint8)
    for versions in ((7, 8, 9), (8, 9)):
        files = BucketFiles(str(tmp_path))
        for version in versions:
            files.write(version, entries, memory)
            files.write(version, entries, memory)
    assert sorted(os.listdir(tmp_path)) == ["version-00000008", "version-00000009"]
    assert len(os.listdir(tmp_path / "version-00000008")) == 2


def sorted_as(weights, loaded):
    return sorted(loaded.items(), key=lambda item: list(weights).index(item[0]))


@pytest.mark.parametrize("fault", ["not shared", "changed", "full"])
def test_missing_or_changed_files_are_errors(tmp_path, monkeypatch, fault):
    words = {
        "not shared": "cannot be read here .* must be on a file system that trainers and engines share",
        "changed": "got other bytes than trainer 0 sent in bucket 0",
        "full": "could not be written to .* two versions of the whole model must fit",
    }
    directory = tmp_path / "weights"
    if fault == "full":
        directory.write_text("no directory")
    else:
        write = BucketFiles.write

        def broken(self, version, entries, memory):
            path = write(self, version, entries, memory)
            if fault == "not shared":
                os.unlink(path)
            elif path.endswith("bucket-000000.safetensors"):
                loaded = load_file(path)
                loaded["embed"][3, 4] += 1
                save_file(loaded, path)
            return path

        monkeypatch.setattr(BucketFiles, "write", broken)
    with (
        full_sender([("e0", "here")], tmp_path, "files", directory=str(directory)) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(receive, FullReceiver(sender.session, "e0"), 1)
        for failing in (lambda: sender.send(1, make_weights(0).items), waiting.result):
            with pytest.raises(WeightSyncError, match=words[fault]):
                failing()


def test_flipped_bit_names_bucket_tensors_and_receiver(tmp_path, monkeypatch):
    here = host_id(str(tmp_path))
    take = FullReceiver._take

    def corrupt(self, bucket, entries):
        memory = take(self, bucket, entries)
        if self.name == "bad" and bucket.header["bucket"] == 1:
            memory[100] ^= 4
        return memory

    monkeypatch.setattr(receiver_module.FullReceiver, "_take", corrupt)
    with full_sender([("good", here), ("bad", here)], tmp_path) as sender, ThreadPoolExecutor(2) as pool:
        receivers = [FullReceiver(sender.session, name) for name in ("good", "bad")]
        waiting = [pool.submit(receive, r, 1) for r in receivers]
        for failing in (lambda: sender.send(1, make_weights(0).items), waiting[0].result, waiting[1].result):
            with pytest.raises(WeightSyncError, match=r"receiver 'bad' got other bytes .* bucket 1 \(big") as error:
                failing()
            assert "fingerprint" in str(error.value)
        with pytest.raises(WeightSyncError, match="aborted"):
            sender.send(2, make_weights(1).items)


def test_an_early_stop_and_a_wrong_version_end_the_update(tmp_path):
    here = host_id(str(tmp_path))
    with full_sender([("e", here)], tmp_path) as sender, ThreadPoolExecutor(1) as pool:
        receiver = FullReceiver(sender.session, "e")
        future = pool.submit(receive, receiver, 7)
        with pytest.raises(WeightSyncError, match="expects version 7, got 1"):
            sender.send(1, make_weights(0).items)
        with pytest.raises(WeightSyncError, match="expects version 7, got 1"):
            future.result(5)
    with full_sender([("e", here)], tmp_path) as sender, ThreadPoolExecutor(1) as pool:
        receiver = FullReceiver(sender.session, "e")
        sending = pool.submit(sender.send, 1, make_weights(0).items)
        next(receiver.weights(1))
        with pytest.raises(WeightSyncError, match="stopped before the end"):
            receiver.finish()
        receiver.fail("its loader stopped")
        with pytest.raises(WeightSyncError, match="receiver 'e': its loader stopped"):
            sending.result(5)


def test_abort_ends_every_wait_with_its_reason(tmp_path):
    """The sender waits for receivers that never come, one receiver for weights, one for its gloo group."""
    here = host_id(str(tmp_path))
    endpoints = [("waits", here), ("remote", "elsewhere"), ("absent", here)]
    with full_sender(endpoints, tmp_path, timeout=60) as sender, ThreadPoolExecutor(3) as pool:
        receivers = [FullReceiver(sender.session, name) for name in ("waits", "remote")]
        futures = [pool.submit(receive, r, 1) for r in receivers]
        futures.append(pool.submit(sender.send, 1, make_weights(0).items))
        time.sleep(0.3)
        start = time.monotonic()
        sender.session.abort("engine 3 was killed")
        sender.session.abort("a later reason")
        for future in futures:
            with pytest.raises(WeightSyncError, match="engine 3 was killed"):
                future.result(5)
        assert time.monotonic() - start < 2


def test_silent_peers_are_named_after_the_timeout(tmp_path):
    here = host_id(str(tmp_path))
    with full_sender([("here", here), ("silent", here)], tmp_path, timeout=0.5) as sender:
        FullReceiver(sender.session, "here")
        with pytest.raises(WeightSyncError, match=r"waited 0.5 s for receivers to connect \(hello/silent\)"):
            sender.send(1, make_weights(0).items)
    with full_sender([("e", here)], tmp_path, timeout=0.5) as sender:
        receiver = FullReceiver(sender.session, "e")
        with pytest.raises(WeightSyncError, match=r"waited 0.5 s for the sender and all other receivers to connect"):
            next(receiver.weights(1))


def test_unusable_sessions(tmp_path):
    with pytest.raises(RecipeError, match="none of auto, shared_memory"):
        load_recipe(Path(__file__).parents[2] / "recipes" / "dapo_qwen2.5_32b.yaml", ["weight_sync.transport=rdma"])
    with pytest.raises(ValueError, match="'e' does not share /dev/shm"):
        check_transport("shared_memory", ["b", "a"], [("e", "b")])
    with pytest.raises(ValueError, match="two receivers"):
        check_transport("auto", ["a"], [("e", "b"), ("e", "a")])
    with pytest.raises(ValueError, match="at least one"):
        check_transport("auto", ["a"], [])
    here = host_id(str(tmp_path))
    with full_sender([("e", here)], tmp_path) as sender:
        with pytest.raises(ValueError, match="'f' is not part"):
            FullReceiver(sender.session, "f")
        with pytest.raises(ValueError, match="'w' was exported twice"):
            sender.send(1, lambda: [("w", torch.zeros(1)), ("w", torch.zeros(1))])
    with full_sender([("e", here)], tmp_path) as sender, pytest.raises(ValueError, match="yielded nothing"):
        sender.send(1, list)


@pytest.fixture
def small_tmpfs(tmp_path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_full_shared_memory_is_an_error_with_the_arithmetic(small_tmpfs):
    with full_sender([("e", host_id(str(small_tmpfs)))], small_tmpfs, bucket_bytes=1 << 20) as sender:
        receiver = FullReceiver(sender.session, "e")
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(receive, receiver, 1)
            with pytest.raises(OSError, match=r"needs 400,000 bytes and 65,536 are free.*--shm-size"):
                sender.send(1, lambda: [("w", torch.zeros(100_000))])
            with pytest.raises(WeightSyncError, match="is full: a weight bucket needs 400,000 bytes"):
                future.result(5)
    assert os.listdir(small_tmpfs) == []


def test_a_receiver_removes_files_of_dead_owners(tmp_path):
    """On a host without senders no other process does: a killed relay left them."""
    here = host_id(str(tmp_path))
    with full_sender([("e", here)], tmp_path) as sender:
        (tmp_path / "megarl-weights-left-behind").write_bytes(b"x")
        receiver = FullReceiver(sender.session, "e")
        assert "megarl-weights-left-behind" not in os.listdir(tmp_path)
        receiver.close()


def test_only_files_of_dead_owners_are_removed(tmp_path):
    slot = SharedSlot(str(tmp_path))
    slot.reserve(100)
    (tmp_path / "megarl-weights-left-behind").write_bytes(b"x")
    (tmp_path / "someone-elses").write_bytes(b"x")
    assert remove_stale_files(str(tmp_path)) == ["megarl-weights-left-behind"]
    assert sorted(os.listdir(tmp_path)) == sorted([slot.name, "someone-elses"])
    slot.close()
    assert os.listdir(tmp_path) == ["someone-elses"]


def test_a_killed_sender_fails_its_receivers(tmp_path):
    """The sender's process is killed mid-version: the receiver fails at once, and the next sender removes its file."""
    script = textwrap.dedent("""
        import sys, time, torch
        from megarl.weight_sync.full.sender import FullSender
        from megarl.weight_sync.session import host_id
        shm = sys.argv[1]
        sender = FullSender.open(
            "127.0.0.1", [("e", host_id(shm))], bucket_bytes=1024, timeout=60, heartbeat_timeout=8, shm_dir=shm
        )
        print(sender.session.to_json(), flush=True)
        def weights():
            yield "a", torch.zeros(200)
            yield "b", torch.zeros(200)
            time.sleep(60)
            yield "c", torch.zeros(200)
        sender.send(1, weights)
    """)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        session = Session.from_json(process.stdout.readline().decode())
        receiver = FullReceiver(session, "e")
        weights = receiver.weights(1)
        assert next(weights)[0] == "a"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"weight sender at 127.0.0.1:.* broke"):
            next(weights)
        assert time.monotonic() - start < 2
    finally:
        process.kill()
        process.wait(10)
    assert len(os.listdir(tmp_path)) <= 1  # its file had not been acknowledged yet
    with full_sender([("e", host_id(str(tmp_path)))], tmp_path):
        assert os.listdir(tmp_path) == []


def test_a_small_update_is_quick(tmp_path):
    """1 MB in well under 50 ms, measured over versions so that connecting does not count."""
    weights = {f"w{i}": torch.randn(64, 64) for i in range(64)}
    here = host_id(str(tmp_path))
    with full_sender([("e", here)], tmp_path, bucket_bytes=64 << 20) as sender, ThreadPoolExecutor(1) as pool:
        receiver = FullReceiver(sender.session, "e")
        seconds = []
        for version in range(6):
            future = pool.submit(receive, receiver, version)
            start = time.perf_counter()
            sender.send(version, weights.items)
            seconds.append(time.perf_counter() - start)
            future.result(10)
    assert min(seconds[1:]) < 0.05, json.dumps(seconds)


def test_copies_are_reused_only_without_tensor_views():
    copies = receiver_module._Copies()
    first = copies.reserve(100).fill_(1)
    view = first[8:12].view(torch.float32).view(1)
    address = first.data_ptr()
    del first
    other = copies.reserve(80).fill_(2)
    assert other.data_ptr() != address and view.view(torch.uint8).tolist() == [1, 1, 1, 1]
    del view
    assert copies.reserve(80).data_ptr() == address
