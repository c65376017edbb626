"""The process of tests/megatron/test_memory_options.py: the same two updates under each memory option.

Usage, with the environment of torchrun: python -m tests.support.memory_worker CASES.json OUTPUT_DIRECTORY
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

from megarl.algorithms.objective import objective  # noqa: E402
from megarl.megatron.batch import MicroBatch  # noqa: E402
from megarl.recipe.schema import Recipe  # noqa: E402
from tests.support.megatron_models import LENGTHS  # noqa: E402
from tests.support.trainer_processes import forget_last_model  # noqa: E402

torch.set_num_threads(1)


def batches() -> list[MicroBatch]:
    """Two micro batches."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for lengths in (LENGTHS[:3], LENGTHS[3:]):
        count = sum(lengths)
        ones = torch.ones(count)
        vectors = {
            "loss_mask": ones,
            "loss_weights": ones / sum(LENGTHS),
            "token_share": ones / sum(LENGTHS),
            "advantages": torch.randn(count, generator=generator),
            "old_log_probs": -5.5 * ones,
        }
        result.append(MicroBatch(torch.randint(0, 250, (count,), generator=generator), lengths, vectors))
    return result


def run(case: dict[str, Any], output: Path) -> None:
    from megarl.megatron.trainer import PolicyTrainer

    forget_last_model()
    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = case["model"], case["dtype"]
    recipe.algorithm.entropy_coef = 0.01
    recipe.actor.optimizer.lr = 1e-3
    for name, value in case["megatron"].items():
        setattr(recipe.megatron, name, value)
    trainer = PolicyTrainer(recipe, platform, total_optimizer_steps=2)
    held, after_forward, metrics = Held(), [], []

    def counted(inputs: Any) -> Any:
        after_forward.append(held.bytes)
        return objective(inputs, recipe.algorithm)

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda tensor: tensor):
            step = trainer.train_step(batches(), counted, temperature=0.7, with_entropy=True)
        step.pop("perf/max_memory_allocated_gb")
        metrics.append(step)
    weights = {name: weight.clone() for name, weight in trainer.export_weights()}
    torch.save({"metrics": metrics, "weights": weights, "saved": after_forward[0]}, output / f"{case['name']}.pt")


class Held:
    """Counts the bytes that autograd has saved for backward passes (each storage once, without parameters)."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seen: set[int] = set()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.bytes += storage.size()
        return tensor


def main() -> None:
    logging.disable(logging.WARNING)
    cases, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group(platform.process_group_backend)
    for case in cases:
        run(case, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
