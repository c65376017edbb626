"""The recipe's section `algorithm`: advantage, loss, KL, rollout correction and dynamic sampling."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Optional

from megarl.recipe.key import key
from megarl.registry import nearest


@dataclass
class DynamicSamplingConfig:
    """DAPO's dynamic sampling: a group with equal scores has no gradient, so a new group replaces it."""

    enabled: bool = key(False, "Filter groups with equal scores and sample replacements.")
    metric: str = key(
        "reward", "Score that must differ within a group: `reward`, or the name of a reward part such as `accuracy`."
    )
    max_attempts: int = key(
        3,
        "Limit on sampling per step, in batches: at most this many times `data.prompts_per_step` prompts.",
        at_least=1,
    )
    oversample: float = key(
        1.0,
        "Groups that start for each group that a step still needs: 2.2 if about half of the groups are filtered, so that no step waits for replacements. Surplus groups enter the next batches; where that exceeds the largest lag, as with `rollout.max_staleness: 0`, they are left out (`rollout/groups_unused`).",
        at_least=1,
    )
    when_exhausted: Literal["smaller", "fail"] = key(
        "smaller",
        "At the limit: train on the groups that passed (`rollout/groups_missing` counts the missing ones), or stop the run.",
    )


@dataclass
class OverlongConfig:
    """DAPO's treatment of responses that reach the length limit."""

    filter: bool = key(
        False,
        "Exclude truncated samples from the loss. Their rewards still count in the group's statistics, except with `opo`.",
    )
    penalty_buffer: int = key(
        0,
        "Soft punishment: the reward falls linearly over this many tokens before `rollout.max_response_length`. 0: off.",
        at_least=0,
    )
    penalty_factor: float = key(1.0, "Amount subtracted from the reward at the full length.", at_least=0)


@dataclass
class CorrectionConfig:
    """Rollout correction, for the mismatch between the trainer's policy and the policy that the engine sampled from.

    The mismatch of a token is rho = p(trainer) / p(engine). p(trainer) is the policy before the step's updates, or the
    current policy if that pass is not run. The metrics `rollout/mismatch_*` are always measured: before the step's
    updates or, without that pass, in the first mini batch.
    """

    weights: Literal["none", "token", "sequence", "geometric"] = key(
        "none",
        "Importance weights of the loss (truncated importance sampling). token: each token's rho. sequence: the product of rho over the sequence. geometric: the geometric mean of rho over the sequence.",
    )
    truncate: float = key(2.0, "Maximum weight.", above=0)
    normalize: bool = key(
        False,
        "Divide the weights by their mean over the mini batch: over its tokens, or its sequences. Rejected tokens do not count in this mean.",
    )
    reject: dict[str, Any] = key(
        {},
        "Reject tokens and sequences by the mismatch: limits by criterion, e.g. {token_ratio: [0.5, 5], mean_k3: 0.01}; see docs/algorithms.md. A rejected token gets no gradient and is in no sequence ratio of the loss; it still counts in the loss's normalizer. A limit of null switches a criterion off.",
    )
    icepop: Optional[list[float]] = key(
        None,
        "IcePop (arXiv 2510.18855) with the interval [low, high] of rho, e.g. [0.5, 5]: sets `weights: token`, `truncate: high` and `reject: {token_ratio: [low, high]}`.",
    )


@dataclass
class AlgorithmConfig:
    """The training algorithm. Names refer to the registries in megarl/algorithms. A setting that the chosen
    advantage and loss do not read is rejected."""

    advantage: str = key("grpo", "Advantage estimator; see docs/algorithms.md. `gae` trains a critic: see `critic`.")
    normalize_by_std: bool = key(
        True,
        "grpo, grpo_passk, grpo_process: divide by the group's standard deviation. Without it, grpo is Dr.GRPO.",
    )
    pass_k: int = key(4, "pass_at_k: k of the pass@k rate that training optimizes.", at_least=1)
    reward_parts: dict[str, float] = key(
        {}, "gdpo: the reward parts to normalize one by one, with their weights, e.g. {accuracy: 1.0, format: 0.5}."
    )
    gamma: float = key(1.0, "gae, reinforce_plus_plus: discount factor per token.", at_least=0, at_most=1)
    lam: float = key(0.95, "gae: lambda, from one-step estimates (0) to full returns (1).", at_least=0, at_most=1)
    whiten_advantages: bool = key(
        True,
        "gae, reinforce_plus_plus, on_policy_distillation: shift and scale the advantages of a batch's tokens to mean 0 and variance 1.",
    )
    tail_baseline: Literal["return", "zero"] = key(
        "return",
        "optimal_token_baseline: baseline of the tokens that only the longest sample of its group reaches. return: the sample's own return, so their advantage is 0. zero: 0, so their advantage is the return.",
    )
    loss: str = key(
        "ppo_clip",
        "Policy loss; see docs/algorithms.md. Some losses have other defaults for settings that the recipe leaves open; a notice at the start names them. `sft` is the negative log-likelihood of the assistant's turns.",
    )
    clip_low: float = key(
        0.2,
        "Lower clip bound of the importance ratio: 1 - clip_low. gmpo: bound of the log-ratio; dppo_*: of the divergence.",
        at_least=0,
        at_most=1,
    )
    clip_high: float = key(
        0.2,
        "Upper clip bound of the importance ratio: 1 + clip_high. DAPO's clip-higher: 0.28. gmpo, dppo_*: as for `clip_low`.",
        at_least=0,
    )
    dual_clip: Optional[float] = key(
        None,
        "Constant c of the dual clip: with a negative advantage the loss is at most c times -advantage. Unset: off.",
        above=1,
    )
    tau_positive: float = key(
        1.0,
        "sapo: temperature of the gate for tokens with a positive advantage. A higher value closes it faster.",
        above=0,
    )
    tau_negative: float = key(1.05, "sapo: temperature of the gate for all other tokens.", above=0)
    ratio_cap: float = key(20.0, "dppo_*: maximum weight of a token.", above=0)
    log_ratio_coef: float = key(
        0.0,
        "dppo_*, dro: weight c of the loss c (log ratio)^2, which holds the policy near the old policy.",
        at_least=0,
    )
    cov_share: float = key(
        2e-4,
        "clip_cov, kl_cov: tokens that are restricted, as a share of the mini batch's tokens. Rounded down, at least one token.",
        above=0,
        at_most=1,
    )
    cov_low: float = key(1.0, "clip_cov: lowest covariance of a restricted token.")
    cov_high: float = key(5.0, "clip_cov: highest covariance of a restricted token.")
    cov_kl_coef: float = key(1.0, "kl_cov: weight of |log ratio| in the loss of restricted tokens.", at_least=0)
    second_moment: float = key(
        0.04, "m2po: largest mean of (log ratio)^2 over the tokens of a mini batch that stay in the loss.", above=0
    )
    dpo_beta: float = key(0.1, "dpo: beta. A higher value keeps the policy closer to the starting policy.", above=0)
    dpo_label_smoothing: float = key(
        0.0, "dpo: probability that a preference label is reversed.", at_least=0, at_most=0.5
    )
    sppo_eta: float = key(
        1.0, "sppo, soft_mean: eta. A higher value moves the policy further from the old policy.", above=0
    )
    gvpo_beta: float = key(0.1, "gvpo: beta. A higher value keeps the policy closer to the old policy.", above=0)
    old_log_probs: Literal["computed", "current", "rollout"] = key(
        "computed",
        "The proximal policy of the losses. computed: a forward pass before the step's updates. current: the current policy, without that pass; requires one optimizer step per controller step (`actor.mini_batches`, `actor.epochs`), with which the numbers are equal. rollout: the engine's log-probs (bypass mode).",
    )
    aggregation: str = key(
        "token_mean", "Reduction of per-token losses to a number. Normalizers are counted over the whole mini batch."
    )
    aggregation_divisor: Optional[float] = key(
        None,
        "token_sum, seq_mean_token_sum_norm: the constant that divides the sum. Unset: `rollout.max_response_length`.",
        above=0,
    )
    reference: Literal["start", "teacher"] = key(
        "start",
        "The reference policy of the KL and `gkd`: the starting weights (`start`; see `refresh_reference_every`), or a teacher (section `teacher`).",
    )
    distill_top_k: int = key(
        64, "gkd: most likely tokens per position for which the teacher returns log-probs.", at_least=1
    )
    distill_beta: float = key(
        0.0,
        "gkd: 0 is KL(teacher || policy), 1 is KL(policy || teacher), values between are Jensen-Shannon divergences.",
        at_least=0,
        at_most=1,
    )
    distill_rest: bool = key(
        True,
        'gkd: compare "any other token" too, so that both distributions are complete. false: only the teacher\'s most likely tokens, as verl does.',
    )
    distill_min_log_prob: Optional[float] = key(
        None, "gkd: lower log-probs of teacher and policy count as this number, e.g. -10. Unset: no limit.", at_most=0
    )
    distill_max: Optional[float] = key(
        None,
        "gkd: largest loss of a token. on_policy_distillation: largest absolute advantage of a token. Unset: no limit.",
        above=0,
    )
    refresh_reference_every: int = key(
        0,
        "Interval in steps: after each, the current policy becomes the reference policy, which checkpoints then contain. 0: never.",
        at_least=0,
    )
    kl_coef: float = key(0.0, "Weight of the KL to the reference policy. 0: no KL.", at_least=0)
    kl_estimator: str = key("low_var_kl", "Estimator of the KL: kl (k1), abs, mse (k2), low_var_kl (k3).")
    kl_in_reward: bool = key(
        False,
        "Subtract each token's KL from its reward, before the step's updates, instead of adding the KL to the loss. Advantages of whole samples use the sum over the sample.",
    )
    kl_straight_through: bool = key(
        False,
        "Combine the value of the KL estimator with the gradient of mse (k2), which is the unbiased gradient of the KL on fresh samples.",
    )
    kl_target: Optional[float] = key(
        None,
        "Target of the mean KL per token. The weight starts at `algorithm.kl_coef` and adapts to reach the target (arXiv 1909.08593, section 2.2). Unset: constant weight.",
        above=0,
    )
    kl_horizon: int = key(
        10000,
        "Samples over which the adapted weight changes by at most a fifth. At least the samples of a step.",
        at_least=1,
    )
    kl_importance: bool = key(
        False,
        "Weight the KL loss of each token by p(current) / p(engine), with its gradient: the KL's estimate is then unbiased although the engine's policy, not the current one, sampled the token (DeepSeek-V3.2, arXiv 2512.02556).",
    )
    entropy_coef: float = key(0.0, "Weight of the entropy bonus. 0: no bonus.", at_least=0)
    modules: list[str] = key(
        [],
        "Your Python modules, from the current directory or PYTHONPATH. Every process imports them. `advantage`, `loss`, `aggregation` and `kl_estimator` may name their decorated functions.",
    )
    options: dict[str, Any] = key({}, "Settings of your functions, which read them as `settings.options`.")
    correction: CorrectionConfig = key(CorrectionConfig, "")
    dynamic_sampling: DynamicSamplingConfig = key(DynamicSamplingConfig, "")
    overlong: OverlongConfig = key(OverlongConfig, "")


def check_settings(names: tuple[str, ...]) -> None:
    """Raise ValueError for a name that is not a field of `AlgorithmConfig`. A registered function declares the
    settings that it reads."""
    settings = [field.name for field in fields(AlgorithmConfig)]
    for name in names:
        if name not in settings:
            close = nearest(name, settings)
            hint = f"; did you mean '{close}'?" if close else "; put your settings into algorithm.options."
            raise ValueError(f"'{name}' is not a setting of algorithm{hint}")
