"""Fixtures shared by several test files."""

from __future__ import annotations

import functools
import gc
import signal
from pathlib import Path

import pytest
import typer.main

ROOT = Path(__file__).parents[1]

# A process started in the background by a script ignores Ctrl-C. Child processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Typer makes all commands anew for each call of the command line, which takes longer than most calls. Tests share them.
typer.main.get_command = functools.cache(typer.main.get_command)


LONGEST = (  # files of minutes, the longest first
    "tests/weight_sync/test_sharded_matrix.py",
    "tests/runs/test_replay.py",
    "tests/runs/test_tiny_recipes.py",
    "tests/commands/accept/test_processes.py",
    "tests/megatron/test_layouts.py",
    "tests/runs/test_train.py",
    "tests/commands/plan/test_refuses.py",
    "tests/megatron/test_loss_invariance.py",
    "tests/cluster/test_ray.py",
    "tests/test_journal.py",
    "tests/rewards/test_code.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files roughly by their time: first the longest, then files that start real processes. A long file at the
    end would occupy one of two workers while the other has nothing left."""
    stack = {item.path for item in items if item.get_closest_marker("stack")}
    longest = {ROOT / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (longest.get(item.path, len(LONGEST)), item.path not in stack))


def pytest_collection_finish() -> None:
    """Exempt the objects of all tests from garbage collections: a full one would take a second, and runs have one after each step."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's folder: data/*.parquet and a random tiny model/ with its tokenizer."""
    from megarl.commands.data.quickstart import prepare_quickstart

    out = tmp_path_factory.mktemp("quickstart")
    prepare_quickstart(out, seed=0)
    return out
