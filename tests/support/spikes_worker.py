"""One trainer process of tests/megatron/test_spikes.py: updates with and without spikes, and their changes.

Usage, with the environment of torchrun: python -m tests.support.spikes_worker CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.platform import select

select("cpu").prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megarl.batching.plan import plan_step  # noqa: E402
from megarl.megatron.optimizer import inner_optimizers, members  # noqa: E402
from megarl.trainer.actor import ActorWorker  # noqa: E402
from tests.support.invariance import Layout, batch, recipe_of  # noqa: E402
from tests.support.trainer_processes import forget_last_model, serve_cases  # noqa: E402

ENOUGH = 16  # norms from which on updates are judged
LARGE = 1e4  # factor of the advantages of a spike, and so of its gradient


class Updates:
    """A trainer with two updates in each step."""

    def __init__(self, case: dict[str, Any]) -> None:
        forget_last_model()
        self.recipe = recipe_of(Layout("qwen3", dist.get_world_size(), case["megatron"]), Path(case["model"]))
        self.recipe.model.dtype, self.recipe.train.on_spike = case["dtype"], "skip"
        self.recipe.algorithm.loss, self.recipe.algorithm.kl_coef = "reinforce", 0.0
        self.recipe.algorithm.entropy_coef = 0.0
        self.recipe.actor.mini_batches = 2
        optimizer = self.recipe.actor.optimizer
        optimizer.lr, optimizer.eps, optimizer.betas, optimizer.weight_decay = 1e-3, 1e-8, (0.9, 0.95), 0.1
        self.worker = ActorWorker(self.recipe, total_optimizer_steps=100)
        self.train_step = self.worker.trainer.train_step
        self.worker.trainer.train_step = self._compared_step  # type: ignore[method-assign]
        self.changed: list[bool] = []

    def _compared_step(self, *args: Any, **kwargs: Any) -> Any:
        before = state_of(self.worker.trainer)
        result = self.train_step(*args, **kwargs)
        after = state_of(self.worker.trainer)
        self.changed.append(not all(torch.equal(old, new) for old, new in zip(before, after, strict=True)))
        return result

    def step(self, first: float = 1.0, second: float = 1.0) -> dict[str, Any]:
        """Make two updates, with advantages multiplied by these factors. Returns whether each changed this rank's weights or optimizer, the
        number of optimizer steps, and the metrics of each, on every rank."""
        where = self.worker.trainer.coordinates
        self.worker.load_shard(plan_step(batch(), self.recipe, where.dp_size, 1).shards[where.dp_rank])
        self.worker.compute_old_log_probs()
        for mini_batch, factor in zip(self.worker.batches, (first, second), strict=True):
            for micro_batch in mini_batch:
                micro_batch.vectors["advantages"] *= factor
        self.changed = []
        metrics = self.worker.update_actor()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, metrics)
        reported = next(part for part in everyone if part)
        return {
            "changed": self.changed,
            "steps": self.worker.trainer.step,
            "norms": [update["actor/grad_norm"] for update in reported],
            "skipped": [update["actor/skipped_updates"] for update in reported],
        }


def state_of(trainer: Any) -> list[torch.Tensor]:
    """Return copies of this rank's weights, masters, moments and counts of updates."""
    tensors = [parameter for chunk in trainer.model.chunks for parameter in chunk.parameters()]
    for inner in (inner for member in members(trainer.optimizer) for inner in inner_optimizers(member)):
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors += [torch.tensor(group["step"]) for group in inner.param_groups if "step" in group]
        tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in tensors]


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    updates = Updates(case)
    worker = updates.worker
    plain = updates.step()
    norm = plain["norms"][0]
    worker.skip_spikes([norm] * (ENOUGH - 1))
    results = {"plain": plain, "the second": updates.step(second=LARGE)}
    worker.skip_spikes([norm] * ENOUGH)
    results["both"] = updates.step(LARGE, LARGE)
    results["none"] = updates.step()
    worker.skip_spikes([norm] * (ENOUGH - 2))
    results["too few"] = updates.step(first=LARGE)
    # Norms of ranks may differ in their last bits. Here the limits of the ranks are on both sides of the norm.
    worker.skip_spikes([1e-9 if dist.get_rank() else 1e9] * ENOUGH)
    results["disagreement"] = updates.step()
    worker.trainer.norms = None
    results["applied"] = updates.step(first=LARGE)
    return results


def save_results(case: dict[str, Any], directory: Path) -> None:
    torch.save(run_case(case), directory / f"{case['name']}.{dist.get_rank()}")


if __name__ == "__main__":
    serve_cases(save_results)
