"""The garbage collector during imports."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.base import load_class
from megarl.platform.installed import paused_collector


class Node:
    pass


def cycle() -> weakref.ref[Node]:
    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    return weakref.ref(node)


@pytest.fixture(autouse=True)
def unfreeze():
    yield
    gc.unfreeze()
    gc.enable()


def test_block_runs_without_collector_and_later_garbage_is_collected():
    frozen = gc.get_freeze_count()
    with paused_collector():
        assert not gc.isenabled()
        held = [Node() for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(held)
    later = cycle()
    gc.collect()
    assert later() is None


def test_nested_blocks_and_errors_leave_the_collector_as_it_was():
    with pytest.raises(ImportError), paused_collector():
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()


def test_classes_of_processes_are_imported_without_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "module_of_a_worker.py").write_text("import gc\n\nclass Worker:\n    collects = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    worker: Any = load_class("module_of_a_worker:Worker")
    assert not worker.collects
    assert gc.isenabled()


def test_trainers_import_megatron_without_collector():
    """The collector's callbacks report each collection; none happens while Megatron is imported, which makes 500,000 objects."""
    script = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append("megatron.core" in sys.modules))
from megarl import platform
from megarl.trainer.worker import import_trainer
platform.select("cpu").prepare()
import_trainer()
assert "megarl.megatron.trainer" in sys.modules and gc.isenabled() and gc.get_freeze_count() > 100_000
print(sum(collections))
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.stdout.splitlines()[-1:] == ["0"], finished.stderr
