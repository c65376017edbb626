"""Facts about the installation: git's commit, the digest of the code, versions, and their differences."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl import __version__
from megarl.platform import installed
from megarl.platform.installed import (
    code_digest,
    differences,
    installation,
    installed_versions,
    megarl_text,
    source_commit,
)


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a git work tree, committed."""
    package = tmp_path / "tree" / "megarl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("a = 1\n")
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "first")
    return package


def test_the_commit_of_a_work_tree(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as git's hooks set it
    monkeypatch.delenv("GIT_DIR")
    commit = git(package, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert source_commit(package) == (commit, False)
    (package.parent / "notes.txt").write_text("outside of the package")
    assert source_commit(package) == (commit, False)
    (package / "__init__.py").write_text("a = 2\n")
    assert source_commit(package) == (commit, True)


def test_each_process_of_a_run_starts_git_twice(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of processes that start at once share a disk."""
    real, calls = subprocess.run, list[str]()

    def run(command: list[str], **more: object) -> object:
        calls.append(command[4])
        return real(command, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", run)
    assert source_commit(package)[1] is False and calls == ["rev-parse", "status"]


def test_a_new_file_is_a_change(package: Path) -> None:
    (package / "new.py").write_text("")
    assert source_commit(package)[1] is True


def test_a_work_tree_around_an_environment_is_not_megarls(package: Path) -> None:
    site = package.parent / "venv" / "site-packages" / "megarl"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("a = 1\n")
    assert source_commit(site) == (None, None)
    (package.parent / ".gitignore").write_text("venv\n")
    assert source_commit(site) == (None, None)


def test_without_git_the_commit_is_unknown(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert source_commit(package) == (None, None)


@pytest.mark.parametrize(("elsewhere", "expected"), [(False, "abc123"), (True, None)])
def test_the_commit_that_pip_has_recorded(
    elsewhere: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`pip install git+https://...`: the files are in no work tree. An installation of other files does not count."""
    location = tmp_path / "megarl" if elsewhere else installed.PACKAGE
    origin = json.dumps({"url": "https://host/megarl", "vcs_info": {"vcs": "git", "commit_id": "abc123"}})
    distribution = SimpleNamespace(locate_file=lambda name: location, read_text=lambda name: origin)
    monkeypatch.setattr(metadata, "distribution", lambda name: distribution)
    monkeypatch.setattr(installed, "_git", lambda *_: None)
    assert source_commit() == (expected, None)


def test_the_digest_follows_names_and_contents(package: Path) -> None:
    before = code_digest(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"x")
    (package / "page.html").write_text("no code")
    assert code_digest(package) == before
    (package / "__init__.py").rename(package / "other.py")
    renamed = code_digest(package)
    (package / "other.py").write_text("a = 3\n")
    assert len({before, renamed, code_digest(package)}) == 3


def test_only_installed_versions() -> None:
    versions = installed_versions({"torch": "2.9", "ray": "2.60", "unknown": "1"}.get)
    assert versions == {"python": sys.version.split()[0], "torch": "2.9", "ray": "2.60"}


def test_differences_of_two_installations() -> None:
    before = {"megarl": "1", "commit": "a" * 40, "changed": True, "code": "x", "versions": {"torch": "1", "ray": "2"}}
    assert list(differences(before, dict(before))) == []
    same_code = {**before, "commit": "b" * 40}
    assert list(differences(before, same_code)) == [], "the files are equal"
    now = {"megarl": "1", "commit": "b" * 40, "changed": False, "code": "y", "versions": {"torch": "3", "vllm": "4"}}
    assert list(differences(before, now)) == [
        ("megarl", "1 (commit aaaaaaaaaaaa, with changes)", "1 (commit bbbbbbbbbbbb)"),
        ("torch", "1", "3"),
        ("ray", "2", "not installed"),
        ("vllm", "not installed", "4"),
    ]
    edited = {**before, "code": "0123456789"}
    assert list(differences(before, edited)) == [
        ("megarl", f"{megarl_text(before)}, files x", f"{megarl_text(before)}, files 01234567")
    ]


def test_this_installation_is_plain_and_complete() -> None:
    here = installation()
    assert json.loads(json.dumps(here)) == here
    assert here["megarl"] == __version__ and len(here["code"]) == 64 and here["versions"]["torch"]


def test_version_needs_nothing_heavy() -> None:
    code = (
        "import sys; from megarl.cli import app; app(args=['--version'], standalone_mode=False);"
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'megatron'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"megarl {__version__}") and second.startswith("python 3.") and "torch " in second
