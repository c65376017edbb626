"""The whole stack at tiny size: real Megatron, vLLM, mbridge and Ray, through the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megarl.observe.metrics import without_times
from tests.support.gsm8k import GSM8K, needs_gsm8k
from tests.support.stack import ROOT, command, environment, metrics, run
from tests.support.training_runs import assert_ended, descendants, metrics_so_far, settings, train

pytestmark = pytest.mark.stack

LOSS_TERMS = ["algorithm.kl_coef=0.01", "algorithm.entropy_coef=0.001"]


def trained(data: Path, runs: Path, name: str, *more: str, torchrun: int = 0) -> Path:
    """Train to the end; return the run's directory."""
    done = train(data, runs, name, *more, torchrun=torchrun)
    assert done.returncode == 0, done.stderr + done.stdout
    return runs / name


@pytest.fixture(scope="module")
def reference(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps over Ray, uninterrupted."""
    runs = tmp_path_factory.mktemp("runs")
    done = train(quickstart_data, runs, "reference", "train.steps=4", *LOSS_TERMS)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "weight_sync.route=auto: sharded; " in done.stderr + done.stdout
    return runs / "reference"


@pytest.mark.slow
def test_sharded_and_full_updates_give_equal_metrics(quickstart_data: Path, reference: Path, tmp_path: Path) -> None:
    """All metrics of both runs are bit-identical."""
    run_dir = trained(quickstart_data, tmp_path, "exported", "train.steps=4", *LOSS_TERMS, "weight_sync.route=full")
    planned, exported = without_times(metrics(reference)), without_times(metrics(run_dir))
    assert planned[0] == exported[0]
    for line, other in zip(planned[1:], exported[1:], strict=True):
        # one engine rank needs every tensor: the bytes sent are its parameters' bytes, without padding to 64 bytes
        assert line.pop("weight_sync/received_bytes") == line["weight_sync/bytes"] <= other["weight_sync/bytes"]
        assert line.pop("weight_sync/sent_bytes/max") < 0.6 * line.pop("weight_sync/bytes")
        assert other.pop("weight_sync/sent_bytes/max") == other["weight_sync/bytes"]
        assert other.pop("weight_sync/received_bytes") == other.pop("weight_sync/bytes")
        assert line == other


@pytest.mark.slow
def test_weights_from_device_to_device(quickstart_data: Path, reference: Path, tmp_path: Path) -> None:
    """Two engines, the second fed by the first, give the metrics of one colocated engine."""
    more = ["train.steps=2", *LOSS_TERMS, "evaluation.at_end=false"]
    apart = [
        "cluster.placement=disaggregated",
        "weight_sync.route=sharded",
        "weight_sync.transport=device",
        "rollout.engines=2",
    ]
    run_dir = trained(quickstart_data, tmp_path, "apart", *more, *apart)
    pair, single = without_times(metrics(run_dir)), without_times(metrics(reference))[:3]  # steps 0 to 2, as here
    assert pair[1]["weight_sync/received_bytes"] == 2 * single[1]["weight_sync/received_bytes"]
    for line, of_one in zip(pair[1:], single[1:], strict=True):
        assert line["actor/pg_loss"] == of_one["actor/pg_loss"] and line["actor/grad_norm"] == of_one["actor/grad_norm"]
        assert line["rollout/logprob_gap_max"] < 1e-3


@pytest.mark.slow
def test_weights_are_read_from_the_trainers_device_memory(
    quickstart_data: Path, reference: Path, tmp_path: Path
) -> None:
    """All metrics equal the metrics of a run with buckets in /dev/shm."""
    more = ["train.steps=2", *LOSS_TERMS, "evaluation.at_end=false"]
    ipc = ["weight_sync.route=sharded", "weight_sync.transport=ipc"]
    mapped, shared = (
        without_times(metrics(trained(quickstart_data, tmp_path, "mapped", *more, *ipc))),
        without_times(metrics(reference)),
    )
    assert mapped[1] == shared[1]
    assert mapped[2].items() <= shared[2].items(), "after its last step the run sends nothing"


class TestReference:
    def test_metrics_are_complete_and_the_engine_agrees_with_the_trainer(self, reference: Path) -> None:
        lines = metrics(reference)
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
        assert "eval/pass@1" in lines[0] and "eval/greedy" in lines[4]
        for line in lines[1:]:
            for name in (
                "critic/rewards/mean", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/lr",
                "response_length/mean", "perf/throughput", "perf/tflops_per_device/actor", "timing_s/gen", "timing_s/update_actor",
                "timing_s/old_log_prob", "timing_s/reference", "timing_s/step", "rollout/logprob_gap_k3",
            ):  # fmt: skip
                assert name in line, name
            assert not any(name.startswith("perf/mfu/") for name in line), "a CPU has no peak to be a share of"
            assert line["rollout/logprob_gap_mean"] < 1e-4
            assert line["rollout/logprob_gap_max"] < 1e-3
            assert line["rollout/staleness_max"] == 0
            assert line["actor/grad_norm"] > 0

    def test_the_policy_moves_away_from_the_reference(self, reference: Path) -> None:
        lines = metrics(reference)
        assert lines[4]["actor/kl_loss"] > lines[1]["actor/kl_loss"] >= 0

    def test_a_finished_run_has_summary_report_and_checkpoints(self, reference: Path) -> None:
        summary = json.loads((reference / "summary.json").read_text())
        assert summary["status"] == "finished" and summary["accuracy_before"] is not None
        assert "<html" in (reference / "report.html").read_text()
        assert len((reference / "samples" / "step_000001.jsonl").read_text().splitlines()) == 16
        assert list((reference / "tensorboard").iterdir())
        assert [path.name for path in sorted((reference / "checkpoints").iterdir())] == [
            f"step_{step:06d}" for step in (1, 2, 3, 4)
        ]

    @pytest.mark.slow
    def test_the_export_is_verified_and_evaluates(self, reference: Path, quickstart_data: Path, tmp_path: Path) -> None:
        done = run("export", str(reference), "--out", str(tmp_path / "hf"), torchrun=2)
        assert done.returncode == 0 and "bit for bit" in done.stdout, done.stderr + done.stdout
        evaluated = run(
            "eval", "recipes/quickstart.yaml",
            *settings(quickstart_data, tmp_path, "eval", "evaluation.samples=4", "evaluation.ks=[1,4]"),
            f"model.path={tmp_path / 'hf'}",
        )  # fmt: skip
        assert evaluated.returncode == 0, evaluated.stderr
        figures = json.loads(evaluated.stdout.strip().splitlines()[-1])
        assert {"eval/pass@1", "eval/pass@4", "eval/greedy"} <= set(figures)

    def test_a_second_run_into_the_same_directory_is_refused(self, reference: Path, quickstart_data: Path) -> None:
        before = (reference / "metrics.jsonl").read_bytes()
        done = train(quickstart_data, reference.parent, "reference")
        assert done.returncode == 2
        assert "already holds a run" in done.stderr and "train.resume=auto" in done.stderr
        assert (reference / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_bit_identical(reference: Path, quickstart_data: Path, tmp_path: Path) -> None:
    """SIGKILL after step 2, over Ray: no process survives, and the resumed run writes bit-identical metrics."""
    more = ["train.steps=4", *LOSS_TERMS]
    arguments = ["train", "recipes/quickstart.yaml", *settings(quickstart_data, tmp_path, "killed", *more)]
    process = subprocess.Popen(command(*arguments), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    run_dir = tmp_path / "killed"
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").exists() or len(metrics_so_far(run_dir)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    started = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_ended(started)
    # As after a kill between the save and the step's line: the checkpoint must restore the line.
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    newest = max((run_dir / "checkpoints").glob("step_*"))
    kept = [line for line in lines if json.loads(line)["step"] < int(newest.name.removeprefix("step_"))]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(kept))
    trained(quickstart_data, tmp_path, "killed", *more, "train.resume=auto")
    assert without_times(metrics(run_dir)) == without_times(metrics(reference))


@pytest.mark.slow
def test_torchrun_gives_the_same_run(reference: Path, quickstart_data: Path, tmp_path: Path) -> None:
    more = ["train.steps=3", *LOSS_TERMS, "evaluation.at_end=false"]
    run_dir = trained(quickstart_data, tmp_path, "torchrun", *more, torchrun=2)
    # Steps 0 to 2: step 3 is this run's last and sends no weights, while the reference goes on.
    assert without_times(metrics(run_dir))[:3] == without_times(metrics(reference))[:3]


ONE_STEP_OFF = [
    "train.steps=3",
    "rollout.max_staleness=1",
    "rollout.at_update=drain",
    "cluster.placement=disaggregated",
    "rollout.engines=2",
    "evaluation.at_start=false",
]


@pytest.fixture(scope="module")
def one_step_off(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps in which two engines sample one step ahead."""
    runs = tmp_path_factory.mktemp("runs")
    return trained(quickstart_data, runs, "whole", *ONE_STEP_OFF, torchrun=2)


@pytest.mark.slow
def test_two_engines_sample_one_step_ahead(one_step_off: Path) -> None:
    assert [line["rollout/staleness_max"] for line in metrics(one_step_off)] == [0, 1, 1]


@pytest.mark.slow
def test_a_resumed_run_uses_the_waiting_samples(one_step_off: Path, quickstart_data: Path, tmp_path: Path) -> None:
    resume = f"train.resume={one_step_off / 'checkpoints' / 'step_000002'}"
    (line,) = metrics(trained(quickstart_data, tmp_path, "rest", *ONE_STEP_OFF, resume, torchrun=2))
    assert without_times([line]) == without_times(metrics(one_step_off)[2:])


@pytest.mark.slow
@needs_gsm8k
def test_the_real_gsm8k_runs(quickstart_data: Path, tmp_path: Path) -> None:
    prepared = run("data", "gsm8k", "--source", str(GSM8K), "--out", str(tmp_path / "gsm8k"))
    assert prepared.returncode == 0, prepared.stderr
    done = run(
        "train", "recipes/gsm8k_tiny.yaml", f"model.path={quickstart_data}/model", f"runs_dir={tmp_path}",
        f"data.train_files=[{tmp_path}/gsm8k/train.parquet]", f"data.eval_files=[{tmp_path}/gsm8k/test.parquet]",
        torchrun=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    lines = metrics(tmp_path / "gsm8k-tiny")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollout/logprob_gap_mean"] < 1e-4 for line in lines)
    notices = (tmp_path / "gsm8k-tiny" / "notices.jsonl").read_text()
    assert "training prompts are longer than the limit and were left out" in notices
