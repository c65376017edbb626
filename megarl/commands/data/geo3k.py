"""Geometry3K (Lu et al., 2021) as prompt rows with images: https://huggingface.co/datasets/hiyouga/geometry3k."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from megarl.commands.data.source import problem_row, rows_of
from megarl.data.images import PLACEHOLDER
from megarl.data.rows import Row, write_parquet

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)
DATA_SOURCE = "hiyouga/geometry3k"


def prepare(source: str, out: Path) -> dict[Path, int]:
    """Write out/train.parquet and out/test.parquet in verl's columns; returns the rows of each.

    `source` is a folder with both splits, in files of ``images``, ``problem`` (with an ``<image>`` for each) and
    ``answer``, or a hub name. Images are bytes, or paths relative to the folder; bytes are what is written.

    Raises:
        ValueError: the source is neither, a file or column is missing, or a row lacks an answer, an image or its place.
    """
    written = {}
    for split in ("train", "test"):
        found = rows_of(source, split, ("images", "problem", "answer"))
        rows = [_prompt_row(row, split, index, Path(source)) for index, row in enumerate(found)]
        written[Path(out) / f"{split}.parquet"] = rows
    for path, rows in written.items():  # only once both splits are known to be good
        write_parquet(path, rows)
    return {path: len(rows) for path, rows in written.items()}


def _prompt_row(row: Row, split: str, index: int, folder: Path) -> dict[str, Any]:
    problem, answer = row.need("problem", str), row.need("answer", str)
    images = [{"bytes": _encoded(row, image, folder), "path": None} for image in row.need("images", list)]
    if not answer.strip() or not images or problem.count(PLACEHOLDER) != len(images):
        raise ValueError(
            f"{row.where}: {len(images)} images, {problem.count(PLACEHOLDER)} {PLACEHOLDER} in the problem and the "
            f"answer {answer!r}: each image needs its place, and a problem an image and an answer"
        )
    content = f"{problem} {INSTRUCTION}"
    made = problem_row(DATA_SOURCE, content, answer, split, index, answer=answer, question=problem)
    return {**made, "images": images}


def _encoded(row: Row, image: Any, folder: Path) -> bytes:
    """The image as a file's bytes."""
    if hasattr(image, "save"):  # decoded, as the package `datasets` gives it: PNG loses nothing
        file = io.BytesIO()
        image.save(file, format="PNG")
        return file.getvalue()
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str) or not (folder / image).is_file():
        raise ValueError(f"{row.where}: an image is neither bytes nor a file in {folder}: {str(image)[:80]!r}")
    return (folder / image).read_bytes()
