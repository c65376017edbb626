"""Seconds of engines: prompts read, responses written, and a teacher's reading. Pure.

Writing is counted step by step: a step reads the weights that its tokens meet and the KV cache of its sequences, at
`decode_share` of the memory's bandwidth, or computes its products at `prefill_share` of the peak where that takes longer
(the roofline; Williams et al. 2009). What tensor- and expert-parallel ranks exchange comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megarl.batching.flops import ModelFlops
from megarl.commands.plan.count.types import EngineRank
from megarl.commands.plan.time.cost import Cost, all_to_all_seconds, ring_seconds
from megarl.commands.plan.time.lengths import Lengths
from megarl.engines.base import EngineLimits
from megarl.hf.shape import ModelShape
from megarl.platform.devices import Device

_WORKING = 4 * 2**30  # bytes of a device that neither weights nor cache get: assumed, where nothing was counted
_POINTS = 16  # at which the end of a wave is looked at


@dataclass(frozen=True)
class Engines:
    """Replicas of a model. `group`: how many of them share the experts; `spread`: whether a device has whole experts."""

    shape: ModelShape
    device: Device
    count: int
    tensor: int
    number: int = 2  # bytes of a weight and of a cached number
    group: int = 1
    spread: bool = False
    sequences: float = math.inf  # that an engine writes at a time, at most
    prefix: bool = True  # samples of a prompt share its cache

    @property
    def ranks_of_experts(self) -> int:
        """Devices over which the experts of a layer are spread."""
        return self.group * self.tensor

    @property
    def weights(self) -> float:
        """Bytes on a device."""
        rest = self.shape.total - self.shape.routed
        return self.number * (rest / self.tensor + self.shape.routed / self.ranks_of_experts)

    @property
    def cache_per_token(self) -> float:
        """Bytes on a device."""
        attention = self.shape.attention
        return self.shape.layers * attention.cached * self.number / min(self.tensor, attention.pieces)


def room(engines: Engines, lengths: Lengths, limits: EngineLimits, counted: EngineRank | None = None) -> float:
    """Sequences that an engine writes at a time: as many as a step may have, or as its KV cache has room for, of the mean
    length. The cache is as `counted`; else as given outright; else it has what the engine's share of the device's memory
    leaves beside the weights. An engine that finds its share out itself is taken to have room for a step."""
    if counted is not None and counted.cache is not None:
        held = counted.cache / (counted.cache_per_token * lengths.tokens)
    elif limits.cache is not None or limits.share is not None:
        cache = limits.cache if limits.cache is not None else _left(engines, limits.share or 0.0)
        held = cache / (engines.cache_per_token * lengths.tokens)
    else:
        held = math.inf
    return max(1.0, min(float(limits.sequences), held))


def _left(engines: Engines, share: float) -> float:
    return engines.device.memory * 2**30 * share - engines.weights - _WORKING


def generate(engines: Engines, lengths: Lengths, prompts: float, samples: float) -> Cost:
    """All engines write `samples` responses to each of `prompts`, the busiest of them as many as the others.

    An engine is full, with new responses in the place of finished ones, until none is left to begin; its last ones then
    end as if they had begun together, the longest last.
    """
    own = prompts * samples / engines.count
    width = min(own, engines.sequences)
    full = (own - width) * lengths.response / width  # steps
    cost = _step(engines, width, lengths.prompt + lengths.age) * full
    share = lengths.longest / _POINTS
    for point in range(_POINTS):
        written = (point + 0.5) * share
        cost += _step(engines, width * lengths.longer(written), lengths.prompt + written) * share
    times = 1.0 if engines.prefix else samples
    return cost + read(engines, lengths.prompt, prompts * times)


def read(engines: Engines, tokens: float, sequences: float) -> Cost:
    """All engines read `sequences` of so many tokens: matrix products at `prefill_share` of the peak."""
    shape, device = engines.shape, engines.device
    flops = ModelFlops(2 * (shape.active - shape.output), 2 * shape.layers * shape.attention.per_pair)
    each = float(flops.of(np.array([tokens]))[0]) * sequences / (engines.count * engines.tensor)
    links = _links(engines, tokens * sequences / engines.count)
    return Cost(compute=each / (device.flops * device.prefill_share), links=links)


def _step(engines: Engines, sequences: float, cached: float) -> Cost:
    """One token of each of an engine's `sequences`, whose caches hold `cached` tokens in the mean."""
    if sequences <= 0:
        return Cost()
    shape, device, tensor = engines.shape, engines.device, engines.tensor
    size = _met_bytes(engines, max(1.0, sequences)) + sequences * cached * engines.cache_per_token
    flops = 2.0 * sequences * (shape.active + shape.layers * shape.attention.per_cached_pair * cached) / tensor
    memory, compute = size / (device.bandwidth * device.decode_share), flops / (device.flops * device.prefill_share)
    return Cost(
        memory=memory if memory >= compute else 0.0,
        compute=compute if compute > memory else 0.0,
        links=_links(engines, sequences),
        start=shape.layers * device.layer_seconds,
    )


def _met_bytes(engines: Engines, sequences: float) -> float:
    """Of weights, that a device reads in a step. Of each layer's experts those that some token is sent to: routing is even
    and independent, so of n tokens that choose k of E experts, an expert is left out by all with (1 - k / E)^n."""
    shape = engines.shape
    rest = shape.total - shape.routed - (0 if shape.tied else shape.output)  # of the embedding, a row a token
    met = rest / engines.tensor
    if shape.experts:
        tokens = sequences * engines.group
        met += shape.routed / engines.ranks_of_experts * (1 - (1 - shape.chosen / shape.experts) ** tokens)
    return met * engines.number


def _links(engines: Engines, tokens: float) -> float:
    """Seconds in which an engine's ranks, or a group's, exchange what `tokens` of an engine leave in the layers: an
    all-reduce behind attention and one behind the MLP; or, where experts are whole, tokens go to them and back."""
    shape, device, tensor = engines.shape, engines.device, engines.tensor
    activations = tokens * shape.hidden * engines.number
    reduced = 2 * ring_seconds(device, activations, tensor)
    sparse = sum(shape.sparse)
    seconds = reduced * (2 * shape.layers - (sparse if engines.spread else 0))
    if engines.spread:
        seconds += (
            2 * sparse * all_to_all_seconds(device, activations * shape.chosen / tensor, engines.ranks_of_experts)
        )
    return seconds
