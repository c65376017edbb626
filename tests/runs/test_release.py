"""The release script in a small clone of the repository: its refusals and the files that it builds. It uploads nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from megarl import __version__
from tests.support.stack import ROOT

PARTS = ("megarl", "recipes", "launch")
FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with one commit of this work tree."""
    folder = tmp_path / "clone"
    for name in PARTS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    (folder / ".gitignore").write_text("dist/\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "all")
    return folder


def release(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(clone.parent), "MEGARL_PYTHON": sys.executable}
    command = ["bash", "launch/release.sh", *arguments]
    return subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True, timeout=400)


def test_a_commit_without_its_tag_is_refused(clone: Path) -> None:
    done = release(clone)
    assert done.returncode == 2 and f"HEAD has no tag v{__version__}" in done.stderr, done.stderr
    git(clone, "tag", "v9.9.9")
    done = release(clone)
    assert done.returncode == 2 and "HEAD has no tag" in done.stderr, done.stderr


def test_a_tag_without_a_section_of_changes_is_refused(clone: Path) -> None:
    git(clone, "tag", f"v{__version__}")
    done = release(clone)
    assert done.returncode == 2 and f"CHANGELOG.md has no section '## [{__version__}]" in done.stderr, done.stderr


def test_changed_files_are_refused(clone: Path) -> None:
    (clone / "README.md").write_text("changed")
    done = release(clone, "--untagged")
    assert done.returncode == 2 and "tracked files have changes" in done.stderr


def test_an_unknown_argument_is_refused(clone: Path) -> None:
    done = release(clone, "--upload")
    assert done.returncode == 2 and "unknown argument --upload" in done.stderr


@pytest.mark.slow
def test_wheel_and_sdist_of_a_tag(clone: Path) -> None:
    """The wheel comes from the sdist, without untracked files, and its commands run in a new environment."""
    (clone / "megarl" / "untracked.py").write_text("")
    changes = (clone / "CHANGELOG.md").read_text()
    (clone / "CHANGELOG.md").write_text(changes.replace("## [Unreleased]", f"## [{__version__}] - 2026-11-27"))
    git(clone, "commit", "--quiet", "--all", "-m", "changes")
    git(clone, "tag", f"v{__version__}")
    done = release(clone, "--packages", sys.prefix, "--no-quickstart")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was uploaded" in done.stdout
    wheel = clone / "dist" / f"megarl-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "megarl/cli.py" in names and "megarl/untracked.py" not in names
    assert f"megarl-{__version__}.data/data/share/megarl/recipes/quickstart.yaml" in names
    with tarfile.open(clone / "dist" / f"megarl-{__version__}.tar.gz") as sdist:
        assert f"megarl-{__version__}/recipes/base/dapo.yaml" in sdist.getnames()
