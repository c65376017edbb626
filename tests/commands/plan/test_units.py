"""Units and plurals in messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.commands.plan.count.devices import too_large
from megarl.commands.plan.count.types import DeviceUses, EngineRank, Links, Use
from megarl.commands.plan.show.console import show
from megarl.commands.plan.show.units import GIB, MIB, Unit, decimal, sized
from megarl.errors import pluralize
from tests.support import plans


def test_a_tiny_model_is_printed_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model's memory is in MiB in tables and sentences; a large device's memory, nearly all free, is in GiB."""
    tiny = replace(
        plans.SMALL,
        memory=64.0,
        engine=EngineRank(200_000, 800_000, 256.0, 3 * MIB, 10 * MIB, 1.5),
        weight_sync=Links("sharded", 800_000, 800_000, 1_600_000, 0),
    )
    show(tiny)
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    assert "MiB of a rank, by pipeline stage" in words and "actor 0 0.20 M 0.8 0.8 2.3 +0.3 +0.9 0.0" in words
    assert "MiB of a device, by phase" in words and "of 64 GiB" in words and "64.0 left" in words
    assert "on its device: 0.20 M parameters, weights 0.76 MiB, largest step 3.0; KV cache 10.0: 40,960 tokens" in words
    assert "1.5 MiB in all, 0 between nodes" in words and "0.0 GiB" not in words
    assert max(map(len, printed.splitlines())) <= 100


def test_a_large_model_is_printed_in_gib(capsys: pytest.CaptureFixture[str]) -> None:
    show(plans.LARGE)
    words = " ".join(capsys.readouterr().out.split())
    assert "GiB of a rank" in words and "3.06 B" in words and "of 64 " in words and "MiB" not in words
    assert "5,600 GiB in all, 5,200 between nodes; a trainer sends up to 0.68" in words


def test_a_refusal_uses_the_unit_of_the_needed_memory() -> None:
    places = [
        DeviceUses("actor 0", 1, [Use("update_actor", {"weights": 3 * MIB, "activations": 300 * MIB, "logits": 2000})])
    ]
    (refusal,) = too_large(places, 0.25, [])
    assert "303.0 MiB in update_actor: activations 300.0 + weights 3.0; there are 256" in refusal.problem


def test_units() -> None:
    assert [Unit.of(size).name for size in (0, GIB - 1, GIB, 2**40)] == ["MiB", "MiB", "GiB", "GiB"]
    assert [sized(size) for size in (0, 300, 57.6 * GIB, 1.2 * 2**40)] == ["0 MiB", "0.00 MiB", "57.6 GiB", "1.2 TiB"]
    assert [decimal(size) for size in (0, 870, 5_200_000, 427_400_000_000, 9_390_000_000_000)] == [
        "0",
        "0.87 kB",
        "5.2 MB",
        "427 GB",
        "9.39 TB",
    ]


def test_pluralize_uses_the_singular_for_one() -> None:
    assert [pluralize(count, "row") for count in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
    assert pluralize(2, "process", "processes") == "2 processes"


def test_missing_memory_is_printed_without_truncation(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns hold seven phases; no cell is truncated."""
    show(plans.TOO_LARGE)
    printed = capsys.readouterr().out
    assert "11.0 short" in printed and "…" not in printed
