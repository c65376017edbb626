"""Sampling of verl's trainers: devices of the engines, staleness, and updates of the actor per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.entry_points import Kind
from megarl.commands.convert_verl.option import Option
from megarl.errors import InputError

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_V1, _FLOW, _DEVICES = "trainer.v1", "async_flow", "async_resources"
_MODE = f"{_V1}.trainer_mode"
_TRAINER, _ROLLOUT = ("trainer.nnodes", "trainer.n_gpus_per_node"), ("rollout.nnodes", "rollout.n_gpus_per_node")
_STEPS_OFF = {"one_step_off": 1, "two_step_off": 2}

OF_SAMPLING = [
    Option(_MODE, "cluster.placement, rollout.max_staleness", "sync; colocate_async and separate_async with num_warmup_batches as staleness", derived=True),
    Option(f"{_V1}.*.num_warmup_batches", "rollout.max_staleness", "with the trainer_mode of the same name", derived=True),
    Option(f"{_V1}.separate_async.parameter_sync_step", "actor.mini_batches", "with trainer_mode=separate_async: data.train_batch_size is this x ppo_mini_batch_size", derived=True),
    *(Option(f"{_R}.{name}", "rollout.engines", "with trainer_mode=separate_async", derived=True) for name in ("nnodes", "n_gpus_per_node")),
    Option(f"{_V1}.sampler.max_off_policy_*", None, "no group is dropped: rollout.max_staleness and rollout.window bound the lag", differs=True),
    Option(f"{_V1}.separate_async.hybrid_rollout.enable_switch", None, "the trainers' devices do not sample", same=(False,)),
    Option(f"{_V1}.separate_async.hybrid_rollout.*", None, "the trainers' devices do not sample"),
    Option("trainer.use_v1", None, "it selects one of verl's implementations"),
    Option(f"{_V1}.*", None, "megarl has no counterpart", changes=True),
    Option("transfer_queue.*", None, "it selects one of verl's implementations"),
]  # fmt: skip
"""Options of main_ppo about sampling ahead of the updates."""

PARTIAL_ROLLOUT = [
    Option("async_training.partial_rollout", None, "rollout.max_staleness=1 with colocated engines continues running requests", same=(True,), changes=True),
]  # fmt: skip
"""Options of recipe/partial_rollout that precede the tables of other RL runs."""

ASYNC_FLOW = [
    Option(f"{_FLOW}.staleness", "rollout.max_staleness", derived=True),
    Option(f"{_FLOW}.wait_for_inflight_requests", "rollout.at_update", "True is drain, False is refresh", derived=True),
    *(Option(f"{_FLOW}.{name}", None, "a micro batch is filled with whatever samples are ready") for name in ("ref_experience_count", "fwd_experience_count", "reward_experience_count")),
    *(Option(f"{_FLOW}.{name}", None, "requests continue after every update") for name in ("experience_topic", "rollout_max_resume_attempts")),
    *(Option(f"{_DEVICES}.actor_train.{name}", "cluster.trainers", derived=True) for name in ("nnodes", "n_gpus_per_node")),
    Option(f"{_DEVICES}.*", None, "the trainers compute old log-probs, reference log-probs and advantages"),
    *(Option(name, "rollout.engines", "trainer.nnodes x trainer.n_gpus_per_node / tensor_model_parallel_size", derived=True) for name in _TRAINER),
    *(Option(f"trainer.{name}", None, "verl's async_flow does not evaluate") for name in ("test_freq", "val_before_train")),
    *(Option(name, None, "verl's async_flow does not read it") for name in ("rule_reward.*", f"{_A}.ppo_epochs")),
]  # fmt: skip
"""Options of recipe/async_flow that precede the tables of other RL runs."""

ASYNC_FLOW_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 16, "data.max_prompt_length": 1024, "data.max_response_length": 1024,
    f"{_A}.optim.lr_warmup_steps_ratio": 0.03, f"{_A}.ppo_mini_batch_size": 1,
    f"{_A}.ppo_micro_batch_size_per_gpu": 4, f"{_R}.n": 8, f"{_R}.tensor_model_parallel_size": 1,
    f"{_FLOW}.staleness": 1, f"{_FLOW}.wait_for_inflight_requests": False, f"{_DEVICES}.actor_train.nnodes": 1,
    f"{_DEVICES}.actor_train.n_gpus_per_node": 4, "trainer.n_gpus_per_node": 2, "trainer.save_freq": 20,
    "trainer.total_epochs": 5, "trainer.val_before_train": False,
}  # fmt: skip
"""Defaults of recipe/async_flow/config/async_grpo.yaml."""


ARRIVAL = (
    "verl trains on groups in the order of their arrival; here a group overtakes older ones only within rollout.window, and "
    "with rollout.at_update=drain batches are in admission order"
)
"""Note of runs in which groups overtake each other."""


@dataclass(frozen=True)
class Updates:
    """Calls of verl's update_actor. prompts: in each call. count: calls per step of the recipe. origin: of `prompts`."""

    prompts: int
    count: int = 1
    origin: str = "data.train_batch_size"


@dataclass(frozen=True)
class TrainerSampling:
    """Sampling of a trainer.

    trainers, engines: pairs of options; the product of a pair is a number of devices. engines=None: on the trainers' devices.
    ahead: as `rollout.max_staleness`, at_update: as `rollout.at_update`; None: the tables or another function set both.
    """

    trainers: tuple[str, str] = _TRAINER
    engines: tuple[str, str] | None = None
    ahead: float | None = None
    at_update: str = ""


def sampling_of(conversion: Conversion, kind: Kind) -> TrainerSampling:
    """Return the sampling of a trainer of `kind` with the command's options. Raises InputError for an unknown mode."""
    get, mode = conversion.get, conversion.get(_MODE, "sync")
    if kind == "one_step_off":
        return TrainerSampling(engines=_ROLLOUT, ahead=1, at_update="drain")
    if kind == "fully_async":
        return TrainerSampling(engines=_ROLLOUT)
    if kind == "partial_rollout":
        return TrainerSampling(ahead=1, at_update="refresh")
    if kind == "distillation":
        option = "trainer.scheduler"
        steps = get(option)
        if steps not in _STEPS_OFF:
            raise InputError(f"{conversion.where(option)}{option}={steps} is neither one_step_off nor two_step_off")
        return TrainerSampling(engines=_ROLLOUT, ahead=_STEPS_OFF[steps], at_update="drain")
    if kind == "async_flow":
        trainers, ahead = (
            (f"{_DEVICES}.actor_train.nnodes", f"{_DEVICES}.actor_train.n_gpus_per_node"),
            get(f"{_FLOW}.staleness"),
        )
        rule = "refresh" if ahead and not conversion.is_on(f"{_FLOW}.wait_for_inflight_requests") else "drain"
        return TrainerSampling(trainers, _TRAINER, ahead, rule)
    if mode == "sync":
        return TrainerSampling()
    if mode not in ("colocate_async", "separate_async"):
        raise InputError(f"{conversion.where(_MODE)}{_MODE}={mode} is none of sync, colocate_async, separate_async")
    ahead = get(f"{_V1}.{mode}.num_warmup_batches", 1)
    rule = "refresh" if ahead else "drain"
    engines = (f"{_R}.nnodes", f"{_R}.n_gpus_per_node") if mode == "separate_async" else None
    return TrainerSampling(engines=engines, ahead=ahead, at_update=rule)


def updates_of(conversion: Conversion, kind: Kind) -> Updates:
    """Return the updates of a step, except for fully asynchronous trainers. Raises InputError for sizes that verl refuses."""
    batch, mini = conversion.number("data.train_batch_size"), conversion.number(f"{_A}.ppo_mini_batch_size")
    if kind == "async_flow" and mini and batch % mini == 0:
        return Updates(mini, batch // mini, "ppo_mini_batch_size")  # an update for each mini batch
    if conversion.get(_MODE) != "separate_async":
        return Updates(batch)
    option = f"{_V1}.separate_async.parameter_sync_step"
    count = conversion.number(option, 4)
    if batch != count * mini:
        raise InputError(
            f"{conversion.where(option)}data.train_batch_size={batch} is not {option}={count} x ppo_mini_batch_size={mini}, "
            "which separate_async requires"
        )
    return Updates(mini, count, "ppo_mini_batch_size")
