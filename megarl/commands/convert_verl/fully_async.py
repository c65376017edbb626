"""Options of verl's fully asynchronous trainer (verl/experimental/fully_async_policy/).

verl's actor updates the weights as soon as ppo_mini_batch_size x require_batches groups have finished. After
trigger_parameter_sync_step of these updates the engines receive the weights. This is a step of the recipe.
"""

from __future__ import annotations

from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.option import Option, no_counterpart
from megarl.commands.convert_verl.sampling import ARRIVAL, Updates
from megarl.commands.convert_verl.table import DEFAULTS
from megarl.errors import InputError

_A, _R, _ASYNC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "async_training"
_STALENESS, _PARTIAL = f"{_ASYNC}.staleness_threshold", f"{_ASYNC}.partial_rollout"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_TOTAL, _CONCURRENT = "rollout.total_rollout_steps", f"{_ASYNC}.concurrent_samples_per_replica"
_HYBRID = "the trainers' devices do not sample"
_UNREAD = "verl's fully asynchronous trainer does not read it"

FULLY_ASYNC = [
    Option("data.train_batch_size", "data.prompts_per_step", "0, as verl requires", derived=True),
    Option("data.gen_batch_size", "data.prompts_per_step", "1, as verl requires", derived=True),
    Option(_STALENESS, "rollout.max_staleness"),
    Option(f"{_ASYNC}.trigger_parameter_sync_step", "data.prompts_per_step, actor.mini_batches", "x require_batches x ppo_mini_batch_size prompts, and x require_batches mini batches: a step is an update of the engines' weights", derived=True),
    Option(f"{_ASYNC}.require_batches", "data.prompts_per_step, actor.mini_batches", "see trigger_parameter_sync_step", derived=True),
    Option(f"{_A}.ppo_mini_batch_size", "data.prompts_per_step, actor.mini_batches", "see trigger_parameter_sync_step", derived=True),
    Option(_PARTIAL, "rollout.at_update", "with a staleness_threshold above 0: True is refresh, False is drain", derived=True),
    Option(_CONCURRENT, None, "engines take all admitted requests; rollout.engine_args.max_num_seqs limits them"),
    *no_counterpart("samples are scored while others are sampled", f"{_ASYNC}.enable_reward_queue", f"{_ASYNC}.reward_queue_size"),
    Option(f"{_ASYNC}.use_trainer_do_validate", None, _HYBRID, same=(False,)),
    Option(f"{_ASYNC}.use_dynamic_resource_scheduling", None, _HYBRID, same=(False,)),
    Option(f"{_ASYNC}.dynamic_schedule_*", None, _HYBRID),
    Option(_TOTAL, "train.steps", "/ data.prompts_per_step; at most trainer.total_epochs x rows", derived=True),
    *(Option(f"rollout.{name}", "rollout.engines", "rollout.nnodes x rollout.n_gpus_per_node / tensor_model_parallel_size", derived=True) for name in ("nnodes", "n_gpus_per_node")),
    Option("rollout.*", None, _UNREAD),
    Option("trainer.total_training_steps", None, _UNREAD),
    Option(f"{_R}.standalone_gpu_memory_utilization", "rollout.engine_args.gpu_memory_utilization", "instead of gpu_memory_utilization", derived=True),
    Option("trainer.critic_warmup", "critic.warmup_steps", "/ trigger_parameter_sync_step: verl counts updates", derived=True),
    Option(f"{_A}.use_rollout_log_probs", None, _UNREAD, same=(True,)),
    Option(f"{_ASYNC}.use_rollout_log_probs", None, "log-probs of the engines are the old log-probs", same=(True,), changes=True),
    Option(f"{_ASYNC}.compute_prox_log_prob", "algorithm.old_log_probs", "True is computed, with the weights of the last update of the engines; False is rollout", names={True: "computed", False: "rollout"}),
    Option("actor_rollout_ref.hybrid_engine", None, "use cluster.placement", same=(False,)),
]  # fmt: skip
"""Options that precede the tables of other RL runs."""

FULLY_ASYNC_DEFAULTS: dict[str, Any] = DEFAULTS | {
    "algorithm.rollout_correction.bypass_mode": True, "data.gen_batch_size": 1, _TOTAL: 100, "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8, _STALENESS: 0.1, _PARTIAL: True, f"{_ASYNC}.trigger_parameter_sync_step": 4,
    f"{_ASYNC}.require_batches": 1, _CONCURRENT: 16,
}  # fmt: skip
"""Defaults of config/fully_async_ppo_trainer.yaml and fully_async_ppo_megatron_trainer.yaml."""
_OF_THE_BATCH = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "gpg")
"""Advantages with statistics of the whole batch."""


def read_updates(conversion: Conversion) -> Updates:
    """Return the updates of a step, and set `data.prompts_per_step`. Raises InputError for values that verl refuses."""
    for option, required in (("data.train_batch_size", 0), ("data.gen_batch_size", 1)):
        if (value := conversion.number(option)) != required:
            raise InputError(f"{conversion.where(option)}{option}={value}: fully_async_main needs {option}={required}")
    names = [f"{_ASYNC}.trigger_parameter_sync_step", f"{_ASYNC}.require_batches", f"{_A}.ppo_mini_batch_size"]
    count, batches, mini = (conversion.number(name) for name in names)
    for name, value in zip(names, (count, batches, mini), strict=True):
        if value < 1:
            raise InputError(f"{conversion.where(name)}{name}={value} is below 1")
    conversion.settings["data.prompts_per_step"] = count * batches * mini
    return Updates(batches * mini, count, "ppo_mini_batch_size x require_batches")


def translate_fully_async(conversion: Conversion, updates: Updates, *, megatron: bool, rows: int | None) -> None:
    """Set staleness, the rule at an update of the weights, and the number of steps; note what differs from verl.

    updates: see `read_updates`. megatron, rows: see `translate_rl`.
    """
    conversion.notes.append(ARRIVAL)
    if _CONCURRENT not in conversion.options:  # an option of the command has a note
        conversion.notes.append(
            f"verl runs at most {conversion.get(_CONCURRENT)} groups per engine (concurrent_samples_per_replica); here engines "
            "get all admitted groups at once, and rollout.engine_args.max_num_seqs limits the requests that run"
        )
    if _BYPASS not in conversion.options:
        conversion.note(
            _BYPASS, "algorithm.old_log_probs=rollout; in verl of January 2026 it was False, which is computed"
        )
    warmup = conversion.get("trainer.critic_warmup") or 0
    if warmup:
        conversion.settings["critic.warmup_steps"] = -(-warmup // updates.count)
    memory = conversion.get(f"{_R}.standalone_gpu_memory_utilization")
    if memory is not None:
        conversion.settings["rollout.engine_args.gpu_memory_utilization"] = memory
    _at_update(conversion)
    _steps(conversion, updates, rows)
    _filter(conversion)
    note_batches(conversion, updates)
    _schedule(conversion, megatron=megatron)


def _at_update(conversion: Conversion) -> None:
    """Set `rollout.at_update`. Without staleness no request runs at an update."""
    settings, staleness = conversion.settings, conversion.get(_STALENESS)
    if isinstance(staleness, bool) or not isinstance(staleness, int | float) or staleness < 0:
        raise InputError(f"{conversion.where(_STALENESS)}{_STALENESS}={staleness} is not a number of at least 0")
    if not staleness:
        return
    if not conversion.is_on(_PARTIAL):
        settings["rollout.at_update"] = "drain"
        conversion.note(
            _PARTIAL,
            "requests finish before an update, as verl's documentation says; its code (llm_server.py:451) ends them and "
            "trains on the cut responses",
        )
        return
    reason = ""
    if settings.get("rollout.engine") == "sglang":
        reason = "SGLang ends running requests at an update"
    elif settings.get("megatron.routing_replay") == "rollout":
        reason = "requests that continue after an update lose the recorded experts of earlier tokens"
    settings["rollout.at_update"] = "drain" if reason else "refresh"
    if reason:
        conversion.leave_out(_PARTIAL, f"{reason}: they finish first", to="rollout.at_update", changes=True)


def _steps(conversion: Conversion, updates: Updates, rows: int | None) -> None:
    """Set `train.steps` from the number of sampled prompts, unless it is unknown (`translate.common` notes it then)."""
    prompts, epochs = conversion.get(_TOTAL), "trainer.total_epochs"
    if prompts is not None:
        prompts = conversion.number(_TOTAL)
    if rows is not None:
        available = rows * conversion.number(epochs)
        prompts = available if prompts is None else min(prompts, available)
    elif prompts is not None:
        conversion.note(
            epochs, f"verl samples at most this value x rows prompts; pass --rows if that is below {prompts}"
        )
    if prompts is None:
        return
    steps, rest = divmod(prompts // updates.prompts, updates.count)
    if not steps and "train.steps" not in conversion.user_choices:
        raise InputError(
            f"{conversion.where(_TOTAL)}{prompts} prompts are less than a step of {updates.prompts * updates.count}: raise "
            f"{_TOTAL} or give train.steps=VALUE after the file"
        )
    conversion.settings["train.steps"] = max(steps, 1)
    if rest:
        conversion.note(
            _TOTAL, f"train.steps={steps} leaves out verl's last {rest} updates, which are less than a step"
        )


def _filter(conversion: Conversion) -> None:
    """Leave out dynamic sampling, which the trainer does not read."""
    conversion.drop("algorithm.dynamic_sampling.")
    option = "algorithm.filter_groups.enable"
    if conversion.is_on(option):
        conversion.note(option, f"not used: {_UNREAD}")


def note_batches(conversion: Conversion, updates: Updates) -> None:
    """Note quantities that verl computes for each of several updates of a step, and megarl for the step."""
    settings = conversion.settings
    if updates.count == 1:
        return
    parts = {
        "statistics of advantages": settings.get("algorithm.advantage") in _OF_THE_BATCH,
        "values": settings.get("algorithm.advantage") == "gae",
        "normalization of correction weights": settings.get("algorithm.correction.normalize") is True,
        "passes of ppo_epochs": int(settings.get("actor.epochs", 1)) > 1,
        "adaptive KL coefficient": bool(settings.get("algorithm.kl_target")),
    }
    if present := [part for part, is_used in parts.items() if is_used]:
        conversion.notes.append(
            f"{', '.join(present)}: of the whole step of {updates.prompts * updates.count} prompts; in verl of an update of "
            f"{updates.prompts}"
        )


def _schedule(conversion: Conversion, *, megatron: bool) -> None:
    """Apply that verl builds the learning-rate schedules before it knows the number of steps (fully_async_trainer.py:363).

    A warm-up by ratio then has no steps, and FSDP's decay oscillates. Megatron's schedules read lr_decay_steps. A command that
    gives the number of steps to the optimizer is refused.
    """
    for role, section in ((_A, "actor"), ("critic", "critic")):
        has_critic = conversion.settings.get("algorithm.advantage") == "gae"
        if (section == "critic" and not has_critic) or (megatron and conversion.get(f"{role}.optim.lr_decay_steps")):
            continue
        length = f"{role}.optim.total_training_steps"
        if (conversion.get(length) or 0) > 0:
            reason = "verl's schedules have this length in updates"
            conversion.leave_out(length, reason, to=f"{section}.optimizer.warmup_steps", changes=True)
            continue
        ratio, key = f"{role}.optim.lr_warmup_steps_ratio", f"{section}.optimizer.decay"
        if ratio in conversion.options and (conversion.get(f"{role}.optim.lr_warmup_steps") or 0) <= 0:
            conversion.note(ratio, "no warm-up: verl's schedule lacks the number of steps here")
            del conversion.options[ratio]
        if conversion.settings.get(key, "constant") != "constant":
            reason = "verl's schedule lacks the number of steps here, so that the rate oscillates"
            conversion.leave_out(conversion.origins[key], reason, to=key)
            del conversion.settings[key]
