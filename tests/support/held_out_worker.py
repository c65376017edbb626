"""One trainer process of tests/trainer/test_held_out.py: evaluates held-out rows, trains in between, and writes the results.

Usage, with the environment of torchrun: python -m tests.support.held_out_worker CASES.json DIRECTORY
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.platform import select

select("cpu").prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megarl.algorithms.objective import needs_reference  # noqa: E402
from megarl.rollout.source_dataset import DatasetSource  # noqa: E402
from megarl.trainer.actor import ActorWorker  # noqa: E402
from megarl.trainer.group import ActorGroup  # noqa: E402
from megarl.trainer.held_out import HeldOut  # noqa: E402
from tests.support.held_out import STEPS, recipe_of, rows  # noqa: E402
from tests.support.trainer_processes import forget_last_model, serve_cases  # noqa: E402


class Ranks:
    """A WorkerGroup of processes that are all the controller: each calls its worker and gathers all answers."""

    def __init__(self, worker: ActorWorker):
        self.worker, self.size = worker, dist.get_world_size()

    def call(self, method: str, *args: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, getattr(self.worker, method)(*args))
        return everyone

    def scatter(self, method: str, per_rank: list[tuple[Any, ...]]) -> list[Any]:
        return self.call(method, *per_rank[dist.get_rank()])


def run_case(case: dict[str, Any], directory: Path) -> None:
    results: dict[str, Any] = {}
    if not case.get("steps"):
        ranks = start(case)
        results["before"] = held_out(case, ranks).evaluate().metrics
    else:
        for evaluates in (True, False):
            ranks = start(case)
            train(case, ranks, evaluates, results)
            ranks.worker.save_hf(str(directory / f"{case['name']}.{'evaluated' if evaluates else 'plain'}"))
    if dist.get_rank() == 0:
        (directory / f"{case['name']}.json").write_text(json.dumps(results))


def start(case: dict[str, Any]) -> Ranks:
    forget_last_model()
    return Ranks(ActorWorker(recipe_of(case), total_optimizer_steps=STEPS))


def held_out(case: dict[str, Any], ranks: Ranks) -> HeldOut:
    actor = ActorGroup(ranks, ranks.worker.recipe)  # type: ignore[arg-type]
    actor.describe()
    return HeldOut(ranks.worker.recipe, rows(case), actor)


def train(case: dict[str, Any], ranks: Ranks, evaluates: bool, results: dict[str, Any]) -> None:
    recipe, source, steps = ranks.worker.recipe, DatasetSource(ranks.worker.recipe, rows(case)), []
    evaluation = held_out(case, ranks)
    if evaluates:
        results["before"] = evaluation.evaluate().metrics
    for _ in range(STEPS):
        plan = evaluation.actor.plan(source.take(4).groups)
        evaluation.actor.load_shards(plan.shards)
        if needs_reference(recipe.algorithm):
            ranks.call("compute_reference_log_probs")
        steps += next(metrics for metrics in ranks.call("update_actor") if metrics)
        if evaluates:
            state = torch.get_rng_state()
            results["after"] = evaluation.evaluate().metrics
            assert torch.equal(torch.get_rng_state(), state), "an evaluation draws random numbers"
            assert not ranks.worker.batches, "the rows are still held"
    kept = [{name: value for name, value in step.items() if not name.startswith("perf/")} for step in steps]
    results["evaluated" if evaluates else "plain"] = kept


if __name__ == "__main__":
    serve_cases(run_case)
