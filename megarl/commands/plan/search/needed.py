"""Arithmetic of the devices that a model needs: which engines hold its weights, and how many devices are enough. Pure."""

from __future__ import annotations

from dataclasses import replace

from megarl.commands.plan.count.engines import policy_engine
from megarl.commands.plan.search.fits import Subject
from megarl.commands.plan.search.layouts import (
    EngineLayout,
    apply_choice,
    choice_of,
    engine_layouts,
    layouts,
    sizes_of_micro_batches,
    with_engines,
)
from megarl.commands.plan.search.lower_bound import min_peak_bytes
from megarl.errors import InputError

_ROOMY = 0.7  # of an engine's memory, for its weights: the rest is for the cache and steps, which are not counted here
_MOST_DEVICES = 4096  # largest number that is tried


def engine_weights(subject: Subject, engines: EngineLayout) -> float:
    """Return a lower bound of the bytes of weights on an engine's device."""
    recipe = with_engines(subject.recipe, engines)
    rollout, routed = recipe.rollout, subject.shape.routed
    if "quantization" in rollout.engine_args:  # of unknown width
        return 0.0
    whole = 4 if (rollout.dtype or recipe.model.dtype) == "float32" else 2
    width = 1 if rollout.quantization else whole
    spread = rollout.tensor_parallel * (rollout.data_parallel if rollout.spreads_experts else 1)
    return width * ((subject.shape.total - routed) / rollout.tensor_parallel + routed / spread)


def engine_room(subject: Subject) -> float:
    """Return the bytes of a device that an engine may use for weights, cache and steps."""
    limits = policy_engine(subject.recipe).limits
    if limits.cache is not None:
        return subject.limit - limits.cache
    return subject.limit * (1.0 if limits.share is None else limits.share)


def holds_weights(subject: Subject, engines: EngineLayout) -> bool:
    """Return False if engines of this layout certainly lack memory for the weights."""
    return subject.recipe.train.source != "rollout" or engine_weights(subject, engines) < engine_room(subject)


def engines_that_hold(subject: Subject) -> list[EngineLayout]:
    """Return the engine layouts of the recipe's devices that hold the weights, the recipe's first if it is among them. Raises
    InputError if there is none."""
    candidates = engine_layouts(subject.recipe, subject.model, subject.device.per_node)
    fitting = [engines for engines in candidates if holds_weights(subject, engines)]
    if not fitting:
        why = shortage(subject) or "Give rollout.engine_args a larger share of the device, or use more devices."
        raise InputError(f"No engine layout on these devices has room for the model's weights. {why}")
    return fitting


def nearest_engines(subject: Subject) -> EngineLayout:
    """Return the recipe's engines if they hold the weights. Else prefer layouts that leave room for the cache, then those with
    the fewest changes. Raises as `engines_that_hold`."""
    current, room = choice_of(subject.recipe).engines, engine_room(subject)

    def cost(engines: EngineLayout) -> tuple[bool, bool, int]:
        changes = sum(value != getattr(current, key) for key, value in vars(engines).items())
        return engines != current, engine_weights(subject, engines) > _ROOMY * room, changes

    return min(engines_that_hold(subject), key=cost)


def shortage(subject: Subject) -> str | None:
    """Return a sentence with the devices that trainers and an engine need by arithmetic, if the recipe has fewer; else None."""
    recipe, parts = subject.recipe, []
    trainers = trainers_needed(subject)
    if trainers is None or trainers > recipe.cluster.trainers:
        needed = f"more than {_MOST_DEVICES:,}" if trainers is None else f"about {trainers:,}"
        parts.append(f"the trainers need {needed} (cluster.trainers is {recipe.cluster.trainers:,})")
    if recipe.train.source == "rollout":
        engine, present = engine_needed(subject), recipe.rollout.engines * recipe.rollout.tensor_parallel
        present = recipe.cluster.trainers if recipe.cluster.placement == "colocated" else present
        if engine is None or engine > present:
            needed = f"more than {_MOST_DEVICES:,}" if engine is None else f"about {engine:,}"
            parts.append(
                f"an engine, or a group of engines that share the experts, needs {needed} for its weights alone "
                f"(rollout.tensor_parallel x rollout.data_parallel; engines have {present:,})"
            )
    device = subject.device
    return f"Too few devices: by arithmetic, with {device.memory:g} GiB each, {'; '.join(parts)}." if parts else None


def trainers_needed(subject: Subject) -> int | None:
    """Return the smallest number of whole machines' devices on which the lower bound of a layout fits; None: more than are
    tried."""
    for devices in _sizes(subject):
        if 2 * subject.shape.total > devices * subject.limit:  # not even the weights: spares the layouts
            continue
        recipe = replace(subject.recipe, cluster=replace(subject.recipe.cluster, trainers=devices))
        choice = replace(choice_of(recipe), recompute="full", offload=True)
        for layout in layouts(recipe, subject.model, subject.device.per_node):
            if layout.virtual_pipeline is None:
                smallest = replace(choice, layout=layout, tokens=sizes_of_micro_batches(recipe, layout)[0])
                if min_peak_bytes(apply_choice(recipe, smallest), subject.shape) <= subject.limit:
                    return devices
    return None


def engine_needed(subject: Subject) -> int | None:
    """Return the devices of the smallest engine, or group of engines, that holds the weights; None: more than are tried."""
    powers = [2**power for power in range(_MOST_DEVICES.bit_length())]
    sizes = (
        tensor * engines
        for tensor in powers
        for engines in (powers if subject.shape.experts else [1])
        if tensor <= subject.device.per_node and tensor * engines <= _MOST_DEVICES
        if holds_weights(subject, EngineLayout(engines, tensor, engines, None))
    )
    return min(sizes, default=None)


def _sizes(subject: Subject) -> list[int]:
    """Return numbers of devices to try: of one machine, of machines by powers of two and their halves in between, and the
    recipe's."""
    node = subject.device.per_node
    machines = [number for power in range(_MOST_DEVICES.bit_length()) for number in (2**power, 3 * 2**power)]
    parts = [2**power for power in range(node.bit_length()) if 2**power < node]
    whole = [node * number for number in machines if node * number <= _MOST_DEVICES]
    return sorted({*parts, *whole, subject.recipe.cluster.trainers})
