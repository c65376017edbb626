"""The checkpoint that a failed run names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.checkpoint.next_commands import naming_checkpoint
from megarl.errors import SpoiledWeights
from megarl.recipe.schema import Recipe
from tests.support.checkpoint_parts import saver, state


@pytest.mark.parametrize("error", [SpoiledWeights("resume from step 3"), RuntimeError("the machine burns")])
def test_an_error_that_names_a_checkpoint_gets_no_note_on_the_last_one(error: Exception, tmp_path: Path) -> None:
    """The last checkpoint may hold the spoiled weights."""
    saver(tmp_path).save(7, state([], []))
    directory = cast(Any, SimpleNamespace(checkpoints=tmp_path, journal=tmp_path / "journal"))
    with pytest.raises(type(error)) as raised, naming_checkpoint(Recipe(), directory):
        raise error
    notes = getattr(raised.value, "__notes__", [])
    assert [note.split(",")[0] for note in notes] == (
        [] if isinstance(error, SpoiledWeights) else ["Last intact checkpoint: step 7"]
    )
