"""Bundles over a run's files: their contents, and what a replay of the unpacked files reads. No training runs."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.commands import replay as replaying
from megarl.commands.bundle import pack as packing
from megarl.commands.bundle.contents import DESCRIPTION, Description
from megarl.commands.bundle.options import replay_or_bundle
from megarl.commands.bundle.unpack import unpack
from megarl.errors import InputError
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.load import read_recipe
from megarl.rollout.tape import TAPE_FORMAT, history, segments_of
from tests.commands.bundle.run import SECRET, RecordedRun

FAILURE = "WorkerFailed: trainer 0 on node-7 (pid 812) failed; its output: {run}/logs/trainer-0.log"
ELSEWHERE = FAILURE.replace("node-7 (pid 812)", "laptop (pid 9)")
PORTABLE = "WorkerFailed: trainer 0 failed; its output: RUN/logs/trainer-0.log"


def bundle(run: Path, file: Path, step: int | None = None) -> int:
    return replay_or_bundle(run, [], name=None, bundle=file, step=step, out=None)


def repeat(file: Path, out: Path | None = None) -> int:
    return replay_or_bundle(file, [], name=None, bundle=None, step=None, out=out)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    run = RecordedRun(tmp_path / "over here")
    monkeypatch.chdir(tmp_path / "over here" / "code")
    return run


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    folder = tmp_path / "here"
    monkeypatch.chdir(tmp_path)
    run = RecordedRun(folder, failure=FAILURE.format(run=folder / "runs" / "mine"))
    monkeypatch.chdir(folder / "code")
    return run


def names_in(file: Path) -> list[str]:
    with tarfile.open(file) as archive:
        return archive.getnames()


def moved(recorded: RecordedRun, file: Path, elsewhere: Path) -> Path:
    """Move a bundle to another folder, and the recorded run's files out of the way."""
    elsewhere.mkdir()
    os.chdir(elsewhere)
    recorded.folder.rename(recorded.folder.with_name("gone"))
    return Path(shutil.move(file, elsewhere / file.name))


def test_a_bundle_has_what_the_step_needs_and_nothing_else(
    recorded: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundle(recorded.run.path, tmp_path / "step.tar", 5) == 0
    assert names_in(tmp_path / "step.tar") == [
        "bundle.json",
        "files/model/config.json",
        "files/model/model.safetensors",
        "files/model/tokenizer.json",
        "files/data/0/train.parquet",
        "files/data/1/test.jsonl",
        "files/functions/0/functions.py",
        "modules/losses_of_a_bundle.py",
        "modules/my_rewards.py",
        "modules/helpers/__init__.py",
        "modules/helpers/tables.py",
        "modules/helpers/names.py",
        "recorded/tape/recipe-1.yaml",
        "recorded/recipe.resolved.yaml",
        "recorded/tape/controller.jsonl",
        "recorded/metrics.jsonl",
        "recorded/tape/engine0.jsonl",
        "recorded/tape/engine1.jsonl",
        "recorded/checkpoints/step_000002/controller.json",
        "recorded/checkpoints/step_000002/manifest.json",
        "recorded/checkpoints/step_000002/trainer/rank0.safetensors",
    ]
    text = capsys.readouterr().out
    assert "from the checkpoint of step 2 to step 5, its end" in text and "together" in text
    assert "left out: cluster.environment: API_TOKEN" in text and "rollout.engine_args.hf_token" in text
    assert SECRET.encode() not in (tmp_path / "step.tar").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if "step" in path.name] == ["step.tar"], "no partial file is left"


def test_an_unpacked_bundle_is_a_run_that_ends_at_the_step(recorded: RecordedRun, tmp_path: Path) -> None:
    """Its tape begins after the checkpoint and ends with the step; the recipe names the unpacked files."""
    bundle(recorded.run.path, tmp_path / "step.tar", 4)
    file, folder = moved(recorded, tmp_path / "step.tar", tmp_path / "elsewhere"), tmp_path / "unpacked"
    description = unpack(file, folder)
    assert (description.after, description.step, description.failure) == (2, 4, None)
    run = RunDirectory(folder / "recorded")
    (segment,) = segments_of(run.tape)
    assert (segment.number, segment.after, segment.identity["model"]) == (
        1,
        2,
        {"path": "files/model", "weights": "abc"},
    )
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [3, 4]
    events = [json.loads(line).get("event") for line in (run.tape / "engine1.jsonl").read_text().splitlines()]
    assert events == [None, "update 2", "update 3", "update 4"]
    recipe = read_recipe(run.tape / "recipe-1.yaml").recipe
    named = [recipe.model.path, *recipe.data.train_files, *recipe.data.eval_files]
    assert all(path.startswith(f"{folder}/files/") and Path(path).exists() for path in named)
    assert list(recipe.reward.functions) == ["my_rewards:short", f"{folder}/files/functions/0/functions.py:long"]
    assert recipe.rollout.engine_args == {"max_num_seqs": 8} and recipe.observe.trackers == []
    assert recipe.observe.alerts.url is None


def test_the_default_is_the_last_step_with_metrics(recorded: RecordedRun, tmp_path: Path) -> None:
    bundle(recorded.run.path, tmp_path / "step.tar")
    assert unpack(tmp_path / "step.tar", tmp_path / "out").step == 6


def test_a_step_before_the_resume_begins_at_the_model(recorded: RecordedRun, tmp_path: Path) -> None:
    bundle(recorded.run.path, tmp_path / "step.tar", 2)
    assert not [name for name in names_in(tmp_path / "step.tar") if "checkpoints" in name]
    assert unpack(tmp_path / "step.tar", tmp_path / "out").after == 0
    (plan,) = history(segments_of(tmp_path / "out" / "recorded" / "tape"))
    assert (plan.segment.number, plan.last_step) == (0, 2)


def test_a_failed_step_is_repeated_up_to_its_failure(failed: RecordedRun, tmp_path: Path) -> None:
    bundle(failed.run.path, tmp_path / "step.tar")
    description = unpack(tmp_path / "step.tar", tmp_path / "out")
    assert (description.step, description.failure) == (5, PORTABLE)
    (plan,) = history(segments_of(tmp_path / "out" / "recorded" / "tape"))
    assert plan.last_step == plan.segment.failed_step == 5
    events = (tmp_path / "out" / "recorded" / "tape" / "engine0.jsonl").read_text().splitlines()
    assert len(events) == 1 + 7, "the engine's records end where the run failed"


def test_a_step_after_sigterm_is_packed_as_the_replay_advises(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run saves no checkpoint in step 2 by its recipe, so SIGTERM caused it."""
    monkeypatch.setattr(replaying, "run_child", lambda *_: 7)
    assert replay_or_bundle(recorded.run.path, [], name=None, bundle=None, step=None, out=None) == 7
    *_, command, run, option, file, _, step = shlex.split(capsys.readouterr().out.splitlines()[1])
    assert (command, run, option, file) == ("replay", str(recorded.run.path), "--bundle", "step.tar")
    assert step == "6" and bundle(recorded.run.path, tmp_path / "the step.tar", int(step)) == 0
    assert capsys.readouterr().out.endswith("Repeat it with: python -m megarl replay 'the step.tar'\n")
    assert unpack(tmp_path / "the step.tar", tmp_path / "out").after == 2
    unpacked = tmp_path / "out" / "recorded"
    assert replay_or_bundle(unpacked, [], name=None, bundle=None, step=None, out=None) == 7
    assert "start 1 of 1: steps 3 to 6" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "step", "packs"), [(0, 4, True), (0, 2, False), (1, 2, True), (1, 4, False)])
def test_only_the_format_of_the_chosen_start_counts(
    recorded: RecordedRun, tmp_path: Path, number: int, step: int, packs: bool
) -> None:
    """The start `number` is of an earlier megarl."""
    tape = recorded.run.tape / "controller.jsonl"
    header = f'{{"segment":{number},'
    tape.write_text(tape.read_text().replace(f'{header}"format":{TAPE_FORMAT},', header))
    if packs:
        assert bundle(recorded.run.path, tmp_path / "step.tar", step) == 0
        return
    with pytest.raises(InputError, match=rf"segment {number} of the tape has format 1.*Pack it with that version"):
        bundle(recorded.run.path, tmp_path / "step.tar", step)


@pytest.mark.parametrize(("step", "words"), [(7, "it has the steps 1 to 2, 3 to 6"), (60, "is not on its tape")])
def test_a_step_that_the_tape_lacks_is_refused(recorded: RecordedRun, tmp_path: Path, step: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        bundle(recorded.run.path, tmp_path / "step.tar", step)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: shutil.rmtree(run.run.checkpoints), "the checkpoint of this step is missing: copy it to"),
        (lambda run: (run.folder / "data/train.parquet").unlink(), r"train\.parquet, which does not exist here"),
        (lambda run: (run.folder / "code/my_rewards.py").unlink(), "reward names the module 'my_rewards', which is not in"),
        (lambda run: shutil.rmtree(run.run.tape), "has no tape|is not the directory of a run"),
    ],
)  # fmt: skip
def test_missing_files_are_named(recorded: RecordedRun, tmp_path: Path, damage, words: str) -> None:
    damage(recorded)
    with pytest.raises(InputError, match=words):
        bundle(recorded.run.path, tmp_path / "step.tar")
    assert not [path for path in tmp_path.iterdir() if "step" in path.name]


def test_a_full_disk_is_refused_before_anything_is_written(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    monkeypatch.setattr(packing, "_write", lambda *_: pytest.fail("it must not write"))
    with pytest.raises(InputError, match=r"the bundle takes 0\.1 MiB, and the disk of .* has 0\.0 MiB free"):
        bundle(recorded.run.path, tmp_path / "step.tar")


def test_the_size_is_not_less_than_the_file(
    recorded: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of more than 100 characters take further blocks."""
    long = recorded.folder / "model" / ("a" * 90)
    long.mkdir()
    for number in range(200):
        (long / f"{'b' * 200}{number}.json").write_text("{}")
    bundle(recorded.run.path, tmp_path / "step.tar")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "together" in line]
    assert float(line.split()[1]) >= (tmp_path / "step.tar").stat().st_size / 2**20 - 0.05


def test_a_write_that_fails_leaves_no_file(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tarfile.TarFile, "addfile", lambda *_: (_ for _ in ()).throw(OSError("the disk failed")))
    with pytest.raises(OSError, match="the disk failed"):
        bundle(recorded.run.path, tmp_path / "step.tar")
    assert not [path for path in tmp_path.iterdir() if "step" in path.name]


def archive_of(file: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    description = Description("mine", 0, 1, None, "1 trainer and 1 engine", {}, [], len(members), 1).to_json()
    first = tarfile.TarInfo(DESCRIPTION)
    with tarfile.open(file, "w") as archive:
        for info, data in ((first, description), *members):
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (member("/etc/cron.d/x"), "is not one of a bundle's"),
        (member("files/../../x"), "is not one of a bundle's"),
        (member("elsewhere/x"), "is not one of a bundle's"),
        (member("files/..\\..\\x"), "is not one of a bundle's"),
        (member("files/link", tarfile.SYMTYPE, "/etc"), "is a link or a device"),
        (member("files/link", tarfile.LNKTYPE, "/etc/passwd"), "is a link or a device"),
        (member("files/device", tarfile.CHRTYPE), "is a link or a device"),
        (member(DESCRIPTION), "twice"),
        (member("."), "is not one of a bundle's"),
        (member(""), "is not one of a bundle's"),
    ],
)
def test_unsafe_members_are_refused(tmp_path: Path, info: tarfile.TarInfo, words: str) -> None:
    file = archive_of(tmp_path / "bad.tar", (info, b"" if not info.isreg() else b"x"))
    with pytest.raises(ValueError, match=words):
        unpack(file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar"]


def test_other_files_and_formats_are_refused(recorded: RecordedRun, tmp_path: Path) -> None:
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(InputError, match="neither a run's directory nor a bundle"):
        repeat(tmp_path / "text.tar")
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.addfile(member("files/x"), io.BytesIO())
    with pytest.raises(InputError, match=r"it does not begin with bundle\.json"):
        repeat(tmp_path / "other.tar")
    bundle(recorded.run.path, tmp_path / "step.tar")
    data = (tmp_path / "step.tar").read_bytes()
    (tmp_path / "later.tar").write_bytes(data.replace(b'"format": 1\n', b'"format": 9\n'))
    with pytest.raises(InputError, match="it has format 9, and this megarl reads format 1"):
        repeat(tmp_path / "later.tar")
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"cut\.tar is damaged"):
        repeat(tmp_path / "cut.tar")
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": 3}, "repeating a run takes no --step"),
        ({"out": Path("x")}, "repeating a run takes no --out"),
        ({"bundle": Path("x.tar"), "name": "again"}, "packing a bundle takes no --name"),
        ({"bundle": Path("step")}, r"--bundle step: name it step\.tar"),
        ({"bundle": Path("a/step.tgz")}, r"--bundle a/step\.tgz: name it a/step\.tar \("),
    ],
)
def test_options_that_do_not_fit_are_refused(recorded: RecordedRun, options: dict[str, object], words: str) -> None:
    values = {"name": None, "bundle": None, "step": None, "out": None, **options}
    with pytest.raises(InputError, match=words):
        replay_or_bundle(recorded.run.path, [], **values)  # type: ignore[arg-type]


def training(
    monkeypatch: pytest.MonkeyPatch, *, status: int, steps: Sequence[int], error: str | None
) -> list[list[str]]:
    """Replace the training by one that writes metrics of `steps` and the summary of a run with `error`."""
    called: list[list[str]] = []

    def run_child(arguments: Sequence[str], environ: Mapping[str, str], folder: Path | None) -> int:
        called.append([*arguments, f"in {folder}", environ["PYTHONPATH"].partition(os.pathsep)[0]])
        target = Path(arguments[4]).parents[2] / "replay"
        target.mkdir()
        lines = [{"step": step, "actor/loss": step / 3} for step in steps]
        (target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (target / "summary.json").write_text(json.dumps({"error": error and error.format(run=target)}))
        return status

    monkeypatch.setattr(replaying, "run_child", run_child)
    return called


def test_a_replay_of_a_bundle_trains_from_the_unpacked_files(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle(recorded.run.path, tmp_path / "step.tar", 4)
    file, folder = moved(recorded, tmp_path / "step.tar", tmp_path / "elsewhere"), tmp_path / "elsewhere" / "step"
    calls = training(monkeypatch, status=0, steps=[3, 4], error=None)
    assert repeat(file) == 0
    assert calls[0][4:] == [
        f"{folder}/recorded/tape/recipe-1.yaml",
        "name=replay",
        f"runs_dir={folder}",
        f"train.replay={folder}/recorded",
        f"train.resume={folder}/recorded/checkpoints/step_000002",
        f"in {folder}/modules",
        f"{folder}/modules",
    ]
    text = capsys.readouterr().out
    assert "2 lines of metrics are bitwise equal" in text
    assert "modules/my_rewards.py" in text and "not in the bundle: cluster.environment: API_TOKEN" in text
    with pytest.raises(InputError, match=r"step exists: remove it, or name another folder \(--out\)"):
        repeat(file)
    with pytest.raises(InputError, match=r"no ending to leave out: name the folder .* \(--out\)"):
        repeat(file.rename("renamed"))


@pytest.mark.parametrize(
    ("status", "steps", "error", "expected", "words"),
    [
        (1, [3, 4], ELSEWHERE, 0, f"step 5 fails as in the recorded run: {PORTABLE}"),
        (
            1,
            [3, 4],
            "ValueError: other",
            1,
            f"recorded: {PORTABLE}\n  replay:   ValueError: other",
        ),
        (0, [3, 4, 5], None, 1, "replay:   no error"),
        (1, [3], FAILURE, 1, "the replay has no metrics of step 4"),
        (1, [3, 4], FAILURE + ". Resume from the checkpoint of step 9.", 0, "step 5 fails as in the recorded run"),
    ],
)
def test_a_failure_is_compared(
    failed: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    status: int, steps: list[int], error: str | None, expected: int, words: str,
) -> None:  # fmt: skip
    bundle(failed.run.path, tmp_path / "step.tar")
    training(monkeypatch, status=status, steps=steps, error=error)
    assert repeat(tmp_path / "step.tar", tmp_path / "out") == expected
    assert words in capsys.readouterr().out


def test_a_training_that_does_not_start_gives_its_status(
    failed: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay on a machine with too few devices has an error, which is not a failure of the step."""
    bundle(failed.run.path, tmp_path / "step.tar")
    monkeypatch.setattr(replaying, "run_child", lambda *_: 2)
    assert repeat(tmp_path / "step.tar", tmp_path / "out") == 2
    assert "step 5" not in capsys.readouterr().out.partition("start 1 of 1")[2].partition("\n")[2]
