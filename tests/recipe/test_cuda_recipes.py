"""Recipes for NVIDIA GPUs: properties that need no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.generate.supported_recipes import Row
from megarl import load_recipe
from megarl.hf import published
from megarl.hf.families import FAMILIES
from megarl.platform.device_table import DEVICES_OF, device_named
from megarl.recipe.derived.offload import offloads
from megarl.recipe.text import hardware_of
from tests.recipe import test_supported_recipes as held

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "recipes" / "cuda").glob("*.yaml"))
IDS = [path.stem for path in PATHS]
HELD = (
    held.test_the_layout_divides_the_real_model,
    held.test_engines_can_cut_the_model,
    held.test_weights_of_an_engine_rank_fit_its_device,
    held.test_processes_fill_the_devices_of_the_head,
    held.test_batches_divide,
    held.test_extra_names_real_settings,
)


def row_of(path: Path) -> Row:
    machine = hardware_of(path)
    shape = re.search(r"^# Shape: (.*)$", path.read_text(), re.MULTILINE)
    assert machine is not None and shape is not None
    return Row(path, path.stem, *machine, shape[1])


@pytest.mark.parametrize("check", HELD, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_cuda_recipes_pass_the_checks_of_all_recipes(path: Path, check: Callable[[Row], None]) -> None:
    check(row_of(path))


@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_the_hardware_is_in_the_table_of_devices(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.cluster.device == "cuda" and offloads(recipe) == (recipe.cluster.placement == "colocated")
    device = device_named(DEVICES_OF[row_of(path).hardware])
    assert device.kind == "cuda" and device.per_node == row_of(path).per_node


def test_each_family_of_language_models_has_a_recipe() -> None:
    """OLMoE has no published configuration here; qwen2 has recipes for NPUs; qwen3_5_text is part of qwen3_5, and so with experts."""
    kinds = {published.read(row_of(path).shape)["model_type"] for path in PATHS}
    with_images = {name for name, family in FAMILIES.items() if family.tower}
    assert kinds >= FAMILIES.keys() - with_images - {"olmoe", "qwen2", "qwen3_5_text", "qwen3_5_moe_text"}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=IDS)
def test_the_recipe_fits_its_hardware(path: Path) -> None:
    """Five GiB remain on each device, and docs/cuda.md has the peak."""
    memory = device_named(DEVICES_OF[row_of(path).hardware]).memory
    command = [sys.executable, "-m", "megarl", "plan", str(path), "--json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environ, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    plan = json.loads(done.stdout)
    peak = max(place["peak"]["total"] for place in plan["places"]) / 2**30
    assert plan["refusals"] == [] and peak <= memory - 5
    row = next(line for line in (ROOT / "docs" / "cuda.md").read_text().splitlines() if f"/{path.name}`" in line)
    assert row.endswith((f"| {peak:.1f} of {memory:g} GiB |", "| not planned yet |"))
