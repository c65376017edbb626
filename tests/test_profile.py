"""Traces of trainers, and deterministic kernels: what a run writes, and what is refused."""

from __future__ import annotations

import gzip
import json
import types
from pathlib import Path

import pytest

from megarl import load_recipe, platform, worker
from megarl.config.errors import RecipeError
from tests import stack

SFT = stack.ROOT / "recipes" / "tiny" / "sft.yaml"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("observe.profile_steps=[2,31]", r"go from 1 to 30, and 31 is none"),
        ("observe.profile_steps=[0]", r"0 is none"),
        ("observe.profile_ranks=[2]", r"\(cluster\.trainers\) go from 0 to 1, and 2 is none"),
        ("observe.profile_ranks=[]", "nothing would be traced"),
        ("observe.trackers=[wand]", "no tracker 'wand'"),
    ],
)
def test_steps_and_ranks_that_there_are_not(given: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(SFT, ["observe.profile_steps=[2]", given])


@pytest.mark.parametrize("asked", [True, False])
def test_a_trainer_is_deterministic_where_asked(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Stop(Exception):
        pass

    def set_device(_: int) -> None:
        raise Stop

    recipe = load_recipe(SFT, [f"train.deterministic={str(asked).lower()}"])
    stopping = types.SimpleNamespace(prepare=lambda: None, set_device=set_device)
    monkeypatch.setattr(platform, "select", lambda device: stopping)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        with pytest.raises(Stop):
            worker.Worker(recipe, 1)
        assert torch.are_deterministic_algorithms_enabled() is asked
    finally:
        torch.use_deterministic_algorithms(before)
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_step_is_traced(quickstart_data: Path, tmp_path: Path) -> None:
    """Of the rank that is asked for alone, forward and backward, and the run goes on; with deterministic kernels."""
    given = [f"model.path={quickstart_data}/model", f"data.train_files=[{quickstart_data}/data/sft.parquet]"]
    given += [f"runs_dir={tmp_path}", "name=traced", "train.steps=3", "train.save_at_end=false", "data.eval_files=[]"]
    given += ["evaluation.at_start=false", "evaluation.every=0", "evaluation.at_end=false", "train.deterministic=true"]
    given += ["observe.profile_steps=[2]", "observe.profile_ranks=[1]"]
    done = stack.run("train", str(SFT), *given, torchrun=2)
    assert done.returncode == 0, done.stderr
    traces = [path.relative_to(tmp_path) for path in tmp_path.glob("traced/profile/**/*") if path.is_file()]
    assert traces == [Path("traced/profile/step_2/rank1.json.gz")]
    events = json.loads(gzip.decompress((tmp_path / traces[0]).read_bytes()))["traceEvents"]
    named = [event.get("name", "") for event in events]
    assert "aten::mm" in named and any("Backward" in name for name in named), "no backward pass in it"
    lines = stack.metrics(tmp_path / "traced")
    assert len(lines) == 3 and [("timing_s/profile" in line) for line in lines] == [False, True, False]
