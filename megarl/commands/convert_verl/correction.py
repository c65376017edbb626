"""verl's rollout correction: importance weights, rejection and veto (verl/trainer/ppo/rollout_corr_helper.py)."""

from __future__ import annotations

from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.errors import InputError

_PREFIX = "algorithm.rollout_correction."
_SPANS = {"token": "token", "seq_sum": "sequence", "seq_mean": "mean", "seq_max": "worst"}
_OLDER = {"token": "token_ratio", "sequence": "sequence_ratio", "geometric": "mean_ratio"}
"""rollout_rs before January 2026: a level, with the bounds of p(trainer) / p(engine) in two options."""


def translate_correction(conversion: Conversion) -> None:
    """Set `algorithm.correction`: `reject`, `truncate`, and `weights` for quantized engines. Raises InputError for a criterion or limit that
    verl refuses."""
    settings, limits = conversion.settings, dict[str, Any]()
    _bypass(conversion)
    weights, threshold = settings.get("algorithm.correction.weights"), _get(conversion, "rollout_is_threshold")
    if weights in ("token", "sequence") and threshold is not None:
        low, high = _interval(conversion, "rollout_is_threshold", str(threshold))
        settings["algorithm.correction.truncate"] = high
        if low is not None:
            limits[f"{weights}_ratio"] = [low, high]
    names = [name.strip() for name in str(_get(conversion, "rollout_rs") or "").split(",") if name.strip()]
    specs = [spec.strip() for spec in str(_get(conversion, "rollout_rs_threshold") or "").split(",") if spec.strip()]
    if names and len(specs) not in (1, len(names)):
        raise InputError(
            f"{conversion.where(f'{_PREFIX}rollout_rs')}rollout_rs has {len(names)} criteria, and rollout_rs_threshold "
            f"{len(specs)} limits: give one limit, or one for each criterion"
        )
    for name, spec in zip(names, specs * len(names) if len(specs) == 1 else specs, strict=False):
        _add(conversion, limits, *_criterion(conversion, name, spec))
    if veto := _get(conversion, "rollout_token_veto_threshold"):
        _add(conversion, limits, "worst_ratio", [float(veto), None])
    if limits:
        settings["algorithm.correction.reject"] = limits
    if "rollout.quantization" in settings:  # megarl's default would be a correction
        settings.setdefault("algorithm.correction.weights", "none")


def _bypass(conversion: Conversion) -> None:
    """Set the loss of bypass mode: REINFORCE with weights, or PPO, where the ratio to the engine acts as the weight."""
    settings, option = conversion.settings, f"{_PREFIX}loss_type"
    if settings.get("algorithm.old_log_probs") != "rollout":
        if option in conversion.options:
            conversion.note(option, "verl reads it in bypass mode")
        return
    kind = conversion.get(option, "ppo_clip")
    if kind == "reinforce":
        settings["algorithm.loss"] = "reinforce"
        del settings["algorithm.old_log_probs"]  # this loss reads none
    elif kind != "ppo_clip":
        raise InputError(f"{conversion.where(option)}loss_type={kind} is neither ppo_clip nor reinforce")
    elif settings.get("algorithm.correction.weights", "none") != "none":
        for name in ("weights", "truncate", "normalize"):
            settings.pop(f"algorithm.correction.{name}", None)
        reason = "not used: in bypass mode the ratio of PPO's loss is already p(current) / p(engine)"
        conversion.note(f"{_PREFIX}rollout_is", reason)
        if _get(conversion, "rollout_is_batch_normalize"):
            conversion.note(f"{_PREFIX}rollout_is_batch_normalize", "not used: it belongs to rollout_is")


def _get(conversion: Conversion, name: str) -> Any:
    return conversion.get(_PREFIX + name)


def _add(conversion: Conversion, limits: dict[str, Any], name: str, limit: Any) -> None:
    """Add a criterion; of two limits of one measure the smaller, of two intervals of one ratio the intersection: both must hold."""
    if name in limits and not isinstance(limit, list):
        limit = min(limits[name], limit)
    elif name in limits:
        (low, high), (other_low, other_high) = limits[name], limit
        limit = [max(low, other_low), min(high, other_high)]
        if limit[0] >= limit[1]:
            raise InputError(f"{conversion.where(f'{_PREFIX}rollout_rs')}no ratio is inside both intervals of {name}")
    limits[name] = limit


def _criterion(conversion: Conversion, name: str, spec: str) -> tuple[str, Any]:
    """Return the name and limit of megarl's criterion."""
    if name in _OLDER:
        low, high = _interval(conversion, "rollout_rs_threshold", spec)
        lower = _get(conversion, "rollout_rs_threshold_lower")
        return _OLDER[name], [float(lower) if lower is not None else low or 1.0 / high, high]
    span, _, measure = name.rpartition("_")
    if span not in _SPANS or measure not in ("k1", "k2", "k3") or (span, measure) == ("seq_max", "k1"):
        raise InputError(f"{conversion.where(f'{_PREFIX}rollout_rs')}verl has no criterion {name}")
    low, high = _interval(conversion, "rollout_rs_threshold", spec)
    if measure == "k1":
        return f"{_SPANS[span]}_ratio", [1.0 / high, high if low is None else 1.0 / low]
    if low is not None:
        raise InputError(
            f"{conversion.where(f'{_PREFIX}rollout_rs_threshold')}the limit of {name} is one number: {spec}"
        )
    return f"{_SPANS[span]}_{measure}", high


def _interval(conversion: Conversion, option: str, spec: str) -> tuple[float | None, float]:
    """Return the bounds of "LOW_HIGH", or of "HIGH", which has no lower bound."""
    low, _, high = spec.rpartition("_")
    try:
        bounds = (float(low) if low else None, float(high))
    except ValueError:
        bounds = (None, 0.0)
    if bounds[1] <= 0 or (bounds[0] is not None and not 0 < bounds[0] < bounds[1]):
        raise InputError(f"{conversion.where(_PREFIX + option)}{option}={spec} is neither a limit above 0 nor LOW_HIGH")
    return bounds
