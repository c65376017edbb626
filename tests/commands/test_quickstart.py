"""`megarl quickstart`: results without evaluations, earlier runs that are renamed or in use, and folders it cannot write to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.commands.quickstart import print_results, quickstart
from megarl.errors import InputError
from megarl.observe.run_dir import RunDirectory

FIGURES = {"accuracy_before": 0.25, "accuracy_after": 0.5, "accuracy_greedy_before": 0.2, "accuracy_greedy_after": 0.6}


@pytest.mark.parametrize(
    ("absent", "lines"),
    [
        ((), ["accuracy on", "  sampled   0.25 -> 0.50", "  greedy    0.20 -> 0.60", "largest difference"]),
        (
            ("accuracy_greedy_before", "accuracy_greedy_after"),
            ["accuracy on", "  sampled   0.25 -> 0.50", "largest difference"],
        ),
        ((*FIGURES, "logprob_gap_max"), []),
    ],
)
def test_only_figures_that_the_run_has_are_printed(
    absent: tuple[str, ...], lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {**FIGURES, "logprob_gap_max": "NaN"} | dict.fromkeys(absent)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    print_results(tmp_path, 120.0)
    *shown, last = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(shown) == len(lines) and all(line.startswith(start) for line, start in zip(shown, lines, strict=True))
    assert last.startswith("2.0 minutes; curves")


def earlier_run(name: str, model: str) -> RunDirectory:
    run = RunDirectory(Path("runs") / name)
    run.path.mkdir(parents=True)
    run.recipe.write_text(f"model:\n  path: {model}\n")
    return run


@pytest.mark.parametrize(("alive", "overrides"), [("quickstart", []), ("quickstart", ["name=b"]), ("c", ["name=b"])])
def test_no_run_is_renamed_while_another_reads_its_model(
    alive: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of DAPO reads the model of the earlier SFT."""
    monkeypatch.chdir(tmp_path)
    earlier_run("quickstart-sft", "data/quickstart/model")
    run = earlier_run(alive, str(tmp_path / "runs/quickstart-sft/hf"))
    run.lock()
    with pytest.raises(InputError, match=rf"runs/{alive}\b.*process.*wait for"):
        quickstart(overrides)
    run.unlock()
    assert sorted(path.name for path in Path("runs").iterdir()) == sorted(["quickstart-sft", alive])


def test_a_folder_that_cannot_be_written_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    earlier_run("quickstart-sft", "data/quickstart/model")
    Path("data").mkdir()
    Path("data/quickstart").write_text("a file")
    with pytest.raises(InputError, match=r"data/quickstart is a file, not a folder"):
        quickstart([])
    assert [path.name for path in Path("runs").iterdir()] == ["quickstart-sft"]
