"""A run on a CPU ends in seconds if a package is installed that was built for CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import NotHereError
from megarl.platform.kinds import kind_of
from megarl.platform.version_sets import cuda_builds
from megarl.preflight import environment
from megarl.recipe.schema import Recipe

PYPI = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0"}
MATCHING = {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}
CUDA = {"torch": "2.13.0", "torchvision": "0.28.0"}


@pytest.mark.parametrize(("installed", "machine", "names"), [
    (PYPI, "x86_64", ["torchvision", "torchaudio"]), (PYPI, "aarch64", []), (MATCHING, "x86_64", []), (CUDA, "x86_64", []),
    ({}, "x86_64", []),
])  # fmt: skip
def test_cuda_builds(installed: dict[str, str], machine: str, names: list[str]) -> None:
    assert [*cuda_builds(installed.get, machine)] == names


def test_the_start_names_packages_and_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cuda_builds", lambda: cuda_builds(PYPI.get, "x86_64"))
    with pytest.raises(NotHereError, match=r"(?s)torchaudio 2.11.0 is a CUDA build.*pip uninstall -y torchvision"):
        environment.environment_notices(Recipe(), kind_of("cpu").platform())


def test_an_accelerator_needs_no_cpu_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "cuda_builds", lambda: cuda_builds(PYPI.get, "x86_64"))
    environment.environment_notices(Recipe(), kind_of("npu").platform())
