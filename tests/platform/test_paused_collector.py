"""The garbage collector during imports and steps."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.base import load_class
from megarl.platform.installed import full_collections_between_steps, paused_collector


class Node:
    pass


def cycle() -> weakref.ref[Node]:
    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    return weakref.ref(node)


@pytest.fixture(autouse=True)
def unfrozen():
    """Without the exemptions of other tests' objects, which are exempt again afterwards (tests/conftest.py)."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


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


@pytest.mark.slow
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


def full_collections(action: Callable[[], object]) -> int:
    """Return the number of full collections during `action`."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        action()
    finally:
        gc.callbacks.remove(note)
    return generations.count(2)


def test_full_collections_happen_only_between_steps():
    held: list[list[Node]] = []

    def step() -> None:
        held.append([Node() for _ in range(200_000)])  # Python starts a full collection in each of them otherwise

    thresholds = gc.get_threshold()
    before = cycle()
    with full_collections_between_steps() as collect_garbage:
        assert before() is None and gc.get_freeze_count()
        garbage = [cycle() for _ in range(100)]
        assert full_collections(step) == 0 and full_collections(step) == 0
        assert full_collections(collect_garbage) == 1 and not any(each() for each in garbage)
    assert gc.get_threshold() == thresholds and not gc.get_freeze_count()
    assert full_collections(step) > 0


def test_objects_that_were_exempt_before_stay_exempt():
    with paused_collector():
        held = [Node() for _ in range(1000)]
    with full_collections_between_steps():
        pass
    assert gc.get_freeze_count() >= len(held)


def test_collector_is_as_before_after_an_error():
    thresholds = gc.get_threshold()
    with pytest.raises(RuntimeError), full_collections_between_steps():
        raise RuntimeError
    assert gc.get_threshold() == thresholds and not gc.get_freeze_count()
