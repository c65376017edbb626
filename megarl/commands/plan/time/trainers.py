"""Seconds of trainers: forward passes and updates of actor and critic. Pure.

A pipeline of p stages with v chunks each, over m micro batches of t seconds per stage, takes m t + (p - 1) t / v; the second
part is the bubble (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). t belongs to the slowest stage: its matrix products
(megarl/batching/flops.py) at `train_share` of the device's peak, communication, and the start of its layers' kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.commands.plan.time import pipeline
from megarl.commands.plan.time.cost import Cost, all_to_all_seconds, offload_seconds, ring_seconds, send_seconds
from megarl.commands.plan.time.lengths import MicroBatches
from megarl.hf.shape import ModelShape
from megarl.megatron.layout import layers_of_chunks
from megarl.platform.adaptor import swapped_parts
from megarl.platform.device_table import Device
from megarl.recipe.derived.optimizer_extra import host_share
from megarl.recipe.schema import Recipe

_GRADIENT = 4  # bytes: gradients are summed in float32 (megatron/model/build.py)
_STATES = 12  # bytes per parameter: float32 master weight and Adam's two moments


@dataclass(frozen=True)
class Passes:
    """Work of an operation in multiples of the forward pass, with recomputation."""

    weights: int  # products with the layers' weights
    pairs: int  # attention
    output: int  # the output layer
    links: int  # communication within a layer
    kernels: int  # kernel starts of a layer
    stage_transfers: int  # between neighbouring stages


FORWARD = Passes(1, 1, 1, 1, 1, 1)


def update_passes(recipe: Recipe) -> Passes:
    """Return the work of an update: forward, and backward with twice the work (frozen weights: no weight gradient).

    `recompute: full` adds a forward pass of the layers, `selective` one of attention; without `keep_logits` the output
    layer is computed again (recipes.md). Communication runs once in each direction.
    """
    backward = 1 if recipe.lora.rank else 2
    full, selective = recipe.megatron.recompute == "full", recipe.megatron.recompute == "selective"
    return Passes(
        weights=1 + backward + full,
        pairs=3 + (full or selective),
        output=1 + backward + (not recipe.megatron.keep_logits),
        links=2 + full,
        kernels=3 + full,
        stage_transfers=2,
    )


@dataclass(frozen=True)
class Trainers:
    """The actor's processes, or the critic's with `critic_view`. `output`: the model has an output layer."""

    recipe: Recipe
    shape: ModelShape
    device: Device
    output: bool = True

    @property
    def world(self) -> int:
        return self.recipe.cluster.trainers

    @property
    def data_parallel(self) -> int:
        m = self.recipe.megatron
        return max(1, self.world // (m.tensor_parallel * m.pipeline_parallel * m.context_parallel))

    @property
    def number(self) -> int:
        """Bytes of a weight or of an activation."""
        return 4 if self.recipe.model.dtype == "float32" else 2

    def stages(self) -> list[list[int]]:
        """Return the layers of each pipeline stage."""
        chunks = layers_of_chunks(self.shape.layers, self.recipe.megatron)
        stages = self.recipe.megatron.pipeline_parallel
        return [[layer for chunk in chunks[stage::stages] for layer in chunk] for stage in range(stages)]


def forward(trainers: Trainers, batches: MicroBatches, mini_batches: int) -> Cost:
    """Return the cost of a pass without gradients over the whole batch, as one run of the pipeline."""
    return _pipeline(trainers, batches, batches.count * mini_batches, FORWARD)


def update(trainers: Trainers, batches: MicroBatches, mini_batches: int) -> Cost:
    """Return the cost of an update: per mini batch a run of the pipeline, the gradient reduction and Adam's step."""
    run = _pipeline(trainers, batches, batches.count, update_passes(trainers.recipe))
    return (run + _optimizer_step(trainers)) * mini_batches


def bubble(trainers: Trainers, batches: MicroBatches) -> float:
    """Return the share of an update's run in which a stage waits."""
    megatron = trainers.recipe.megatron
    return pipeline.bubble(megatron.pipeline_parallel, megatron.virtual_pipeline or 1, batches.count)


def reference_swap(trainers: Trainers) -> Cost:
    """Return the cost of exchanging policy and reference weights before and after a reference pass: twice the weights in
    each direction. Adapters are only switched off."""
    if trainers.recipe.lora.rank:
        return Cost()
    return Cost(host=offload_seconds(trainers.device, 4 * weight_bytes(trainers)))


def weight_bytes(trainers: Trainers) -> float:
    """Return the bytes of weights on the rank that holds most."""
    return max(sum(_held(trainers, stage)) for stage in range(len(trainers.stages()))) * trainers.number


def state_bytes(trainers: Trainers) -> float:
    """Return the bytes of optimizer states that offloading moves, on the rank that holds most; states that stay on the host
    do not count."""
    if swapped_parts(trainers.recipe.megatron.extra) or trainers.recipe.lora.rank:
        return 0.0
    shares = [_shards(trainers, stage) for stage in range(len(trainers.stages()))]
    stays = 1 - host_share(trainers.recipe.actor.optimizer)
    return max(shares) * (_STATES if trainers.number == 2 else 8) * stays


def _pipeline(trainers: Trainers, batches: MicroBatches, count: int, passes: Passes) -> Cost:
    megatron = trainers.recipe.megatron
    stages = [_stage(trainers, stage, batches, passes) for stage in range(megatron.pipeline_parallel)]
    slowest = max(stages, key=lambda cost: cost.seconds)
    waits = (megatron.pipeline_parallel - 1) / (megatron.virtual_pipeline or 1)
    return slowest * count + Cost(bubble=slowest.seconds * waits)


def _stage(trainers: Trainers, stage: int, batches: MicroBatches, passes: Passes) -> Cost:
    """Return the cost of one micro batch in one stage."""
    shape, megatron, device = trainers.shape, trainers.recipe.megatron, trainers.device
    layers = trainers.stages()[stage]
    flops = 2.0 * sum(shape.active_in(layer) for layer in layers) * batches.tokens * passes.weights
    flops += 2.0 * shape.attention.per_pair * len(layers) * batches.pairs * passes.pairs
    if trainers.output and stage == megatron.pipeline_parallel - 1:
        flops += 2.0 * shape.output * batches.tokens * passes.output
    compute = flops / (megatron.tensor_parallel * megatron.context_parallel) / (device.flops * device.train_share)
    links = sum(_layer_links(trainers, shape.sparse[layer], batches.tokens) for layer in layers) * passes.links
    return Cost(
        compute=compute,
        links=links + _stage_transfer(trainers, batches.tokens) * passes.stage_transfers,
        start=len(layers) * device.layer_seconds * passes.kernels,
    )


def _layer_links(trainers: Trainers, sparse: bool, tokens: float) -> float:
    """Return the seconds of communication of a layer in a forward pass over `tokens` of a micro batch.

    Tensor parallel: an all-gather and a reduce-scatter of the activations around attention and around a dense MLP (as many
    bytes as without sequence parallel; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). Context parallel: keys and
    values of the other parts. Mixture of experts: tokens to their experts and back, one copy per expert; with expert tensor
    parallelism they are gathered and summed.
    """
    shape, megatron, device = trainers.shape, trainers.recipe.megatron, trainers.device
    tensor, context, number = megatron.tensor_parallel, megatron.context_parallel, trainers.number
    experts, cut = megatron.expert_parallel, megatron.expert_tensor_parallel or 1
    activations = tokens / context * shape.hidden * number
    seconds = 2 * ring_seconds(device, activations, tensor) * (1 if sparse else 2)
    keys_and_values = tokens * shape.attention.keys_and_values / tensor * number
    seconds += ring_seconds(device, keys_and_values, context, tensor)
    if sparse:
        sent = activations / tensor * shape.chosen
        seconds += 2 * all_to_all_seconds(device, sent, experts * cut) * (experts > 1)
        seconds += 2 * ring_seconds(device, sent * cut, cut)
    return seconds


def _stage_transfer(trainers: Trainers, tokens: float) -> float:
    """Return the seconds of sending a micro batch's hidden states to the next stage, chunk by chunk."""
    megatron = trainers.recipe.megatron
    if megatron.pipeline_parallel == 1:
        return 0.0
    size = tokens / megatron.context_parallel / megatron.tensor_parallel * trainers.shape.hidden * trainers.number
    distance = trainers.world // megatron.pipeline_parallel
    return send_seconds(trainers.device, size, distance) * (megatron.virtual_pipeline or 1)


def _held(trainers: Trainers, stage: int) -> tuple[float, float]:
    """Return the parameters of a rank: (experts, others)."""
    shape, megatron = trainers.shape, trainers.recipe.megatron
    layers = trainers.stages()[stage]
    sparse = sum(shape.sparse[layer] for layer in layers)
    experts = (
        sparse * shape.experts * shape.expert / (megatron.expert_parallel * (megatron.expert_tensor_parallel or 1))
    )
    dense = sum(shape.total_in(layer) for layer in layers) - sparse * shape.experts * shape.expert
    ends = (stage == 0) + (trainers.output and stage == megatron.pipeline_parallel - 1)
    if megatron.pipeline_parallel == 1 and shape.tied:
        ends = 1
    return experts, (dense + ends * shape.output) / megatron.tensor_parallel


def _replicas(trainers: Trainers) -> tuple[int, int]:
    """Return the number of ranks with equal parameters: (experts, others)."""
    m = trainers.recipe.megatron
    each = trainers.world // m.pipeline_parallel
    return max(1, each // (m.expert_parallel * (m.expert_tensor_parallel or 1))), max(1, each // m.tensor_parallel)


def _shards(trainers: Trainers, stage: int) -> float:
    """Return the parameters with optimizer states on a rank."""
    held, replicas = _held(trainers, stage), _replicas(trainers)
    if not trainers.recipe.megatron.distributed_optimizer:
        return sum(held)
    return sum(size / copies for size, copies in zip(held, replicas, strict=True))


def _optimizer_step(trainers: Trainers) -> Cost:
    """Return the cost of an optimizer step.

    Gradients are reduced over ranks with equal parameters, each updates its share, and weights are gathered. Adam reads
    gradient, master weight and moments, and writes master weight, moments and weight. Adapters are too small to count.
    """
    if trainers.recipe.lora.rank:
        return Cost()
    device, megatron = trainers.device, trainers.recipe.megatron
    stages = range(len(trainers.stages()))
    experts, dense = max((_held(trainers, stage) for stage in stages), key=sum)
    copies_of_experts, copies = _replicas(trainers)
    stride = megatron.expert_parallel * (megatron.expert_tensor_parallel or 1)
    # Bytes per parameter on the way back: weights, or the second half of an all-reduce.
    back = trainers.number if megatron.distributed_optimizer else _GRADIENT
    links = ring_seconds(device, experts * (_GRADIENT + back), copies_of_experts, stride)
    links += ring_seconds(device, dense * (_GRADIENT + back), copies, megatron.tensor_parallel)
    share_of_rank = max(_shards(trainers, stage) for stage in stages)
    written = 2 if trainers.number == 2 else 0  # the weight, if it is not its own master
    touched = share_of_rank * (_GRADIENT + 2 * _STATES + written)
    swapped = 2 * _STATES * share_of_rank if swapped_parts(megatron.extra) else 0.0
    # Gradients to the host and weights back; the host's part of the update is not estimated.
    share = host_share(trainers.recipe.actor.optimizer)
    swapped += share * share_of_rank * (_GRADIENT + trainers.number)
    return Cost(
        links=links,
        memory=(1 - share) * touched / device.adam_rate,
        host=offload_seconds(device, swapped),
    )
