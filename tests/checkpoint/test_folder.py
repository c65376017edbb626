"""Checkpoint folders: atomic saves, retention, and resume from the newest intact checkpoint with notices of damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.checkpoint.controller_state import load_state
from megarl.checkpoint.folder import NoRoomError, find_checkpoint, list_checkpoints, resume_hint, set_aside_later
from megarl.checkpoint.identity import (
    CONTENTS,
    check_base,
    check_identity,
    data_digest,
    identity_of,
    weights_digest,
)
from megarl.checkpoint.manifest import MANIFEST, find_damage
from megarl.errors import RecipeError
from megarl.hf.families.tables.family_table import FIELD
from megarl.preflight.run_directory import open_run_directory
from megarl.recipe.data import DataConfig
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml
from megarl.recipe.trainers import ModelConfig
from megarl.rollout.admission import TriedGroup
from megarl.types import DraftCount, InlineData, SampleFailure, SampleImages, Span, ToolUse, Turn
from tests.support.checkpoint_parts import Trainers, names, saver, spoil, state, tried


def flat(saved: dict[str, Any]) -> list[TriedGroup]:
    return [*(item for batch in saved["source"]["gathered"] for item in batch), *saved["source"]["waiting"]]


def find(resume: str, folder: Path, checksums: bool = True) -> tuple[Path | None, list[str]]:
    notices: list[str] = []
    return find_checkpoint(resume, folder, checksums=checksums, notice=notices.append), notices


def test_round_trip_is_exact(tmp_path: Path) -> None:
    saved = state([tried(3, True), tried(4, False)], [tried(5, True)])
    saved["source"] |= {"waiting": [tried(8, True)], "unfinished": [6, 7]}
    first = flat(saved)[0].group
    first.greedy = replace(first.samples[0], reward=0.25, data=InlineData([]))
    first.failures = (SampleFailure("scorer 'mine'", "row/7", "timeout", "it ran for too long", 2),)
    first.scoring_retries = 3
    first.sampled_again = {"unavailable": 2}
    first.samples[0].tool_use = ToolUse(turns=2, calls=1, seconds=0.5)
    first.samples[0].drafts = DraftCount(7, 3)
    spoken = first.samples[0].data.get()[0]
    spoken.reason = "off by one"
    spoken.turns = (Turn("assistant", "one?", 3), Turn("tool", "2", 5, "add", {"a": 1}, seconds=0.5, reward=0.25))
    assert saver(tmp_path).save(4, saved) == {"checkpoint/write_seconds": 1.5, "checkpoint/bytes": 16.0}
    path = tmp_path / "step_000004"
    assert (path / "trainer" / "tensors_1").read_bytes() == b"weights\1"
    assert names(path) == ["controller.json", MANIFEST, "trainer", "waiting.npz"]
    assert names(path / "trainer") == ["tensors_0", "tensors_1"]
    loaded = load_state(path)
    assert loaded["source"]["counters"] == {"admitted": 7} and loaded["step"] == 4
    assert loaded["source"]["unfinished"] == [6, 7]
    for old, new in zip(flat(saved), flat(loaded), strict=True):
        assert old.accepted == new.accepted
        assert (old.group.number, old.group.prompt_uid) == (new.group.number, new.group.prompt_uid)
        assert old.group.greedy == new.group.greedy
        assert (old.group.failures, old.group.scoring_retries) == (new.group.failures, new.group.scoring_retries)
        assert old.group.sampled_again == new.group.sampled_again
        for before, after in zip(old.group.samples, new.group.samples, strict=True):
            assert {**before.__dict__, "data": None} == {**after.__dict__, "data": None}
        for before, after in zip(old.group.samples[0].data.get(), new.group.samples[0].data.get(), strict=True):
            for name in ("tokens", "loss_mask", "rollout_log_probs"):
                left, right = getattr(before, name), getattr(after, name)
                assert left.dtype == right.dtype and np.array_equal(left, right)
            assert (before.text, before.reason, before.turns) == (after.text, after.reason, after.turns)


def test_groups_of_a_checkpoint_before_spans_are_read(tmp_path: Path) -> None:
    saver(tmp_path).save(4, state([tried(3, True)]))
    path = tmp_path / "step_000004" / "controller.json"
    written = json.loads(path.read_text())
    del written["source"]["waiting"]
    for sample in written["source"]["gathered"][0][0]["samples"]:
        del sample["spans"]
        sample["version"] = 2
    path.write_text(json.dumps(written))
    source = load_state(path.parent)["source"]
    assert source["waiting"] == []
    assert [sample.spans for sample in source["gathered"][0][0].group.samples] == [(Span(0, 2),)] * 2


def test_a_failed_save_leaves_only_the_older_checkpoint(tmp_path: Path) -> None:
    trainers = Trainers()
    run_saver = saver(tmp_path, trainers)
    run_saver.save(2, state())
    trainers.error = RuntimeError("no space left on device")
    with pytest.raises(RuntimeError, match="no space"):
        run_saver.save(4, state())
    assert names(tmp_path) == ["step_000002"]


def test_a_save_larger_than_the_free_space_is_refused_before_writing(tmp_path: Path) -> None:
    trainers = Trainers()
    run_saver = saver(tmp_path, trainers)
    run_saver.save(2, state())
    trainers.bytes = 1 << 60
    with pytest.raises(NoRoomError, match=r"step 4 needs 2305843009213693952 bytes.* free.*step_000002") as error:
        run_saver.save(4, state())
    assert str(tmp_path) in str(error.value)
    assert names(tmp_path) == ["step_000002"] and find("auto", tmp_path)[0] == tmp_path / "step_000002"


def test_resuming_from_an_older_checkpoint_sets_newer_ones_aside(tmp_path: Path) -> None:
    run_saver = saver(tmp_path, keep_checkpoints=9)
    for step in (5, 9, 10):
        run_saver.save(step, state())
    assert [path.name for path in set_aside_later(tmp_path, 5)] == ["step_000009", "step_000010"]
    saver(tmp_path).save(6, state())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000005", "step_000006"]
    assert find("auto", tmp_path) == (tmp_path / "step_000006", [])
    assert (tmp_path / "discarded" / "step_000010" / "controller.json").exists()


def test_resume_finds_the_newest_of_the_kept_checkpoints(tmp_path: Path) -> None:
    assert find("auto", tmp_path / "none") == (None, [])
    (tmp_path / ".step_000001.partial").mkdir()  # killed in its very first save
    newest, notices = find("auto", tmp_path)
    assert newest is None and len(notices) == 1 and "step_000001 was still being written" in notices[0]
    run_saver = saver(tmp_path)
    for step in (1, 2, 10):
        run_saver.save(step, state())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002", "step_000010"]
    assert find("auto", tmp_path) == (tmp_path / "step_000010", [])
    assert find("never", tmp_path) == (None, [])
    assert find(str(tmp_path / "step_000002"), tmp_path) == (tmp_path / "step_000002", [])
    with pytest.raises(ValueError, match="must be never, auto or the path of a checkpoint"):
        find(str(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="step_000099 does not exist"):
        find(str(tmp_path / "step_000099"), tmp_path)


def test_keep_every_keeps_every_nth_checkpoint(tmp_path: Path) -> None:
    run_saver = saver(tmp_path, keep_checkpoints=1, keep_every=4)
    for step in (2, 4, 6, 8, 9):
        run_saver.save(step, state())
    assert names(tmp_path) == ["step_000004", "step_000008", "step_000009"]


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
@pytest.mark.parametrize("file", ["trainer/tensors_1", "controller.json", "waiting.npz", MANIFEST])
def test_auto_skips_a_damaged_checkpoint_with_a_notice(tmp_path: Path, file: str, how: str) -> None:
    run_saver = saver(tmp_path)
    for step in (1, 2):
        run_saver.save(step, state())
    spoil(tmp_path / "step_000002" / file, how)
    newest, notices = find("auto", tmp_path)
    assert newest == tmp_path / "step_000001"
    assert len(notices) == 1 and "step_000002" in notices[0] and "damaged" in notices[0]
    assert file in notices[0] or file == MANIFEST, notices
    with pytest.raises(ValueError, match="step_000002 is damaged"):
        find(str(tmp_path / "step_000002"), tmp_path)
    spoil(tmp_path / "step_000001" / "trainer" / "tensors_0", "folder")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged .*step_000002: .*step_000001: "):
        find("auto", tmp_path)


def test_without_checksums_sizes_are_compared(tmp_path: Path) -> None:
    saver(tmp_path).save(1, state())
    path = tmp_path / "step_000001"
    spoil(path / "trainer" / "tensors_1", "flipped")
    assert find_damage(path, checksums=False) is None
    spoil(path / "trainer" / "tensors_1", "short")
    assert find_damage(path, checksums=False) == "trainer/tensors_1 has 7 bytes instead of 8"


CONFIG = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 256}


def opened(tmp_path: Path, config: dict[str, Any], critic: dict[str, Any] | None = None, **model: str) -> Path | None:
    """Run the checks of `train` before any process starts, on a run that the first call creates."""
    recipe = Recipe(name="run", runs_dir=str(tmp_path))
    recipe.train.resume = "auto"
    recipe.model = ModelConfig(**{"path": "/models/one", "dtype": "float32", **model})
    identity = identity_of(recipe, config, critic, rows=4)
    folder = tmp_path / "run" / "checkpoints"
    if not folder.exists():
        saver(folder).save(3, {**state(), "identity": identity})
    return open_run_directory(recipe, identity).checkpoint


def test_a_damaged_checkpoint_is_a_warning_of_the_start(tmp_path: Path) -> None:
    assert opened(tmp_path, CONFIG) is not None
    recipe = Recipe(name="run", runs_dir=str(tmp_path))
    recipe.train.resume = "auto"
    recipe.model = ModelConfig(path="/models/one", dtype="float32")
    identity = identity_of(recipe, CONFIG, None, rows=4)
    folder = tmp_path / "run" / "checkpoints"
    saver(folder).save(4, {**state(), "identity": identity})
    spoil(folder / "step_000004" / "trainer" / "tensors_1", "flipped")
    place = open_run_directory(recipe, identity)
    assert place.checkpoint == folder / "step_000003"
    (warning,) = place.warnings
    assert "step_000004 is damaged and is skipped" in warning and warning not in place.notices


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    assert opened(tmp_path, CONFIG) == tmp_path / "run" / "checkpoints" / "step_000003"
    assert opened(tmp_path, {**CONFIG, "use_cache": True}, path="/elsewhere/one") is not None
    layers, width = {**CONFIG, "num_hidden_layers": 6}, {**CONFIG, "hidden_size": 96, "head_dim": 16}
    for config, model, words in (
        (layers, {}, "model.path = '/models/one'.* num_hidden_layers 4 there and 6 here"),
        (width, {}, "hidden_size 64 there and 96 here, head_dim None there and 16 here"),
        (CONFIG, {"dtype": "bfloat16"}, "model.dtype = 'bfloat16'.* written with 'float32'"),
    ):
        with pytest.raises(RecipeError, match=f"(?s){words}"):
            opened(tmp_path, config, **model)


def test_other_base_weights_are_refused_and_their_path_does_not_matter(tmp_path: Path) -> None:
    """Adapters and the reference policy belong to weights, whatever the folder is called."""
    for name, byte in (("one", b"a"), ("copy", b"a"), ("other", b"b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(byte * 99)
    assert opened(tmp_path, CONFIG, path=f"{tmp_path}/one") is not None
    checkpoint = opened(tmp_path, CONFIG, path=f"{tmp_path}/copy")
    assert checkpoint is not None
    with pytest.raises(
        RecipeError, match=r"(?s)model\.path = .*other.*started from other weights, at that time in .*one"
    ):
        opened(tmp_path, CONFIG, path=f"{tmp_path}/other")
    recipe = Recipe()
    for recipe.model.path in (f"{tmp_path}/one", f"{tmp_path}/copy"):
        check_base(checkpoint, recipe.model)
    recipe.model.path = f"{tmp_path}/other"
    with pytest.raises(RecipeError, match="started from other weights"):
        check_base(checkpoint, recipe.model)


def test_changed_rows_are_refused_and_older_checkpoints_are_accepted(tmp_path: Path) -> None:
    """Reversed rows have the same number and name, and the data position would refer to other rows."""
    file = tmp_path / "train.jsonl"
    data = DataConfig(train_files=[str(file)])
    recipe = Recipe(data=data)
    file.write_text("a\nb\n")
    identity = identity_of(recipe, CONFIG, None, {"train": 2})
    saver(tmp_path / "old").save(1, {**state(), "identity": dict(identity)})
    identity[CONTENTS] = data_digest(data)
    saver(tmp_path / "new").save(1, {**state(), "identity": identity})
    for folder in ("old", "new"):
        check_identity(tmp_path / folder / "step_000001", identity)
    file.write_text("b\na\n")
    identity = {**identity, CONTENTS: data_digest(data)}
    check_identity(tmp_path / "old" / "step_000001", identity)
    with pytest.raises(
        RecipeError, match=r"(?s)data\.train_files.*rows of train\.jsonl have changed.*restore the files"
    ):
        check_identity(tmp_path / "new" / "step_000001", identity)


def test_the_digest_of_a_large_file_covers_both_ends_and_the_size(tmp_path: Path) -> None:
    file, size = tmp_path / "model.safetensors", (16 << 20) + 5
    digests = set()
    for start in (None, 0, size - 1):  # nothing, and either end
        data = bytearray(size)
        if start is not None:
            data[start] = 1
        file.write_bytes(data)
        digests.add(weights_digest(tmp_path))
    file.write_bytes(bytes(size + 1))
    digests.add(weights_digest(tmp_path))
    assert len(digests) == 4


def test_a_checkpoint_without_identity_is_refused_with_a_remedy(tmp_path: Path) -> None:
    before = {"model": {"name": "one", "dtype": "float32"}, "lora": None}
    saver(tmp_path / "run" / "checkpoints").save(3, {**state(), "identity": before})
    with pytest.raises(RecipeError, match=r"(?s)train\.resume.*written by an earlier megarl.*export it"):
        opened(tmp_path, CONFIG)


def test_a_refused_resume_leaves_no_folder(tmp_path: Path) -> None:
    opened(tmp_path, CONFIG)
    recipe = Recipe(name="another", runs_dir=str(tmp_path))
    recipe.train.resume = str(tmp_path / "run" / "checkpoints" / "step_000003")
    with pytest.raises(RecipeError):
        open_run_directory(recipe, identity_of(recipe, {**CONFIG, "hidden_size": 32}, None, rows=4))
    assert not (tmp_path / "another").exists()


def test_a_checkpoint_of_another_table_is_refused(tmp_path: Path) -> None:
    """The text for people may change; a checkpoint of an earlier version, without the digest, loads."""
    table = {"model_type": "qwen3", "rows": [["copy", "a", ["b"]]], "ties": False, "source": "one", "unread": []}
    assert opened(tmp_path, {**CONFIG, FIELD: table}) is not None
    assert opened(tmp_path, {**CONFIG, FIELD: {**table, "source": "two", "unread": ["c"]}}) is not None
    for config in ({**CONFIG, FIELD: {**table, "rows": [["copy", "a", ["c"]]]}}, CONFIG):
        with pytest.raises(RecipeError, match=r"(?s)model\.table.*another table"):
            opened(tmp_path, config)
    assert opened(tmp_path / "earlier", CONFIG) is not None
    assert opened(tmp_path / "earlier", {**CONFIG, FIELD: table}) is not None


def test_an_unwritable_folder_for_weight_files_is_refused(tmp_path: Path) -> None:
    recipe = Recipe(name="run", runs_dir=str(tmp_path))
    identity = identity_of(recipe, CONFIG, None, rows=4)
    recipe.weight_sync.transport = "files"
    open_run_directory(recipe, identity)
    assert (tmp_path / "run" / "weight_sync").is_dir()
    recipe.weight_sync.directory = str(tmp_path / "file")
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"(?s)weight_sync.directory.*Not a directory"):
        open_run_directory(recipe, identity)


def test_a_resume_lists_changed_settings(tmp_path: Path) -> None:
    opened(tmp_path, CONFIG)
    recipe = Recipe(name="run", runs_dir=str(tmp_path))
    recipe.model = ModelConfig(path="/models/one", dtype="float32")
    recipe.train.resume = "auto"
    identity = identity_of(recipe, CONFIG, None, rows=4)
    place = open_run_directory(recipe, identity)
    assert not [notice for notice in place.notices if "changed" in notice]
    place.directory.write_recipe(to_yaml(recipe))
    recipe.actor.optimizer.lr, recipe.teacher.path, recipe.data.chat_template_args = 2e-6, "other", {"a": 1}
    (notice,) = [notice for notice in open_run_directory(recipe, identity).notices if "changed" in notice]
    assert notice == (
        "changed since the run was last started: data.chat_template_args {} -> {'a': 1}, teacher.path null -> 'other', "
        "actor.optimizer.lr 1e-06 -> 2e-06"
    )
    text = place.directory.recipe.read_text()
    place.directory.recipe.write_text(text + "model: {path: 'cut")
    (notice,) = [notice for notice in open_run_directory(recipe, identity).notices if "changed" in notice]
    assert notice.startswith(f"{place.directory.recipe} is damaged")


def test_a_checkpoint_of_another_critic_is_refused(tmp_path: Path) -> None:
    assert opened(tmp_path, CONFIG, critic=CONFIG) is not None
    with pytest.raises(RecipeError, match=r"(?s)critic\.model_path.*hidden_size 64 there and 32 here"):
        opened(tmp_path, CONFIG, critic={**CONFIG, "hidden_size": 32})
    with pytest.raises(RecipeError, match=r"(?s)algorithm\.advantage.*with a critic .*and this run has none"):
        opened(tmp_path, CONFIG)


@pytest.mark.parametrize("steps", [1, 2])
def test_images_and_experts_of_waiting_groups_survive(steps: int, tmp_path: Path) -> None:
    """Images and routed experts are restored: without them a resumed run would train on inputs that differ from sampling."""
    waiting = tried(3, True)
    seconds = np.array([0.7]) if steps > 1 else None  # of a video
    images = SampleImages(np.ones((4 * steps, 6), np.float32), np.array([[steps, 2, 2]]), np.array([1]), seconds)
    for vectors in waiting.group.samples[0].data.get():
        vectors.images = images
        vectors.routed_experts = np.arange(10, dtype=np.int16).reshape(5, 1, 2)
    saver(tmp_path).save(4, state([waiting, tried(5, True)]))
    with_images, without = flat(load_state(tmp_path / "step_000004"))
    for vectors in with_images.group.samples[0].data.get():
        assert (vectors.images.seconds is None) is (seconds is None)
        for name in ("pixels", "grids", "starts", *(("seconds",) if steps > 1 else ())):
            before, after = getattr(images, name), getattr(vectors.images, name)
            assert before.dtype == after.dtype and np.array_equal(before, after)
        assert np.array_equal(vectors.routed_experts, np.arange(10).reshape(5, 1, 2))
    assert all(vectors.images is vectors.routed_experts is None for vectors in without.group.samples[0].data.get())


def test_the_resume_hint_names_the_last_intact_checkpoint(tmp_path: Path) -> None:
    """A damaged checkpoint is never named."""
    none = f"No checkpoint was written to {tmp_path}: the same command"
    assert resume_hint(tmp_path, "never").startswith(f"{none} with train.resume=auto starts over")
    assert resume_hint(tmp_path, "auto") == f"{none} starts over (train.save_every writes them)."
    assert resume_hint(tmp_path, "auto", 5).endswith("(train.save_every=5 writes the first after step 5).")
    assert resume_hint(tmp_path, "/old/step_000001").startswith(
        f"No checkpoint was written to {tmp_path} after /old/step_000001; the same command resumes"
    )
    run_saver = saver(tmp_path)
    run_saver.save(4, state())
    run_saver.save(5, state())
    (tmp_path / "step_000005" / "trainer" / "tensors_1").unlink()
    left = f"Last intact checkpoint: step 4, {tmp_path}/step_000004. Resume from it: the same command"
    assert resume_hint(tmp_path, "never") == f"{left} with train.resume=auto."
    assert resume_hint(tmp_path, "auto") == f"{left}."
    assert resume_hint(tmp_path, "/old/step_000001") == f"{left} with train.resume=auto."
