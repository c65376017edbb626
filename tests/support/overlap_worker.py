"""One trainer process of tests/megatron/test_overlap.py: updates, evaluation, reference, offloading, checkpoint and resume.

Usage, with the environment of torchrun: python -m tests.support.overlap_worker CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from tests.support import megatron_training as training  # isort: skip -- prepares the platform before Megatron is imported

import torch
import torch.distributed as dist

from tests.support.megatron_checkpoints import save


def groups_of(trainer: Any) -> list[Any]:
    """Megatron's bucket groups of all chunks of the model."""
    return [
        group for chunk in trainer.model.chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]


def reduced_in_backward(trainer: Any, batches: list[Any]) -> tuple[list[Any], int]:
    """Return an update's metrics and the gradient reductions that began before Megatron waited for the first."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start, finish, events = Group.start_grad_sync, Group.finish_grad_sync, []

    def started(self: Any, *args: Any, **options: Any) -> None:
        events.append("start")
        start(self, *args, **options)

    def finished(self: Any, *args: Any, **options: Any) -> None:
        events.append("finish")
        finish(self, *args, **options)

    Group.start_grad_sync, Group.finish_grad_sync = started, finished
    try:
        metrics = training.train(trainer, batches, 1)
    finally:
        Group.start_grad_sync, Group.finish_grad_sync = start, finish
    return metrics, events.index("finish")


def run_case(case: dict[str, Any], output: Path) -> None:
    """Run each reader of weights directly after an update, before shards are gathered."""
    trainer = training.build(case)
    trainer.recipe.actor.optimizer.clip_grad = case.get("clip_grad", 0.0)
    batches, _ = training.micro_batches(trainer, case["per_micro"])
    trainer.keep_reference()
    metrics = training.train(trainer, batches, 2)
    more, early = reduced_in_backward(trainer, batches)
    metrics += more
    gathers = trainer.model.chunks[0].use_forward_hook
    pending = gathers and any(not group.param_gather_dispatched for group in groups_of(trainer))
    log_probs = trainer.log_probs(batches, temperature=1.0)
    first = training.weights_of(trainer)

    training.train(trainer, batches, 1)
    reference = trainer.log_probs(batches, temperature=1.0, reference=True)
    after_reference = training.weights_of(trainer)
    training.train(trainer, batches, 1)

    training.platform.can_offload = (
        True  # before a save, which reads the memory through numpy: it keeps its size from then on
    )
    trainer.offload_optimizer()
    trainer.offload_weights()
    trainer.onload()
    training.platform.can_offload = False
    metrics += training.train(trainer, batches, 1)
    directory = output / f"{case['name']}.checkpoint"
    save(trainer, directory)
    metrics += training.train(trainer, batches, 1)
    went_on = training.train(trainer, batches, 2)
    last = training.weights_of(trainer)

    resumed = training.build(case)
    resumed.recipe.actor.optimizer.clip_grad = case.get("clip_grad", 0.0)
    training.train(resumed, batches, 1)  # a load replaces weights of which a gather is due
    assert resumed.load(directory) is None
    assert training.train(resumed, batches, 1) == metrics[-1:]
    assert training.train(resumed, batches, 2) == went_on
    for name, weight in training.weights_of(resumed).items():
        assert torch.equal(weight, last[name]), name
    result = {
        "metrics": [*metrics, *went_on], "log_probs": log_probs, "reference": reference, "groups": len(groups_of(trainer)),
        "weights": [first, after_reference, last], "pending": pending, "early": early,
    }  # fmt: skip
    torch.save(result, output / f"{case['name']}.{dist.get_rank()}.pt")


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
