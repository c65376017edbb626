"""The commands of docs/tutorials/ that a CPU can run, as a reader runs them: page by page, in the order of the page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.tutorials import PAGES, STATUSES, commands, reason_not_to_run, run_in, workspace, write_files

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def warmed_up(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after some SFT, in the folder that the tutorials start from."""
    folder = workspace(tmp_path_factory.mktemp("first"), quickstart_data)
    done = run_in(folder, "python -m megarl train recipes/quickstart_sft.yaml train.steps=400")
    assert done.returncode == 0, done.stderr + done.stdout
    return folder / "runs" / "quickstart-sft"


@pytest.mark.parametrize("page", [page for page in PAGES if not page.endswith(".zh.md")])
def test_commands_run(page: str, warmed_up: Path, quickstart_data: Path, tmp_path: Path) -> None:
    """Chinese pages have the same commands (tests/docs/test_tutorials.py)."""
    folder = workspace(tmp_path, quickstart_data)
    shutil.copytree(warmed_up, folder / "runs" / "quickstart-sft")
    (folder / "data" / "gsm8k").mkdir()
    for name in ("train.parquet", "test.parquet"):
        shutil.copy(quickstart_data / "data" / name, folder / "data" / "gsm8k" / name)
    write_files(page, folder)
    run = [line for line in commands(page) if not reason_not_to_run(line)]
    assert run
    for line in run:
        allowed = next((statuses for start, statuses in STATUSES.items() if line.startswith(start)), (0,))
        done = run_in(folder, line)
        assert done.returncode in allowed, f"{line}\n{done.stdout}\n{done.stderr}"
