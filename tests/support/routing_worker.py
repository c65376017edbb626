"""One trainer process of tests/megatron/test_routing_replay.py.

Usage, with the environment of torchrun: python -m tests.support.routing_worker CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from megarl.platform import select

platform = select("cpu")
platform.prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megarl.megatron.batch import MicroBatch  # noqa: E402
from megarl.megatron.moe.recorded_routing import Routing  # noqa: E402
from tests.support.megatron_models import LENGTHS  # noqa: E402
from tests.support.trainer_processes import forget_last_model  # noqa: E402

torch.set_num_threads(1)


def build(case: dict[str, Any]) -> Any:
    from megarl.megatron.trainer import PolicyTrainer
    from megarl.recipe.schema import Recipe

    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = case["model"], case.get("dtype", "float32")
    recipe.actor.optimizer.lr, recipe.actor.optimizer.eps = case.get("lr", 1e-2), 1e-2
    for name, value in case["megatron"].items():
        setattr(recipe.megatron, name, value)
    forget_last_model()
    return PolicyTrainer(recipe, platform, total_optimizer_steps=10)


def batches(case: dict[str, Any], tokens: torch.Tensor, experts: torch.Tensor | None) -> list[MicroBatch]:
    """Two micro batches of this data-parallel rank; all ranks have the same."""
    cuts = [sum(LENGTHS[:4]), sum(LENGTHS[4:])]
    parts = zip(
        tokens.split(cuts),
        (LENGTHS[:4], LENGTHS[4:]),
        experts.split(cuts) if experts is not None else (None, None),
        strict=True,
    )
    micro_batches, generator = [], torch.Generator().manual_seed(6)
    for ids, lengths, where in parts:
        ones = torch.ones(len(ids))
        vectors = {
            "loss_weights": ones,
            "loss_mask": ones,
            "advantages": torch.randn(len(ids), generator=generator),
            "token_share": ones / sum(LENGTHS),
        }
        micro_batches.append(MicroBatch(ids, lengths, vectors, None if where is None else Routing(tokens=where)))
    return micro_batches


def current_log_probs(trainer: Any, micro_batches: list[MicroBatch]) -> tuple[list[Any], float]:
    """Log-probs that an update sees, and its gradient norm."""
    seen: list[torch.Tensor] = []

    def objective(x: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(x.log_probs.detach().clone())
        return -(x.log_probs * x.advantages).sum() / sum(LENGTHS), {}

    metrics = trainer.train_step(micro_batches, objective, temperature=1.0, with_entropy=False)
    return seen, metrics["actor/grad_norm"] if metrics else 0.0


def run_given(case: dict[str, Any], output: Path) -> None:
    """Write log-probs before and in an update that replays the engine's routing."""
    trainer = build(case)
    inputs = torch.load(output / "inputs.pt", weights_only=True)
    micro_batches = batches(case, inputs["tokens"], inputs["experts"])
    rows = trainer.log_probs(micro_batches, temperature=1.0)
    seen, norm = current_log_probs(trainer, micro_batches)
    if trainer.coordinates.reports and trainer.coordinates.dp_rank == 0:
        result = {"before": torch.cat([row[0] for row in rows]), "seen": torch.cat(seen), "norm": norm}
        torch.save(result, output / f"{case['name']}.pt")


def run_recorded(case: dict[str, Any], output: Path) -> None:
    """Record routing, change the weights, and write log-probs with and without the recorded routing."""
    trainer = build(case)
    inputs = torch.load(output / "inputs.pt", weights_only=True)
    trainer.keep_reference()
    micro_batches = batches(case, inputs["tokens"], None)
    rows = trainer.log_probs(micro_batches, temperature=1.0)
    current_log_probs(trainer, micro_batches)
    replayed, _ = current_log_probs(trainer, micro_batches)
    reference = trainer.log_probs(micro_batches, temperature=1.0, reference=True)
    free = build(case)
    unrecorded = batches(case, inputs["tokens"], None)
    current_log_probs(free, micro_batches)
    freely, _ = current_log_probs(free, unrecorded)
    if trainer.coordinates.reports and trainer.coordinates.dp_rank == 0:
        result = {
            "before": torch.cat([row[0] for row in rows]),
            "reference": torch.cat([row[0] for row in reference]),
            "replayed": torch.cat(replayed),
            "freely": torch.cat(freely),
        }
        torch.save(result, output / f"{case['name']}.pt")


def run_mismatch(case: dict[str, Any], output: Path) -> None:
    """Write log-probs with and without the engine's routing."""
    trainer = build(case)
    tokens = torch.load(output / "inputs.pt", weights_only=True)["tokens"]
    experts = torch.load(output / "engine.pt", weights_only=True)["experts"]
    result = {}
    for name, routing in (("replayed", experts), ("freely", None)):
        rows = trainer.log_probs(batches(case, tokens, routing), temperature=1.0)
        result[name] = torch.cat([row[0] for row in rows])
    torch.save(result, output / f"{case['name']}.pt")


def main() -> None:
    logging.disable(logging.WARNING)
    cases, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group(platform.process_group_backend)
    for case in cases:
        {"given": run_given, "recorded": run_recorded, "mismatch": run_mismatch}[case["kind"]](case, output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
