"""Background saves, and kills at every moment of a save."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.atomic_files import DiskFullError
from megarl.checkpoint import folder as checkpoint
from megarl.checkpoint.folder import check_whole, find_checkpoint, list_checkpoints
from megarl.checkpoint.manifest import find_damage
from megarl.checkpoint.saver import Saver
from megarl.cluster.failures import Failure, ProcessInfo, WorkerFailed
from megarl.errors import ProcessFailure
from megarl.recipe.schema import TrainConfig
from tests.support.checkpoint_parts import Trainers, names, saver, state, unexpected


def test_a_background_checkpoint_is_listed_after_it_is_written(tmp_path: Path) -> None:
    trainers = Trainers()
    run_saver = saver(tmp_path, trainers, save_in_background=True, keep_checkpoints=1)
    assert run_saver.save(1, state()) == {}
    trainers.contents = b"trained on"
    assert run_saver.poll() == {} and run_saver.pending
    assert list_checkpoints(tmp_path) == [], "it is not whole yet"
    trainers.work()
    assert run_saver.poll() == {"checkpoint/write_seconds": 1.5, "checkpoint/bytes": 16.0} and not run_saver.pending
    assert run_saver.poll() == {}
    run_saver.save(2, state())
    assert names(tmp_path) == [".step_000002.partial", "step_000001"], (
        "the only intact checkpoint was removed too early"
    )
    run_saver.save(3, state())  # waits for the previous write
    assert names(tmp_path) == [".step_000003.partial", "step_000002"]
    run_saver.poll(wait=True)
    assert names(tmp_path) == ["step_000003"] and find_damage(tmp_path / "step_000003") is None


def test_complete_checkpoints_are_announced(tmp_path: Path) -> None:
    """Once each, when the folder has its final name: also a background save that a failed run completes."""
    announced: list[tuple[int, Path]] = []

    def completed(step: int, path: Path) -> None:
        check_whole(path)
        announced.append((step, path))

    trainers, config = Trainers(), TrainConfig(save_in_background=True, keep_checkpoints=2)
    run_saver = Saver(tmp_path, {"trainer": trainers}, config, lambda: None, unexpected, completed=completed)
    run_saver.save(1, state())
    assert announced == []
    run_saver.save(2, state())
    trainers.work()
    assert run_saver.rescue(wait=False) is not None
    assert announced == [(step, tmp_path / f"step_00000{step}") for step in (1, 2)]


def test_a_failed_background_write_is_raised_at_the_next_step(tmp_path: Path) -> None:
    trainers = Trainers()
    run_saver = saver(tmp_path, trainers, save_in_background=True)
    run_saver.save(1, state())
    run_saver.save(2, state())
    trainers.error = RuntimeError("disk full")
    with pytest.raises(RuntimeError, match="disk full"):
        run_saver.poll()
    assert names(tmp_path) == ["step_000001"]
    assert run_saver.rescue(wait=True) is None, "there is nothing left to wait for"


def test_the_save_after_a_failed_commit_lists_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = Trainers()
    run_saver = saver(tmp_path, trainers)
    with monkeypatch.context() as patch, pytest.raises(DiskFullError, match="the disk is full"):
        patch.setattr(checkpoint, "write_manifest", raise_error(OSError(errno.ENOSPC, "No space left on device")))
        run_saver.save(1, state())
    assert names(tmp_path) == []
    trainers.contents = b"later weights"
    run_saver.save(2, state())
    assert names(tmp_path) == ["step_000002"]
    check_whole(tmp_path / "step_000002")


@pytest.mark.parametrize("operation", ["rename", "rmdir"])
@pytest.mark.parametrize("background", [False, True])
def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, background: bool
) -> None:
    """A file server may refuse to rename a folder with open files, or to remove it: the next save tries again."""
    trainers, notices = Trainers(), list[str]()
    run_saver = saver(tmp_path, trainers, notices.append, save_in_background=background, keep_checkpoints=1)
    refuse = True
    original = getattr(os, operation)

    def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
        if refuse and "step_000001" in str(path) and ".partial" not in str(path):
            raise PermissionError(errno.EBUSY, "Device or resource busy", str(path))
        return original(path, *args, **kwargs)

    def save(step: int) -> None:
        run_saver.save(step, state())
        assert run_saver.poll(wait=True) or not background
        check_whole(tmp_path / f"step_{step:06d}")

    monkeypatch.setattr(os, operation, refused)
    save(1)
    assert notices == []
    left = "step_000001" if operation == "rename" else ".step_000001.deleted"
    for step in (2, 3):
        save(step)
        assert names(tmp_path) == sorted([left, f"step_{step:06d}"])
        assert {notice.partition(" could not be deleted")[0] for notice in notices} <= {"step_000001", left}
        assert notices and all("could not be deleted" in notice and "busy" in notice for notice in notices)
    assert not run_saver.pending and run_saver.rescue(wait=True) is None
    refuse = False
    notices.clear()
    save(4)
    assert names(tmp_path) == ["step_000004"] and notices == []


def test_the_reason_is_raised_if_the_steps_partial_folder_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".step_000001.partial").mkdir()
    monkeypatch.setattr("shutil.rmtree", raise_error(PermissionError(errno.EBUSY, "Device or resource busy")))
    notices = list[str]()
    with pytest.raises(PermissionError, match="busy"):
        saver(tmp_path, Trainers(), notices.append).save(1, state())
    assert [notice.partition(" could")[0] for notice in notices] == [".step_000001.partial"]


def raise_error(error: Exception) -> Callable[..., None]:
    def raise_it(*_: Any) -> None:
        raise error

    return raise_it


def test_rescue_waits_for_receipts_without_calling_the_trainers(tmp_path: Path) -> None:
    trainers = Trainers()
    run_saver = saver(tmp_path, trainers, save_in_background=True)
    run_saver.save(1, state())
    assert run_saver.rescue(wait=False) is None and run_saver.pending
    looks = []

    def check() -> None:
        looks.append(1)
        trainers.work()

    run_saver._check = check
    for method in ("stage_save", "write_save", "save_done"):
        setattr(trainers, method, None)
    assert run_saver.rescue(wait=True) == tmp_path / "step_000001"
    assert looks == [1] and names(tmp_path) == ["step_000001"]


def test_a_full_disk_of_a_trainer_is_no_failure_of_its_process(tmp_path: Path) -> None:
    """`train.restarts` and `train.trainer_restarts` repeat failures of processes only, and another attempt would find the same disk."""
    trainers = Trainers()
    run_saver = saver(tmp_path, trainers, save_in_background=True)
    run_saver.save(1, state())
    full = "DiskFullError: writing to step_000001 failed: No space left on device. Free some space"
    trainers.error = WorkerFailed(Failure(ProcessInfo("trainer rank 1"), full))
    with pytest.raises(DiskFullError, match=r"trainer rank 1 .*: writing to step_000001 .* Free some space") as raised:
        run_saver.poll()
    assert not isinstance(raised.value, ProcessFailure) and not run_saver.pending and names(tmp_path) == []


@pytest.mark.parametrize("method", ["stage_save", "write_save"])
def test_a_full_disk_at_the_begin_of_a_save_is_no_failure_of_a_process(method: str, tmp_path: Path) -> None:
    trainers = Trainers()
    full = WorkerFailed(Failure(ProcessInfo("trainer rank 1"), "DiskFullError: no space left. Free some space"))
    setattr(trainers, method, raise_error(full))
    with pytest.raises(DiskFullError, match=r"trainer rank 1 .* Free some space") as raised:
        saver(tmp_path, trainers).save(1, state())
    assert not isinstance(raised.value, ProcessFailure) and names(tmp_path) == []


@pytest.mark.parametrize("name", ["waiting.npz", "controller.json", "manifest.json"])
def test_a_full_disk_of_the_controller_names_the_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses the write of one file of a checkpoint."""
    opened = Path.open

    def open_full(path: Path, *args: Any, **options: Any) -> Any:
        return opened(Path("/dev/full") if path.name == name else path, *args, **options)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(DiskFullError, match=r"the disk is full .*train\.keep_checkpoints") as raised:
        saver(tmp_path).save(1, state())
    assert raised.value.errno == errno.ENOSPC and names(tmp_path) == []


@pytest.mark.parametrize("died", [True, False], ids=["a trainer died", "a write failed"])
@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
def test_a_save_of_failed_trainers_is_committed_or_named(died: bool, written: bool, tmp_path: Path) -> None:
    """Either way the next save can begin, and the folder holds no partial checkpoint."""
    trainers = Trainers()
    run_saver = saver(tmp_path, trainers, save_in_background=True)
    run_saver.save(1, state())
    if written and died:
        trainers.work()
    trainers.error = WorkerFailed(Failure(ProcessInfo("trainer rank 1"), "disk full", died=died))
    with pytest.raises(WorkerFailed):
        run_saver.poll()
    lost = run_saver.give_up()
    assert not run_saver.pending and run_saver.give_up() is None
    if written and died:
        assert lost is None and names(tmp_path) == ["step_000001"]
        assert find_damage(tmp_path / "step_000001") is None
    else:
        assert lost is not None and lost[0] == 1 and ("disk full" in lost[1]) != died and names(tmp_path) == []
    trainers.error = None
    run_saver.save(2, state())
    run_saver.poll(wait=True)
    assert "step_000002" in names(tmp_path)


def test_an_interrupt_during_commit_loses_no_written_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt each disk operation of `commit`: the written checkpoint is listed afterwards."""
    calls = Operations(monkeypatch)
    for moment in range(1, 40):
        folder = tmp_path / str(moment)
        trainers = Trainers()
        run_saver = saver(folder, trainers, save_in_background=True)
        run_saver.save(1, state())
        trainers.work()
        calls.at(moment, interrupt)
        try:
            run_saver.poll()
        except KeyboardInterrupt:
            calls.at(0, interrupt)
            run_saver.rescue(wait=True)
            assert names(folder) == ["step_000001"] and find_damage(folder / "step_000001") is None
        else:
            assert moment > 5, "too few moments were tried"
            return
    raise AssertionError("commit never completed")


def interrupt() -> None:
    raise KeyboardInterrupt


class Operations:
    """Count the disk operations of a save, and run an action before one of them."""

    NAMES = ((os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.moment = 0
        self.action: Callable[[], None] = interrupt
        for module, name in self.NAMES:
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def at(self, moment: int, action: Callable[[], None]) -> None:
        self.count, self.moment, self.action = 0, moment, action

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.moment:
                self.action()
            return function(*args, **kwargs)

        return counted


def test_files_and_folders_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, every folder that names one, and, after the rename, the folder of checkpoints."""
    fsync, rename = os.fsync, os.rename
    events: list[str] = []

    def record(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(old: Any, new: Any) -> None:
        rename(old, new)
        events.append("renamed")

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", renamed)
    saver(tmp_path).save(1, state())
    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    final = tmp_path / "step_000001"
    partial = str(checkpoint.partial_path(tmp_path, 1))
    assert {str(path).replace(str(final), partial) for path in (final, *final.rglob("*"))} <= set(before)
    assert str(tmp_path) in after


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL before each disk operation of the second save and its retention: resume finds the newest intact
    checkpoint, and the next session saves normally."""
    calls = Operations(monkeypatch)
    found_steps = []
    for moment in range(1, 200):
        folder = tmp_path / str(moment)
        calls.at(0, kill)
        saver(folder, keep_checkpoints=1).save(1, state())
        child = os.fork()
        if child == 0:
            calls.at(moment, kill)
            try:
                saver(folder, keep_checkpoints=1).save(2, state())
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        notices: list[str] = []
        newest = find_checkpoint("auto", folder, checksums=True, notice=notices.append)
        assert newest is not None
        assert all(find_damage(path) is None for path in list_checkpoints(folder)), (
            "a checkpoint with a final name is incomplete"
        )
        step = checkpoint.checkpoint_step(newest)
        found_steps.append(step)
        partial = checkpoint.partial_path(folder, 2).exists()
        assert step == 1 or not partial
        assert bool(notices) == partial and all("step_000002" in notice for notice in notices)
        saver(folder, keep_checkpoints=1).save(3, state())
        assert names(folder) == ["step_000003"], "a killed save left something behind"
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        shutil.rmtree(folder)
    assert status == 0 and len(found_steps) > 15
    assert found_steps == sorted(found_steps), "a later moment found an older checkpoint"
    assert found_steps[0] == 1 and found_steps[-2] == 2


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_time_shared_groups_are_saved_as_one_checkpoint(tmp_path: Path) -> None:
    """Actor and critic time-share devices: each is onloaded before its files are copied, and both form one checkpoint."""
    critic, trainers = Trainers(), Trainers()
    events: list[Any] = []
    critic.contents = b"critic's"
    groups: Any = {"critic": critic, "trainer": trainers}
    for name, group in groups.items():
        stage = group.stage_save
        group.stage_save = lambda *args, name=name, stage=stage: events.append((name, args[1])) or stage(*args)
    both = Saver(tmp_path, groups, TrainConfig(), lambda: None, unexpected, onload=events.append)
    both.save(1, state())
    assert events == ["critic", ("critic", True), "trainer", ("trainer", True)]
    written = tmp_path / "step_000001"
    assert (written / "critic" / "tensors_0").read_bytes() == b"critic's\0"
    assert (written / "trainer" / "tensors_1").read_bytes() == b"weights\1"
    check_whole(written)
    (written / "critic" / "tensors_1").unlink()
    with pytest.raises(ValueError, match="critic/tensors_1"):
        check_whole(written)
    trainers.error = RuntimeError("disk full")
    with pytest.raises(RuntimeError, match="disk full"):
        both.save(2, state())
    assert names(tmp_path) == ["step_000001"], "an incomplete checkpoint is listed"
