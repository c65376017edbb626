"""The benchmark against verl: verl's rows, reward, options and metrics, and refused environments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import against_verl
from benchmarks.against_trl import job_of
from benchmarks.trl.figures import read_record
from benchmarks.trl.job import Job
from benchmarks.verl import verl_side


@pytest.fixture
def job(tmp_path: Path) -> Job:
    arguments = ["--verl", "verl", "--verl-python", "python", "--threads", "3", "--steps", "5", "--prompts", "4"]
    return job_of(against_verl.parser().parse_args(arguments), tmp_path)


def test_rows_are_chats_of_the_same_prompts(job: Job, tmp_path: Path):
    verl_side.write_rows(job, tmp_path / "chats.jsonl")
    rows = [json.loads(line) for line in Path(job.rows).read_text().splitlines()]
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert len(chats) == 512
    assert [chat["prompt"] for chat in chats] == [[{"role": "user", "content": row["prompt"]}] for row in rows]
    assert chats[0]["reward_model"] == rows[0]["reward_model"]


def test_reward_is_recorded(tmp_path: Path):
    path = str(tmp_path / "record")
    assert verl_side.compute_score("source", "12ab", "3", None, score="digits", record_path=path) == 0.5
    assert [reward for _, reward in read_record(Path(path).read_text())] == [0.5]


def test_options_have_the_job(job: Job, tmp_path: Path):
    options = dict(option.split("=", 1) for option in verl_side.options(job, tmp_path))
    assert options["data.train_batch_size"] == "4" and options["actor_rollout_ref.rollout.n"] == "8"
    assert options["actor_rollout_ref.actor.ppo_mini_batch_size"] == "4"  # prompts: one optimizer step for each batch
    assert options["trainer.total_training_steps"] == "5"
    assert options["reward.custom_reward_function.path"].endswith("benchmarks/verl/verl_side.py")
    assert str(tmp_path / "record") in options["+reward.custom_reward_function.reward_kwargs"]
    assert "param_dtype: fp32" in options["+actor_rollout_ref.actor.fsdp_config.mixed_precision"]


def test_environment_has_the_clone_and_the_threads(job: Job, tmp_path: Path):
    env = against_verl.verl_environment(job, tmp_path, tmp_path / "clone")
    assert env["PYTHONPATH"].endswith(str(tmp_path / "clone"))
    assert env["TQ_NUM_THREADS"] == env["OMP_NUM_THREADS"] == "3"
    assert env["VERL_FILE_LOGGER_PATH"] == str(tmp_path / verl_side.METRICS)


def test_metrics_give_lengths_and_medians_of_phases(tmp_path: Path):
    lines = [{"response_length/mean": 40 + n, "timing_s/gen": seconds} for n, seconds in enumerate((9.0, 1.0, 3.0))]
    text = "".join(json.dumps({"step": n, "data": line}) + "\n" for n, line in enumerate([*lines, {"val/acc": 1.0}]))
    (tmp_path / verl_side.METRICS).write_text(text)
    assert verl_side.response_lengths(tmp_path) == [40, 41, 42]
    assert verl_side.phases(tmp_path, 1) == {"gen": 2.0}


def test_missing_verl_is_refused(tmp_path: Path):
    arguments = ["--verl", str(tmp_path), "--verl-python"]
    with pytest.raises(SystemExit, match=r"has no verl/trainer/main_ppo.py. Clone https"):
        against_verl.main([*arguments, sys.executable])
    (trainer := tmp_path / "verl" / "trainer").mkdir(parents=True)
    (trainer / "main_ppo.py").touch()
    with pytest.raises(SystemExit, match=r"/nonexistent/python cannot be run"):
        against_verl.main([*arguments, "/nonexistent/python"])
    with pytest.raises(SystemExit, match=r"has no .*transfer_queue.*requirements.txt"):
        against_verl.main([*arguments, sys.executable])
    with pytest.raises(SystemExit, match=r"--steps is 3: .*at least 4"):
        against_verl.main([*arguments, sys.executable, "--steps", "3"])
