"""Devices of verl's trainers and engines, their parallelism, intervals, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.sampling import TrainerSampling
from megarl.errors import InputError
from megarl.recipe.load import OPEN
from megarl.recipe.trainers import CriticOptimizerConfig, OptimizerConfig

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def devices_of(conversion: Conversion, options: tuple[str, str]) -> int | str:
    """Return the product of two options, or OPEN if one of them is open."""
    if OPEN in map(conversion.get, options):
        return OPEN
    return math.prod(map(conversion.number, options))


def machines_of(pools: Sequence[tuple[Any, Any]]) -> tuple[int, int] | None:
    """Return the number of machines and the devices of each, for pools of nodes x devices per node; None if they are unknown.

    Pools are on the same machines if these have few enough devices: 8, or 16 for pools that differ.
    """
    if not all(isinstance(size, int) and size > 0 for pool in pools for size in pool):
        return None
    nodes, devices = [pool[0] for pool in pools], [pool[1] for pool in pools]
    differ = len({*devices}) > 1
    if len({*nodes}) == 1 and (sum(devices) <= 8 or (differ and sum(devices) == 16)):
        return nodes[0], sum(devices)
    return None if differ else (sum(nodes), devices[0])


def translate_layout(conversion: Conversion, *, megatron: bool, sampling: TrainerSampling) -> None:
    """Set the trainers, the engines and their parallelism. `megatron`: verl's actor uses Megatron, not FSDP."""
    settings, get = conversion.settings, conversion.get
    settings["cluster.trainers"] = devices_of(conversion, sampling.trainers)
    devices = settings["cluster.trainers"]
    pools = [sampling.trainers, *([sampling.engines] if sampling.engines else [])]
    if get("distillation.nnodes"):
        pools.append(("distillation.nnodes", "distillation.n_gpus_per_node"))
    conversion.machines = machines_of([(get(nodes), get(each)) for nodes, each in pools])
    offload = offloaded(conversion, f"{_A}.")
    if sampling.engines:
        devices = devices_of(conversion, sampling.engines)
        settings["cluster.placement"] = "disaggregated"
        for name in offload:
            conversion.note(name, "trainers do not share their devices: nothing is offloaded")
    elif offload:
        settings["megatron.offload"] = True
    if sampling.ahead is not None:
        settings |= {"rollout.max_staleness": sampling.ahead, "rollout.at_update": sampling.at_update}
    size = conversion.number(f"{_R}.tensor_model_parallel_size")
    if isinstance(devices, int) and devices % size:
        raise InputError(f"{devices} devices are not a multiple of rollout.tensor_model_parallel_size={size}")
    engines = devices // size if isinstance(devices, int) else OPEN
    settings |= {"rollout.tensor_parallel": size, "rollout.engines": engines}
    if conversion.number(f"{_R}.expert_parallel_size", 1) > 1 and settings.get("rollout.data_parallel", 1) == 1:
        settings["rollout.expert_parallel"] = True
    if megatron:
        translate_router_losses(conversion, f"{_A}.megatron.", "megatron")
        if settings.get("megatron.expert_parallel", 1) > 1:
            size_of_experts = get(f"{_A}.megatron.expert_tensor_parallel_size")
            settings["megatron.expert_tensor_parallel"] = size_of_experts or settings.get("megatron.tensor_parallel", 1)
        return
    settings.setdefault("megatron.recompute", "full")
    size = conversion.number(f"{_A}.ulysses_sequence_parallel_size", 1)
    settings["megatron.tensor_parallel"] = size
    if size > 1:
        conversion.note(
            f"{_A}.ulysses_sequence_parallel_size", f"megatron.tensor_parallel={size}, which also splits sequences"
        )
    else:
        conversion.notes.append(
            "the actor uses FSDP: megatron.tensor_parallel is 1, so each device holds all weights and gradients; raise it "
            "if these do not fit"
        )


def translate_router_losses(conversion: Conversion, prefix: str, section: str) -> None:
    """Set `moe_aux_loss_coef` of a recipe's section from the options of verl's Megatron engine below `prefix`."""
    config, get = f"{prefix}override_transformer_config", conversion.get
    option, kind = f"{config}.moe_aux_loss_coeff", get(f"{config}.moe_router_load_balancing_type")
    if not (coefficient := get(option)):
        return
    if kind == "none" or (kind is None and conversion.is_on(f"{prefix}vanilla_mbridge")):
        conversion.note(
            option, f"{section}.moe_aux_loss_coef=0: verl's router has no balancing, so that it has no effect"
        )
        return
    conversion.settings[f"{section}.moe_aux_loss_coef"] = coefficient
    conversion.note(
        option,
        f"{section}.moe_aux_loss_coef={coefficient}: of each sequence; Megatron's aux_loss is of a micro batch. Set 0 if the model's "
        "bridge in verl turns balancing off",
    )


def offloaded(conversion: Conversion, prefix: str) -> list[str]:
    """Return the command's offload options below `prefix` that are on."""
    return [
        name
        for name, option in conversion.options.items()
        if name.startswith(prefix) and name.endswith("_offload") and option.value
    ]


def translate_schedule(conversion: Conversion, section: str, optimizer: str, updates: int, *, megatron: bool) -> None:
    """Derive the learning-rate schedule in `section`. verl's advances once per training step, of `updates` optimizer steps.

    Source: verl/utils/megatron/optimizer.py:249, verl/workers/engine/veomni/transformer_impl.py:290.
    """
    settings, veomni = conversion.settings, conversion.get("model_engine") == "veomni"
    if veomni:
        settings.setdefault(f"{section}.decay", "cosine")  # verl/trainer/config/optim/veomni.yaml
    warmup, decay = (int(conversion.get(f"{optimizer}.lr_{name}_steps") or -1) for name in ("warmup", "decay"))
    ratio = conversion.get(f"{optimizer}.lr_warmup_steps_ratio", 0)
    rate = float(settings.get(f"{section}.lr", _default_rate(section)))
    steps = decay if megatron and decay > 0 else settings.get("train.steps")
    if veomni and warmup > 0:
        conversion.note(f"{optimizer}.lr_warmup_steps", "not used: verl's VeOmni reads lr_warmup_steps_ratio")
    elif warmup > 0:
        settings[f"{section}.warmup_steps"] = warmup * updates
    if ratio and (veomni or warmup <= 0) and steps is not None:
        settings[f"{section}.warmup_steps"] = int(ratio * steps * updates)
    elif ratio and (veomni or warmup <= 0):
        conversion.note(
            f"{optimizer}.lr_warmup_steps_ratio", f"the number of steps is unknown: set {section}.warmup_steps"
        )
    first = conversion.get(f"{optimizer}.init_lr_ratio") or (conversion.get(f"{optimizer}.lr_warmup_init") or 0) / rate
    if first and settings.get(f"{section}.warmup_steps"):
        settings[f"{section}.init_lr_ratio"] = float(f"{first:.12g}")
    if settings.get(f"{section}.decay", "constant") == "constant":
        return
    if decay > 0:
        settings[f"{section}.decay_steps"] = decay * updates
    if lowest := conversion.get(f"{optimizer}.min_lr"):
        settings[f"{section}.min_lr_ratio"] = float(lowest) / rate


def _default_rate(section: str) -> float:
    """Return megarl's default learning rate of the actor's or the critic's optimizer."""
    return (CriticOptimizerConfig() if section.startswith("critic") else OptimizerConfig()).lr


def frequency(conversion: Conversion, option: str, rows: int | None) -> int:
    """Return a number of steps: below 1 for never, and -2 for the end of each epoch if its length is unknown."""
    value = conversion.get(option, -1)
    if value is False:
        return -1
    if value != "after_each_epoch":
        return conversion.number(option, -1)
    batch = conversion.settings["data.prompts_per_step"]
    if rows is not None:
        return max(rows // batch, 1)
    key = "evaluation.every" if option == "trainer.test_freq" else "train.save_every"
    conversion.note(option, f"at the end of the run: for each epoch, set {key} to rows / {batch}, or pass --rows")
    return -2
