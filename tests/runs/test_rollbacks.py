"""A planted spike sends real trainers and engines back to a checkpoint (`train.on_spike: rollback`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.stack import metrics
from tests.support.training_runs import train

pytestmark = pytest.mark.stack

SETTINGS = [
    "cluster.trainers=2",
    "megatron.expert_parallel=2",
    "cluster.placement=disaggregated",
    "rollout.at_update=drain",
    "train.stop_after_skipped=0",
    "train.steps=6",
    "train.save_every=3",
    "train.on_spike=rollback",
    "train.spikes_before_rollback=1",
    "train.spike_factor=1000",
    "actor.mini_batches=4",
    "evaluation.every=3",
    "evaluation.at_start=false",
    "algorithm.modules=[tests.support.planted_loss]",
    "algorithm.loss=spikes_once",
    "algorithm.clip_high=0.2",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_spike_restores_weights_and_optimizer_and_the_engines_follow(quickstart_data: Path, tmp_path: Path) -> None:
    """The second of four updates of step 6 is a spike. At the end, step 6 has the weights and moments of step 3."""
    result = train(quickstart_data, tmp_path, "spiking", *SETTINGS)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "spiking"
    lines = metrics(run)
    assert [line.get("actor/spikes") for line in lines] == [0, 0, 0, 0, 0, 1]
    assert lines[-1]["actor/skipped_updates"] == 1 and lines[-1]["recovery/dropped_steps"] == 3
    notices = [json.loads(line) for line in (run / "notices.jsonl").read_text().splitlines()]
    (text,) = [notice["text"] for notice in notices if notice.get("event") == "rollback"]
    assert "back to the checkpoint of step 3" in text and "steps 4 to 6" in text
    saved, restored = (run / "checkpoints" / f"step_{step:06}" / "trainer" for step in (3, 6))
    files = sorted(path.name for path in saved.glob("*.safetensors"))
    assert len(files) == 2
    for name in files:
        before, after = load_file(saved / name), load_file(restored / name)
        assert before.keys() == after.keys() and all(before[key].equal(after[key]) for key in before), name
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (saved, restored)]
    assert states[0] == states[1] and states[0]["step"] == 12
    third, sixth = (
        {name: value for name, value in lines[step - 1].items() if name.startswith("eval/") and "seconds" not in name}
        for step in (3, 6)
    )
    assert third and third == sixth, "the engines sample from the restored weights"
