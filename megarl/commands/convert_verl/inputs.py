"""Reward functions, tools, columns of rows, and arguments of engines."""

from __future__ import annotations

from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.errors import InputError

_R = "actor_rollout_ref.rollout"
SGLANG = {
    "gpu_memory_utilization": "mem_fraction_static", "max_num_seqs": "max_running_requests", "max_num_batched_tokens": "",
    "enforce_eager": "disable_cuda_graph", "enable_chunked_prefill": "", "enable_prefix_caching": "",
}  # fmt: skip
"""Arguments of vLLM's engine -> SGLang's; "": none."""

RECIPE_DEFAULTS: dict[str, dict[str, Any]] = {
    "main_entropy": {
        "custom_reward_function.path": "pkg://recipe.entropy.reward_score",
        "custom_reward_function.name": "_default_compute_score",
    },
}
"""Further defaults by training module: main_entropy has its own scorer (recipe/entropy/reward.py)."""


def translate_reward_function(conversion: Conversion) -> None:
    """Set reward.function to verl's custom_reward_function: a file, or pkg:// and a module."""
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):  # verl prefers the former
        option, path = f"{prefix}.path", conversion.get(f"{prefix}.path")
        if not path:
            continue
        path = str(path).removeprefix("file://")
        module = path.removeprefix("pkg://").replace("/", ".") if path.startswith("pkg://") else path
        if "://" in module or not (path.startswith("pkg://") or path.endswith(".py")):
            raise InputError(f"{conversion.where(option)}{option}={path} is neither a .py file nor pkg:// and a module")
        name = conversion.get(f"{prefix}.name", "compute_score")
        if not name:
            raise InputError(f"{conversion.where(f'{prefix}.name')}{prefix}.name has no value")
        conversion.settings["reward.function"] = f"{module}:{name}"
        if option not in conversion.options:
            conversion.note(option, "the scorer of verl's recipe, whose repository must be on PYTHONPATH")
        return
    conversion.drop("reward.arguments.", "verl uses it with custom_reward_function.path")


def translate_tools(conversion: Conversion) -> None:
    """Refuse a run with tools, unless the user names megarl's; drop the limits of tools of a run without."""
    get = conversion.get
    switches = {
        f"{_R}.multi_turn.enable": get(f"{_R}.multi_turn.enable") is True,
        f"{_R}.agent.default_agent_loop": get(f"{_R}.agent.default_agent_loop") == "tool_agent",
        f"{_R}.multi_turn.tool_config_path": bool(get(f"{_R}.multi_turn.tool_config_path")),
        f"{_R}.multi_turn.function_tool_path": bool(get(f"{_R}.multi_turn.function_tool_path")),
    }
    options = [option for option, is_on in switches.items() if is_on]
    if options and any(name.startswith(("agent.tools", "agent.mcp")) for name in conversion.given):
        conversion.settings.setdefault("agent.max_calls_per_turn", 1)
        if "agent.max_turns" not in conversion.settings:
            conversion.note(
                f"{_R}.multi_turn.max_assistant_turns", "unlimited in verl; set agent.max_turns, which is 8"
            )
        if f"{_R}.multi_turn.max_tool_response_length" not in conversion.options:
            reason = "256 characters in verl; agent.max_answer_tokens is 512 tokens"
            conversion.note(f"{_R}.multi_turn.max_tool_response_length", reason)
        return
    if options and not {*options} & {*conversion.given}:
        reason = "verl's tools are classes, megarl's are functions (docs/agents.md)"
        conversion.leave_out(options[0], reason, to="agent.tools", changes=True)
    for option in options:
        conversion.note(option, "left out: the run has no tools")
    conversion.drop("agent.")


def translate_columns(conversion: Conversion) -> None:
    """Leave out names of columns that are megarl's."""
    for key in [key for key in conversion.settings if key.startswith("data.columns.")]:
        if conversion.settings[key] == key.removeprefix("data.columns."):
            del conversion.settings[key]


def translate_sft_columns(conversion: Conversion) -> None:
    """Set the columns of demonstrations. Of verl's SFT trainers the first reads prompt and response, or messages."""
    get = conversion.get
    if "data.prompt_key" in conversion.defaults and get("data.multiturn.enable") is not True:
        columns = {"prompt": "data.prompt", "response": "data.response"}
        names = {key: [get(f"{option}_key"), *_list(get(f"{option}_dict_keys"))] for key, option in columns.items()}
    else:
        options = {
            key: conversion.first(f"data.multiturn.{key}_key", f"data.{key}_key") for key in ("messages", "tools")
        }
        names = {key: [name] for key, name in options.items() if name is not None}
        for option in ("data.prompt_key", "data.response_key"):
            if option in conversion.options:
                conversion.note(option, "not used: the trainer reads messages")
    for key, path in names.items():
        if path[0] is not None:
            conversion.settings[f"data.columns.{key}"] = ".".join(map(str, path))
    translate_columns(conversion)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def translate_engine(conversion: Conversion) -> None:
    """Rename engine arguments for SGLang, and leave out those that it lacks."""
    settings, section = conversion.settings, "rollout.engine_args."
    if settings.get("rollout.engine") != "sglang":
        return
    for name in [key.removeprefix(section) for key in settings if key.startswith(section)]:
        if name in SGLANG:
            value = settings.pop(section + name)
            if SGLANG[name]:
                settings.setdefault(section + SGLANG[name], value)
            elif (option := f"{_R}.{name}") in conversion.options:
                conversion.note(option, "vLLM's; set SGLang's argument in rollout.engine_args")
