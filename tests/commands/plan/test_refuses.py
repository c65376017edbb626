"""A list of mutated recipes, each of which `plan` refuses with advice, before it starts to count."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli import app
from megarl.exit_status import guarded
from tests.support.refused_recipes import DPO, QUICK, REFUSED, SCORED, SFT, TOO_LARGE, Bad

ROOT = Path(__file__).parents[3]
_FILES = {QUICK: ("train", "test"), SFT: ("sft", None), DPO: ("preferences", None)}


@pytest.fixture
def counts_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks were counted")

    monkeypatch.setattr("megarl.commands.plan.command.make_plan", started)
    monkeypatch.setattr(
        "megarl.commands.plan.search.suggest.uncounted_layouts", lambda _: []
    )  # of layouts that do not divide
    monkeypatch.setattr("signal.signal", lambda *_: None)
    yield
    sys.modules.pop("own_scorer", None)


def refusal_of(bad: Bad, data: Path, place: Path, output: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and output of `plan`."""
    overrides = [override.replace("HERE", str(place)) for override in bad.overrides]
    train, test = _FILES.get(bad.recipe.removesuffix(".yaml"), (None, None))
    if train is not None:
        shutil.copytree(data, place, dirs_exist_ok=True)
        if bad.damage is not None:
            bad.damage(place)
        loaders = [
            f"model.path={place}/model",
            f"data.train_files=[{place}/data/{train}.parquet]",
            f"runs_dir={place}/runs",
        ]
        loaders += [f"data.eval_files=[{place}/data/{test}.parquet]"] if test else []
        overrides = [*loaders, *overrides]
    arguments = ["plan", str(ROOT / "recipes" / bad.recipe), *overrides, *bad.options]
    status = guarded(lambda: app(args=arguments, standalone_mode=False), debug=False)
    return status, output.readouterr().err


def check(bad: Bad, status: int, message: str) -> None:
    assert status == 2, message or "it was not refused"
    assert "Traceback" not in message and "debug" not in message
    assert bad.key in message and bad.words in message, message


CALLED = [pytest.param(bad, id=bad.name, marks=pytest.mark.slow) for bad in SCORED]


@pytest.mark.parametrize("bad", [*(pytest.param(bad, id=bad.name) for bad in REFUSED), *CALLED])
def test_an_impossible_recipe_is_refused_with_advice(
    bad: Bad,
    quickstart_data: Path,
    tmp_path: Path,
    counts_nothing: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # folder of a recipe's scorer
    check(bad, *refusal_of(bad, quickstart_data, tmp_path, capsys))


@pytest.mark.slow
@pytest.mark.parametrize("bad", TOO_LARGE, ids=lambda bad: bad.name)
def test_insufficient_memory_is_refused(
    bad: Bad, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan exits with status 1 after counting and names each excess."""
    monkeypatch.chdir(ROOT)  # the processes that count import megarl from there
    monkeypatch.setattr("signal.signal", lambda *_: None)
    arguments = ["plan", str(ROOT / "recipes" / bad.recipe), *bad.overrides, *bad.options]
    assert guarded(lambda: app(args=arguments, standalone_mode=False), debug=False) == 1
    output = capsys.readouterr()
    assert "Traceback" not in output.err and bad.key in output.out and bad.words in output.out, output.out
