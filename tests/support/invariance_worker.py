"""One trainer process of the invariance tests: computes every split of its layouts and writes the results.

Usage, with the environment of torchrun: python -m tests.support.invariance_worker LAYOUTS.json MODELS_DIRECTORY OUTPUT_DIRECTORY
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.platform import select

select("cpu").prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import megarl.trainer.worker as trainer_worker  # noqa: E402
from megarl.algorithms.advantages import AdvantageSource  # noqa: E402
from megarl.algorithms.catalogue import ADVANTAGES  # noqa: E402
from megarl.algorithms.correction import correction_scales  # noqa: E402
from megarl.algorithms.moments import Moments  # noqa: E402
from megarl.algorithms.optimal_baseline import group_lengths  # noqa: E402
from megarl.batching.plan import plan_step  # noqa: E402
from megarl.trainer.actor import ActorWorker  # noqa: E402
from tests.support.invariance import STEP, Case, Layout, Split, apply, batch, recipe_of  # noqa: E402
from tests.support.trainer_processes import forget_last_model  # noqa: E402


def run_layout(layout: Layout, models: Path, output: Path) -> None:
    forget_last_model()
    recipe = recipe_of(layout, models / layout.model)
    worker = ActorWorker(recipe, total_optimizer_steps=1)
    before = gather(worker)
    for split in layout.splits:
        apply(split, recipe)
        compute(worker, Case(layout, split), before, output)
        worker.trainer.model.bridge.load_weights(worker.trainer.model.chunks, recipe.model.path)


def compute(worker: ActorWorker, case: Case, before: dict[str, torch.Tensor], output: Path) -> None:
    recipe, where = worker.recipe, worker.trainer.coordinates
    interleaved = recipe.megatron.pipeline_parallel if recipe.megatron.virtual_pipeline else 1
    plan = plan_step(batch(), recipe, where.dp_size, interleaved)
    worker.load_shard(plan.shards[where.dp_rank])
    gap = worker.compute_old_log_probs()
    if gap is not None:
        torch.save(asdict(gap), output / f"{case.file}.gap.{where.dp_rank}")
    settings = recipe.algorithm
    for micro_batch in worker.batches[0]:
        shift(micro_batch, old=not settings.correction.normalize)
    penalties: dict[int, float] = {}
    estimator = ADVANTAGES[settings.advantage]
    if estimator.source is AdvantageSource.TOKENS:
        for part in of_reporters(worker.compute_kl()) if settings.kl_in_reward else []:
            penalties |= part
        lengths = group_lengths(plan.outcomes)
        moments = sum(of_reporters(worker.estimate_advantages(settings.kl_coef, lengths)), Moments())
        worker.whiten_advantages(estimator.whitening(moments, settings))
    scales = correction_scales(of_reporters(worker.correction_totals())) if settings.correction.normalize else None
    metrics = worker.update_actor(correction_scales=scales)
    after = gather(worker)
    # The last stage has the metrics; rank 0 need not be on it.
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    if dist.get_rank() == 0:
        reported = next(step[0] for step in everyone if step)
        torch.save(
            {
                "metrics": {name: value for name, value in reported.items() if not name.startswith("perf/")},
                "penalties": penalties,
                "gradient": {name: (weight.double() - before[name].double()) / -STEP for name, weight in after.items()},
            },
            output / case.file,
        )


def of_reporters(value: Any) -> list[Any]:
    """Gather the results of the reporting ranks, as the controller does."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return [report for report in everyone if report is not None]


def shift(micro_batch: Any, old: bool) -> None:
    """A reference policy that differs from the current one, and an old one where the engine's is not to be compared
    with it: ratios, clipping and KL are then not trivial."""
    step = (micro_batch.tokens * 37 % 101) / 101 - 0.5
    vectors = micro_batch.vectors
    if old:
        vectors["old_log_probs"] = vectors["rollout_log_probs"]
    vectors["reference_log_probs"] = vectors["rollout_log_probs"] + 0.6 * step


def gather(worker: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in worker.trainer.export_weights()}


def main() -> None:
    logging.disable(logging.WARNING)
    layouts, models, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    trainer_worker.join_ranks = lambda *_: None  # one group serves all trainers of this process
    for layout in layouts:
        splits = tuple(Split(**split) for split in layout.pop("splits"))
        run_layout(Layout(**layout, splits=splits), models, output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
