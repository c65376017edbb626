"""Device memory of libraries: communicators, process contexts, captured graphs. Pure.

Figures per device are in devices.yaml, each with its source or "assumed". Groups are derived from the layout; a group with
one rank has no communicator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.commands.plan.count.types import EngineRank, PipelineStage
from megarl.commands.plan.environment import device_kind, environment_of
from megarl.commands.plan.show.units import GIB, MIB
from megarl.platform.device_table import Device
from megarl.platform.kinds import kind_of
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.schema import Recipe, RolloutConfig
from megarl.recipe.trainers import MegatronConfig

COMMUNICATORS, CONTEXTS, GRAPHS, RECOMPUTED = "communicators", "contexts", "graphs", "recomputed weights"
LEGEND = (
    "Counted in addition to tensors: communicators (groups of the layout x device.communicator), contexts (of each process), "
    "graphs of engines that capture them, and weights that MLA recomputes at the first update. None of it was "
    "measured on a device."
)


@dataclass(frozen=True)
class Libraries:
    """Bytes on a device, equal in all phases. Roles: "actor", "critic", "rollout"."""

    communicators: Mapping[str, int] = field(default_factory=dict)
    context: int = 0  # per process
    graphs: int = 0  # per engine process

    def of(self, occupants: Iterable[PipelineStage | EngineRank]) -> dict[str, int]:
        """Return the libraries' memory of the processes that share a device; empty if libraries are not counted."""
        parts = {COMMUNICATORS: 0, CONTEXTS: 0, GRAPHS: 0, RECOMPUTED: 0}
        for occupant in occupants:
            role = occupant.role if isinstance(occupant, PipelineStage) else "rollout"
            parts[COMMUNICATORS] += self.communicators.get(role, 0)
            parts[CONTEXTS] += self.context
            if isinstance(occupant, EngineRank):
                parts[GRAPHS] += self.graphs
                parts[RECOMPUTED] += occupant.recomputed
        return {name: size for name, size in parts.items() if size}


NOT_COUNTED = Libraries()


def counted_libraries(recipe: Recipe, models: Mapping[str, dict[str, Any]], device: Device | None) -> Libraries:
    """Return the libraries' memory with the buffer sizes (MiB) of the recipe, its layout and this shell. Empty on a CPU and
    without a device. `models`: section -> config.json."""
    name = device_kind(recipe.cluster, device)
    if device is None or name is None or kind_of(name).ray_resource is None:
        return NOT_COUNTED
    buffer = kind_of(name).buffer_variable
    sizes = {
        variable.role: 2 * int(variable.value)
        for variable in environment_of(recipe, models, device)
        if buffer and variable.name == buffer and variable.value.isdecimal()
    }
    of_trainers = sizes.get("trainers", device.communicator)
    critic = critic_view(recipe)
    groups = {
        "actor": trainer_groups(recipe.megatron, recipe.cluster.trainers) * of_trainers,
        "critic": trainer_groups(critic.megatron, critic.cluster.trainers) * of_trainers,
        "rollout": _of_engines(recipe.rollout, device.communicator, sizes.get("engines", device.communicator)),
    }
    communicators = {role: round(size * MIB) for role, size in groups.items()}
    graphs = 0.0 if recipe.rollout.engine_args.get("enforce_eager") else device.graphs
    return Libraries(communicators, round(device.context * GIB), round(graphs * GIB))


def trainer_groups(megatron: MegatronConfig, world: int) -> int:
    """Count a trainer's process groups of more than one rank (megatron/core/parallel_state.py).

    World, tensor, context, pipeline, data (with context) and model parallel (for the gradient norm); for experts: expert,
    expert tensor, expert data and expert model parallel.
    """
    tensor, pipeline, context = megatron.tensor_parallel, megatron.pipeline_parallel, megatron.context_parallel
    experts, cut = megatron.expert_parallel, megatron.expert_tensor_parallel or 1
    sizes = [world, tensor, context, pipeline, world // (tensor * pipeline), tensor * pipeline]
    if experts > 1 or cut > 1:
        sizes += [experts, cut, world // (experts * cut * pipeline), experts * cut * pipeline]
    return sum(size > 1 for size in sizes)


def _of_engines(rollout: RolloutConfig, each: float, of_dispatch: float) -> float:
    """Return MiB of an engine rank's communicators: world, tensor and data parallel; if experts are spread, also the
    expert group and its dispatch, which alone has the buffer size of the environment."""
    ranks = rollout.tensor_parallel * rollout.data_parallel
    sizes = [ranks, rollout.tensor_parallel, rollout.data_parallel]
    spread = rollout.spreads_experts and ranks > 1
    return each * (sum(size > 1 for size in sizes) + spread) + of_dispatch * spread
