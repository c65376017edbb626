"""One trainer process of tests/trainer/test_datums.py: accumulates gradients, updates, and writes the results.

Usage, with the environment of torchrun: python -m tests.support.datum_worker CASES.json DIRECTORY
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.platform import select

select("cpu").prepare()

import torch.distributed as dist  # noqa: E402

from megarl.algorithms.datum_losses import checked_loss  # noqa: E402
from megarl.batching.datums import DatumScores  # noqa: E402
from megarl.trainer.datums.group import DatumGroup  # noqa: E402
from megarl.trainer.datums.worker import DatumWorker  # noqa: E402
from tests.support.datum_cases import ADAM, AGAIN, PASSES, data_of, recipe_of  # noqa: E402
from tests.support.held_out_worker import Ranks  # noqa: E402
from tests.support.trainer_processes import forget_last_model, serve_cases  # noqa: E402


def run_case(case: dict[str, Any], directory: Path) -> None:
    forget_last_model()
    worker = DatumWorker(recipe_of(case), total_optimizer_steps=1)
    actor = DatumGroup(Ranks(worker), worker.recipe)  # type: ignore[arg-type]
    actor.describe()
    results: dict[str, Any] = {"passes": [], "scores": None, "norms": []}
    for seed, (name, options) in enumerate(PASSES):
        data, loss = data_of(name, seed), checked_loss(name, options)
        results["scores"] = plain(actor.score(data, loss))
        results["passes"].append(plain(actor.add_gradient(data, loss)))
    results["norms"].append(actor.update_weights(ADAM))
    actor.save_hf(directory / f"{case['name']}.hf1")
    first, loss = data_of("cross_entropy", 0), checked_loss("cross_entropy")
    actor.add_gradient(first, loss)
    actor.forget_gradients()  # the next pass starts from nothing
    results["second"] = plain(actor.add_gradient(first, loss))
    results["norms"].append(actor.update_weights(AGAIN))
    actor.save_hf(directory / f"{case['name']}.hf2")
    if dist.get_rank() == 0:
        (directory / f"{case['name']}.json").write_text(json.dumps(results))


def plain(scores: DatumScores) -> dict[str, Any]:
    vectors = [scores.log_probs[number].tolist() for number in range(len(scores.log_probs))]
    return {"loss": scores.loss, "log_probs": vectors}


if __name__ == "__main__":
    serve_cases(run_case)
