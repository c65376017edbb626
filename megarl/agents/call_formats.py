"""Parse tool calls from sampled text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HERMES, DEEPSEEK, GPT_OSS = "hermes", "deepseek", "gpt_oss"
CALL_END = "<|call|>"  # ends a call, and generation, in gpt-oss's format
DEEPEST = 32  # levels of lists and objects; the limit of records, schemas and messages between processes


@dataclass(frozen=True)
class ToolCall:
    """A tool call as the policy wrote it. `problem`: why it cannot be made, as text for the policy; "" if it can."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>|\Z)", re.DOTALL)
_HARMONY = re.compile(
    r"(?:\A|<\|start\|>assistant)((?:(?!<\|(?:start|message)\|>).)*)<\|message\|>(.*?)(?:<\|(?:call|end|return|start)\|>|\Z)",
    re.DOTALL,
)  # a message of the assistant: header, content. The first header begins in the prompt
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FENCE = re.compile(r"\s*```(?:json)?\n?(.*?)\n?```\s*", re.DOTALL)
_NOT_JSON = ("<function=", "<arg_key>")  # tags of Qwen3-Coder and GLM within <tool_call>: no reader


def format_of(template: str) -> str | None:
    """Return the call format that a chat template shows its model, or None."""
    if "<tool_call>" in template and not any(tag in template for tag in _NOT_JSON):
        return HERMES
    if "<｜tool▁call▁begin｜>" in template:
        return DEEPSEEK
    return GPT_OSS if CALL_END in template and "functions." in template else None


def calls_in(text: str, format: str, head: str = "") -> list[ToolCall]:
    """Return the calls of one turn, in order. Text inside <think>, and in gpt-oss's channel of analysis, is ignored.

    `text`: the turn with its special tokens. `head`: the chat template's text before it, because templates of reasoning models
    may open <think> there.
    """
    if format == GPT_OSS:
        return _gpt_oss(text)
    begun = head[head.rindex("<think>") :] if "<think>" in head else ""
    answer = (begun + text).rpartition("</think>")[2]
    if "<think>" in answer:  # never closed
        return []
    return _READERS[format](answer)


def _hermes(text: str) -> list[ToolCall]:
    """<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, as Qwen2.5 and Qwen3 write them."""
    return [_of_object(call_text) for call_text in _HERMES.findall(text)]


def _deepseek(text: str) -> list[ToolCall]:
    """function<|tool_sep|>add, then arguments in a JSON fence (DeepSeek-V3, R1); or add<|tool_sep|>arguments (V3.1)."""
    calls = []
    for call_text in _DEEPSEEK.findall(text):
        before, separator, after = call_text.partition("<｜tool▁sep｜>")
        if not separator:
            calls.append(ToolCall("", problem="the call has no <｜tool▁sep｜> between its parts"))
            continue
        name, arguments = before.strip(), after
        first, newline, rest = after.partition("\n")
        if name == "function" and newline and not first.lstrip().startswith("{"):
            name, arguments = first.strip(), rest
        fenced = _FENCE.fullmatch(arguments)
        calls.append(_with_arguments(name, fenced[1] if fenced else arguments))
    return calls


def _gpt_oss(text: str) -> list[ToolCall]:
    """<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>; the recipient may also come first."""
    calls = []
    for header, content in _HARMONY.findall(text):
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            continue  # analysis, or text for the user
        namespace, _, name = recipient[1].rpartition(".")
        if namespace == "functions":
            calls.append(_with_arguments(name, content))
        else:
            calls.append(ToolCall(recipient[1], problem=f"calls go to functions.NAME, and this one to {recipient[1]}"))
    return calls


_READERS: dict[str, Callable[[str], list[ToolCall]]] = {HERMES: _hermes, DEEPSEEK: _deepseek}


def _of_object(call_text: str) -> ToolCall:
    try:
        parsed = json.loads(call_text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", problem=f"the call is not valid JSON: {error}")
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return ToolCall("", problem='the call is not an object with a "name" and "arguments"')
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        return _with_arguments(parsed["name"], arguments)
    return _checked(parsed["name"], arguments)


def _with_arguments(name: str, call_text: str) -> ToolCall:
    try:
        arguments = json.loads(call_text) if call_text.strip() else {}
    except (ValueError, RecursionError) as error:
        return ToolCall(name, problem=f"its arguments are not valid JSON: {error}")
    return _checked(name, arguments)


def _checked(name: str, arguments: Any) -> ToolCall:
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"its arguments are {type(arguments).__name__}, not an object")
    if _is_deeper(arguments, DEEPEST):
        return ToolCall(name, problem=f"its arguments are nested more than {DEEPEST} deep")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # NaN, Infinity, 1e999; half of a surrogate pair
        return ToolCall(name, problem="its arguments hold a number that is not finite, or text that is not Unicode")
    return ToolCall(name, arguments)


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep."""
    layer = [value]
    for _ in range(levels):
        layer = [part for value in layer for part in (value.values() if isinstance(value, dict) else value)]
        layer = [part for part in layer if isinstance(part, (dict, list))]
        if not layer:
            return False
    return True
