"""Rollout engines, which sample from the policy. An engine is selected by name and imported when created."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from megarl.hf import hub
from megarl.platform.environment import RoleSettings, users_first
from megarl.registry import nearest

if TYPE_CHECKING:
    from megarl.engines.backed import BackedEngine
    from megarl.engines.base import EngineLimits, EngineSpec
    from megarl.platform.environment import Requirement

_ENGINES = {"vllm": "megarl.engines.vllm.engine:VllmEngine", "sglang": "megarl.engines.sglang.engine:SglangEngine"}
_ARGUMENTS = {"vllm": "megarl.engines.vllm.args", "sglang": "megarl.engines.sglang.args"}
_GROUPS = ("vllm",)  # engines that can spread experts over a group
# Values of NPU variables for engines without graphs; None: unset. Task queue 2 is the fastest.
_WITHOUT_GRAPHS = {"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": None}


class EngineArguments(Protocol):
    """Functions of each module in `_ARGUMENTS`, which imports nothing heavy. megarl/engines/vllm/args.py documents them."""

    OVERRIDES: str

    def fields(self) -> Collection[str]: ...
    def check_engine_args(self, engine_args: Mapping[str, Any], section: str = "rollout") -> None: ...
    def check_plan(self, spec: EngineSpec, device: str) -> None: ...
    def merged_because(self, spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None) -> str | None: ...
    def limits(self, spec: EngineSpec) -> EngineLimits: ...
    def captures_graphs(self, engine_args: Mapping[str, Any]) -> bool: ...
    def expert_split(self, engine_args: Mapping[str, Any], tensor_parallel: int) -> tuple[int, str]: ...
    def process_env(self, threads: int) -> dict[str, str]: ...
    def required_environment(
        self, spec: EngineSpec, device: str, config: Mapping[str, Any] | None = None
    ) -> dict[str, Requirement]: ...


def create(name: str, spec: EngineSpec) -> BackedEngine:
    """Create the engine `name` without starting it, and fetch its model if it is of the hub and this node lacks it.

    Raises ValueError for an unknown name, and HubError.
    """
    check_name(name)
    module, attribute = _ENGINES[name].split(":")
    spec = dataclasses.replace(spec, model_path=hub.local_model(spec.model_path))
    return getattr(importlib.import_module(module), attribute)(spec)


def check_name(name: str, key: str = "rollout.engine") -> None:
    """Raise ValueError with the nearest name if the engine `name`, the value of the recipe's `key`, is unknown."""
    if name not in _ENGINES:
        near = difflib.get_close_matches(name, _ENGINES, 1, 0.0)[0]
        raise ValueError(f"{key} is {name!r}, which is not known; did you mean {near!r}? ({', '.join(_ENGINES)})")


def arguments_of(name: str) -> EngineArguments:
    """Return the functions that check the arguments of the engine `name` before its start. ValueError for an unknown name."""
    check_name(name)
    return cast(EngineArguments, importlib.import_module(_ARGUMENTS[name]))


def check_groups(name: str, data_parallel: int) -> None:
    """Raise ValueError if the engine `name` cannot form groups of `data_parallel` engines."""
    if data_parallel > 1 and name not in _GROUPS:
        raise ValueError(
            f"rollout.data_parallel is {data_parallel}, but engines of rollout.engine {name!r} form no groups; set it to 1, "
            f"or rollout.engine to {' or '.join(_GROUPS)}"
        )


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
    return RoleSettings("engines", defaults, variables, arguments_of(name).required_environment(spec, device, config))


def process_env(name: str, threads: int) -> dict[str, str]:
    """Return the variables that the engine `name` needs before its process starts, for `threads` CPU threads."""
    return arguments_of(name).process_env(threads)


def engine_env(
    name: str, platform_env: Mapping[str, str], threads: int, engine_args: Mapping[str, Any]
) -> dict[str, str]:
    """Return the environment of an engine without a recipe: `process_env`, and `rollout_env` overridden by the shell."""
    return process_env(name, threads) | users_first(rollout_env(name, platform_env, engine_args))


def rollout_env(name: str, platform_env: Mapping[str, str], engine_args: Mapping[str, Any]) -> dict[str, str]:
    """Return `platform_env`, the platform's settings for engines with graphs, adapted to the engine's arguments."""
    if arguments_of(name).captures_graphs(engine_args):
        return dict(platform_env)
    adapted = {variable: _WITHOUT_GRAPHS.get(variable, value) for variable, value in platform_env.items()}
    return {variable: value for variable, value in adapted.items() if value is not None}


def package_folder(package: str) -> Path | None:
    """Return the folder of a package without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) if folders else None


def check_argument(
    name: str, section: str, library: str, supported: Iterable[str], owned: Mapping[str, str | None]
) -> None:
    """Raise ValueError for an argument in `section`.engine_args that another setting determines or that is unknown.

    `supported`: argument names of the installed library; empty if it is not installed. `owned`: arguments that other
    settings determine -> the setting, in which {section} is replaced; None if megarl sets a fixed value.
    """
    key, supported = f"{section}.engine_args.{name}", list(supported)
    if name in owned:
        owner = owned[name]
        instead = f"set {owner.format(section=section)} instead" if owner else "megarl sets it"
        raise ValueError(f"{key} cannot be set: {instead}")
    if supported and name not in supported:
        near = nearest(name, (each for each in supported if not each.startswith("_")))
        remedy = f"; did you mean {near!r}?" if near else "; leave it out, or install a version that has it"
        raise ValueError(f"{key}: {library} has no such engine argument{remedy}")
