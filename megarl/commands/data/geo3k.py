"""Geometry3K (Lu et al., 2021) as prompt rows with images: https://huggingface.co/datasets/hiyouga/geometry3k."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megarl.commands.data.source import PreparedFiles, problem_row, write_splits
from megarl.data.placeholders import IMAGE
from megarl.data.rows import Row

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    "The final answer MUST BE put in \\boxed{}."
)
DATA_SOURCE = "hiyouga/geometry3k"


def prepare(source: str, out: Path) -> PreparedFiles:
    """Write out/train.parquet and out/test.parquet in verl's columns.

    `source` is a folder with both splits, in columns ``images``, ``problem`` (with one ``<image>`` per image) and
    ``answer``, or a name on the hub. Images are bytes or paths relative to the folder; the output has bytes.

    Raises ValueError as `write_splits`, and for a row without an answer, an image or its placeholder.
    """
    return write_splits(out, source, ("images", "problem", "answer"), partial(_prompt_row, folder=Path(source)))


def _prompt_row(row: Row, split: str, index: int, *, folder: Path) -> dict[str, Any]:
    problem, answer = row.need("problem", str), row.need("answer", str)
    images = [{"bytes": _encoded(row, image, folder), "path": None} for image in row.need("images", list)]
    if not answer.strip() or not images or problem.count(IMAGE) != len(images):
        raise ValueError(
            f"{row.where}: {len(images)} images, {problem.count(IMAGE)} {IMAGE} in the problem and the "
            f"answer {answer!r}: a problem needs an answer, an image, and one {IMAGE} per image"
        )
    content = f"{problem} {INSTRUCTION}"
    prompt_row = problem_row(DATA_SOURCE, content, answer, split, index, answer=answer, question=problem)
    return {**prompt_row, "images": images}


def _encoded(row: Row, image: Any, folder: Path) -> bytes:
    """Return the bytes of an image file."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str) or not (folder / image).is_file():
        raise ValueError(f"{row.where}: an image is neither bytes nor a file in {folder}: {str(image)[:80]!r}")
    return (folder / image).read_bytes()
