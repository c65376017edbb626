"""A few rows in the columns of real data sets, short enough for a tiny model. `megarl rehearse` uses them."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megarl.agents import find
from megarl.commands.data.source import problem_row
from megarl.data.rows import write_parquet

Layout = Literal["problems", "pictures", "films", "answers", "conversations", "pairs"]
PICTURE = (60, 60)  # pixels, a little more than the minimum of a vision tower


def write_tiny_rows(path: Path, layout: Layout, data_source: str, count: int, seed: int) -> Path:
    """Write `count` rows with this data source to the parquet file `path`. Return `path`.

    Layouts: "problems" has RL prompts with an answer; "pictures" also has an image per prompt, "films" a video of three frames; "answers" has prompt and
    response; "conversations" has messages with a tool call; "pairs" has prompt, chosen and rejected.
    """
    rng = random.Random(seed)
    write_parquet(path, [_row(layout, data_source, index, rng) for index in range(count)])
    return path


def _row(layout: Layout, data_source: str, index: int, rng: random.Random) -> dict[str, Any]:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    question, answer = f"{a} + {b} = ?", str(a + b)
    if layout == "problems":
        return problem_row(data_source, question, answer, "train", index)
    if layout == "pictures":
        row = problem_row(data_source, f"<image>{question}", answer, "train", index)
        return {**row, "images": [{"bytes": _picture(rng), "path": None}]}
    if layout == "films":
        row = problem_row(data_source, f"<video>{question}", answer, "train", index)
        return {**row, "videos": [{"frames": [_picture(rng) for _ in range(3)], "fps": 2.0}]}
    named = {"data_source": data_source, "extra_info": {"split": "train", "index": index}}
    if layout == "answers":
        return {**named, "prompt": question, "response": f"#### {answer}"}
    if layout == "pairs":
        return {**named, "prompt": question, "chosen": f"#### {answer}", "rejected": f"#### {a + b + 1}"}
    call = {"name": "code_interpreter", "arguments": {"code": f"print({a}+{b})"}}
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]
    return {**named, "messages": turns, "tools": [find("code_interpreter").schema]}


def _picture(rng: random.Random) -> bytes:
    from PIL import Image

    values = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (*PICTURE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, format="PNG")
    return file.getvalue()
