"""ReTool's demonstrations (Feng et al., 2025) as conversations with tool calls: https://huggingface.co/datasets/JoeYing/ReTool-SFT.

In the published data the assistant's turn is one text with the program in <code>, its output in <interpreter> and the
final answer in <answer>. Here each of them becomes a separate message. The chat template can then format the calls for
the model, and the loss ignores the interpreter's output.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megarl.agents import find
from megarl.commands.data.source import PreparedFiles, rows_of
from megarl.data.rows import Row, messages_of, write_parquet

DATA_SOURCE = "JoeYing/ReTool-SFT"
QUESTION = "*user question:*"
_PARTS = re.compile(r"<(code|interpreter|answer)>(.*?)</\1>", re.DOTALL)
_FENCE = re.compile(r"```(?:python)?\n?(.*?)```", re.DOTALL)


def prepare(source: str, out: Path) -> PreparedFiles:
    """Write out/train.parquet with ``messages`` and ``tools``.

    `source` is a file or a folder with the split train, in a column ``messages`` (a question and the assistant's text),
    or a name on the hub. Rows that cannot be split into messages are omitted, with a notice.

    Raises ValueError as `rows_of`, and if every row would be omitted.
    """
    rows, omitted, first = [], 0, ""
    published, notices = rows_of(source, "train", ("messages",))
    for index, row in enumerate(published):
        try:
            rows.append(_conversation_row(row, index))
        except ValueError as error:
            omitted, first = omitted + 1, first or str(error)
    if not rows:
        raise ValueError(first)
    path = out / "train.parquet"
    write_parquet(path, rows)
    if omitted:
        notices.append(f"{omitted:,} rows were omitted; the first: {first}")
    return PreparedFiles({path: len(rows)}, notices)


def _conversation_row(row: Row, index: int) -> dict[str, Any]:
    messages = messages_of(row, "messages")
    if [message["role"] for message in messages] != ["user", "assistant"]:
        raise ValueError(
            f"{row.where}: expected a user and an assistant message, got {[message['role'] for message in messages]}"
        )
    if not all(isinstance(message["content"], str) for message in messages):
        raise ValueError(f"{row.where}: a message's content is not text")
    question = messages[0]["content"].rpartition(QUESTION)[2].replace("<answer>", "").replace("</answer>", "").strip()
    turns = conversation(messages[1]["content"], row.where)
    return {
        "data_source": DATA_SOURCE,
        "messages": [{"role": "user", "content": question}, *turns],
        "tools": [find("code_interpreter").schema],
        "extra_info": {"split": "train", "index": index},
    }


def conversation(text: str, where: str) -> list[dict[str, Any]]:
    """Split a published answer into messages of the assistant and the tool, in turn. The last is the assistant's.

    Raises:
        ValueError: a call without a result, a result without a call, or no answer at the end. `where` names the row.
    """
    messages: list[dict[str, Any]] = []
    place, called = 0, False
    for part in _PARTS.finditer(text):
        before, kind, content = text[place : part.start()].strip(), part[1], part[2].strip()
        place = part.end()
        if (kind == "interpreter") != called or (called and before):
            raise ValueError(f"{where}: <{kind}> is out of order: each <code> needs an <interpreter> directly after it")
        called = kind == "code"
        if kind == "interpreter":
            messages.append({"role": "tool", "content": content})
        elif kind == "answer":
            messages.append({"role": "assistant", "content": f"{before}\n{content}".strip()})
            break
        else:
            fenced = _FENCE.search(content)
            call = {"name": "code_interpreter", "arguments": {"code": fenced[1].strip() if fenced else content}}
            calls = [{"type": "function", "function": call}]
            messages.append({"role": "assistant", "content": before, "tool_calls": calls})
    if not messages or messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        raise ValueError(f"{where}: the demonstration has no <answer>")
    return messages
