"""Checks of output paths before long work."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.atomic_files import make_empty_folder


def test_a_folder_that_cannot_be_filled_is_refused_by_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out .*file is a file\. Choose another folder"):
        make_empty_folder("--out", tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be created: Not a directory"):
        make_empty_folder("--out", tmp_path / "file" / "model")
    with pytest.raises(ValueError, match="is not empty: choose another --out"):
        make_empty_folder("--out", tmp_path)
    make_empty_folder("--out", tmp_path / "new" / "model")
    make_empty_folder("--out", tmp_path / "new" / "model")
    assert (tmp_path / "new" / "model").is_dir()
