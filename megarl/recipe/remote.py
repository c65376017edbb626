"""The recipe's section `reward.remote`: a reward service over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megarl.recipe.key import key

SERVICES = ("remote", "reward_model")
"""Scorers that ask the service of the section `reward.remote`."""


@dataclass
class RemoteConfig:
    """The HTTP service of the scorers `remote` and `reward_model`; see docs/rewards.md."""

    url: Optional[str] = key(None, "URL that samples are posted to, e.g. https://judge.example.com/score.")
    model: Optional[str] = key(
        None, "reward_model: name of the model at the server, by default the path that it was started with. Required."
    )
    headers: dict[str, str] = key(
        {},
        "Headers of each request, each with the name of the environment variable that contains its value, e.g. {Authorization: MY_TOKEN}. A recipe contains no secret.",
    )
    timeout: float = key(20.0, "Time limit of a request, in seconds.", above=0)
    attempts: int = key(
        3,
        "Maximum requests per sample: the first, and repeats after lost connections, 429 and 5xx. If all fail, the sample waits for the service or fails (docs/rewards.md).",
        at_least=1,
    )
    first_wait: float = key(
        0.5,
        "Maximum wait before the second request, in seconds. It doubles before each further request; the actual wait is random up to it.",
        above=0,
    )
    longest_wait: float = key(
        10.0,
        "Maximum wait between two requests, in seconds. A service that requests a longer wait counts as down (`rollout.outage_timeout`).",
        above=0,
    )
