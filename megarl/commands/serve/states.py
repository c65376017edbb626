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

from megarl.atomic_files import DiskFullError
from megarl.checkpoint.controller_state import load_state
from megarl.checkpoint.folder import NoRoomError, check_whole, checkpoint_step, list_checkpoints
from megarl.checkpoint.identity import weights_digest
from megarl.checkpoint.saver import Saver, SavingGroup
from megarl.cluster.failures import WorkerFailed
from megarl.hf.config import text_fields
from megarl.recipe.schema import Recipe, TrainConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GROUP = "trainer"
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
_BASE = "weights of model.path"  # digest; adapters belong to them


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


def state_identity(recipe: Recipe, config: dict[str, Any]) -> dict[str, Any]:
    """Return what a state and the server that loads it must share. config: the model's config.json. With adapters, reads weight files."""
    text, lora = text_fields(config), recipe.lora
    model = {"model": {name: text.get(name) for name in _SIZES}, "lora_rank": lora.rank}
    if not lora.rank:
        return model
    base = weights_digest(Path(recipe.model.path))
    return model | {"lora_alpha": lora.alpha, "lora_targets": list(lora.targets), _BASE: base}


class StateStore:
    """States below `folder`, by model and name. `identity`: of the served model; a state of another one is not loaded."""

    def __init__(self, folder: Path, actor: SavingGroup, identity: dict[str, Any], check: Callable[[], None]) -> None:
        self.folder, self.actor, self.identity, self.check = folder, actor, identity, check

    def save(
        self, model: str, name: str, *, overwrite: bool = False, seconds: float | None = None, metadata: Any = None
    ) -> Path:
        """Save the trainers' weights and optimizer. Returns the folder.

        seconds: lifetime; see `delete_expired`. Raises ValueError for a name that exists, and if the disk has no room. A disk that
        becomes full while the trainers write ends them: DiskFullError.
        """
        check_name(model)
        check_name(name)
        place = self.folder / model / name
        existing = list_checkpoints(place)
        if existing and not overwrite:
            raise ValueError(f"the state {name!r} exists: choose another name, or save it with overwrite=True")
        expires = None if seconds is None else time.time() + seconds
        state = {"source": {"gathered": []}, "identity": self.identity, "expires_at": expires, "metadata": metadata}
        step = checkpoint_step(existing[-1]) + 1 if existing else 0
        saver = Saver(place, {_GROUP: self.actor}, TrainConfig(keep_checkpoints=1), self.check, print)
        try:
            saver.save(step, state)
        except DiskFullError as error:
            if isinstance(error.__cause__, WorkerFailed):  # a call that fails in a trainer has ended all of them
                raise
            needs = f" for its {error.needed:,} bytes" if isinstance(error, NoRoomError) else ""
            raise ValueError(
                f"the state {name!r} was not saved: the disk of {self.folder} has no room{needs}. Earlier states and the weights in "
                "training are unchanged. Free some space and save again"
            ) from error
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
        different = sorted(key for key in self.identity if saved.get(key) != self.identity[key])
        if different == [_BASE]:
            raise ValueError(
                f"the state {name!r} has adapters for other weights than those that this server starts from: serve the recipe with the "
                "model.path of the server that saved it"
            )
        if different:
            changes = ", ".join(f"{key} {saved.get(key)!r}, here {self.identity[key]!r}" for key in different)
            raise ValueError(f"the state {name!r} was saved with another model: {changes}")
        return SavedState(existing[-1] / _GROUP, about)

    def delete_expired(self) -> None:
        """Delete expired states. They can be loaded until then."""
        for place in self.folder.glob("*/*"):
            for path in list_checkpoints(place):
                expires = load_state(path)["expires_at"]
                if expires is not None and expires < time.time():
                    shutil.rmtree(place)
                    break


class ExportStore:
    """Models for engines below `folder`, by model and name: Hugging Face directories, each with a `.NAME.json` that records its lifetime.

    No name begins with a dot (`check_name`), so a record is never another model's directory.
    """

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
        place.with_name(f".{name}.json").write_text(about, encoding="utf-8")
        return place

    def delete_expired(self) -> None:
        """Delete expired models."""
        for about in self.folder.glob("*/.*.json"):
            expires = json.loads(about.read_text(encoding="utf-8"))["expires_at"]
            if expires is not None and expires < time.time():
                name = about.name.removeprefix(".").removesuffix(".json")
                shutil.rmtree(about.with_name(name), ignore_errors=True)
                about.unlink()
