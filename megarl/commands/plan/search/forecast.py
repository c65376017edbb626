"""Forecast of a layout's memory: counted with two and three layers, extrapolated to the full model.

It only decides the order in which layouts are counted. A layout is reported to fit only after it was counted itself.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.commands.plan.count.rank_client import CannotCount, RankClient, RankRequest
from megarl.commands.plan.count.types import Activations
from megarl.commands.plan.count.workload import Workload, peak_workload
from megarl.commands.plan.search.lower_bound import StagePart, chunks_in_flight, largest_parts, min_held_bytes
from megarl.hf.config import experts_per_token, number_of_experts, text_fields, with_experts, with_layers
from megarl.hf.shape import ModelShape
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig

_CONTEXT = 2
"""Largest context parallel size of a sample: with larger ones the memory per token differs by a few percent."""


@dataclass(frozen=True)
class MemorySample:
    """Bytes per token of a micro batch, for layers with one setting."""

    layer: float  # kept per layer
    inputs: tuple[float, float]  # kept in addition by the first and by the last stage
    beyond: tuple[float, float]  # peak of passes with gradients beyond kept memory
    forward: tuple[float, float]  # peak of a pass without gradients
    step: int  # bytes of the optimizer step


class Forecast:
    """Forecasts layouts of one recipe. Each sample is counted once, on first use. Thread-safe.

    `recipe`: from `stages.built_from`; `model`: its config.json; `directory`: an empty one.
    """

    def __init__(
        self, client: RankClient, recipe: Recipe, model: dict[str, Any], shape: ModelShape, directory: Path
    ) -> None:
        self._client, self._recipe, self._shape = client, recipe, shape
        self._samples: dict[tuple[Any, ...], MemorySample | None] = {}
        self._lock, self._locks = threading.Lock(), dict[tuple[Any, ...], threading.Lock]()
        self._paths = [directory / f"of_{layers}" for layers in (2, 3)]
        for layers, path in zip((2, 3), self._paths, strict=True):
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(_small(model, layers)), encoding="utf-8")

    def peak(self, recipe: Recipe) -> float:
        """Return the bytes of the fullest rank of `recipe`, a layout of this recipe. 0 if the sample cannot be counted."""
        sample = self._known(recipe)
        if sample is None:
            return 0.0
        return max(self._of_part(recipe, part, sample) for part in largest_parts(recipe.megatron, self._shape))

    def knows(self, megatron: MegatronConfig) -> bool:
        """Return True if `peak` needs no further counting."""
        return setting(megatron) in self._samples

    def _known(self, recipe: Recipe) -> MemorySample | None:
        """Return the sample for the setting of `recipe`; the first caller counts it, others wait."""
        key = setting(recipe.megatron)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._samples:
                self._samples[key] = self._sample(recipe)
            return self._samples[key]

    def _of_part(self, recipe: Recipe, part: StagePart, sample: MemorySample) -> float:
        tokens = _tokens(recipe, part.number)
        end = int(part.last)
        times, chunks = chunks_in_flight(recipe.megatron, part.number)
        kept = times * part.layers / chunks * sample.layer + times * sample.inputs[end] / chunks
        passes = max(kept + sample.beyond[end], sample.forward[end])
        return min_held_bytes(recipe, self._shape, part) + max(passes * tokens, sample.step)

    def _sample(self, recipe: Recipe) -> MemorySample | None:
        """Count two pipeline stages of one layer each, and the first stage again with two layers."""
        short, long = (self._shrunk(recipe, layers) for layers in (2, 3))
        work, last = Workload(peak_workload(short, 0).lengths, 2, 2), short.cluster.trainers // 2
        requests = [RankRequest(recipe, rank, work=work) for recipe, rank in ((short, 0), (short, last), (long, 0))]
        try:
            answers = [future.result() for future in [self._client.submit(request) for request in requests]]
        except CannotCount:
            return None
        if any("activations" not in answer for answer in answers):
            return None
        first, end, longer = (Activations(**answer["activations"]) for answer in answers)
        layer = (longer.kept - first.kept) / 2  # the first of two stages has two micro batches in flight
        tokens = _tokens(short, 0)

        def a_token(of_first: float, of_last: float) -> tuple[float, float]:
            return of_first / tokens, of_last / tokens

        return MemorySample(
            layer=layer / tokens,
            inputs=a_token(max(0.0, first.kept / 2 - layer), max(0.0, end.kept - layer)),
            beyond=a_token(first.update - first.kept, end.update - end.kept),
            forward=a_token(first.forward, end.forward),
            step=max(first.optimizer, end.optimizer),
        )

    def _shrunk(self, recipe: Recipe, layers: int) -> Recipe:
        megatron = recipe.megatron
        expert, within = min(2, megatron.expert_parallel), megatron.expert_tensor_parallel or 1
        context = min(_CONTEXT, megatron.context_parallel)
        stage = math.lcm(megatron.tensor_parallel * context, expert * within)
        return replace(
            recipe,
            model=replace(recipe.model, path=str(self._paths[layers - 2])),
            cluster=replace(recipe.cluster, trainers=2 * stage),
            megatron=replace(
                megatron,
                pipeline_parallel=2,
                virtual_pipeline=None,
                first_stage_layers=layers - 1,
                last_stage_layers=1,
                context_parallel=context,
                expert_parallel=expert,
            ),
        )


def setting(megatron: MegatronConfig) -> tuple[Any, ...]:
    """Return the settings that determine the memory per token of a layer."""
    return (
        megatron.tensor_parallel,
        min(_CONTEXT, megatron.context_parallel),
        megatron.expert_tensor_parallel or 1,
        megatron.expert_parallel > 1,
        megatron.recompute,
    )


def _tokens(recipe: Recipe, stage: int) -> float:
    """Return the tokens of a micro batch on one device."""
    return sum(peak_workload(recipe, stage).lengths) / recipe.megatron.context_parallel


def _small(model: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return `model` with this many equal layers, and with few experts: a rank's experts still receive as many tokens."""
    text = text_fields(model)
    text.pop("text_config", None)
    few = with_layers(text, layers, dense=0) | {"num_nextn_predict_layers": 0}
    if experts := number_of_experts(text):
        count = min(experts, max(2 * experts_per_token(text), 4 * (text.get("n_group") or 1)))
        few |= with_experts(text, count)
        few |= {"mlp_only_layers": []} if "mlp_only_layers" in text else {}
    return {**text, **few}
