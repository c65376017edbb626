"""Commands on a CPU end in seconds if a package is installed that was built for CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.cli import app
from megarl.commands.plan.count.rank_client import RankClient
from megarl.commands.quickstart import quickstart
from megarl.errors import NotHereError
from megarl.platform import version_sets
from megarl.platform.kinds import kind_of
from megarl.platform.version_sets import cuda_builds
from megarl.preflight import environment
from megarl.recipe.schema import Recipe
from tests.support.stack import ROOT

PYPI = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0"}
MATCHING = {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}
CUDA = {"torch": "2.13.0", "torchvision": "0.28.0"}


@pytest.mark.parametrize(("installed", "machine", "names"), [
    (PYPI, "x86_64", ["torchvision", "torchaudio"]), (PYPI, "aarch64", []), (MATCHING, "x86_64", []), (CUDA, "x86_64", []),
    ({}, "x86_64", []),
])  # fmt: skip
def test_cuda_builds(installed: dict[str, str], machine: str, names: list[str]) -> None:
    assert [*cuda_builds(installed.get, machine)] == names


@pytest.fixture
def pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment have a torch for CPUs with torchvision and torchaudio for CUDA."""
    monkeypatch.setattr(version_sets, "cuda_builds", lambda: cuda_builds(PYPI.get, "x86_64"))


@pytest.mark.usefixtures("pypi")
class TestRefusal:
    def test_the_start_names_packages_and_the_remedy(self) -> None:
        with pytest.raises(
            NotHereError, match=r"(?s)torchaudio 2.11.0 is a CUDA build.*uninstall -y torchvision torchaudio,"
        ):
            environment.environment_notices(Recipe(), kind_of("cpu").platform())

    def test_an_accelerator_needs_no_cpu_builds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        environment.environment_notices(Recipe(), kind_of("npu").platform())
        monkeypatch.setattr(version_sets, "version_of", {"torch-npu": "2.10.0"}.get)
        version_sets.refuse_cuda_builds()

    def test_the_plan_names_them_before_its_processes_start(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RankClient, "_start", lambda client: pytest.fail("a process was started"))
        recipe = str(ROOT / "recipes" / "grpo_qwen2.5_0.5b.yaml")
        with pytest.raises(NotHereError, match=r"torchvision 0.28.0 is a CUDA build"):
            app(args=["plan", recipe], standalone_mode=False)

    def test_the_quickstart_names_them_before_it_writes(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(NotHereError, match=r"torchvision 0.28.0 is a CUDA build"):
            quickstart([])
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_pip", [True, False])
def test_the_remedy_is_a_command_for_this_environment(monkeypatch: pytest.MonkeyPatch, has_pip: bool) -> None:
    """An environment of `uv tool` has no pip, and the shell's pip changes another environment."""
    monkeypatch.setattr(version_sets.importlib.util, "find_spec", lambda name: object() if has_pip else None)
    monkeypatch.setattr(sys, "executable", "/my tools/python")
    command = version_sets.cuda_builds_remedy(["torchvision", "torchaudio"]).partition(", or")[0]
    if has_pip:
        assert command == "'/my tools/python' -m pip uninstall -y torchvision torchaudio"
    else:
        assert command == "uv pip uninstall --python '/my tools/python' torchvision torchaudio"
