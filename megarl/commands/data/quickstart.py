"""Everything the quickstart recipes read: data, a tokenizer and a random model, under one folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.commands.data import word_problems
from megarl.commands.data.tiny_model import make_tiny_model

MANIFEST = "quickstart.json"
FORMAT = 2  # raise it when what is written changes, so that older folders are made anew


@dataclass(frozen=True)
class Prepared:
    """What lies under the folder: files in order with their sizes, and whether they were made just now.

    `reason` says why they were made (or "whole" where they were kept).
    """

    files: dict[Path, int]  # bytes
    rows: dict[Path, int]  # of the data files among them
    made: bool
    reason: str


def prepare_quickstart(out: Path | str, seed: int) -> Prepared:
    """Make out/data (see `word_problems.prepare`) and out/model (Qwen3-MoE of 0.2 M parameters).

    What is whole and was made with the same settings is kept: every file is held to the SHA-256 in
    out/quickstart.json, which is written last.

    Raises:
        ValueError: `out` cannot be a folder.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a folder to write to")
    manifest = out / MANIFEST
    settings = {"format": FORMAT, "seed": seed}
    reason = _why_not_whole(out, settings)
    if reason is not None:
        manifest.unlink(missing_ok=True)
        rows = word_problems.prepare(out / "data", seed)
        make_tiny_model("qwen3_moe", out / "model", seed, norm_spread=0.0)
        written = [*rows, *sorted((out / "model").iterdir())]
        content: dict[str, Any] = {
            "settings": settings,
            "sha256": {path.relative_to(out).as_posix(): _sha256(path) for path in written},
            "rows": {path.relative_to(out).as_posix(): count for path, count in rows.items()},
        }
        manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    known = json.loads(manifest.read_text(encoding="utf-8"))
    return Prepared(
        files={out / name: (out / name).stat().st_size for name in known["sha256"]},
        rows={out / name: count for name, count in known["rows"].items()},
        made=reason is not None,
        reason=reason or "whole",
    )


def _why_not_whole(out: Path, settings: dict[str, Any]) -> str | None:
    """Why the folder has to be made, or None where it is whole and has these settings."""
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "nothing whole was there"
    except json.JSONDecodeError:
        return f"{MANIFEST} was damaged"
    if manifest["settings"] != settings:
        return f"it was made with {manifest['settings']}, not {settings}"
    for name, digest in manifest["sha256"].items():
        if not (out / name).is_file():
            return f"{name} was missing"
        if _sha256(out / name) != digest:
            return f"{name} had changed"
    return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
