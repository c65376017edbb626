"""Simulation of a paced run, with its schedule, the seconds of its pace, and the lengths of its groups."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.pacing import Pace
from megarl.commands.simulate.engine import Costs
from megarl.commands.simulate.lengths import DrawnLengths, Recorded
from megarl.commands.simulate.simulation import AsyncSchedule, Simulation
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import read_samples, sample_steps
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe


class RunLengths(DrawnLengths):
    """Lengths of a run's groups by number. A group that the run did not train on is drawn from the others."""

    def __init__(self, run: Path, samples: int) -> None:
        run_dir = RunDirectory(run)
        records = [record for step in sample_steps(run_dir) for record in read_samples(run_dir, step)]
        groups: dict[int, dict[int, int]] = {}
        for record in records:
            groups.setdefault(record["group"], {})[record["index"]] = record["response_length"]
        self._known = {number: [lengths[index] for index in range(samples)] for number, lengths in groups.items()}
        self.prompt = fmean(record["prompt_length"] for record in records)
        super().__init__(Recorded(tuple(map(tuple, self._known.values())), self.prompt, str(run)), samples, 0)

    def of(self, group: int) -> list[int]:
        return self._known[group] if group in self._known else super().of(group)


def costs(recipe: Recipe, pace: Pace, prompt: float) -> Costs:
    """Return the costs of a paced run. `prompt`: mean tokens of a prompt, shorter than a block of the prefix cache."""
    most = int(recipe.rollout.engine_args["max_num_seqs"])
    return Costs(
        engines=recipe.rollout.engines,
        decode=pace.step + pace.request * np.arange(most + 1),
        prefill=pace.prefill,
        training=pace.train,
        weight_sync=pace.weight_sync,
        load=pace.load,
        prompt=prompt,
        shares_prefix=False,
    )


def predict(run: Path, pace: Pace, first: int, last: int) -> dict[str, float]:
    """Simulate the run; returns its figures without the `first` and the `last` steps."""
    recipe = load_recipe(RunDirectory(run).recipe)
    samples = recipe.rollout.samples_per_prompt
    lengths = RunLengths(run, samples)
    simulation = Simulation(costs(recipe, pace, lengths.prompt), AsyncSchedule.of(recipe), lengths, samples)
    simulation.run(recipe.train.steps, 0)
    before, measured = simulation.records[first - 1], simulation.records[first:-last]
    seconds = measured[-1].end - before.end
    return {
        "tokens per second": sum(step.tokens for step in measured) / seconds,
        "step": seconds / len(measured),
        "waits": sum(step.waited for step in measured) / seconds,
        "staleness": sum(step.lag for step in measured) / sum(step.responses for step in measured),
    }
