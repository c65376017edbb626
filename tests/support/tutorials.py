"""The tutorials of docs/tutorials/: the files that a reader writes, the commands, and a folder to run them in."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megarl.algorithms.catalogue import ADVANTAGES, LOSSES
from tests.support.stack import ROOT, environment

FOLDER = ROOT / "docs" / "tutorials"
PAGES = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "index.md")
BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
ONLY_PARSED = {
    r"bash launch/quickstart\.sh": "installs 2.5 GB; `workspace` makes the same folders with fewer steps",
    r"source ": "activates the environment that runs the tests",
    r"python -m megarl view ": "serves a page until Ctrl-C; tests/commands/view/",
    r"python -m megarl model check Qwen/|hf download |HF_HUB_OFFLINE=1 |python -m megarl data \w+ --source \w+/": "needs the hub",
    r"python -m megarl plan \S+ --search": "searches for two minutes; tests/commands/plan/",
    r"python -m megarl plan --calibrate |python -m megarl (export|doctor) runs/(my-model|dapo)": "reads a run on devices",
    r"python -m megarl (doctor|accept|train) recipes/(cuda/|grpo_qwen2\.5_0\.5b)": "needs devices",
    r"docker |nvidia-smi|npu-smi|SHARED=\S+ bash launch/container\.sh ": "needs devices and their driver",
    r"export PIP_EXTRA_INDEX_URL=": "is for the installation",
    r"bash launch/(ssh|multinode)\.sh |export |sbatch |kubectl ": "needs several machines; tests/runs/test_multinode.py",
}
"""Commands that tests parse and do not run -> why."""
STATUSES = {"python -m megarl compare ": (0, 1)}
"""Commands that may end with another exit status than 0, for example because two runs differ."""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return the code blocks of a page: language, title ("" without one) and content."""
    matches = BLOCK.findall((FOLDER / page).read_text(encoding="utf-8"))
    return [(language, title, textwrap.dedent(content)) for _, language, title, content in matches]


def files(page: str) -> dict[str, str]:
    """Return the files that the reader saves: name -> content."""
    return {title: content for _, title, content in blocks(page) if title}


def commands(page: str) -> list[str]:
    """Return the command lines of a page without comments."""
    lines = [line for language, _, content in blocks(page) if language == "bash" for line in content.splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def reason_not_to_run(command: str) -> str:
    """Return why tests only parse a command, or ""."""
    return next((reason for pattern, reason in ONLY_PARSED.items() if re.match(pattern, command)), "")


def workspace(folder: Path, quickstart_data: Path) -> Path:
    """Make a folder like the top of the repository, with the quickstart's data and empty runs/, data/ and models/."""
    for name in ("recipes", "launch", "examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("runs", "models", "data"):
        (folder / name).mkdir()
    (folder / "data" / "quickstart").symlink_to(quickstart_data)
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


def forget_user_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a test's losses and advantages after it, and import their modules again in the next test."""
    for registry in (ADVANTAGES, LOSSES):
        monkeypatch.setattr(registry, "_entries", {name: registry[name] for name in registry.names()})
    for module in ("my_ideas", "my_rewards", "examples.own_loss.loss"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def write_files(page: str, folder: Path) -> None:
    for name, content in files(page).items():
        (folder / name).write_text(content, encoding="utf-8")


def run_in(folder: Path, command: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Run a command line of a page in a `workspace`, where `python` is this one."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = {**environment(), "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["/bin/bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
    )
