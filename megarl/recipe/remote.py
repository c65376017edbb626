"""The recipe's section `reward.remote`: a reward service over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megarl.recipe.key import key


@dataclass
class RemoteConfig:
    """The service that the scorer `remote` asks, over HTTP; see docs/rewards.md."""

    url: Optional[str] = key(None, "Where samples are posted to, e.g. https://judge.example.com/score.")
    headers: dict[str, str] = key(
        {},
        "Headers of each request, each with the name of the environment variable that holds its value, e.g. {Authorization: MY_TOKEN}: no secret stands in a recipe.",
    )
    timeout: float = key(20.0, "Seconds that one request may take.", above=0)
    attempts: int = key(
        3, "Requests for a sample: the first, and others after lost connections, 429 and 5xx.", at_least=1
    )
    first_wait: float = key(
        0.5, "Seconds before the second request; twice as many before each further one, at random up to that.", above=0
    )
    longest_wait: float = key(
        10.0, "Longest wait between two requests, in seconds. A service that asks for a longer one has failed.", above=0
    )
