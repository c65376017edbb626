"""The benchmark against TRL: its job, its figures and its measurement of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import against_trl
from benchmarks.trl.figures import (
    Figures,
    batches,
    figures_of,
    mean_rewards,
    medians,
    ratio,
    read_record,
    rewards_table,
    table,
)
from benchmarks.trl.job import accuracy, digits, make_rows, record, recorded_score
from benchmarks.trl.process_tree import Usage, measure
from megarl.preflight.load import load_recipe
from megarl.rewards.base import ScoreRequest
from tests.support.cluster_workers import alive, wait_until

# Four steps of two samples, scored at these seconds; the command began at second 100 and used one core from second 110 on.
RECORD = "110 0\n111 1\n121 1\n120 0\n124 1\n125 1\n133 1\n131 1\n"
USAGE = Usage(begun=100.0, times=[100.0, 110.0, 140.0], cpu=[0.0, 0.0, 30.0], peak=512.0, code=0)


def test_figures_leave_out_the_first_two_steps():
    steps = batches(read_record(RECORD), 2)
    figures = figures_of(steps, [10, 20, 40, 80], USAGE)
    # The third step lasts from 125 to 133. Its 2 x 40 tokens took 8 s.
    assert figures == Figures(
        step=8.0, step_cpu=8.0, tokens=10.0, peak=512.0, first_sample=10.0, first_batch=11.0, first_cpu=1.0
    )
    assert mean_rewards(steps) == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("moment", "cpu"), [(90, 0.0), (110, 0.0), (125, 15.0), (140, 30.0), (150, 30.0)])
def test_cpu_between_samples_lies_on_a_line(moment: float, cpu: float):
    assert USAGE.cpu_at(moment) == cpu


def test_incomplete_runs_are_refused():
    with pytest.raises(ValueError, match="8 samples were scored, not a multiple of the 3"):
        batches(read_record(RECORD), 3)
    with pytest.raises(ValueError, match="0 samples"):
        batches([], 3)
    steps = batches(read_record(RECORD), 2)
    with pytest.raises(ValueError, match="at least 4"):
        figures_of(steps[:3], [1, 1, 1], USAGE)
    with pytest.raises(ValueError, match="4 steps, but lengths of 3"):
        figures_of(steps, [1, 1, 1], USAGE)


def test_table_has_ratios_of_rounds_first():
    """The ratio is the median of the rounds' ratios (0.5, 0.5, 4), not the ratio of the medians (0.75)."""

    def runs(*steps: float) -> list[Figures]:
        return [Figures(step, 2.0, 100.0, 1000.0, 3.0, 4.0, 5.0) for step in steps]

    assert ratio(runs(1, 4, 4), runs(2, 8, 1)).step == 0.5
    assert medians(runs(1, 4, 3)).step == 3
    lines = table({"TRL": runs(2, 8, 1), "megarl": runs(1, 4, 4)}, "TRL").splitlines()
    assert lines[2] == "| megarl / TRL | 0.50 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |"
    assert lines[3:] == [
        "| TRL | 2.00 | 2.00 | 100 | 1000 | 3.0 | 4.0 | 5.0 |",
        "| megarl | 4.00 | 2.00 | 100 | 1000 | 3.0 | 4.0 | 5.0 |",
    ]


def test_rewards_table_shows_first_and_last_step():
    runs = {"TRL": [[0.0] * 19 + [1.0], [0.5] * 20], "megarl": [[0.25] * 20]}
    head, _, trl, megarl = rewards_table(runs).splitlines()
    assert head.startswith("| mean reward of step | 1 | 3 |") and head.endswith("| 20 |")
    assert trl.startswith("| TRL | 0.250 ± 0.354 |") and trl.endswith("| 0.750 ± 0.354 |")
    assert megarl.startswith("| megarl | 0.250 | 0.250 |")  # one run has no deviation
    assert len(megarl.split("|")) == len(head.split("|"))


def test_rewards():
    assert digits("a1b2", "") == 0.5 and digits("", "") == 0.0
    assert accuracy(" 8*8=64.\n#### 68", "68") == 1.0 and accuracy("#### 67", "68") == 0.0


def test_both_frameworks_write_the_same_record(tmp_path: Path):
    path = tmp_path / "record"
    record(str(path), [0.25, 0.5])
    request = ScoreRequest("12ab", "3", "source")
    assert recorded_score(request, "digits", str(path)) == 0.5
    samples = read_record(path.read_text())
    assert sorted(reward for _, reward in samples) == [0.25, 0.5, 0.5]
    assert all(abs(moment - time.time()) < 60 for moment, _ in samples)


def test_recipe_has_the_job(tmp_path: Path):
    options = against_trl.parser().parse_args(["--trl-python", "python", "--threads", "3", "--steps", "5"])
    job = against_trl.job_of(options, tmp_path)
    command = against_trl.megarl_command(job, tmp_path, against_trl.RAY, ["actor.mini_batches=1"])
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), command[command.index("train") + 2 :])
    assert (recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.train.steps) == (32, 8, 5)
    assert (recipe.cluster.threads, recipe.cluster.trainers, recipe.algorithm.kl_coef) == (3, 1, 0.0)
    assert recipe.actor.max_tokens_per_micro_batch == 64 * (64 + 48)
    assert recipe.reward.arguments == {"name": "digits", "path": str(tmp_path / "record")}
    assert "torch.distributed.run" in against_trl.megarl_command(job, tmp_path, against_trl.TORCHRUN, [])


def test_rows_are_equal_for_a_seed(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_rows(tmp_path / name, 8, seed)
    texts = [(tmp_path / name).read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2] and texts[0].count("\n") == 8


def test_phases_are_medians_of_steady_steps():
    lines = [{"timing_s/gen": 9.0, "step": 1}] * 2 + [
        {"timing_s/gen": 1.0},
        {"timing_s/gen": 3.0, "timing_s/save": 4.0},
    ]
    assert against_trl.steady_phases(lines) == {"gen": 2.0, "save": 2.0}


def test_missing_trl_is_refused_with_the_command_that_installs_it():
    with pytest.raises(SystemExit, match=r"does not exist.*pip install trl"):
        against_trl.main(["--trl-python", "/nonexistent/python"])
    with pytest.raises(SystemExit, match=r"--steps is 3.*at least 4"):
        against_trl.main(["--trl-python", sys.executable, "--steps", "3"])


# Starts a process in a new session, which uses a second of CPU time and 64 MiB, and goes on after its parent's end.
DAEMON = """
import subprocess, sys, time
child = "import os, time; held = bytearray(os.urandom(1 << 20)) * 64\\nwhile time.process_time() < 1: pass\\ntime.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print(process.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_daemons_count_and_end(tmp_path: Path):
    """`measure` runs in a process without other children, as in the benchmark."""
    script = f"""
import sys
from pathlib import Path
from benchmarks.trl.process_tree import measure
import os
usage = measure([sys.executable, "-c", {DAEMON!r}, "4"], os.environ, Path("."), Path(sys.argv[1]), 60)
assert usage.code == 0, usage.code
print(usage.cpu[-1], usage.peak)
"""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", script, str(tmp_path / "output")]
    usage = measure(command, {**os.environ, "PYTHONPATH": root}, tmp_path, tmp_path / "log", 60)
    text = (tmp_path / "log").read_text()
    assert usage.code == 0, text
    cpu, peak = map(float, text.split()[-2:])
    assert cpu > 0.9 and peak > 64, text
    assert not Path(f"/proc/{(tmp_path / 'output').read_text().strip()}").exists()


def test_time_limit_ends_the_command(tmp_path: Path):
    usage = measure([sys.executable, "-c", DAEMON, "600"], os.environ, tmp_path, tmp_path / "log", 3)
    assert usage.code is None
    assert not Path(f"/proc/{(tmp_path / 'log').read_text().strip()}").exists()


def test_the_command_ends_with_a_killed_benchmark(tmp_path: Path):
    script = "import os, sys; from pathlib import Path; from benchmarks.trl.process_tree import measure\n"
    script += "measure(['sleep', '600'], os.environ, Path('.'), Path(sys.argv[1]), 600)"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "log")], env=environ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert wait_until(lambda: children.read_text().split(), 30)
        (command,) = map(int, children.read_text().split())
        assert wait_until(lambda: Path(f"/proc/{command}/cmdline").read_text().startswith("sleep"), 10)
        process.kill()
    assert wait_until(lambda: not alive(command), 10)
