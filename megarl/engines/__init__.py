"""Rollout engines: what samples from the policy. An engine is chosen by name and imported when made."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.platform.environment import RoleSettings, users_first

if TYPE_CHECKING:
    from megarl.engines.base import EngineSpec, RolloutEngine
    from megarl.engines.limits import Limits

_ENGINES = {"vllm": "megarl.engines.vllm.engine:VllmEngine", "sglang": "megarl.engines.sglang.engine:SglangEngine"}
_ARGUMENTS = {"vllm": "megarl.engines.vllm.args", "sglang": "megarl.engines.sglang.args"}
_GROUPS = ("vllm",)  # whose experts can be spread over several engines


def create(name: str, spec: EngineSpec) -> RolloutEngine:
    """The engine called `name`, not yet started. ValueError for an unknown name."""
    check_known(name)
    module, attribute = _ENGINES[name].split(":")
    return getattr(importlib.import_module(module), attribute)(spec)


def check_known(name: str, key: str = "rollout.engine") -> None:
    """ValueError, with the nearest name, unless there is an engine called `name`, which the recipe's `key` says."""
    if name not in _ENGINES:
        near = difflib.get_close_matches(name, _ENGINES, 1, 0.0)[0]
        raise ValueError(f"{key} is {name!r}, which is not known; did you mean {near!r}? ({', '.join(_ENGINES)})")


def check_groups(name: str, data_parallel: int) -> None:
    """ValueError where the engine called `name` cannot be one of a group of `data_parallel`."""
    if data_parallel > 1 and name not in _GROUPS:
        raise ValueError(
            f"rollout.data_parallel is {data_parallel}, and engines of rollout.engine {name!r} form no groups; set it to 1, "
            f"or rollout.engine to {' or '.join(_GROUPS)}"
        )


def check_args(name: str, engine_args: Mapping[str, Any], section: str) -> None:
    """ValueError for arguments that the engine called `name` does not have, or that another setting decides. Nothing heavy
    is imported. `section`: the recipe's, whose `engine_args` they are."""
    _arguments(name).check_engine_args(engine_args, section)


def knows_args(name: str) -> bool:
    """Whether the engine called `name` is installed here, so that the names of its arguments are known."""
    return bool(_arguments(name).fields())


def check_plan(name: str, spec: EngineSpec, device: str) -> None:
    """RecipeError or ValueError for what an engine of `spec` can never do on `device` ("cpu", "cuda", "npu")."""
    _arguments(name).check_plan(spec, device)


def merged_because(name: str, spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None) -> str | None:
    """Why an engine called `name` cannot hold the adapters of `spec`, and must be given merged weights; None: it can, as far
    as is known before it has started. `config`: the model's config.json; None: the one at `spec.model_path`."""
    return _arguments(name).merged_because(spec, device, config)


def limits_of(name: str, spec: EngineSpec) -> Limits:
    """How large the steps of an engine called `name` are, and how much of its device the engine takes."""
    return _arguments(name).limits(spec)


def engine_settings(
    name: str,
    spec: EngineSpec,
    platform_env: Mapping[str, str],
    device: str,
    variables: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
) -> RoleSettings:
    """The environment of an engine called `name` on `device` ("cpu", "cuda", "npu"), by who decides each variable.

    `platform_env`: the platform's `rollout_env`. `variables`: the recipe's, of engines. `config`: config.json; None: the
    one at the spec's path, without which nothing is computed from the model.
    """
    own = rollout_env(name, platform_env, spec.engine_args)
    return RoleSettings("engines", own, variables, _arguments(name).required_environment(spec, device, config))


def process_env(name: str, threads: int) -> dict[str, str]:
    """The engine's own environment of a process, with `threads` CPU threads; it must be set before the process starts."""
    found: dict[str, str] = _arguments(name).process_env(threads)
    return found


def engine_env(
    name: str, platform_env: Mapping[str, str], threads: int, engine_args: Mapping[str, Any]
) -> dict[str, str]:
    """The environment of an engine without a recipe: `process_env`, and `rollout_env` with the shell's values."""
    return process_env(name, threads) | users_first(rollout_env(name, platform_env, engine_args))


def rollout_env(name: str, platform_env: Mapping[str, str], engine_args: Mapping[str, Any]) -> dict[str, str]:
    """The platform's rollout settings (`platform_env`) as an engine with these `engine_args` wants them."""
    queue = {"TASK_QUEUE_ENABLE": _arguments(name).task_queue(engine_args)}  # on an NPU it hangs on the arguments
    return {variable: queue.get(variable, value) for variable, value in platform_env.items()}


def _arguments(name: str):
    check_known(name)
    return importlib.import_module(_ARGUMENTS[name])
