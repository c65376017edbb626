"""Dataset classes written for verl run once, and their rows are megarl's."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from megarl.commands.data.command import app
from megarl.commands.data.verl_dataset import prepare
from megarl.data.prompts import ground_truth_of, layout_of
from megarl.data.rows import Row, iterate_rows, messages_of, write_parquet
from tests.support.verl_stand_in import forget_loop_modules

OWN = "tests/support/verl_datasets.py"


@pytest.fixture
def questions(tmp_path: Path) -> str:
    file = tmp_path / "questions.parquet"
    write_parquet(file, [{"question": f"{n} + 1?", "prompt": f"{n}?", "answer": n + 1} for n in range(20)])
    return str(file)


def rows_of(file: Path) -> list[Row]:
    layouts, optional = layout_of(())
    return list(iterate_rows(file, *layouts, optional=optional))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verl_dataset", *arguments])


def test_rows_of_a_class_derived_from_verls(questions: str, tmp_path: Path) -> None:
    """Also the tools' arguments, numbers of numpy, and options that the class reads."""
    out = tmp_path / "rows" / "train.parquet"
    ran = run("--class", f"{OWN}:HintedDataset", "--source", questions, "--out", str(out), "--option", "hint=Guess.")
    assert ran.exit_code == 0 and "20 rows" in ran.output, ran.output
    rows = rows_of(out)
    assert len(rows) == 20 and rows[3].get("data_source", str) == "me/hinted"
    assert messages_of(rows[3], "prompt") == [
        {"role": "system", "content": "Guess."},
        {"role": "user", "content": "3 + 1?"},
    ]
    assert ground_truth_of(rows[3], needed=True) == 4
    kwargs = {"guess": {"create_kwargs": {"degrees": 3}}}
    assert rows[3].get("extra_info", dict) == {"index": 3, "tools_kwargs": kwargs}


def test_the_same_class_and_files_give_the_same_file(questions: str, tmp_path: Path) -> None:
    """A checkpoint's identity covers the contents of the file."""
    for name in ("a", "b"):
        prepare(f"{OWN}:HintedDataset", [questions], tmp_path / f"{name}.parquet", None, {})
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_images_in_messages_become_the_column_images(tmp_path: Path) -> None:
    out = tmp_path / "drawings.parquet"
    assert prepare(f"{OWN}:DrawingDataset", ["none"], out, None, {})[0] == {out: 2}
    row = rows_of(out)[1]
    assert messages_of(row, "prompt") == [{"role": "user", "content": "Look: <image>?"}]
    (image,) = row.get("images", list)
    assert Image.open(io.BytesIO(image["bytes"])).size == (5, 3)


def test_the_arguments_of_an_interaction_are_in_extra_info(tmp_path: Path) -> None:
    """agent.interaction reads them there, as verl's agent loop does."""
    out = tmp_path / "talk.parquet"
    prepare(f"{OWN}:TalkingDataset", ["none"], out, None, {})
    assert rows_of(out)[0].get("extra_info", dict)["interaction_kwargs"] == {"name": "user"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SampledDataset", "row 0 is another one when it is read again"),
        ("GrowingDataset", "its method on_batch_end changes the rows during training"),
        ("MappedDataset", "cannot be created: AttributeError: dataframe.map: without verl"),
        ("StreamDataset", "it has no fixed number of rows"),
        ("VideoDataset", "row 0 has videos"),
        ("Plain", "it is not derived from torch.utils.data.Dataset"),
        ("HintDataset", "did you mean"),
    ],
)
def test_classes_that_cannot_be_carried_over_are_refused(questions: str, tmp_path: Path, name: str, words: str) -> None:
    out = tmp_path / "rows.parquet"
    with pytest.raises(ValueError, match=words):
        prepare(f"{OWN}:{name}", [questions], out, None, {})
    assert not out.exists()


def test_a_class_that_needs_more_of_verl_is_told_what_there_is(
    questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_loop_modules(monkeypatch)
    (tmp_path / "own.py").write_text("from verl.utils.model import compute_position_id_with_mask\n")
    with pytest.raises(
        ValueError,
        match=r"megarl provides only verl\.interactions\.base, verl\.tools\.base_tool.*verl\.utils\.dataset",
    ):
        prepare(f"{tmp_path}/own.py:Any", [questions], tmp_path / "rows.parquet", None, {})
    wrong = run("--class", "x:y", "--source", questions, "--out", "a.parquet", "--option", "hint")
    assert wrong.exit_code != 0


def test_rows_keep_the_name_of_their_agent_loop(tmp_path: Path) -> None:
    """A run with tools refuses rows without them, and agent.loop selects a class by this name."""
    source, out = tmp_path / "rows.parquet", tmp_path / "out.parquet"
    names = ["tool_agent", "single_turn_agent", None]
    write_parquet(source, [{"prompt": [{"role": "user", "content": "2?"}], "agent_name": name} for name in names])
    (tmp_path / "plain_rows.py").write_text(
        "from verl.utils.dataset.rl_dataset import RLHFDataset\n\n\nclass Plain(RLHFDataset):\n    pass\n"
    )
    prepare(f"{tmp_path}/plain_rows.py:Plain", [str(source)], out, None, {})
    rows = list(iterate_rows(out, ("prompt",), optional=["agent_name"]))
    assert [row.values.get("agent_name") for row in rows] == names
