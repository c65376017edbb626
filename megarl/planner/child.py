"""The process that is any rank of any layout: reads questions from standard input, writes answers to standard output.

Started by `ask.py`. Everything is imported once; each question is then answered in a fork of its own, since Megatron
keeps one layout in a process.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
import warnings
from typing import Any

from megarl.platform.meta import MetaPlatform, join

platform = MetaPlatform()
platform.prepare()  # before Megatron is imported, below

from megarl.config.critic import critic_view  # noqa: E402
from megarl.config.load import load_recipe  # noqa: E402
from megarl.megatron.critic import CriticTrainer  # noqa: E402
from megarl.megatron.trainer import PolicyTrainer, Trainer  # noqa: E402
from megarl.planner.activations import activations  # noqa: E402
from megarl.planner.held import held, largest_rank  # noqa: E402
from megarl.planner.workload import Workload  # noqa: E402


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Of one rank: what it holds, the `largest_rank` of its stage, and, where asked for, what it takes beyond.

    `error`: there is no such rank. `not_counted`: why what it takes beyond is not known.
    """
    recipe = load_recipe(question["recipe"], check=False)
    if question["critic"]:
        recipe = critic_view(recipe)
    join(question["rank"], recipe.cluster.trainers)
    make = CriticTrainer if question["critic"] else PolicyTrainer
    try:
        with platform.device():
            trainer: Trainer = make(recipe, platform, 1)
    except ValueError as error:
        return {"error": str(error)}
    result: dict[str, Any] = {"held": dataclasses.asdict(held(trainer)), "largest": largest_rank(trainer)}
    if question["work"] is not None:
        try:
            result["activations"] = dataclasses.asdict(activations(trainer, Workload(**question["work"])))
        except ValueError as error:
            result["not_counted"] = str(error)
    return result


def main() -> None:
    warnings.simplefilter("ignore")  # of a model that nobody will train
    asked = json.load(sys.stdin)
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # what libraries print is no answer
    import mbridge  # noqa: F401 - before the forks, which then have it

    with multiprocessing.get_context("fork").Pool(asked["processes"], maxtasksperchild=1) as pool:
        json.dump(pool.map(answer, asked["questions"], chunksize=1), answers)
    answers.close()


if __name__ == "__main__":
    main()
