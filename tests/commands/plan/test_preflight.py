"""Checks of `plan` other than memory: files, data and services on this machine, and notes on absent ones."""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path

import pytest

from docs.generate import rehearsed
from megarl.commands.plan.preflight import checked, require
from megarl.data.rows import sample_rows, write_parquet
from megarl.errors import InputError
from megarl.hf import weights
from megarl.preflight.findings import Survey
from megarl.preflight.load import load_recipe
from megarl.recipe.library_fields import fields_of, problem
from megarl.recipe.text import shape_of

ROOT = Path(__file__).parents[3]
COLUMNS = ("prompt", "data_source", "reward_model")


def look(name: str, *overrides: str) -> Survey:
    path = ROOT / "recipes" / f"{name}.yaml"
    return checked(load_recipe(path, overrides), path)


def here(data: Path, *more: str) -> list[str]:
    files = [f"data.train_files=[{data}/data/train.parquet]", f"data.eval_files=[{data}/data/test.parquet]"]
    return [f"model.path={data}/model", *files, *more]


@pytest.mark.parametrize("path", rehearsed.recipes(), ids=rehearsed.name_of)
def test_every_recipe_passes_without_its_model_and_data(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a laptop nothing is refused, and missing files are named."""
    monkeypatch.chdir(tmp_path)
    report = checked(load_recipe(path), path)
    assert not report.errors
    assert any(line.startswith("model.path: ") for line in report.texts("unavailable"))
    assert any(line.startswith("data.train_files: ") for line in report.texts("unavailable"))


def test_local_files_are_checked(quickstart_data: Path, tmp_path: Path) -> None:
    """Local files are checked: a sample of the rows, their number, and the scorer's verdict on their ground truth."""
    report = look("quickstart", *here(quickstart_data), f"runs_dir={tmp_path}")
    assert not report.errors and not report.texts("unavailable")
    notes = "\n".join(report.texts("notice"))
    assert "At most 1 checkpoint of about " in notes and " MB is there at a time" in notes
    assert "Of 256 of 4,096 training rows the longest has 36 tokens; data.max_prompt_length is 64" in notes
    assert "Scorer gsm8k, megarl/word_problems: a correct answer scores 1, a wrong one 0." in notes
    assert not list(tmp_path.iterdir()), "the run's directory was made"


def test_columns_are_checked_without_a_tokenizer(quickstart_data: Path, tmp_path: Path) -> None:
    report = look("grpo_qwen3_8b", *here(quickstart_data)[1:], f"runs_dir={tmp_path}")
    assert not report.errors
    assert any("without a tokenizer" in line for line in report.texts("unavailable"))


def test_an_existing_run_does_not_refuse_the_plan(quickstart_data: Path, tmp_path: Path) -> None:
    """A recipe that has been run can be planned without a new name."""
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "metrics.jsonl").write_text('{"step": 1}\n')
    report = look("quickstart", *here(quickstart_data), f"runs_dir={tmp_path}")
    assert not report.errors
    assert any("already holds a run" in line and "train.resume=auto" in line for line in report.texts("unavailable"))


def test_judges_services_and_servers_are_listed_but_not_called(quickstart_data: Path, tmp_path: Path) -> None:
    overrides = [
        "reward.functions.gsm8k=1", "reward.functions.judge=1", "judge.path=models/Qwen3-8B", "judge.prompt='{{ response }}'",
        "data.chat_template=true", "agent.mcp.search.url=http://127.0.0.1:1/mcp", f"runs_dir={tmp_path}",
    ]  # fmt: skip
    report = look("quickstart", *here(quickstart_data, *overrides))
    lines = "\n".join(report.texts("unavailable"))
    assert "reward: judge is not called in a plan" in lines and "agent.mcp: search" in lines
    assert not any("127.0.0.1" in str(error) for error in report.errors)


def test_checkpoints_larger_than_this_disk_are_reported(tmp_path: Path) -> None:
    """671 B parameters of 14 bytes, in two checkpoints and a third being written, may go to another machine's disk."""
    report = look("grpo_deepseek_v3", "train.save_every=5", f"runs_dir={tmp_path}")
    assert any("3 checkpoints of about 9.39 TB are there" in line for line in report.texts("unavailable")), (
        report.texts("unavailable")
    )


def test_a_judge_with_an_unknown_model_is_reported(tmp_path: Path) -> None:
    """A judge is not counted with the trainers; a policy with an unknown model is refused."""
    overrides = [
        "reward.function=judge",
        "judge.path=models/mine",
        "judge.prompt='{{ response }}'",
        f"runs_dir={tmp_path}",
    ]
    report = look("grpo_qwen3_8b", *overrides)
    assert not report.errors and any(
        line.startswith("judge.path: the directory does not exist") for line in report.texts("unavailable")
    )


def test_all_errors_are_reported_together() -> None:
    overrides = ["rollout.engine_args.max_sequences=4", "megatron.expert_parallel=2", "critic.model_path=null"]
    report = look("grpo_qwen3_8b", *overrides)
    with pytest.raises(InputError) as raised:
        require(report, strict=False)
    keys = re.findall(r"^  key +(\S+)$", str(raised.value), re.MULTILINE)
    assert sorted(keys) == ["megatron.expert_parallel", "rollout.engine_args"] and str(raised.value).endswith(
        "2 errors"
    )


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_sampled_rows_are_spread_over_the_file(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"prompt": str(number), "data_source": "x", "reward_model": {"ground_truth": "1"}} for number in range(1000)
    ]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        write_parquet(path, rows)
    else:
        path.write_text("\n\n".join(map(json.dumps, rows)))  # empty lines are not rows
    sample, total = sample_rows(path, 5, COLUMNS)
    assert total == 1000 and [row.values["prompt"] for row in sample] == ["0", "250", "500", "749", "999"]
    place = "row 250" if suffix == "parquet" else "line 501"
    assert sample[1].where == f"{path}, {place}"
    everything, _ = sample_rows(path, 2000, COLUMNS)
    assert len(everything) == 1000


def test_a_large_file_is_sampled_in_seconds(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "word " * 200, "data_source": "x", "reward_model": {"ground_truth": "1"}}) + "\n"
    path = tmp_path / "rows.jsonl"
    path.write_text(line * 50_000)  # 50 MB
    began = time.process_time()
    assert sample_rows(path, 256, COLUMNS)[1] == 50_000
    assert time.process_time() - began < 2


def test_missing_weights_are_found(quickstart_data: Path, tmp_path: Path) -> None:
    assert weights.find_fault(quickstart_data / "model", 2) is None
    assert weights.find_fault(quickstart_data / "model", 4) == "its files have no weights of layer 2 and 1 others of 4"
    assert sum(weights.sizes(quickstart_data / "model")) > 100_000


def test_problems_follow_the_declared_type(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "class A:\n  switch: bool = x\n  count: int | None = None\n  share: Optional[float] = None\n"
        "  word: Literal['a', 'b'] = 'a'\n  either: Union[int, str] = 1\n  other: Config = None\nclass B:\n  no: int = 1\n"
    )
    fields = fields_of(source, "A")
    assert list(fields) == ["switch", "count", "share", "word", "either", "other"]
    for name, right, wrong in (
        ("switch", [True], [1, "true", None]),
        ("count", [None, 4], [True, 4.0, "4"]),
        ("share", [None, 1, 0.5], [True, "0.5"]),
        ("word", ["a"], ["c", None]),
        ("either", [1, "x", 2.0], []),
        ("other", [object()], []),
    ):
        assert all(problem("it", fields[name], value) is None for value in right)
        assert all(problem("it", fields[name], value) is not None for value in wrong), name
    assert isinstance(fields["switch"], ast.expr)


def test_a_base_recipes_shape_applies_until_the_model_changes(tmp_path: Path) -> None:
    """A recipe of another model on a base with a `shape` must not be planned as the base's model."""
    (tmp_path / "base.yaml").write_text("# Shape: Qwen3-8B\nmodel:\n  path: somewhere\n")
    (tmp_path / "same.yaml").write_text("base: base.yaml\n")
    (tmp_path / "other.yaml").write_text("base: base.yaml\nmodel:\n  path: models/mine\n")
    (tmp_path / "teacher.yaml").write_text("# Shape of teacher.path: Qwen3-32B\nbase: base.yaml\n")
    assert shape_of(tmp_path / "same.yaml") == "Qwen3-8B"
    assert shape_of(tmp_path / "other.yaml") is None
    assert shape_of(tmp_path / "teacher.yaml", "teacher.path") == "Qwen3-32B"
    assert shape_of(tmp_path / "teacher.yaml") == "Qwen3-8B"


def test_each_recipe_has_an_up_to_date_rehearsal_row() -> None:
    """The outcome of a recipe that has changed since is out of date."""
    record = rehearsed.read_record()
    now = {rehearsed.name_of(path): rehearsed.digest_of(path) for path in rehearsed.recipes()}
    assert {name: outcome.digest for name, outcome in record.items()} == now, (
        "run python -m docs.generate.rehearsals, or with --page, which marks them as not run"
    )
    assert all(outcome.seconds > 0 for outcome in record.values() if outcome.rehearsal != rehearsed.NOT_RUN)
    page = rehearsed.table(record)
    assert all(f"| [{name}](../recipes/{name}) |" in page for name in now)
