"""The trainer process of tests/trainer/test_epochs.py: trains on one batch and writes the weights and metrics.

Usage, with the environment of torchrun: python -m tests.support.epochs_worker MODEL OUTPUT
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from megarl.platform import select

select("cpu").prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import megarl.trainer.worker as trainer_worker  # noqa: E402
from megarl.batching.plan import plan_step  # noqa: E402
from megarl.trainer.actor import ActorWorker  # noqa: E402
from tests.support.invariance import Layout, batch, recipe_of  # noqa: E402
from tests.support.trainer_processes import forget_last_model  # noqa: E402


def train(model: Path, loss: str, epochs: int, batches: int, mini_batches: int = 2) -> dict[str, Any]:
    """Train on the same batch of four groups `batches` times, each with `epochs` epochs of its mini batches."""
    forget_last_model()
    recipe = recipe_of(Layout("qwen3", 1, {}), model)
    recipe.algorithm.loss, recipe.algorithm.kl_coef = loss, 0.0
    recipe.actor.mini_batches, recipe.actor.epochs = mini_batches, epochs
    recipe.train.source, recipe.observe.token_samples_per_step, recipe.rollout.samples_per_prompt = "rollout", 2, 2
    worker = ActorWorker(recipe, total_optimizer_steps=mini_batches * epochs * batches)
    metrics: list[Any] = []
    for _ in range(batches):
        worker.load_shard(plan_step(batch(), recipe, 1, 1).shards[0])
        worker.compute_old_log_probs()
        before = vectors_of_samples(worker)
        metrics += worker.update_actor() or []
    recorded = worker.take_recorded_tokens()
    assert not worker.take_recorded_tokens(), "they are taken once"
    return {
        "weights": {name: weight.clone() for name, weight in worker.trainer.export_weights()},
        "metrics": metrics,
        "before": before,
        "recorded": {
            number: {name: torch.from_numpy(values) for name, values in vectors.items()}
            for number, vectors in recorded.items()
        },
    }


def vectors_of_samples(worker: ActorWorker) -> dict[int, dict[str, torch.Tensor]]:
    """Return the per-token vectors of each sample before the update, by its index in the batch."""
    names = ("old_log_probs", "advantages", "loss_mask")
    return {
        worker.numbers[member]: dict(zip(names, parts, strict=True))
        for batch, members in worker._micro_batches()
        for member, *parts in zip(members, *(batch.vectors[name].split(batch.lengths) for name in names), strict=True)
    }


def main() -> None:
    logging.disable(logging.WARNING)
    model, output = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    trainer_worker.join_ranks = lambda *_: None  # one group serves all trainers of this process
    cases = {
        "two epochs": train(model, "reinforce", epochs=2, batches=1),
        "two batches": train(model, "reinforce", epochs=1, batches=2),
        "six mini batches": train(model, "reinforce", epochs=2, batches=1, mini_batches=6),
        "ratios": train(model, "ppo_clip", epochs=2, batches=1),
    }
    torch.save(cases, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
