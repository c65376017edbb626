"""Seconds of engines: prefill, decoding, and a teacher's prefill. Pure.

Decoding is summed over steps. A step reads the weights that its tokens use and the KV cache of its sequences, at
`decode_share` of the memory bandwidth, or computes its products at `prefill_share` of the peak if that takes longer (the
roofline; Williams et al. 2009). Communication between tensor- and expert-parallel ranks is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megarl.batching.flops import shape_flops
from megarl.commands.plan.count.types import EngineRank
from megarl.commands.plan.time.cost import Cost, all_to_all_seconds, ring_seconds
from megarl.commands.plan.time.lengths import Lengths
from megarl.engines.base import EngineLimits
from megarl.hf.shape import ModelShape
from megarl.platform.device_table import Device

_WORKING = 4 * 2**30  # bytes per device for neither weights nor cache: assumed if nothing was counted
_POINTS = 16  # samples of the last wave of responses


@dataclass(frozen=True)
class Engines:
    """Engines of one model. `group`: engines that share the experts; `spread`: devices have whole experts."""

    shape: ModelShape
    device: Device
    count: int
    tensor: int
    number: int = 2  # bytes of an activation and of a cached value
    weight: int = 2  # bytes of a weight
    group: int = 1
    spread: bool = False
    sequences: float = math.inf  # sequences that an engine decodes at a time, at most
    prefix: bool = True  # samples of a prompt share its cache

    @property
    def ranks_of_experts(self) -> int:
        """Devices over which the experts of a layer are spread."""
        return self.group * self.tensor

    @property
    def weights(self) -> float:
        """Bytes per device."""
        rest = self.shape.total - self.shape.routed
        return self.weight * (rest / self.tensor + self.shape.routed / self.ranks_of_experts)

    @property
    def cache_per_token(self) -> float:
        """Bytes per device."""
        attention = self.shape.attention
        return self.shape.layers * attention.cached * self.number / min(self.tensor, attention.pieces)


def room(engines: Engines, lengths: Lengths, limits: EngineLimits, counted: EngineRank | None = None) -> float:
    """Return the sequences of mean length that an engine decodes at a time: limited by its arguments and its KV cache.

    The cache is the `counted` one, else the size in the arguments, else the engine's share of the device without the
    weights. An engine that chooses its share at start is assumed to have enough room.
    """
    seen = engines.shape.attention.seen(lengths.tokens)
    if counted is not None and counted.cache is not None:
        fitting = counted.cache / (counted.cache_per_token * seen)
    elif limits.cache is not None or limits.share is not None:
        share = engines.device.memory * 2**30 * (limits.share or 0.0)
        cache = limits.cache if limits.cache is not None else share - engines.weights - _WORKING
        fitting = cache / (engines.cache_per_token * seen)
    else:
        fitting = math.inf
    return max(1.0, min(float(limits.sequences), fitting))


def generate(engines: Engines, lengths: Lengths, prompts: float, samples: float) -> Cost:
    """Return the cost of `samples` responses to each of `prompts`, evenly distributed over the engines.

    An engine is full, with new responses replacing finished ones, until no response is left to start. The last responses
    then finish as if they had started together.
    """
    responses = prompts * samples / engines.count
    width = min(responses, engines.sequences)
    full = (responses - width) * lengths.response / width  # steps
    cost = decode_step(engines, width, lengths.prompt + lengths.age) * full
    share = lengths.longest / _POINTS
    for point in range(_POINTS):
        written = (point + 0.5) * share
        cost += decode_step(engines, width * lengths.longer(written), lengths.prompt + written) * share
    times = 1.0 if engines.prefix else samples
    return cost + read(engines, lengths.prompt, prompts * times)


def read(engines: Engines, tokens: float, sequences: float) -> Cost:
    """Return the cost of a prefill of `sequences` with `tokens` each: matrix products at `prefill_share` of the peak."""
    shape, device = engines.shape, engines.device
    flops = shape_flops(shape, output=False)
    each = float(flops.of(np.array([tokens]))[0]) * sequences / (engines.count * engines.tensor)
    links = _links(engines, tokens * sequences / engines.count)
    return Cost(compute=each / (device.flops * device.prefill_share), links=links)


def decode_step(engines: Engines, sequences: float, cached: float) -> Cost:
    """Return the cost of one token for each of `sequences`, with `cached` tokens in each cache on average."""
    if sequences <= 0:
        return Cost()
    shape, device, tensor = engines.shape, engines.device, engines.tensor
    seen = shape.attention.seen(cached)
    size = _met_bytes(engines, max(1.0, sequences)) + sequences * seen * engines.cache_per_token
    flops = 2.0 * sequences * (shape.active + shape.layers * shape.attention.per_cached_pair * seen) / tensor
    memory, compute = size / (device.bandwidth * device.decode_share), flops / (device.flops * device.prefill_share)
    return Cost(
        memory=memory if memory >= compute else 0.0,
        compute=compute if compute > memory else 0.0,
        links=_links(engines, sequences),
        start=shape.layers * device.layer_seconds,
    )


def _met_bytes(engines: Engines, sequences: float) -> float:
    """Return the bytes of weights that a device reads in a step.

    A layer's expert is read if a token is routed to it. With even, independent routing of n tokens to k of E experts, an
    expert receives no token with probability (1 - k / E)^n.
    """
    shape = engines.shape
    rest = shape.total - shape.routed - (0 if shape.tied else shape.output)  # the embedding reads one row per token
    met = rest / engines.tensor
    if shape.experts:
        tokens = sequences * engines.group
        met += shape.routed / engines.ranks_of_experts * (1 - (1 - shape.chosen / shape.experts) ** tokens)
    return met * engines.weight


def _links(engines: Engines, tokens: float) -> float:
    """Return the seconds of communication for `tokens` of an engine: an all-reduce after attention and after the MLP, or,
    with whole experts, two all-to-alls in place of the latter."""
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
