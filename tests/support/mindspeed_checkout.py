"""MindSpeed's sources for the tests that need them: a git directory that MEGARL_MINDSPEED names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megarl.platform.mindspeed.source_keys import TABLES

SOURCES = os.environ.get("MEGARL_MINDSPEED", "")
WITH_SOURCES = pytest.mark.skipif(not SOURCES, reason="MEGARL_MINDSPEED names no git directory of MindSpeed")


def source_of(version: str, into: Path) -> Path:
    """Unpack the commit recorded in the table of `version` into the folder `into`; returns the folder."""
    return checkout(json.loads((TABLES / f"{version}.json").read_text())["source"], into)


def checkout(commit: str, into: Path) -> Path:
    archive = subprocess.run(["git", "-C", SOURCES, "archive", commit, "mindspeed", "setup.py"], capture_output=True)
    assert archive.returncode == 0, archive.stderr.decode()
    subprocess.run(["tar", "x", "-C", str(into)], input=archive.stdout, check=True)
    return into
