"""`megarl model table`: the folder whose tensors are compared with the rows. Megatron-Bridge's part is a dump written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.commands.model import check, table
from megarl.hf.families.tables.megatron_bridge import translate
from tests.support.megatron_bridge_dump import CONFIG, dense_dump

NOT_COMPARED = "its rows were not compared with the model's tensors"


@pytest.fixture(autouse=True)
def dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "table_of", lambda config, folder: (translate(dense_dump(), CONFIG), dense_dump()))


def model(folder: Path, *tensors: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if tensors:
        save_file({name: np.zeros(1, np.float32) for name in tensors}, folder / "model.safetensors")
    return folder


def test_tensors_without_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder below the home directory, and its config.json, name the same tensors."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model(tmp_path / "model", "model.norm.weight", "model.layers.1.extra.weight", "model.layers.2.of_prediction.weight")
    for name in ("~/model", "~/model/config.json", str(tmp_path / "model")):
        assert table.write_table(name, tmp_path / "table.json", None) == 1
        assert "tensors that no row has: model.layers.0.extra.weight\n" in capsys.readouterr().out
    assert not (tmp_path / "table.json").exists()


def test_the_output_says_whether_tensors_were_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, compared in (
        (model(tmp_path / "whole", "model.norm.weight"), True),
        (model(tmp_path / "config"), False),
    ):
        assert table.write_table(str(folder), tmp_path / "table.json", None) == 0
        assert (NOT_COMPARED not in capsys.readouterr().out) == compared


def test_a_published_model_is_not_compared_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model(tmp_path / "here", "extra.weight"))
    monkeypatch.setattr(check.published, "names", lambda: ["Newest-1B"])
    monkeypatch.setattr(check.published, "read", lambda name: CONFIG)
    assert table.write_table("Newest-1B", tmp_path / "table.json", None) == 0
    assert NOT_COMPARED in capsys.readouterr().out


def test_a_model_of_the_hub_is_compared_with_its_folder_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = model(tmp_path / "cached", "extra.weight")
    monkeypatch.setattr(check.hub, "config_folder", lambda name: cached)
    monkeypatch.setattr(check.hub, "weights_fault", lambda name: (None, None))
    assert table.write_table("owner/newest", tmp_path / "table.json", None) == 1
    assert "tensors that no row has: extra.weight" in capsys.readouterr().out
