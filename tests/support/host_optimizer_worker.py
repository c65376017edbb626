"""One trainer process of tests/megatron/test_host_optimizer.py: Megatron's HybridDeviceOptimizer, with bfloat16 tensors in the device's role.

Usage, with the environment of torchrun: python -m tests.support.host_optimizer_worker CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import megatron_training as training  # isort: skip -- prepares the platform before Megatron is imported

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megarl.algorithms.spikes import GradNorms
from megarl.recipe.schema import TrainConfig
from tests.support.megatron_checkpoints import assert_same, save
from tests.support.trainer_processes import forget_last_model


@contextlib.contextmanager
def a_device() -> Iterator[None]:
    """While Megatron divides parameters, bfloat16 parameters count as on the device, and float32 copies as on the host."""
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divided(self: Any, share: float) -> Any:
        on_device = property(lambda tensor: tensor.dtype == torch.bfloat16)
        pinned = mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor)
        with mock.patch.object(torch.Tensor, "is_cuda", on_device, create=True), pinned:
            return divide(self, share)

    # Megatron compares versions of Transformer Engine, which is not installed and which this path does not use.
    no_engine = mock.patch("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda version: False)
    with mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divided), no_engine:
        yield


def build(case: dict[str, Any]) -> Any:
    from megarl.megatron.trainer import PolicyTrainer

    forget_last_model()
    recipe = training.recipe_of(case)
    recipe.actor.optimizer.extra = case["optimizer"]
    recipe.actor.optimizer.clip_grad = 0.5  # below the norms, so that clipping counts
    with a_device():
        return PolicyTrainer(recipe, training.platform, total_optimizer_steps=10)


def run_case(case: dict[str, Any], output: Path) -> None:
    trainer = build(case)
    start = training.weights_of(trainer)
    batches, _ = training.micro_batches(trainer, 2)
    empty = output / f"{case['name']}.start.checkpoint"
    save(trainer, empty)  # before the first update: the moments are there, and the weights are as they were loaded
    assert all(torch.equal(start[name], weight) for name, weight in trainer.export_weights())
    metrics = training.train(trainer, batches, 3)
    directory = output / f"{case['name']}.checkpoint"
    save(trainer, directory)
    went_on, last = training.train(trainer, batches, 2), training.weights_of(trainer)
    check_skipped(trainer, batches, output / f"{case['name']}.skipped")

    resumed = build(case)
    assert resumed.load(directory) is None
    assert training.train(resumed, batches, 2) == went_on
    for name, weight in training.weights_of(resumed).items():
        assert torch.equal(weight, last[name]), name
    if other := case.get("continues"):  # checkpoint of the other kind of optimizer
        resumed.load(output / f"{other}.checkpoint")
        save(resumed, output / f"{case['name']}.copied.checkpoint")
        crossed = training.train(resumed, batches, 2)
    else:
        crossed = None
    if dist.get_rank() == 0:
        torch.save({"metrics": metrics, "went_on": went_on, "crossed": crossed}, output / f"{case['name']}.pt")


def check_skipped(trainer: Any, batches: list[Any], output: Path) -> None:
    """Assert that an update which is a spike changes no weight, master or moment, in the memory of device or host."""
    train = TrainConfig(on_spike="skip")
    trainer.norms = GradNorms(train, [1e-6] * train.spike_window)
    folders = [output / name for name in ("before", "after")]
    save(trainer, folders[0])
    (metrics,) = training.train(trainer, batches, 1)
    assert metrics["actor/skipped_updates"] == 1.0 and metrics["actor/grad_norm"] > 0.5
    save(trainer, folders[1])
    dist.barrier()
    assert_same(*folders)


def main() -> None:
    logging.disable(logging.WARNING)
    cases, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group(training.platform.process_group_backend)
    for case in cases:
        run_case(case, output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
