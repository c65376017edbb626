"""Saved states of a training API: named checkpoints in the run's directory, `states/MODEL/NAME/`."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint.controller_state import load_state
from megarl.checkpoint.folder import check_whole, checkpoint_step, list_checkpoints
from megarl.checkpoint.saver import Saver, SavingGroup
from megarl.recipe.schema import TrainConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GROUP = "trainer"


@dataclass(frozen=True)
class SavedState:
    """A state to load. `path`: the checkpoint's folder of the trainers. `about`: what `StateStore.save` received."""

    path: Path
    about: dict[str, Any]


def check_name(name: str) -> None:
    """Raise ValueError for a name that is not a plain file name."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the name {name!r} cannot be used for a saved state: use 1 to 128 letters, digits, '.', '_' and '-', the first a "
            "letter or digit"
        )


class StateStore:
    """States below `folder`, by model and name. `identity`: of the served model; a state of another one is not loaded."""

    def __init__(self, folder: Path, actor: SavingGroup, identity: dict[str, Any], check: Callable[[], None]) -> None:
        self.folder, self.actor, self.identity, self.check = folder, actor, identity, check

    def save(
        self, model: str, name: str, *, overwrite: bool = False, seconds: float | None = None, metadata: Any = None
    ) -> Path:
        """Save the trainers' weights and optimizer. Returns the folder.

        seconds: lifetime; expired states are deleted at the next save. Raises ValueError for a name that exists.
        """
        check_name(model)
        check_name(name)
        self.delete_expired()
        place = self.folder / model / name
        existing = list_checkpoints(place)
        if existing and not overwrite:
            raise ValueError(f"the state {name!r} exists: choose another name, or save it with overwrite=True")
        expires = None if seconds is None else time.time() + seconds
        state = {"source": {"gathered": []}, "identity": self.identity, "expires_at": expires, "metadata": metadata}
        step = checkpoint_step(existing[-1]) + 1 if existing else 0
        Saver(place, {_GROUP: self.actor}, TrainConfig(keep_checkpoints=1), self.check, print).save(step, state)
        return place

    def find(self, model: str, name: str) -> SavedState:
        """Return a state. Raises ValueError if it does not exist, is damaged, or belongs to another model."""
        check_name(model)
        check_name(name)
        existing = list_checkpoints(self.folder / model / name)
        if not existing:
            raise ValueError(f"the state {name!r} of {model} does not exist in {self.folder}, or has expired")
        check_whole(existing[-1])
        about = load_state(existing[-1])
        saved = about["identity"]
        if different := sorted(key for key in self.identity if saved.get(key) != self.identity[key]):
            changes = ", ".join(f"{key} {saved.get(key)!r}, here {self.identity[key]!r}" for key in different)
            raise ValueError(f"the state {name!r} was saved with another model: {changes}")
        return SavedState(existing[-1] / _GROUP, about)

    def delete_expired(self) -> None:
        """Delete expired states."""
        for place in self.folder.glob("*/*"):
            for path in list_checkpoints(place):
                expires = load_state(path)["expires_at"]
                if expires is not None and expires < time.time():
                    shutil.rmtree(place)
                    break


class ExportStore:
    """Models for engines below `folder`, by model and name: Hugging Face directories, each with a `NAME.json` that records its lifetime."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, model: str, name: str, *, seconds: float | None, metadata: Any) -> Path:
        """Return a new directory to export to, and record its lifetime. Raises ValueError for a name that exists."""
        check_name(model)
        check_name(name)
        self.delete_expired()
        place = self.folder / model / name
        if place.exists():
            raise ValueError(f"sampler weights {name!r} exist: choose another name")
        place.parent.mkdir(parents=True, exist_ok=True)
        expires = None if seconds is None else time.time() + seconds
        about = json.dumps({"expires_at": expires, "metadata": metadata})
        place.with_name(f"{name}.json").write_text(about, encoding="utf-8")
        return place

    def delete_expired(self) -> None:
        """Delete expired models."""
        for about in self.folder.glob("*/*.json"):
            expires = json.loads(about.read_text(encoding="utf-8"))["expires_at"]
            if expires is not None and expires < time.time():
                shutil.rmtree(about.with_suffix(""), ignore_errors=True)
                about.unlink()
