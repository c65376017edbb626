"""Losses that fail, hang or die after some calls, named in a recipe as algorithm.modules=[tests.support.planted_loss]."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from megarl.algorithms.inputs import LossInputs
from megarl.algorithms.losses.registry import policy_loss
from megarl.recipe.algorithm import AlgorithmConfig

CALLS = 10
"""Calls in a trainer process until the losses fail: the preflight checks of a run call a loss once, in another process."""
_calls = 0


def _reinforce(inputs: LossInputs) -> Tensor:
    global _calls
    _calls += 1
    return -inputs.advantages * inputs.log_probs


@policy_loss("raises_later", needs_old_log_probs=False)
def raises_later(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    loss = _reinforce(inputs)
    if _calls > CALLS:
        raise FloatingPointError(f"planted failure with a loss of {float((loss * inputs.loss_weights).sum())!r}")
    return loss, {}


@policy_loss("nan_later", needs_old_log_probs=False)
def nan_later(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    loss = _reinforce(inputs)
    return loss * (float("nan") if _calls > CALLS else 1.0), {}


@policy_loss("sleeps_later", needs_old_log_probs=False)
def sleeps_later(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    if _calls > 1 and os.environ.get("RANK") == "1":
        time.sleep(1000)
    return _reinforce(inputs), {}


DEATH = "PLANTED_DEATH"
"""Variable with the path of a file: `dies_once` kills rank 1 when the file is missing, and writes it."""


@policy_loss("dies_once", needs_old_log_probs=False)
def dies_once(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    loss, file = _reinforce(inputs), os.environ.get(DEATH)
    if _calls > CALLS and os.environ.get("RANK") == "1" and file and not Path(file).exists():
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return loss, {}


SPIKES = 22
"""Call in a trainer process in which `spikes_once` has a gradient a million times as large."""


@policy_loss("spikes_once", needs_old_log_probs=False)
def spikes_once(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    loss = _reinforce(inputs)
    return loss * (1e6 if _calls == SPIKES else 1.0), {}
