"""How models write calls of tools, read back from what was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HERMES, DEEPSEEK = "hermes", "deepseek"
DEEPEST = 32  # lists and objects in each other: what records, schemas and messages between processes can take


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it. `problem`: why it cannot be made, in words for the policy; "": it can be read."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>|\Z)", re.DOTALL)
_FENCE = re.compile(r"\s*```(?:json)?\n?(.*?)\n?```\s*", re.DOTALL)


def format_of(template: str) -> str | None:
    """Which of the formats a chat template shows its model; None: neither."""
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder writes XML between these tags
        return HERMES
    return DEEPSEEK if "<｜tool▁call▁begin｜>" in template else None


def calls_in(text: str, format: str, head: str = "") -> list[Call]:
    """The calls of one turn, in order. `text` has its special tokens still; what is thought aloud calls nothing. `head`:
    what stood before it, where templates of reasoning models begin the thought."""
    begun = head[head.rindex("<think>") :] if "<think>" in head else ""
    said = (begun + text).rpartition("</think>")[2]
    if "<think>" in said:  # it never came to an end
        return []
    return _READERS[format](said)


def _hermes(text: str) -> list[Call]:
    """<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, as Qwen2.5 and Qwen3 write them."""
    return [_of_object(written) for written in _HERMES.findall(text)]


def _deepseek(text: str) -> list[Call]:
    """function<|tool_sep|>add, then arguments in a JSON fence (DeepSeek-V3, R1); or add<|tool_sep|>arguments (V3.1)."""
    calls = []
    for written in _DEEPSEEK.findall(text):
        before, separator, after = written.partition("<｜tool▁sep｜>")
        if not separator:
            calls.append(Call("", problem="the call has no <｜tool▁sep｜> between its parts"))
            continue
        name, arguments = before.strip(), after
        first, newline, rest = after.partition("\n")
        if name == "function" and newline and not first.lstrip().startswith("{"):
            name, arguments = first.strip(), rest
        fenced = _FENCE.fullmatch(arguments)
        calls.append(_with_arguments(name, fenced[1] if fenced else arguments))
    return calls


_READERS: dict[str, Callable[[str], list[Call]]] = {HERMES: _hermes, DEEPSEEK: _deepseek}


def _of_object(written: str) -> Call:
    try:
        found = json.loads(written)
    except (ValueError, RecursionError) as error:
        return Call("", problem=f"the call is not valid JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call("", problem='the call is not an object with a "name" and "arguments"')
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):  # some models write them as text in text
        return _with_arguments(found["name"], arguments)
    return _checked(found["name"], arguments)


def _with_arguments(name: str, written: str) -> Call:
    try:
        arguments = json.loads(written) if written.strip() else {}
    except (ValueError, RecursionError) as error:
        return Call(name, problem=f"its arguments are not valid JSON: {error}")
    return _checked(name, arguments)


def _checked(name: str, arguments: Any) -> Call:
    if not isinstance(arguments, dict):
        return Call(name, problem=f"its arguments are {type(arguments).__name__}, not an object")
    if _is_deeper(arguments, DEEPEST):
        return Call(name, problem=f"its arguments are nested more than {DEEPEST} deep")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # NaN, Infinity, 1e999; half of a surrogate pair
        return Call(name, problem="its arguments hold a number that is not finite, or text that is not Unicode")
    return Call(name, arguments)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in each other more than so many times."""
    layer = [value]
    for _ in range(levels):
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
        layer = [part for part in layer if isinstance(part, (dict, list))]
        if not layer:
            return False
    return True
