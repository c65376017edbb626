"""Phases that need more memory than a device has: the arithmetic, and the key that matters. Pure."""

from __future__ import annotations

from megarl.commands.plan.count.types import Place, Refusal, Use
from megarl.commands.plan.show.units import GIB, Unit

_REMEDY = "change it, or the layout; megarl plan --search looks for layouts that fit"


def too_large(places: list[Place], memory: float) -> list[Refusal]:
    """One of each place whose peak is above `memory` GiB."""
    refusals = []
    for place in places:
        use = place.peak
        if use.total <= memory * GIB:
            continue
        unit = Unit.of(use.total)
        what = (
            f"{place.name} needs {unit.tenths(use.total)} {unit.name} in {use.phase}: {arithmetic(use, unit)}; there are "
            f"{unit.whole(memory * GIB)}"
        )
        if use.phase == "gen":
            refusals.append(_of_engine(use, what, memory))
        else:
            refusals.append(Refusal(_key(use), what, _REMEDY))
    return refusals


def arithmetic(use: Use, unit: Unit) -> str:
    """ "weights 12.1 + gradients 12.1": the largest first, what would be 0.0 left out."""
    parts = sorted(use.parts.items(), key=lambda part: -part[1])
    return " + ".join(f"{name} {unit.tenths(size)}" for name, size in parts if size / unit.size >= 0.05)


def _of_engine(use: Use, what: str, memory: float) -> Refusal:
    """Engines take a share of the device whoever else is there."""
    own = sum(size for part, size in use.parts.items() if part in ("engine weights", "KV cache", "engine's step"))
    others = use.total - own
    stayed = {"actor": "megatron.offload", "critic": "critic.megatron.offload"}
    keys = [key for role, key in stayed.items() if f"{role}'s weights" in use.parts]
    if keys:
        wanted = " and ".join(f"{key}=true" for key in keys)
        return Refusal(keys[0], what, f"set {wanted}: trainers then leave the device while engines sample")
    share = (memory * GIB - others) / (memory * GIB)
    key = "rollout.engine_args.gpu_memory_utilization"
    return Refusal(key, what, f"set it to {max(0.0, share - 0.01):.2f} or less")


def _key(use: Use) -> str:
    """The setting of what takes the most."""
    role = "critic" if "critic" in use.phase else "actor"
    megatron = "critic.megatron" if role == "critic" else "megatron"
    largest = max(use.parts, key=lambda part: use.parts[part])
    if largest.startswith(("actor's", "critic's")):  # who does not compute has stayed
        return "megatron.offload" if largest.startswith("actor") else "critic.megatron.offload"
    batch = f"{role}.max_tokens_per_micro_batch"
    keys = {"activations": batch, "logits": batch, "exchange buffers": "exchange.bucket_mb"}
    return keys.get(largest, f"{megatron}.pipeline_parallel")
