"""Unpack the wheels of sources-dev.txt that tests read: `unpack_sources.py FOLDER` makes FOLDER/NAME-VERSION of each.

Nothing is installed: the wheels are for Ascend devices. A folder that is there is kept. A wheel that cannot be fetched is
reported; the tests that read it are skipped then, and the exit status is 0.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LOCK = Path(__file__).parent / "sources-dev.txt"
TRIES = 2


def main(folder: Path, lock: Path = LOCK) -> None:
    for line in lock.read_text().splitlines():
        if line and not line.startswith("#"):
            name, version, tags, digest = line.split()
            unpack(folder / f"{name}-{version}", f"{name}=={version}", tags, digest)


def unpack(place: Path, requirement: str, tags: str, digest: str) -> None:
    if place.is_dir():
        return
    python, platform = tags.split("-", 1)
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(TRIES):
            done = _download(requirement, python.removeprefix("cp"), platform, scratch)
            wheels = list(Path(scratch).glob("*.whl"))
            if done.returncode == 0 and wheels:
                break
        else:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            print(f"{requirement} could not be fetched, tests that read it are skipped: {reason}", file=sys.stderr)
            return
        got = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if got != digest:
            raise SystemExit(f"{wheels[0].name} has the sha256 {got}, and sources-dev.txt says {digest}")
        partial = place.with_name(f".{place.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(partial)
        partial.rename(place)
    print(f"unpacked {requirement} into {place}")


def _download(requirement: str, python: str, platform: str, into: str) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    target = ["--python-version", python, "--platform", platform, "--dest", into]
    return subprocess.run([*pip, *target, requirement], capture_output=True, text=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
