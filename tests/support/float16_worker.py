"""One trainer process of tests/megatron/test_float16.py: gradients, overflows and checkpoints with float16 weights.

Usage, with the environment of torchrun: python -m tests.support.float16_worker CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from megarl.platform import select

select("cpu").prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megarl.batching.plan import plan_step  # noqa: E402
from megarl.megatron.optimizer import loss_scale_of  # noqa: E402
from megarl.trainer.actor import ActorWorker  # noqa: E402
from tests.support.invariance import Layout, batch, recipe_of  # noqa: E402
from tests.support.megatron_checkpoints import save  # noqa: E402
from tests.support.megatron_training import gradient_of, weights_of  # noqa: E402
from tests.support.spikes_worker import state_of  # noqa: E402
from tests.support.trainer_processes import forget_last_model, serve_cases  # noqa: E402

LARGE = 1e7  # factor of the advantages with which a gradient leaves float16's range at each loss scale above 1


class Run:
    """A trainer with one update in each step."""

    def __init__(self, case: dict[str, Any], dtype: Literal["float32", "float16"]) -> None:
        forget_last_model()
        self.recipe = recipe_of(
            Layout(case["model_name"], dist.get_world_size(), case["megatron"]), Path(case["model"])
        )
        self.recipe.model.dtype = dtype
        self.recipe.algorithm.loss, self.recipe.algorithm.kl_coef = "reinforce", 0.0
        self.recipe.algorithm.entropy_coef = 0.0
        self.recipe.megatron.moe_aux_loss_coef, self.recipe.megatron.moe_z_loss_coef = case.get("router_losses", (0, 0))
        optimizer = self.recipe.actor.optimizer
        optimizer.lr, optimizer.eps, optimizer.clip_grad, optimizer.weight_decay = 1e-3, 1e-8, 0.0, 0.1
        self.worker = ActorWorker(self.recipe, total_optimizer_steps=100)
        self.trainer: Any = self.worker.trainer

    def step(self, factor: float = 1.0) -> dict[str, Any]:
        """Update with advantages times `factor`. Returns the metrics, and whether this rank's weights or optimizer changed."""
        where, before = self.trainer.coordinates, state_of(self.trainer)
        self.worker.load_shard(plan_step(batch(), self.recipe, where.dp_size, 1).shards[where.dp_rank])
        self.worker.compute_old_log_probs()
        for micro_batch in (each for mini_batch in self.worker.batches for each in mini_batch):
            micro_batch.vectors["advantages"] *= factor
        metrics = self.worker.update_actor()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, metrics)
        reported = next(part for part in everyone if part)
        after = state_of(self.trainer)
        changed = not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        return {**reported[0], "changed": changed}

    @property
    def scale(self) -> dict[str, float]:
        scale = loss_scale_of(self.trainer.optimizer)
        assert scale is not None
        return scale.state()


def run_case(case: dict[str, Any], output: Path) -> dict[str, Any]:
    if case.get("refused"):
        try:
            Run(case, "float16")
        except ValueError as error:
            return {"message": str(error)}
        raise AssertionError("the weights were not refused")
    metrics, gradients = {}, {}
    dtypes: tuple[Literal["float32", "float16"], ...] = ("float32", "float16")
    for dtype in dtypes:
        run = Run(case, dtype)
        metrics[dtype] = run.step()
        gradients[dtype] = gradient_of(run.trainer)  # the trainer is not used again: its weights have had another dtype
    run = Run(case, "float16")
    run.step()
    sent = {str(weight.dtype) for weight in weights_of(run.trainer).values()}
    results: dict[str, Any] = {"metrics": metrics, "gradients": gradients, "dtypes": sent}
    results["overflows"] = [run.step(LARGE) for _ in range(3)]
    results["after"] = run.step()
    folder = output / f"{case['name']}-checkpoint"
    save(run.trainer, folder)
    saved = run.scale
    results["went on"] = [run.step(), run.step(LARGE), run.step()]
    ended, last = state_of(run.trainer), run.scale
    other = Run(case, "float16")
    other.trainer.load(folder)
    results["scales"] = [saved, other.scale]
    results["resumed"] = [other.step(), other.step(LARGE), other.step()]
    results["same end"] = all(torch.equal(a, b) for a, b in zip(ended, state_of(other.trainer), strict=True))
    results["last scales"] = [last, other.scale]
    results["until the smallest"] = [other.step(LARGE) for _ in range(16)]
    return results


def save_results(case: dict[str, Any], directory: Path) -> None:
    torch.save(run_case(case, directory), directory / f"{case['name']}.{dist.get_rank()}")


if __name__ == "__main__":
    serve_cases(save_results)
