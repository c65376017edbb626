"""Several epochs over the batch of a step (`actor.epochs`), with a real trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.megatron_models import write_model
from tests.support.trainer_processes import run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("epochs")
    model = write_model("qwen3", folder)
    arguments = [model, folder / "results"]
    run_ranks("tests.support.epochs_worker", 1, arguments, log=folder / "rank", timeout=300)
    return torch.load(folder / "results", weights_only=True)


def test_two_epochs_are_two_steps_on_the_same_batch(results: Any) -> None:
    """With a loss that reads no old log-probs: the order of the mini batches, the learning rates, the weights."""
    epochs, batches = results["two epochs"], results["two batches"]
    assert len(epochs["metrics"]) == len(batches["metrics"]) == 4
    for epoch_metrics, batch_metrics in zip(epochs["metrics"], batches["metrics"], strict=True):
        assert (
            epoch_metrics["actor/loss"] == batch_metrics["actor/loss"]
            and epoch_metrics["actor/grad_norm"] == batch_metrics["actor/grad_norm"]
        )
    for name, weight in epochs["weights"].items():
        assert torch.equal(weight, batches["weights"][name]), name


def test_a_batch_of_few_groups_is_trained_on_once_an_epoch(results: Any) -> None:
    """Four groups are four mini batches, not six of which two repeat."""
    losses = [metrics["actor/loss"] for metrics in results["six mini batches"]["metrics"]]
    assert len(losses) == 8


def test_old_log_probs_are_those_of_before_the_first_epoch(results: Any) -> None:
    ratios = [metrics["actor/ratio"] for metrics in results["ratios"]["metrics"]]
    assert ratios[0] == pytest.approx(1.0, abs=1e-6)
    assert abs(ratios[2] - 1.0) > 1e-4, "the first mini batch again, after two updates"


@pytest.mark.parametrize("name", ["two batches", "ratios"])
def test_the_tokens_of_the_first_samples_are_recorded(results: Any, name: str) -> None:
    """`observe.token_samples_per_step`: of the newest batch, and of no other sample. The updates are huge."""
    recorded, before = results[name]["recorded"], results[name]["before"]
    assert set(recorded) == {0, 1} < set(before)
    for number, vectors in recorded.items():
        loss_tokens = before[number]["loss_mask"] > 0
        assert loss_tokens.any()
        assert torch.equal(vectors["old_log_probs"], before[number]["old_log_probs"])
        assert torch.equal(vectors["advantages"], before[number]["advantages"].float())
        change = (vectors["log_probs"] - vectors["old_log_probs"])[loss_tokens].abs().max()
        if name == "two batches":
            assert change < 1e-3, "the samples are in the first mini batch, and there is one epoch"
        else:
            assert change > 1, "two updates lie between"
        assert (vectors["entropy"][loss_tokens] >= 0).all() and len(vectors["entropy"]) == len(loss_tokens)
