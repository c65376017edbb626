"""Folders of keepers that were killed are removed by the next start on their machine, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster import keeper
from megarl.cluster.keeper import Keepers
from megarl.cluster.keeper_folder import KeeperFolder, remove_stale_folders
from megarl.cluster.sigstop_watch import start_time
from megarl.recipe.schema import Recipe


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def owner_of(folder: KeeperFolder) -> dict[str, Any]:
    owner: dict[str, Any] = json.loads((folder.path / "owner.json").read_text())
    return owner


def test_a_folder_is_stale_once_all_its_processes_have_ended() -> None:
    folder = KeeperFolder()
    assert folder.path.stat().st_mode & 0o077 == 0
    process = subprocess.Popen(["sleep", "60"])
    folder.set_owners(process.pid, os.getpid())
    assert owner_of(folder)["processes"] == [
        [process.pid, start_time(process.pid)],
        [os.getpid(), start_time(os.getpid())],
    ]
    folder.set_owners(process.pid)
    assert remove_stale_folders() == []
    process.kill()
    process.wait()
    assert remove_stale_folders() == [folder.path] and not folder.path.exists()
    folder.remove()  # by a keeper's second `close`


def test_another_process_with_the_same_id_does_not_keep_it() -> None:
    folder = KeeperFolder()
    owner = owner_of(folder)
    owner["processes"][0][1] -= 1
    (folder.path / "owner.json").write_text(json.dumps(owner))
    assert remove_stale_folders() == [folder.path]


@pytest.mark.parametrize("change", [{"host": "another"}, {"namespace": "pid:[1]"}])
def test_folders_of_other_machines_and_containers_stay(change: dict[str, str]) -> None:
    """They may share the temporary directory, and their process ids mean nothing here."""
    folder = KeeperFolder()
    owner = owner_of(folder) | {"processes": [[1 << 30, 1]]}
    (folder.path / "owner.json").write_text(json.dumps(owner | change))
    assert remove_stale_folders() == []
    (folder.path / "owner.json").write_text(json.dumps(owner))
    assert remove_stale_folders() == [folder.path]


def test_unreadable_folders_and_links_stay(temporary: Path) -> None:
    folder = KeeperFolder()
    (folder.path / "owner.json").write_text(json.dumps(owner_of(folder) | {"processes": [[1 << 30, 1]]}))
    folder.path.rename(temporary / "elsewhere")
    (temporary / "megarl-keeper-link").symlink_to(temporary / "elsewhere")
    (temporary / "megarl-keeper-new").mkdir()
    (temporary / "megarl-keeper-damaged").mkdir()
    (temporary / "megarl-keeper-damaged" / "owner.json").write_text("{")
    assert remove_stale_folders() == []


def test_the_next_start_removes_the_folder_of_a_killed_command_and_prints_one_line(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = "import os\nfrom megarl.cluster.keeper_folder import KeeperFolder\nKeeperFolder()\nos.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed], check=False)
    (left,) = temporary.glob("megarl-keeper-*")
    monkeypatch.setattr(keeper, "MODULE", "this")  # a program that ends at once, in place of Ray's
    recipe = Recipe()
    recipe.train.keep_workers = 60.0
    with Keepers(recipe) as keepers:
        keepers.environment()
        assert not left.exists() and len([*temporary.glob("megarl-keeper-*")]) == 1
    assert [*temporary.glob("megarl-keeper-*")] == []
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"megarl: removed folders of killed keepers (train.keep_workers): {left}"]
