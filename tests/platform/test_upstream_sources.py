"""Wheels that tests read: how `launch/install_cpu.sh dev` gets them, and that CI has them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path


def test_wheels_that_tests_read_are_unpacked(tmp_path: Path) -> None:
    """Fetched again after a failure, compared with the lock, and reported without an error where they cannot be had."""
    index, folder, lock = tmp_path / "index", tmp_path / "sources", tmp_path / "lock.txt"
    index.mkdir()
    wheel = index / "thing-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "x = 1\n")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    pip = index / "pip" / "__main__.py"
    pip.parent.mkdir()
    (pip.parent / "__init__.py").touch()
    pip.write_text(
        "import pathlib, shutil, sys\n"
        f"index, count = pathlib.Path({str(index)!r}), pathlib.Path({str(tmp_path)!r}, 'count')\n"
        "count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))\n"
        "if 'absent==1.0' in sys.argv or count.read_text() == '1': sys.exit('no such wheel')\n"
        "shutil.copy(next(index.glob('*.whl')), sys.argv[sys.argv.index('--dest') + 1])\n"
    )

    def unpack(*lines: str) -> subprocess.CompletedProcess[str]:
        lock.write_text("".join(f"{line}\n" for line in ("# a comment", *lines)))
        code = (
            "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import unpack_sources\n"
            "unpack_sources.main(*map(pathlib.Path, sys.argv[2:]))"
        )
        command = [sys.executable, "-c", code, str(Path(__file__).parents[2] / "launch"), str(folder), str(lock)]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(index)})

    tags = "1.0 cp311-manylinux_2_28_x86_64"
    folder.mkdir()
    done = unpack(f"absent {tags} {digest}", f"thing {tags} {digest}")
    assert done.returncode == 0, done.stderr
    assert "absent==1.0 could not be fetched, tests that read it are skipped: no such wheel" in done.stderr
    assert (folder / "thing-1.0" / "thing" / "__init__.py").read_text() == "x = 1\n"
    fetched = (tmp_path / "count").read_text()
    assert unpack(f"thing {tags} {digest}").returncode == 0 and (tmp_path / "count").read_text() == fetched
    other = unpack(f"other {tags} {'0' * 64}")
    assert other.returncode == 1 and f"has the sha256 {digest}" in other.stderr
    assert not (folder / "other-1.0").exists()
