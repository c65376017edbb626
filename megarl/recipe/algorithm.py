"""The recipe's section on what is optimised."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Optional

from megarl.recipe.key import key
from megarl.registry import nearest


@dataclass
class DynamicSamplingConfig:
    """DAPO's dynamic sampling: groups whose samples all score the same carry no gradient and are sampled anew."""

    enabled: bool = key(False, "Filter groups without spread and sample others in their place.")
    metric: str = key(
        "reward", "What must differ within a group: `reward`, or the name of a reward part such as `accuracy`."
    )
    max_attempts: int = key(
        3,
        "Bound on sampling, in batches: at most this many times `data.prompts_per_step` prompts are tried a step.",
        at_least=1,
    )
    when_exhausted: Literal["smaller", "fail"] = key(
        "smaller",
        "At the bound: train on the groups that were found (counted in `rollout/groups_missing`), or stop the run.",
    )


@dataclass
class OverlongConfig:
    """DAPO's treatment of responses that reach the length limit."""

    filter: bool = key(
        False, "Leave truncated samples out of the loss (their reward still counts in their group's, but for `opo`)."
    )
    penalty_buffer: int = key(
        0,
        "Soft punishment: over the last so many tokens before `rollout.max_response_length` the reward falls linearly. 0 switches it off.",
        at_least=0,
    )
    penalty_factor: float = key(1.0, "What is taken from the reward at the full length.", at_least=0)


@dataclass
class CorrectionConfig:
    """Rollout correction: what is done where the trainer's policy is not quite the one that the engine sampled from.

    The mismatch of a token is rho = p(trainer) / p(engine): of the policy before the step's updates, or, where no such
    pass is run, of the current one. Its diagnostics (`rollout/mismatch_*`) are measured in any case: before the step's updates, or, without that pass, in the first mini batch."""

    weights: Literal["none", "token", "sequence", "geometric"] = key(
        "none",
        "Importance weights on the loss: each token's rho, the product of its sequence's, or their geometric mean (truncated importance sampling).",
    )
    truncate: float = key(2.0, "Largest weight.", above=0)
    normalize: bool = key(
        False, "Divide the weights by their mean over the mini batch: over its tokens, or its sequences."
    )
    mask: Literal["none", "token", "sequence", "geometric"] = key(
        "none",
        "Tokens left out where rho, taken as for `weights`, is outside of [mask_low, mask_high] (masked importance sampling; IcePop: `mask` and `weights` by token, with `truncate` at mask_high). They still count in the loss's normaliser.",
    )
    mask_low: float = key(0.5, "Lower bound.", at_least=0)
    mask_high: float = key(5.0, "Upper bound.", above=0)
    veto: Optional[float] = key(
        None,
        "Leave out the whole sequence where any token's rho is below this, e.g. 1e-4: the engine all but could not have sampled it. Unset: off.",
        above=0,
        at_most=1,
    )


@dataclass
class AlgorithmConfig:
    """What is optimised. Names are those of the registries in megarl/algorithms. A setting that the chosen advantage
    and loss do not read is refused."""

    advantage: str = key("grpo", "Advantage estimator; see docs/algorithms.md. `gae` trains a critic: see `critic`.")
    normalize_by_std: bool = key(
        True,
        "grpo, grpo_passk, grpo_process: divide by the group's standard deviation (grpo with it off: Dr.GRPO).",
    )
    pass_k: int = key(4, "pass_at_k: the k of the pass rate that is optimised.", at_least=1)
    gamma: float = key(1.0, "gae, reinforce_plus_plus: discount of what the next token earns.", at_least=0, at_most=1)
    lam: float = key(0.95, "gae: lambda, from one-step estimates (0) to whole outcomes (1).", at_least=0, at_most=1)
    whiten_advantages: bool = key(
        True,
        "gae, reinforce_plus_plus, on_policy_distillation: shift and scale the advantages of a batch's tokens to mean 0 and variance 1.",
    )
    loss: str = key(
        "ppo_clip",
        "Policy loss; see docs/algorithms.md. `sft` is the negative log-likelihood of the masked tokens.",
    )
    clip_low: float = key(
        0.2,
        "Lower clip bound of the importance ratio: 1 - clip_low. gmpo: of the log-ratio; dppo_*: of the divergence.",
        at_least=0,
        at_most=1,
    )
    clip_high: float = key(
        0.2, "Upper clip bound: 1 + clip_high. DAPO's clip-higher: 0.28. gmpo, dppo_*: as for `clip_low`.", at_least=0
    )
    dual_clip: Optional[float] = key(
        None, "Dual clip's c: with negative advantages the loss is at most c times -advantage. Unset: off.", above=1
    )
    tau_positive: float = key(1.0, "sapo: how fast the gate closes for tokens with a positive advantage.", above=0)
    tau_negative: float = key(1.05, "sapo: and for the others.", above=0)
    ratio_cap: float = key(20.0, "dppo_*: largest weight of a token.", above=0)
    cov_share: float = key(
        2e-4, "clip_cov, kl_cov: tokens that are held back, as a share of the mini batch's.", above=0, at_most=1
    )
    cov_low: float = key(1.0, "clip_cov: lowest covariance of a token that may be held back.")
    cov_high: float = key(5.0, "clip_cov: and the highest.")
    cov_kl_coef: float = key(1.0, "kl_cov: weight of |log ratio| in the loss of tokens that are held back.", at_least=0)
    dpo_beta: float = key(0.1, "dpo: how strongly the policy is held to the starting one.", above=0)
    dpo_label_smoothing: float = key(
        0.0, "dpo: the chance that a preference is the wrong way round.", at_least=0, at_most=0.5
    )
    old_log_probs: Literal["computed", "current", "rollout"] = key(
        "computed",
        "The proximal policy that losses compare with. computed: a pass before the step's updates. current: the policy itself, without a pass: the same numbers, with `actor.mini_batches: 1`. rollout: the engine's own log-probs (bypass mode).",
    )
    aggregation: str = key(
        "token_mean", "How per-token losses become one number; normalisers are counted over the whole mini batch."
    )
    reference: Literal["start", "teacher"] = key(
        "start",
        "The reference policy, which the KL and `gkd` compare with: the starting weights, or a teacher (section `teacher`).",
    )
    distill_top_k: int = key(
        64, "gkd: tokens in each place that the teacher tells its log-probs of, the likeliest ones.", at_least=1
    )
    distill_beta: float = key(
        0.0,
        "gkd: 0 is KL(teacher || policy), 1 KL(policy || teacher), between lie Jensen-Shannon divergences.",
        at_least=0,
        at_most=1,
    )
    kl_coef: float = key(0.0, "Weight of the KL to the reference policy. 0: none.", at_least=0)
    kl_estimator: str = key("low_var_kl", "Estimator of that KL: kl (k1), abs, mse (k2), low_var_kl (k3).")
    kl_in_reward: bool = key(
        False,
        "Take the KL of each token, before the step's updates, from what it earns, instead of adding it to the loss. Advantages of whole samples then see its sum over the sample.",
    )
    kl_straight_through: bool = key(
        False, "That KL's value with the gradient of mse (k2), which is the unbiased one of the KL on fresh samples."
    )
    kl_target: Optional[float] = key(
        None,
        "Adapt the weight, which starts at kl_coef, so that the mean KL of a token tends to this (arXiv 1909.08593, section 2.2). Unset: it stays.",
        above=0,
    )
    kl_horizon: int = key(
        10000, "Samples in which the adapted weight moves by a fifth at most; no fewer than a step's.", at_least=1
    )
    entropy_coef: float = key(0.0, "Entropy bonus.", at_least=0)
    modules: list[str] = key(
        [],
        "Python modules of your own, from the current directory or PYTHONPATH, imported in every process, whose decorated functions `advantage`, `loss`, `aggregation` and `kl_estimator` may name.",
    )
    options: dict[str, Any] = key({}, "Settings of such functions of your own: they read them as `settings.options`.")
    correction: CorrectionConfig = key(CorrectionConfig, "")
    dynamic_sampling: DynamicSamplingConfig = key(DynamicSamplingConfig, "")
    overlong: OverlongConfig = key(OverlongConfig, "")


def check_settings(names: tuple[str, ...]) -> None:
    """Raise ValueError for what is no field of `AlgorithmConfig`: a function that registers itself says what it reads."""
    known = [field.name for field in fields(AlgorithmConfig)]
    for name in names:
        if name not in known:
            close = nearest(name, known)
            hint = f"; did you mean '{close}'?" if close else "; settings of your own go into algorithm.options."
            raise ValueError(f"'{name}' is no setting of algorithm{hint}")
