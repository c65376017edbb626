"""megarl from its wheel, without a checkout: commands find their data inside the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megarl import __version__
from tests.support.stack import ROOT, metrics
from tests.support.training_runs import settings

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, to put before the checkout on sys.path."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("megarl", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    built = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = out.glob("megarl-*.whl")
    zipfile.ZipFile(wheel).extractall(out / "site")
    return out / "site"


def megarl(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the wheel in `folder`, which has no checkout."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: recipes and nothing else."""
    shutil.copytree(ROOT / "recipes", tmp_path / "mine")
    return tmp_path


def test_the_package_is_the_wheels(site: Path, folder: Path) -> None:
    code = "import megarl; print(megarl.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    shown = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert shown.stdout.startswith(str(site)), shown.stdout + shown.stderr


def test_the_package_is_typed(site: Path) -> None:
    """Type checkers read annotations of an installed package only with this file (PEP 561)."""
    assert (site / "megarl" / "py.typed").is_file()


def test_the_version(site: Path, folder: Path) -> None:
    """The wheel's files are in no work tree, so no commit is named."""
    done = megarl(site, folder, "--version")
    (metadata,) = site.glob("megarl-*.dist-info")
    assert done.stdout.splitlines()[0] == f"megarl {__version__}" and metadata.name == f"megarl-{__version__}.dist-info"


def test_a_first_recipe(site: Path, folder: Path) -> None:
    """`init` needs no recipe of the checkout as a base."""
    done = megarl(site, folder, "init", "first.yaml", "--task", "dapo", "--devices", "2 cpu", "--defaults")
    assert done.returncode == 0 and (folder / "first.yaml").is_file(), done.stderr


@pytest.mark.slow
def test_plan(site: Path, folder: Path) -> None:
    """`plan` reads package data: a published config.json, devices.yaml, templates and the statistics of published runs."""
    page = folder / "plan.html"
    done = megarl(site, folder, "plan", "mine/grpo_qwen2.5_0.5b.yaml", "--html", str(page))
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr + done.stdout
    assert "range" in done.stdout and "<html" in page.read_text(), done.stdout + done.stderr


def test_view(site: Path, folder: Path) -> None:
    """The page's scripts and styles are package data."""
    code = "from megarl.observe.page.bundle import static_files; print(*static_files())"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    shown = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    static = ROOT / "megarl" / "observe" / "page" / "static"
    assert shown.stdout.split() == sorted(path.name for path in static.iterdir()), shown.stderr


def test_recipes(site: Path, folder: Path) -> None:
    """The wheel has every recipe, and the quickstart finds its own without a checkout."""
    (shipped,) = site.glob("megarl-*.data/data/share/megarl/recipes")
    files = {path.relative_to(shipped) for path in shipped.rglob("*.yaml")}
    assert files == {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*.yaml")}
    done = megarl(site, folder, "quickstart", "train.step=3")
    assert done.returncode == 2 and "train.steps" in done.stderr, done.stderr


def test_a_package_without_recipes_is_refused(site: Path, folder: Path) -> None:
    shutil.copytree(site / "megarl", folder / "megarl")
    done = megarl(folder, folder, "quickstart")
    assert done.returncode == 2 and "the recipes of megarl are missing" in done.stderr, done.stderr


@pytest.mark.stack
@pytest.mark.slow
def test_train(site: Path, folder: Path, quickstart_data: Path) -> None:
    more = settings(
        quickstart_data, folder / "runs", "wheel", "train.steps=1", "evaluation.at_end=false", "reward.function=null"
    )
    done = megarl(site, folder, "train", "mine/quickstart.yaml", *more)
    assert done.returncode == 0, done.stderr + done.stdout
    assert [line["step"] for line in metrics(folder / "runs" / "wheel")][-1] == 1
    assert (folder / "runs" / "wheel" / "report.html").exists()
