"""Options of an RL run that verl does not read."""

from __future__ import annotations

from collections.abc import Collection

from megarl.commands.convert_verl.table import OF_POLICY_LOSS

_A = "actor_rollout_ref.actor"


def unread_options(
    options: Collection[str], *, megatron: bool, loss: str, critic: bool, trains: bool = True
) -> dict[str, str]:
    """Return the reasons why verl does not read some options of an RL run, by option.

    options: the options of the command. megatron: see `translate_rl`. loss: megarl's name of the loss. critic: the run has
    one. trains: the run is more than an evaluation.
    Source: verl/trainer/ppo/core_algos.py (ratios), verl/utils/megatron/optimizer.py:130, verl/trainer/ppo/utils.py:160.
    """
    ratios = {"clip_cov", "kl_cov"} - {loss}
    unread = {f"{_A}.policy_loss.{mode}_ratio": f"verl reads it with loss_mode={mode}" for mode in ratios}
    if not trains:
        unread["data.train_max_samples"] = "the run only evaluates"
    if megatron:
        unread["actor_rollout_ref.model.enable_gradient_checkpointing"] = (
            "verl's Megatron actor ignores it and uses override_transformer_config.recompute_*"
        )
        unread["critic.model.enable_gradient_checkpointing"] = (
            "verl's Megatron critic ignores it and uses override_transformer_config.recompute_*"
        )
    for name in OF_POLICY_LOSS:
        if f"{_A}.policy_loss.{name}" in options:
            unread[f"{_A}.{name}"] = f"verl reads policy_loss.{name}"
    unread["critic.grad_clip"] = "verl reads critic.optim.clip_grad"
    if not critic:
        unread |= dict.fromkeys((name for name in options if name.startswith("critic.")), "the run has no critic")
    if megatron or f"{_A}.optim.clip_grad" in options:
        unread[f"{_A}.grad_clip"] = "verl reads optim.clip_grad"
    if "data.seed" in options:
        unread["trainer.seed"] = "verl's RL trainers read data.seed"
    return unread
