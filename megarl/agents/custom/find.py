"""Find the loop that `agent.loop` names: a class of megarl's interface or of verl's, or a YAML file of verl's loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.agents.custom.interface import ATTRIBUTE, AgentLoopClass, loop_class
from megarl.data.tokenizer import Tokenizer
from megarl.registry import import_function


def find_loop(path: str, arguments: Mapping[str, Any], verl: Mapping[str, Any], tokenizer: Tokenizer) -> AgentLoopClass:
    """Return the loop ``module:Class``, ``file.py:Class``, or of ``file.yaml``.

    arguments: `agent.loop_arguments`. verl: the recipe's settings under verl's names (`verl_loops.verl_settings`).

    Raises:
        ValueError: it cannot be imported, is not an agent loop, or does not take the arguments.
    """
    from megarl.agents import verl_stand_in
    from megarl.agents.custom.verl_base import LOOP_MODULES

    verl_stand_in.provide(LOOP_MODULES)
    if is_file_of_loops(path):
        from megarl.agents.custom.verl_loops import loops_of_file

        return loops_of_file(path, arguments, verl, tokenizer)
    if ":" not in path:
        raise ValueError(f"agent loop {path!r}: give module:Class, file.py:Class, or a YAML file of verl's loops")
    class_ = import_function(path, "agent loop")
    if getattr(class_, ATTRIBUTE, False):
        return loop_class(class_, arguments)
    from megarl.agents.custom.verl_loops import is_verls, loop_of_verl

    if is_verls(class_):
        return loop_of_verl(class_, arguments, verl, tokenizer)
    raise ValueError(
        f"agent loop {path!r}: it is not decorated with megarl.agents.agent_loop, and not derived from verl's AgentLoopBase"
    )


def is_file_of_loops(path: str) -> bool:
    """Return whether `path` is a YAML file (`agent_loop_config_path` of verl)."""
    return path.endswith((".yaml", ".yml"))
