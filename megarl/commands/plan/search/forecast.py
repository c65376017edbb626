"""What a layout will probably need: counted of two and three layers, and carried over to as many as it has.

Only the order in which layouts are counted follows from it. That a layout fits is said of none that was not counted itself.
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
from megarl.commands.plan.count.workload import Workload, largest
from megarl.commands.plan.search.lower_bound import Part, chunks_under_way, held_at_least, largest_parts
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.shape import ModelShape
from megarl.recipe.schema import Recipe

_CONTEXT = 2
"""The most of context parallel that samples have: what a token keeps with more of it differs by some percent."""

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Sample:
    """Bytes a token of a micro batch, of layers under one setting."""

    layer: float  # that a layer keeps
    inputs: tuple[float, float]  # that the first stage keeps beside its layers, and the last
    beyond: tuple[float, float]  # that passes with gradients take beyond what is kept
    forward: tuple[float, float]  # that a pass without gradients takes
    step: int  # bytes that the optimizer takes


class Forecast:
    """Of layouts of one recipe; samples are counted as they are needed, each once. Any thread may ask.

    `recipe`: of `stages.built_from`; `model`: its config.json; `directory`: an empty one.
    """

    def __init__(
        self, client: RankClient, recipe: Recipe, model: dict[str, Any], shape: ModelShape, directory: Path
    ) -> None:
        self._client, self._recipe, self._shape = client, recipe, shape
        self._samples: dict[tuple[Any, ...], Sample | None] = {}
        self._lock, self._locks = threading.Lock(), dict[tuple[Any, ...], threading.Lock]()
        self._paths = [directory / f"of_{layers}" for layers in (2, 3)]
        for layers, path in zip((2, 3), self._paths, strict=True):
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(_small(model, layers)), encoding="utf-8")

    def peak(self, recipe: Recipe) -> float:
        """Bytes of the rank of `recipe`, a layout of the forecast's own, that needs the most. 0: nothing is known."""
        sample = self._known(recipe)
        if sample is None:
            return 0.0
        return max(self._of_part(recipe, part, sample) for part in largest_parts(recipe, self._shape))

    def knows(self, recipe: Recipe) -> bool:
        """Whether nothing is left to count for its peak."""
        return setting(recipe) in self._samples

    def _known(self, recipe: Recipe) -> Sample | None:
        """Of the setting of `recipe`: who asks for it first counts it, others wait for that."""
        of = setting(recipe)
        with self._lock:
            of_setting = self._locks.setdefault(of, threading.Lock())
        with of_setting:
            if of not in self._samples:
                self._samples[of] = self._sample(recipe)
            return self._samples[of]

    def _of_part(self, recipe: Recipe, part: Part, sample: Sample) -> float:
        tokens = _tokens(recipe, part.number)
        end = int(part.last)
        times, chunks = chunks_under_way(recipe, part.number)
        kept = times * part.layers / chunks * sample.layer + times * sample.inputs[end] / chunks
        passes = max(kept + sample.beyond[end], sample.forward[end])
        return held_at_least(recipe, self._shape, part) + max(passes * tokens, sample.step)

    def _sample(self, recipe: Recipe) -> Sample | None:
        """Two pipeline stages of a layer each, and the first again with two."""
        one, two = (self._shrunk(recipe, layers) for layers in (2, 3))
        lengths = largest(one, 0).lengths
        last = one.cluster.trainers // 2
        asked = [
            RankRequest(one, 0, work=Workload(lengths, 2, 2)),
            RankRequest(one, last, work=Workload(lengths, 2, 2)),
        ]
        asked.append(RankRequest(two, 0, work=Workload(lengths, 2, 2)))
        try:
            answers = [future.result() for future in [self._client.submit(question) for question in asked]]
        except CannotCount:
            return None
        if any("activations" not in answer for answer in answers):
            return None
        first, end, longer = (Activations(**answer["activations"]) for answer in answers)
        layer = (longer.kept - first.kept) / 2  # the first of two stages has two micro batches under way
        found = Sample(
            layer=layer,
            inputs=(max(0.0, first.kept / 2 - layer), max(0.0, end.kept - layer)),
            beyond=(first.update - first.kept, end.update - end.kept),
            forward=(first.forward, end.forward),
            step=max(first.optimizer, end.optimizer),
        )
        return _a_token(found, _tokens(one, 0))

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


def setting(recipe: Recipe) -> tuple[Any, ...]:
    """What a token of a layer keeps depends on."""
    megatron = recipe.megatron
    return (
        megatron.tensor_parallel,
        min(_CONTEXT, megatron.context_parallel),
        megatron.expert_tensor_parallel or 1,
        megatron.expert_parallel > 1,
        megatron.recompute,
    )


def _tokens(recipe: Recipe, stage: int) -> float:
    """Of a micro batch, a device's."""
    return sum(largest(recipe, stage).lengths) / recipe.megatron.context_parallel


def _a_token(sample: Sample, tokens: float) -> Sample:
    def each(pair: tuple[float, float]) -> tuple[float, float]:
        return pair[0] / tokens, pair[1] / tokens

    return Sample(sample.layer / tokens, each(sample.inputs), each(sample.beyond), each(sample.forward), sample.step)


def _small(model: dict[str, Any], layers: int) -> dict[str, Any]:
    """`model` with so many layers, all alike, and few experts: as many tokens go to a rank's."""
    text = text_fields(model)
    few: dict[str, Any] = {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    if experts := number_of_experts(text):
        wanted = min(experts, max(2 * text["num_experts_per_tok"], 4 * (text.get("n_group") or 1)))
        few |= {name: wanted for name in _EXPERTS if text.get(name)}
        few |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in text else {}
        few |= {"mlp_only_layers": []} if "mlp_only_layers" in text else {}
    return {**model, **few}
