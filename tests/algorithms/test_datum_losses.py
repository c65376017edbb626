"""Losses of a training API: by hand, and the checks of their names, options and inputs."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.datum_losses import DATUM_LOSSES, check_inputs, checked_loss

LOG_PROBS = [-1.0, -2.0, -0.5]
SAMPLED = {"logprobs": [-1.0, -1.0, -1.5], "advantages": [0.0, 1.0, -2.0]}  # ratios: unused, 1/e, e


def value_and_gradient(
    name: str, options: dict[str, float], vectors: dict[str, list[float]]
) -> tuple[float, list[float]]:
    log_probs = torch.tensor(LOG_PROBS, requires_grad=True)
    loss = checked_loss(name, options)
    value = loss(log_probs, {key: torch.tensor(vector) for key, vector in vectors.items()}, [1, 2])
    value.backward()
    return float(value.detach()), log_probs.grad.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "options", "more", "value", "gradient"),
    [
        ("cross_entropy", {}, {"weights": [0.0, 2.0, 0.5]}, 4.25, [0.0, -2.0, -0.5]),
        ("importance_sampling", {}, SAMPLED, 2 * math.e - 1 / math.e, [0.0, -1 / math.e, 2 * math.e]),
        # ratio 1/e < 0.8 with advantage 1: the smaller term is unclipped; e with -2: unclipped
        ("ppo", {}, SAMPLED, 2 * math.e - 1 / math.e, [0.0, -1 / math.e, 2 * math.e]),
        ("cispo", {"clip_high_threshold": 2.0}, SAMPLED, 2 / math.e - 2.0, [0.0, -1 / math.e, 4.0]),
        ("dro", {"beta": 2.0}, SAMPLED, 2.0 - 1.0 + 1.0 + 1.0, [0.0, -1.0 - 2.0, 2.0 + 2.0]),
    ],
)
def test_by_hand(
    name: str, options: dict[str, float], more: dict[str, list[float]], value: float, gradient: list[float]
) -> None:
    measured = value_and_gradient(name, options, more)
    assert measured[0] == pytest.approx(value)
    assert measured[1] == pytest.approx(gradient)


def test_gspo_has_one_ratio_for_a_sequence() -> None:
    """The second datum's log-ratios are -1 and 1, so its ratio is 1: nothing is clipped, and each token has its own gradient."""
    clips = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    value, gradient = value_and_gradient("gspo", clips, {**SAMPLED, "sequence_ratio_mask": [1.0, 1.0, 1.0]})
    assert value == pytest.approx(1.0) and gradient == pytest.approx([0.0, -1.0, 2.0])
    lower = {**SAMPLED, "logprobs": [-1.0, -1.0, 0.5], "sequence_ratio_mask": [1.0, 1.0, 1.0]}  # log-ratios -1 and -1
    assert value_and_gradient("gspo", clips, lower)[0] == pytest.approx(-1 / math.e + 2 * 0.9)
    value, gradient = value_and_gradient("gspo", clips, {**SAMPLED, "sequence_ratio_mask": [1.0, 1.0, 0.0]})
    assert value == pytest.approx(-1 / math.e + 2 * 0.9) and gradient == pytest.approx([0.0, -1 / math.e, 0.0])


def test_tokens_without_advantage_may_have_any_log_prob() -> None:
    vectors = {"logprobs": [-200.0, -1.0, -1.5], "advantages": [0.0, 1.0, 1.0]}
    for name in ("importance_sampling", "ppo", "cispo"):
        value, gradient = value_and_gradient(name, {}, vectors)
        assert math.isfinite(value) and gradient[0] == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("stable_reinforce", {}, "which this server does not have; use one of cross_entropy"),
        ("ppo", {"epsilon": 0.2}, "loss_fn_config has epsilon; the options of ppo are: clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "the options of cross_entropy are: none"),
        ("dro", {}, "has no default for beta"),
        ("dro", {"beta": "x"}, "it must be a finite number"),
        ("ppo", {"clip_low_threshold": 1.3}, "is above clip_high_threshold 1.2"),
    ],
)
def test_names_and_options_are_checked(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_loss(name, options)


def test_inputs_are_checked() -> None:
    loss = checked_loss("ppo")
    check_inputs(loss, {"advantages": 3, "logprobs": 3}, 3, "datum 0")
    for given, message in (
        ({"advantages": 3}, "datum 0: loss_fn_inputs lacks logprobs; ppo takes target_tokens, advantages, logprobs"),
        ({"advantages": 3, "logprobs": 3, "mask": 3}, "loss_fn_inputs has mask"),
        ({"advantages": 3, "logprobs": 2}, "logprobs has 2 entries and target_tokens has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            check_inputs(loss, given, 3, "datum 0")


def test_every_loss_has_a_formula_that_reads_its_inputs() -> None:
    assert set(DATUM_LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
