"""The recipe's section `reward.remote`: a reward service over HTTP."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional
from urllib.parse import SplitResult, urlsplit

from megarl.errors import RecipeError
from megarl.recipe.key import key
from megarl.recipe.urls import check_headers, check_url

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe, RewardConfig


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


def uses_remote(reward: RewardConfig) -> bool:
    return reward.function == "remote" or "remote" in reward.functions


def check_remote(recipe: Recipe) -> None:
    """Raise RecipeError for a service that cannot be asked as the recipe says."""
    remote = recipe.reward.remote
    if not uses_remote(recipe.reward):
        if remote != RemoteConfig():
            what = "the scorer `remote` is not named: this section would change nothing"
            raise RecipeError("reward.remote", what, "set reward.function=remote, or leave the section out")
        return
    if not remote.url:
        what = "the scorer `remote` is named, and no service"
        raise RecipeError("reward.remote.url", what, "give its URL, or name another scorer", value=remote.url)
    check_url("reward.remote", remote.url)
    check_headers("reward.remote", remote.headers)
    longest = remote.attempts * remote.timeout + (remote.attempts - 1) * remote.longest_wait
    if recipe.reward.timeout < longest:
        what = (
            f"a sample is ended after {recipe.reward.timeout:g} s, and the scorer `remote` may take {longest:g} s: "
            f"{remote.attempts} requests x {remote.timeout:g} s + {remote.attempts - 1} waits x {remote.longest_wait:g} s"
        )
        remedy = (
            f"set reward.timeout to {longest:g} or more, or lower reward.remote's attempts, timeout or longest_wait"
        )
        raise RecipeError("reward.timeout", what, remedy, value=recipe.reward.timeout)


def remote_notices(reward: RewardConfig) -> list[str]:
    """What people should know of a service that is used all the same."""
    if not uses_remote(reward) or not reward.remote.url:
        return []
    url = urlsplit(reward.remote.url)
    if url.scheme == "https" or _is_this_machine(url):
        return []
    what = "samples" if not reward.remote.headers else "samples and the headers' values"
    return [f"reward.remote.url is plain http to {url.hostname}: whoever is between can read {what}"]


def _is_this_machine(url: SplitResult) -> bool:
    host = url.hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
