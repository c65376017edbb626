"""Tools, interactions, columns of rows, and arguments of engines."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from megarl.commands.convert_verl.conversion import Conversion
from megarl.errors import InputError
from megarl.recipe.load import OPEN

_R = "actor_rollout_ref.rollout"
SGLANG = {
    "gpu_memory_utilization": "mem_fraction_static", "max_num_seqs": "max_running_requests", "max_num_batched_tokens": "",
    "enforce_eager": "disable_cuda_graph", "enable_chunked_prefill": "", "enable_prefix_caching": "",
}  # fmt: skip
"""Arguments of vLLM's engine -> SGLang's; "": none."""
_INTERACTION = f"{_R}.multi_turn.interaction_config_path"
_LOOPS, _DEFAULT_LOOP = f"{_R}.agent.agent_loop_config_path", f"{_R}.agent.default_agent_loop"
_MANAGER, _BUILT_IN = f"{_R}.agent.agent_loop_manager_class", ("single_turn_agent", "tool_agent")
_MULTI_TURN = f"{_R}.multi_turn."
_FUNCTION_TOOLS = f"{_MULTI_TURN}function_tool_path"
_OF_BUILT_IN = (
    "enable", "max_assistant_turns", "max_parallel_calls", "format", "tool_config_path", "function_tool_path", "max_user_turns",
    "max_tool_response_length", "tool_response_truncate_side", "interaction_config_path",
)  # fmt: skip
"""Options of the section multi_turn that verl's own loops read."""
_MOST_REQUESTS = 1000  # of a sample with a loop of the user; verl has no limit
_FORMATS = {"hermes": "hermes", "gpt-oss": "gpt_oss"}
_FUNCTIONS = "verl's function tools are not read: write functions of megarl (docs/agents.md)"
_ROWS = "data.custom_cls"


def translate_agent(conversion: Conversion) -> None:
    """Set agent.loop, or agent.tools and agent.interaction, to verl's files, unless the user names others; drop the limits of a run
    without them."""
    if _translate_loop(conversion):
        return
    with_tools = _translate_tools(conversion)
    with_user = _translate_interaction(conversion)
    if with_tools:
        syntax = f"{_R}.multi_turn.format"
        format = _FORMATS.get(conversion.get(syntax, "hermes"))
        if format is None:
            conversion.leave_out(syntax, "megarl does not read this syntax of calls", to="agent.format", changes=True)
        elif syntax in conversion.options:
            conversion.settings["agent.format"] = format
        conversion.settings.setdefault("agent.max_calls_per_turn", 1)
    else:
        conversion.drop("agent.max_calls_per_turn")
    if with_tools or with_user:
        _limit_turns(conversion)
        if f"{_R}.multi_turn.max_tool_response_length" not in conversion.options:
            reason = "256 characters of a tool in verl; agent.max_answer_tokens is 512 tokens, of a user's reply too"
            conversion.note(f"{_R}.multi_turn.max_tool_response_length", reason)
    else:
        conversion.drop("agent.")


def _translate_loop(conversion: Conversion) -> bool:
    """Set agent.loop, with the options that loops read; returns whether the user's loop makes the samples."""
    get, chosen = conversion.get, {*conversion.user_choices}
    path, default = get(_LOOPS), get(_DEFAULT_LOOP)
    named = any(name.startswith("agent.loop") for name in chosen)
    if not named and (not path or _LOOPS in chosen):
        if path:
            conversion.note(_LOOPS, "left out: megarl's agent loop makes the samples")
        if default not in (None, *_BUILT_IN):
            reason = "no counterpart: agent_loop_config_path names no file of loops"
            conversion.leave_out(_DEFAULT_LOOP, reason, to="agent.loop", changes=True)
        for name in conversion.options:
            if name.startswith(_MULTI_TURN) and name.removeprefix(_MULTI_TURN) not in _OF_BUILT_IN:
                conversion.leave_out(name, "unknown option, omitted: agent loops of your own read it", changes=True)
        return False
    if get(_MANAGER) and not named:
        conversion.leave_out(_LOOPS, "the manager's file", to="agent.loop", changes=True)
        return False
    if get(_FUNCTION_TOOLS):
        reason = "verl's function tools are not passed to agent loops"
        conversion.leave_out(_FUNCTION_TOOLS, reason, to="agent.loop", changes=True)
    conversion.drop("agent.max_calls_per_turn")
    if "agent.max_turns" not in chosen:
        conversion.settings["agent.max_turns"] = _MOST_REQUESTS
    if not named:
        read = {
            name: get(name)
            for name in (*conversion.options, *conversion.defaults)
            if name.startswith((_MULTI_TURN, "sampling_params.")) and name != _FUNCTION_TOOLS
        }
        if default not in (None, *_BUILT_IN):
            read[_DEFAULT_LOOP] = default
        conversion.settings |= {"agent.loop": str(path), "agent.loop_arguments": read}
        conversion.note(
            _LOOPS,
            f"YAML and classes must be here; a row without agent_name has the file's only loop; requests per sample: {_MOST_REQUESTS}",
        )
    return True


def _translate_tools(conversion: Conversion) -> bool:
    """Set agent.tools; returns whether the policy calls tools."""
    get, chosen = conversion.get, {*conversion.user_choices}
    file, functions = f"{_R}.multi_turn.tool_config_path", f"{_R}.multi_turn.function_tool_path"
    switches = {
        f"{_R}.multi_turn.enable": conversion.is_on(f"{_R}.multi_turn.enable"),
        f"{_R}.agent.default_agent_loop": get(f"{_R}.agent.default_agent_loop") == "tool_agent",
        file: bool(get(file)),
        functions: bool(get(functions)),
    }
    options = [option for option, is_on in switches.items() if is_on]
    if any(name.startswith(("agent.tools", "agent.mcp")) for name in chosen):
        return bool(options)
    if switches[file] and not {*options} & chosen:
        conversion.settings |= {"agent.tools": [str(get(file))], "agent.tool_rewards": "scorer"}
        conversion.note(
            file,
            "every row has the tools, in verl rows with agent_name=tool_agent; an instance lasts for a sample, in verl for a call; "
            "YAML and classes must be here",
        )
        if switches[functions]:
            conversion.leave_out(functions, _FUNCTIONS, to="agent.tools", changes=True)
        return True
    if get(_INTERACTION) and not switches[functions]:
        return False  # the switches are the interaction's
    if options and not {*options} & chosen:
        reason = _FUNCTIONS if switches[functions] else "the command names no tool_config_path"
        conversion.leave_out(options[0], reason, to="agent.tools", changes=True)
    for option in options:
        conversion.note(option, "left out: the run has no tools")
    return False


def _translate_interaction(conversion: Conversion) -> bool:
    """Set agent.interaction; returns whether a user replies to the policy."""
    if "agent.interaction" in conversion.user_choices:
        return True
    path = conversion.get(_INTERACTION)
    if path and _INTERACTION in conversion.user_choices:
        conversion.note(_INTERACTION, "left out: no user replies")
    elif path:
        conversion.settings |= {"agent.interaction": str(path), "agent.tool_rewards": "scorer"}
        conversion.note(
            _INTERACTION,
            "the response ends before a reply that ends the conversation, in verl after it; YAML and classes must be here",
        )
    return bool(path) and _INTERACTION not in conversion.user_choices


def _limit_turns(conversion: Conversion) -> None:
    """Set agent.max_turns to the smaller of verl's limits: of the policy's turns, and of the messages between them."""
    option = f"{_R}.multi_turn.max_user_turns"
    if conversion.get(option) and "agent.max_turns" not in conversion.user_choices:
        turns = conversion.number(option) + 1
        conversion.settings["agent.max_turns"] = min(conversion.settings.get("agent.max_turns", turns), turns)
    if "agent.max_turns" not in conversion.settings:
        conversion.note(f"{_R}.multi_turn.max_assistant_turns", "unlimited in verl; set agent.max_turns, which is 8")


def translate_dataset_class(conversion: Conversion) -> None:
    """Replace the files by the output of ``megarl data verl_dataset`` for verl's dataset class, and note the commands."""
    option = f"{_ROWS}.path"
    path = conversion.get(option)
    if not path:
        return
    if option in conversion.user_choices:
        conversion.note(option, "left out: megarl reads the files itself")
        return
    name = conversion.get(f"{_ROWS}.name")
    if not name:
        raise InputError(f"{conversion.where(option)}{option} needs {_ROWS}.name, the class")
    module = str(path).removeprefix("file://")
    module = module.removeprefix("pkg://").replace("/", ".") if module.startswith("pkg://") else module
    settings = conversion.settings
    read = [option for option in conversion.options if option.startswith("data.") and not option.startswith(_NOT_READ)]
    options = [f"--option={option[5:]}={_yaml(conversion.options[option].value)}" for option in read]
    for key, written in (("data.train_files", "train"), ("data.eval_files", "test")):
        if key in settings and key not in conversion.user_choices:
            out = f"data/{name}/{written}.parquet"
            files = [OPEN] if settings[key] == OPEN else settings[key]
            sources = [f"--source={file}" for file in files]
            arguments = [
                f"--class={module}:{name}",
                *sources,
                f"--model={settings['model.path']}",
                *options,
                f"--out={out}",
            ]
            command = shlex.join(["python", "-m", "megarl", "data", "verl_dataset", *arguments])
            conversion.note(option, f"write the rows of {key} once, before the run: {command}")
            settings[key] = [out]
    conversion.drop("data.columns.")


_NOT_READ = (
    "data.train_", "data.val_", "data.gen_batch_size", "data.custom_cls", "data.shuffle", "data.seed",
    "data.filter_overlong", "data.dataloader", "data.truncation",
)  # fmt: skip
"""Options of verl's section data that concern the order, number and length of rows, which the recipe sets."""


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("\n...\n").strip()


def translate_columns(conversion: Conversion) -> None:
    """Leave out names of columns that are megarl's."""
    for key in [key for key in conversion.settings if key.startswith("data.columns.")]:
        if conversion.settings[key] == key.removeprefix("data.columns."):
            del conversion.settings[key]


def translate_sft_columns(conversion: Conversion) -> None:
    """Set the columns of demonstrations. Of verl's SFT trainers the first reads prompt and response, or messages."""
    get = conversion.get
    if "data.prompt_key" in conversion.defaults and not conversion.is_on("data.multiturn.enable"):
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
    """Set the engine's data type if the trainers have another, rename engine arguments for SGLang, and leave out the ones that SGLang lacks."""
    settings, section = conversion.settings, "rollout.engine_args."
    if settings.get("model.dtype", "bfloat16") != "bfloat16":
        settings.setdefault("rollout.dtype", "bfloat16")  # verl's default; megarl's is model.dtype
    if settings.get("rollout.engine") != "sglang":
        return
    for name in [key.removeprefix(section) for key in settings if key.startswith(section)]:
        if name in SGLANG:
            value = settings.pop(section + name)
            if SGLANG[name]:
                settings.setdefault(section + SGLANG[name], value)
            elif (option := f"{_R}.{name}") in conversion.options:
                conversion.note(option, "vLLM's; set SGLang's argument in rollout.engine_args")
