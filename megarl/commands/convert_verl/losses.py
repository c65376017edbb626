"""Loss, KL to the reference policy, and advantage of single samples."""

from __future__ import annotations

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.table import KL_ESTIMATORS
from megarl.errors import InputError
from megarl.recipe.trainers import OptimizerConfig

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def translate_kl(conversion: Conversion) -> None:
    settings, get = conversion.settings, conversion.get
    in_loss, in_reward = map(conversion.is_on, (f"{_A}.use_kl_loss", "algorithm.use_kl_in_reward"))
    if in_loss and in_reward:
        raise InputError(
            "use_kl_loss and use_kl_in_reward are both True; megarl has one KL term, in the loss or in the reward"
        )
    if in_loss:
        kind = str(get(f"{_A}.kl_loss_type"))
        settings["algorithm.kl_coef"] = get(f"{_A}.kl_loss_coef")
        settings["algorithm.kl_straight_through"] = kind.endswith("+")
        settings["algorithm.kl_estimator"] = _estimator(conversion, f"{_A}.kl_loss_type", kind.removesuffix("+"))
    elif in_reward:
        settings["algorithm.kl_in_reward"] = True
        settings["algorithm.kl_coef"] = get("algorithm.kl_ctrl.kl_coef")
        settings["algorithm.kl_estimator"] = _estimator(
            conversion, "algorithm.kl_penalty", str(get("algorithm.kl_penalty"))
        )
        if get("algorithm.kl_ctrl.type") == "adaptive":
            settings["algorithm.kl_target"] = get("algorithm.kl_ctrl.target_kl", 0.1)
            settings["algorithm.kl_horizon"] = get("algorithm.kl_ctrl.horizon", 10000)
    if not in_reward:
        for name in conversion.options:
            if name.startswith("algorithm.kl_ctrl."):
                conversion.note(name, "verl ignores it without use_kl_in_reward")
    if not settings.get("algorithm.kl_coef"):
        conversion.drop("algorithm.kl_")


def _estimator(conversion: Conversion, option: str, kind: str) -> str:
    if kind not in KL_ESTIMATORS:
        supported = ", ".join(KL_ESTIMATORS)
        raise InputError(f"{conversion.where(option)}{option}={kind} has no counterpart; supported: {supported}")
    return str(KL_ESTIMATORS[kind])


def translate_loss(conversion: Conversion) -> None:
    """Set the values that verl's loss fixes, and its defaults."""
    settings, loss = conversion.settings, conversion.settings.get("algorithm.loss")
    low = settings.get("algorithm.clip_low")
    if isinstance(low, int | float) and low > 1:
        settings["algorithm.clip_low"] = 1.0
        conversion.note(f"{_A}.clip_ratio_low", "1.0: no ratio is below 0, so neither bound has an effect")
    if loss in ("gvpo", "sppo"):
        _squared(conversion, loss)
    if loss in ("gspo", "sapo", "gmpo"):
        if (
            f"{_A}.loss_agg_mode" in conversion.options
            and settings.get("algorithm.aggregation") != "seq_mean_token_mean"
        ):
            conversion.note(f"{_A}.loss_agg_mode", f"not used: verl's {loss} always has seq-mean-token-mean")
        settings["algorithm.aggregation"] = "seq_mean_token_mean"
    if (
        loss == "gspo"
        and settings.pop("algorithm.dual_clip", None) is not None
        and f"{_A}.clip_ratio_c" in conversion.options
    ):
        conversion.note(f"{_A}.clip_ratio_c", "not used: verl's gspo has no dual clip")
    if settings.get("algorithm.advantage") == "gpg":
        conversion.note(
            "algorithm.adv_estimator", "alpha is the paper's: verl counts non-zero scores instead (docs/algorithms.md)"
        )
    if settings.get("algorithm.advantage") == "optimal_token_baseline":
        settings["algorithm.tail_baseline"] = "zero"
        if conversion.get("algorithm.adv_estimator") == "optimal_token_baseline":
            remark = (
                "positions skip tool output, as in tir_optimal_token_baseline; verl of January 2026 computed "
                "algorithm.tail_baseline=return"
            )
            conversion.note("algorithm.adv_estimator", remark)
    if loss == "kl_cov":
        settings.setdefault("algorithm.cov_share", 2e-4)
        settings.setdefault("algorithm.cov_kl_coef", 0.1)
    if loss in ("dppo_tv", "dppo_kl"):  # verl's cap is the bound of its dual clip
        settings["algorithm.ratio_cap"] = settings.pop("algorithm.dual_clip", None) or 20.0
    beta = conversion.get(f"{_A}.policy_loss.dro_beta")
    if loss == "dro":
        if not isinstance(beta, int | float) or beta <= 0:
            raise InputError(f"loss_mode=dro needs {_A}.policy_loss.dro_beta, a number above 0")
        settings["algorithm.log_ratio_coef"] = beta / 2
    divisor = conversion.get(f"{_A}.loss_scale_factor")
    if settings.get("algorithm.aggregation") == "token_sum":
        settings["algorithm.aggregation_divisor"] = 1.0
    elif settings.get("algorithm.aggregation") == "seq_mean_token_sum_norm" and divisor is not None:
        settings["algorithm.aggregation_divisor"] = float(divisor)
    if settings.get("algorithm.advantage") == "gdpo":
        settings["algorithm.reward_parts"] = _reward_parts(conversion)


def _squared(conversion: Conversion, loss: str) -> None:
    """Set the values of losses of whole sequences. Source: recipe/gvpo/gvpo_core_algos.py, recipe/sppo/dp_actor.py."""
    settings, get = conversion.settings, conversion.get
    settings["algorithm.aggregation"] = "seq_mean_token_mean"
    if f"{_A}.loss_agg_mode" in conversion.options:
        conversion.note(f"{_A}.loss_agg_mode", f"not used: the loss of {loss} is a mean over sequences")
    terms = [name for name in (f"{_A}.entropy_coeff", f"{_A}.use_kl_loss") if get(name)]
    for name in terms:
        conversion.leave_out(name, f"verl's {loss} weighs this term by tokens, and its loss by sequences", changes=True)
    if loss == "sppo":
        etas = [get(f"{prefix}.sppo_eta", 1.0) for prefix in ("algorithm", _A)]
        if etas[0] != etas[1]:
            raise InputError(f"algorithm.sppo_eta={etas[0]} and {_A}.sppo_eta={etas[1]} differ; megarl has one")
        settings["algorithm.sppo_eta"] = etas[0]
        return
    scale = conversion.number(f"{_A}.ppo_micro_batch_size_per_gpu") / conversion.number(f"{_R}.n")
    limit = float(settings.get("actor.optimizer.clip_grad", OptimizerConfig().clip_grad))
    settings["actor.optimizer.clip_grad"] = limit / scale
    conversion.notes.append(
        f"actor.optimizer.clip_grad={limit / scale:g}: verl's gvpo sums over the samples of a micro batch, so its gradient is "
        f"{scale:g} (ppo_micro_batch_size_per_gpu / n) times as large; AdamW's update does not depend on this factor"
    )


def translate_single_samples(conversion: Conversion) -> None:
    """Set the advantage of a run with one sample per prompt. verl's group advantages are then the sample's reward.

    Source: verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage and compute_rloo_outcome_advantage.
    """
    settings, option = conversion.settings, "algorithm.adv_estimator"
    if (
        settings.get("algorithm.advantage") not in ("grpo", "rloo")
        or settings.get("rollout.samples_per_prompt", 1) != 1
    ):
        return
    if {"algorithm.advantage", "rollout.samples_per_prompt"} & {*conversion.user_choices} or settings.get(
        "algorithm.kl_in_reward"
    ):
        return
    settings |= {
        "algorithm.advantage": "reinforce_plus_plus",
        "algorithm.whiten_advantages": False,
        "algorithm.gamma": 1.0,
    }
    reason = "a single sample of a prompt has its reward as advantage: reinforce_plus_plus without whitening"
    conversion.note(option, reason)


def _reward_parts(conversion: Conversion) -> dict[str, float]:
    names, weights = (conversion.get(f"algorithm.gdpo_reward_{name}") for name in ("keys", "weights"))
    if not isinstance(names, list) or not names:
        raise InputError("adv_estimator=gdpo needs algorithm.gdpo_reward_keys, a list of reward parts")
    weights = [1.0] * len(names) if weights is None else weights
    if not isinstance(weights, list) or len(weights) != len(names):
        raise InputError(f"algorithm.gdpo_reward_weights={weights} does not have one weight for each of {names}")
    return {str(name): float(weight) for name, weight in zip(names, weights, strict=True)}
