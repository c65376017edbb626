"""Saved states and exported models in the run's directory, with stand-in trainers that write small files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.atomic_files import DiskFullError
from megarl.cluster.failures import Failure, ProcessInfo, WorkerFailed
from megarl.commands.serve.session import TrainingSession
from megarl.commands.serve.states import ExportStore, StateStore, state_identity
from megarl.recipe.schema import Recipe
from tests.support.checkpoint_parts import Trainers

IDENTITY = {"lora_rank": 0}


def store(folder: Path, trainers: Trainers | None = None, identity: dict[str, Any] | None = None) -> StateStore:
    return StateStore(folder, trainers or Trainers(), identity or IDENTITY, lambda: None)


def test_a_state_that_expires_while_it_is_loaded_is_still_there(tmp_path: Path) -> None:
    """The session saves the starting model between the search and the load; only a save of the caller deletes expired states."""
    states = store(tmp_path)
    states.save("m", "short", seconds=-1)
    found = states.find("m", "short")
    states.save("start", "start", overwrite=True)
    assert found.path.is_dir()
    session: Any = SimpleNamespace(states=states, _give_to_actor=lambda: None)
    TrainingSession.save_state(session, "m", "later")
    assert not found.path.exists()
    with pytest.raises(ValueError, match="the state 'short' of m does not exist"):
        states.find("m", "short")
    assert states.find("m", "later").path.is_dir()


def too_large(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers.bytes = 1 << 60


def full_at_the_begin(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_room_for("controller.json", monkeypatch)


def full_at_the_end(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_room_for("manifest.json", monkeypatch)


def _no_room_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses the write of this file."""
    opened = Path.open

    def open_full(path: Path, *args: Any, **options: Any) -> Any:
        return opened(Path("/dev/full") if path.name == name else path, *args, **options)

    monkeypatch.setattr(Path, "open", open_full)


@pytest.mark.parametrize("fill", [too_large, full_at_the_begin, full_at_the_end])
def test_a_full_disk_refuses_a_save_and_training_goes_on(
    fill: Callable[[Trainers, pytest.MonkeyPatch], None], tmp_path: Path
) -> None:
    trainers = Trainers()
    states = store(tmp_path, trainers)
    states.save("m", "one")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ValueError, match="Free some space and save again") as error,
    ):
        fill(trainers, patch)
        states.save("m", "one", overwrite=True)
    assert f"'one' was not saved: the disk of {tmp_path} has no room" in str(error.value)
    assert "train.resume" not in str(error.value)
    assert ("for its 2,305,843,009,213,693,952 bytes. " in str(error.value)) == (fill is too_large)
    trainers.bytes = 10
    assert states.find("m", "one").path.parent.name == "step_000000"
    states.save("m", "one", overwrite=True)
    assert states.find("m", "one").path.parent.name == "step_000001"


def test_a_disk_that_is_full_for_a_trainer_ends_the_session(tmp_path: Path) -> None:
    """A call that fails in a trainer has ended all trainers: no later call could succeed."""
    trainers = Trainers()
    trainers.error = WorkerFailed(Failure(ProcessInfo("trainer rank 1"), "DiskFullError: no space left"))
    with pytest.raises(DiskFullError, match="trainer rank 1"):
        store(tmp_path, trainers).save("m", "one")


CONFIG = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}


def served(folder: Path, weights: bytes, rank: int = 8) -> Recipe:
    """Return the recipe of a server of a model with these weights."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    recipe = Recipe()
    recipe.model.path, recipe.lora.rank = str(folder), rank
    return recipe


def test_adapters_are_loaded_on_the_weights_that_they_belong_to(tmp_path: Path) -> None:
    """Models of equal sizes, such as a base model and its instruct model, differ in their weights alone."""
    base, copied, tuned = (served(tmp_path / name, name[:4].encode()) for name in ("base", "base_copied", "tuned"))
    states = tmp_path / "states"
    store(states, identity=state_identity(base, CONFIG)).save("m", "one")
    assert store(states, identity=state_identity(copied, CONFIG)).find("m", "one").path.is_dir()
    with pytest.raises(
        ValueError, match=r"'one' has adapters for other weights .* serve the recipe with the model\.path"
    ):
        store(states, identity=state_identity(tuned, CONFIG)).find("m", "one")
    tuned.lora.alpha *= 2
    with pytest.raises(ValueError, match=r"another model: lora_alpha \d+.*, here .*weights of model\.path"):
        store(states, identity=state_identity(tuned, CONFIG)).find("m", "one")


@pytest.mark.parametrize("nested", [False, True])
def test_states_of_a_model_of_another_size_are_refused(nested: bool, tmp_path: Path) -> None:
    """Multi-modal models have their sizes in a section of config.json. All weights are in the state: it needs no base."""
    larger = CONFIG | {"num_hidden_layers": 4}
    small, large = ({"model_type": "vl", "text_config": each} if nested else each for each in (CONFIG, larger))
    recipe = served(tmp_path / "model", b"weights", rank=0)
    store(tmp_path / "states", identity=state_identity(recipe, small)).save("m", "one")
    served(tmp_path / "model", b"trained on", rank=0)
    assert store(tmp_path / "states", identity=state_identity(recipe, small)).find("m", "one").path.is_dir()
    with pytest.raises(ValueError, match=r"'num_hidden_layers': 2.*, here .*'num_hidden_layers': 4"):
        store(tmp_path / "states", identity=state_identity(recipe, large)).find("m", "one")


def test_a_sampler_may_have_the_name_of_a_file(tmp_path: Path) -> None:
    exports = ExportStore(tmp_path)
    for name, seconds in (("x.json", None), ("x", -1), ("x.y", -1), ("later", None)):
        exports.place("m", name, seconds=seconds, metadata=None).mkdir()
    exports.delete_expired()
    assert sorted(path.name for path in (tmp_path / "m").iterdir() if path.is_dir()) == ["later", "x.json"]
    with pytest.raises(ValueError, match=r"sampler weights 'x\.json' exist"):
        exports.place("m", "x.json", seconds=None, metadata=None)
    exports.place("m", "x", seconds=None, metadata=None).mkdir()
