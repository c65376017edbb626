"""What is refused of the recipe's section `reward`. Names of scorers are checked with the data, in megarl/preflight/run.py."""

from __future__ import annotations

import ipaddress
import math
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from megarl.errors import RecipeError
from megarl.recipe.urls import check_headers, check_url

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe, RewardConfig
from megarl.recipe.remote import RemoteConfig, uses_remote

if TYPE_CHECKING:
    from megarl.recipe.schema import Recipe


def check_reward(recipe: Recipe) -> None:
    """Raise RecipeError for the first thing that cannot be had as asked."""
    reward = recipe.reward
    check_remote(recipe)
    if not reward.functions:
        return
    if reward.function is not None:
        raise RecipeError(
            "reward.functions",
            f"reward.function names a scorer for every row, too ('{reward.function}')",
            "set one of the two",
            value=dict(reward.functions),
        )
    labels: dict[str, str] = {}
    for name, weight in reward.functions.items():
        if not math.isfinite(weight) or weight == 0:
            remedy = "give a number other than 0, or leave the scorer out"
            raise RecipeError(f"reward.functions.{name}", "this is no weight", remedy, value=weight)
        label = name.rpartition(":")[2]
        if label in labels or label in ("accuracy", "steps"):
            other = f"'{labels[label]}' has" if label in labels else "a part of the sum itself has"
            raise RecipeError(
                "reward.functions",
                f"metrics call '{name}' '{label}', a name that {other} already",
                "give the function another name",
                value=dict(reward.functions),
            )
        labels[label] = name


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
