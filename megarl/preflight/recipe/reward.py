"""Checks of the section `reward`. Names of scorers are checked with the data, in megarl/preflight/data.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from urllib.parse import urlsplit

from megarl.errors import RecipeError, errors_of
from megarl.preflight.recipe.shared import unused_section_errors
from megarl.recipe.schema import RewardConfig
from megarl.recipe.urls import check_headers, check_url, is_this_machine

_LONGEST_ARGUMENTS = 50_000


def reward_errors(reward: RewardConfig) -> Iterator[ValueError]:
    yield from _remote_errors(reward)
    yield from _argument_errors(reward)
    if not reward.functions:
        return
    if reward.function is not None:
        yield RecipeError(
            "reward.functions",
            f"reward.function ('{reward.function}') already names a scorer for every row",
            "set only one of the two",
            value=dict(reward.functions),
        )
    labels: dict[str, str] = {}
    for name, weight in reward.functions.items():
        if not math.isfinite(weight) or weight == 0:
            remedy = "give a number other than 0, or leave the scorer out"
            yield RecipeError(f"reward.functions.{name}", "a weight must be finite and not 0", remedy, value=weight)
        label = name.rpartition(":")[2]
        if label in labels or label in ("accuracy", "steps"):
            other = f"'{labels[label]}'" if label in labels else "a part of the sum"
            yield RecipeError(
                "reward.functions",
                f"the metric of '{name}' would be '{label}', which is the metric of {other}",
                "give the function another name",
                value=dict(reward.functions),
            )
        labels[label] = name


def _argument_errors(reward: RewardConfig) -> Iterator[ValueError]:
    arguments = dict(reward.arguments)
    if not arguments:
        return
    if len(reward.own_functions) != 1:
        count = len(reward.own_functions) or "no"
        problem = f"arguments are passed to one function of yours, and the reward has {count}"
        yield RecipeError("reward.arguments", problem, "leave it out, or set defaults in your code", value=arguments)
    try:
        text = json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        text = f"{error}"
    if len(text) > _LONGEST_ARGUMENTS or (text[:1] == "{" and json.loads(text) != arguments) or text[:1] != "{":
        problem = f"scorer processes get them as JSON with text keys, of at most {_LONGEST_ARGUMENTS:,} characters"
        yield RecipeError("reward.arguments", problem, "use text, numbers, lists and mappings", value=arguments)


def _remote_errors(reward: RewardConfig) -> Iterator[ValueError]:
    remote = reward.remote
    if not reward.services:
        cause = "the reward does not use the scorer `remote` or `reward_model`"
        yield from unused_section_errors("reward.remote", remote, cause, "set reward.function=remote")
        return
    name = reward.services[0]
    if len(reward.services) > 1:
        problem = "the section reward.remote describes one service, for `remote` or for `reward_model`"
        yield RecipeError("reward.functions", problem, "name one of the two", value=dict(reward.functions))
    if name == "reward_model" and not remote.model:
        problem = "the scorer `reward_model` names the model in its requests"
        yield RecipeError(
            "reward.remote.model", problem, "give the name under which the server has it", value=remote.model
        )
    if name == "remote" and remote.model:
        problem = "only the scorer `reward_model` reads it"
        yield RecipeError(
            "reward.remote.model", problem, "leave it out, or set reward.function=reward_model", value=remote.model
        )
    if not remote.url:
        problem = f"the reward uses the scorer `{name}`, but its URL is unset"
        yield RecipeError("reward.remote.url", problem, "give its URL, or use another scorer", value=remote.url)
    else:
        yield from errors_of(check_url, "reward.remote", remote.url)
    yield from errors_of(check_headers, "reward.remote", remote.headers)
    longest = remote.attempts * remote.timeout + (remote.attempts - 1) * remote.longest_wait
    if reward.timeout < longest:
        problem = (
            f"the timeout of a sample is {reward.timeout:g} s, and the scorer `{name}` may take {longest:g} s: "
            f"{remote.attempts} requests x {remote.timeout:g} s + {remote.attempts - 1} waits x {remote.longest_wait:g} s"
        )
        remedy = (
            f"set reward.timeout to {longest:g} or more, or lower reward.remote's attempts, timeout or longest_wait"
        )
        yield RecipeError("reward.timeout", problem, remedy, value=reward.timeout)


def remote_notices(reward: RewardConfig) -> list[str]:
    """Return a notice if samples are sent to another machine without encryption."""
    if not reward.services or not reward.remote.url:
        return []
    url = urlsplit(reward.remote.url)
    if url.scheme == "https" or is_this_machine(url):
        return []
    exposed = "samples" if not reward.remote.headers else "samples and the headers' values"
    return [f"reward.remote.url is plain http to {url.hostname}: {exposed} are sent unencrypted"]
