"""Counting process for trainer ranks: builds any rank of any layout on tensors without memory. Started by `rank_client.py`."""

from __future__ import annotations

import base64
import dataclasses
import sys
from typing import Any

from megarl.commands.plan.meta_device import MetaPlatform, join

platform = MetaPlatform()
platform.prepare()  # before Megatron is imported, below

from megarl.algorithms.catalogue import import_modules  # noqa: E402
from megarl.commands.plan.count.activations import activations  # noqa: E402
from megarl.commands.plan.count.parameters import held, largest_rank  # noqa: E402
from megarl.commands.plan.count.serve import serve  # noqa: E402
from megarl.commands.plan.count.workload import Workload  # noqa: E402
from megarl.megatron.critic import CriticTrainer  # noqa: E402
from megarl.megatron.held_slices import describe  # noqa: E402
from megarl.megatron.model.build import Model  # noqa: E402
from megarl.megatron.trainer import PolicyTrainer, Trainer  # noqa: E402
from megarl.preflight.load import load_recipe  # noqa: E402
from megarl.recipe.derived.critic_view import critic_view  # noqa: E402


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Handle one request: return the rank's memory and the `largest_rank` of its stage, and on request also its
    activations and the slices of the checkpoint's tensors that the ranks of its stage hold (`held_slices`).

    The result is {"error": ...} for a rank that does not exist. `not_planned`: why the slices cannot be described.
    """
    recipe = load_recipe(question["recipe"], check=False)
    import_modules(recipe.algorithm)  # registers the user's losses, which the skipped check would have imported
    if question["critic"]:
        recipe = critic_view(recipe)
    rank, world = question["rank"], recipe.cluster.trainers
    join(rank, world)
    make = CriticTrainer if question["critic"] else PolicyTrainer
    try:
        with platform.device():
            trainer: Trainer = make(recipe, platform, 1)
    except ValueError as error:
        return {"error": str(error)}
    result: dict[str, Any] = {"held": dataclasses.asdict(held(trainer)), "largest": largest_rank(trainer)}
    if question["held_slices"]:
        try:
            result["held_slices"] = _held_slices(trainer.model, rank, world // recipe.megatron.pipeline_parallel)
        except ValueError as error:
            result["not_planned"] = str(error)
    if question["work"] is not None:
        result["activations"] = dataclasses.asdict(activations(trainer, Workload(**question["work"])))
    return result


def _held_slices(model: Model, rank: int, ranks: int) -> dict[str, Any]:
    """Describe the slices of all `ranks` of a stage: `unique` descriptions, and for each rank its number in them.

    The ranks have equal shapes, so this process describes each by setting its coordinates in mbridge. Ranks are ordered
    tensor, context, data parallel; for experts: expert tensor, expert, data parallel.
    """
    chunks = model.lora.base() if model.lora else model.chunks
    mpu = model.bridge.mpu
    coordinates = [
        (peer % mpu.tp_size, peer // mpu.etp_size % mpu.ep_size, peer % mpu.etp_size) for peer in range(ranks)
    ]
    assert coordinates[rank % ranks] == (mpu.tp_rank, mpu.ep_rank, mpu.etp_rank), "Megatron changed its order of ranks"
    descriptions: dict[tuple[int, ...], str] = {}
    for place in dict.fromkeys(coordinates):
        tensor, expert, expert_tensor = place
        model.bridge.mpu = dataclasses.replace(mpu, tp_rank=tensor, ep_rank=expert, etp_rank=expert_tensor)
        descriptions[place] = base64.b64encode(describe(model.bridge, chunks).to_bytes()).decode()
    model.bridge.mpu = mpu
    numbers = {place: number for number, place in enumerate(descriptions)}
    return {"unique": list(descriptions.values()), "of_rank": [numbers[place] for place in coordinates]}


if __name__ == "__main__":
    serve(answer, int(sys.argv[1]), "mbridge")
