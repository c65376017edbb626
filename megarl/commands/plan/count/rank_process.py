"""The process that is any trainer rank of any layout: see serve.py. Started by `ask.py`."""

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
from megarl.megatron.held_slices import Forms, describe  # noqa: E402
from megarl.megatron.model import Model  # noqa: E402
from megarl.megatron.trainer import PolicyTrainer, Trainer  # noqa: E402
from megarl.preflight.load import load_recipe  # noqa: E402
from megarl.recipe.critic import critic_view  # noqa: E402


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Of one rank: what it holds, the `largest_rank` of its stage, and, where asked for, what it takes beyond, and which
    boxes of the checkpoint's tensors the ranks of its stage hold (`holdings`).

    `error`: there is no such rank. `not_planned`: why these are no boxes.
    """
    recipe = load_recipe(question["recipe"], check=False)
    import_modules(recipe.algorithm)  # which a check would have done: losses of the user's own are looked up by name
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
    if question["holdings"]:
        try:
            result["holdings"] = _holdings(trainer.model, rank, world // recipe.megatron.pipeline_parallel)
        except ValueError as error:
            result["not_planned"] = str(error)
    if question["work"] is not None:
        result["activations"] = dataclasses.asdict(activations(trainer, Workload(**question["work"])))
    return result


def _holdings(model: Model, rank: int, ranks: int) -> dict[str, Any]:
    """Of all `ranks` of a stage: the different descriptions, `unique`, and the number of each rank's, `of_rank`.

    They have the same shapes, and are described by saying to mbridge that this one is they. They stand in the order
    tensor, context, data parallel; for experts, expert tensor, expert, data parallel.
    """
    chunks = model.lora.base() if model.lora else model.chunks
    own = model.bridge.mpu
    places = [(one % own.tp_size, one // own.etp_size % own.ep_size, one % own.etp_size) for one in range(ranks)]
    assert places[rank % ranks] == (own.tp_rank, own.ep_rank, own.etp_rank), "Megatron orders ranks in another way"
    found: dict[tuple[int, ...], str] = {}
    forms = Forms(model.bridge)
    for place in dict.fromkeys(places):
        tensor, expert, expert_tensor = place
        model.bridge.mpu = dataclasses.replace(own, tp_rank=tensor, ep_rank=expert, etp_rank=expert_tensor)
        found[place] = base64.b64encode(describe(model.bridge, chunks, forms).to_bytes()).decode()
    model.bridge.mpu = own
    numbers = {place: number for number, place in enumerate(found)}
    return {"unique": list(found.values()), "of_rank": [numbers[place] for place in places]}


if __name__ == "__main__":
    serve(answer, int(sys.argv[1]), "mbridge")
