"""Rollout engines, which sample from the policy. An engine is selected by name and imported when created."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.platform.environment import RoleSettings, users_first

if TYPE_CHECKING:
    from megarl.engines.backed import BackedEngine
    from megarl.engines.base import EngineLimits, EngineSpec

_ENGINES = {"vllm": "megarl.engines.vllm.engine:VllmEngine", "sglang": "megarl.engines.sglang.engine:SglangEngine"}
_ARGUMENTS = {"vllm": "megarl.engines.vllm.args", "sglang": "megarl.engines.sglang.args"}
_GROUPS = ("vllm",)  # engines that can spread experts over a group


def create(name: str, spec: EngineSpec) -> BackedEngine:
    """Create the engine `name` without starting it. ValueError for an unknown name."""
    check_name(name)
    module, attribute = _ENGINES[name].split(":")
    return getattr(importlib.import_module(module), attribute)(spec)


def check_name(name: str, key: str = "rollout.engine") -> None:
    """Raise ValueError with the nearest name if the engine `name`, the value of the recipe's `key`, is unknown."""
    if name not in _ENGINES:
        near = difflib.get_close_matches(name, _ENGINES, 1, 0.0)[0]
        raise ValueError(f"{key} is {name!r}, which is not known; did you mean {near!r}? ({', '.join(_ENGINES)})")


def check_groups(name: str, data_parallel: int) -> None:
    """Raise ValueError if the engine `name` cannot form groups of `data_parallel` engines."""
    if data_parallel > 1 and name not in _GROUPS:
        raise ValueError(
            f"rollout.data_parallel is {data_parallel}, but engines of rollout.engine {name!r} form no groups; set it to 1, "
            f"or rollout.engine to {' or '.join(_GROUPS)}"
        )


def check_args(name: str, engine_args: Mapping[str, Any], section: str) -> None:
    """Raise ValueError for arguments that the engine `name` does not have or that another setting determines. Imports
    nothing heavy. `section`: the recipe's section with these `engine_args`."""
    _arguments(name).check_engine_args(engine_args, section)


def can_check_args(name: str) -> bool:
    """Return True if the engine `name` is installed here, so that `check_args` can check argument names."""
    return bool(_arguments(name).fields())


def check_plan(name: str, spec: EngineSpec, device: str) -> None:
    """Raise RecipeError or ValueError if `spec` is impossible on `device` ("cpu", "cuda", "npu")."""
    _arguments(name).check_plan(spec, device)


def merged_because(name: str, spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None) -> str | None:
    """Return why the engine `name` cannot hold the adapters of `spec` and needs merged weights; None if it can, judged
    before its start. `config`: the model's config.json; None: read from `spec.model_path`."""
    return _arguments(name).merged_because(spec, device, config)


def limits_of(name: str, spec: EngineSpec) -> EngineLimits:
    """Return the step size and the device memory of the engine `name`."""
    return _arguments(name).limits(spec)


def engine_settings(
    name: str,
    spec: EngineSpec,
    platform_env: Mapping[str, str],
    device: str,
    variables: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
) -> RoleSettings:
    """Return the environment of the engine `name` on `device` ("cpu", "cuda", "npu"), with the origin of each variable.

    `platform_env`: the platform's `rollout_env`. `variables`: the recipe's variables for engines. `config`: the model's
    config.json; None: read from the spec's path. Without the file, no variable is derived from the model.
    """
    defaults = rollout_env(name, platform_env, spec.engine_args)
    return RoleSettings("engines", defaults, variables, _arguments(name).required_environment(spec, device, config))


def process_env(name: str, threads: int) -> dict[str, str]:
    """Return the variables that the engine `name` needs before its process starts, for `threads` CPU threads."""
    variables: dict[str, str] = _arguments(name).process_env(threads)
    return variables


def engine_env(
    name: str, platform_env: Mapping[str, str], threads: int, engine_args: Mapping[str, Any]
) -> dict[str, str]:
    """Return the environment of an engine without a recipe: `process_env`, and `rollout_env` overridden by the shell."""
    return process_env(name, threads) | users_first(rollout_env(name, platform_env, engine_args))


def rollout_env(name: str, platform_env: Mapping[str, str], engine_args: Mapping[str, Any]) -> dict[str, str]:
    """Return `platform_env`, the platform's settings for engines, adapted to the engine's arguments."""
    queue = {"TASK_QUEUE_ENABLE": _arguments(name).task_queue(engine_args)}  # an NPU setting that depends on arguments
    return {variable: queue.get(variable, value) for variable, value in platform_env.items()}


def _arguments(name: str):
    check_name(name)
    return importlib.import_module(_ARGUMENTS[name])
