"""A task in two turns that a tiny model can learn: each row has a table of digits that only the tool `find_digit` can see.

Demonstrations call the tool in half of the rows and guess in the others. A policy trained on them is right in little
more than half of its samples, and learns from rewards to call the tool always."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megarl.agents import find
from megarl.data.rows import write_parquet

KEYS = "abcd"
TOOL = "tests.support.agent_tools:find_digit"


VERLS_TOOL = "tests.support.verl_tools.DigitTool"


def write_verls_tool(folder: Path) -> Path:
    """Write verl's tools file with a tool that the policy sees as `TOOL`; it logs to folder/digits."""
    config = {"type": "native", "log": str(folder / "digits")}
    entry = {"class_name": VERLS_TOOL, "config": config, "tool_schema": find(TOOL).schema}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return folder / "tools.yaml"


def _row(rng: random.Random, number: int) -> dict[str, Any]:
    table = {key: rng.randrange(10) for key in KEYS}
    key = rng.choice(KEYS)
    return {
        "data_source": "test/digits",
        "prompt": [{"role": "user", "content": f"Digit of {key}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(table[key])},
        "extra_info": {
            "index": number,
            "table": table,
            "key": key,
            "tools_kwargs": {"find_digit": {"create_kwargs": {"table": table}}},  # for the tool of verl
        },
    }


def write_prompts(path: Path, rows: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    write_parquet(path, [_row(rng, number) for number in range(rows)])


def write_demonstrations(path: Path, rows: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    demonstrations = []
    for number in range(rows):
        row = _row(rng, number)
        key, answer = row["extra_info"]["key"], row["reward_model"]["ground_truth"]
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": "find_digit", "arguments": f'{{"key": "{key}"}}'},
        }
        turns = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer, "tool_calls": []},
            {"role": "assistant", "content": answer, "tool_calls": []},
        ]
        guessed = [{"role": "assistant", "content": str(rng.randrange(10)), "tool_calls": []}]
        question = {**row["prompt"][0], "tool_calls": []}
        demonstrations.append(
            {"messages": [question, *(turns if rng.random() < 0.5 else guessed)], "tools": [find(TOOL).schema]}
        )
    write_parquet(path, demonstrations)
