"""Data, tokenizer and random model of the quickstart recipes, in one folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.commands.data import word_problems
from megarl.commands.data.tiny_model import make_tiny_model

MANIFEST = "quickstart.json"
FORMAT = 2  # increase it when the content of the files changes, so that older folders are rewritten


@dataclass(frozen=True)
class QuickstartFiles:
    """Files of the folder. `reason` is why they were written, or "" if existing files were kept."""

    files: dict[Path, int]  # path -> bytes
    rows: dict[Path, int]  # path of a data file -> rows
    reason: str


def prepare_quickstart(out: Path | str, seed: int) -> QuickstartFiles:
    """Write out/data (see `word_problems.prepare`) and out/model (a Qwen3-MoE with 0.2 M parameters).

    Existing files are kept if they have the same settings and the SHA-256 digests in out/quickstart.json, which is
    written last.

    Raises:
        ValueError: `out` cannot be a folder.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a folder to write to")
    manifest = out / MANIFEST
    settings = {"format": FORMAT, "seed": seed}
    reason = _reason_to_write(out, settings)
    if reason is not None:
        manifest.unlink(missing_ok=True)
        rows = word_problems.prepare(out / "data", seed)
        make_tiny_model("qwen3_moe", out / "model", seed, norm_spread=0.0)
        written = [*rows, *sorted(path for path in (out / "model").iterdir() if path.is_file())]
        content: dict[str, Any] = {
            "settings": settings,
            "sha256": {path.relative_to(out).as_posix(): _sha256(path) for path in written},
            "rows": {path.relative_to(out).as_posix(): count for path, count in rows.items()},
        }
        manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    recorded = json.loads(manifest.read_text(encoding="utf-8"))
    return QuickstartFiles(
        files={out / name: (out / name).stat().st_size for name in recorded["sha256"]},
        rows={out / name: count for name, count in recorded["rows"].items()},
        reason=reason or "",
    )


def _reason_to_write(out: Path, settings: dict[str, Any]) -> str | None:
    """Return why the files must be written, or None if they are intact and have these settings."""
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{MANIFEST} was missing"
    except ValueError:
        manifest = None
    if not _is_manifest(manifest):
        return f"{MANIFEST} was damaged"
    if manifest["settings"] != settings:
        return f"the settings were {manifest['settings']}, not {settings}"
    for name, digest in manifest["sha256"].items():
        if not (out / name).is_file():
            return f"{name} was missing"
        if _sha256(out / name) != digest:
            return f"{name} had changed"
    return None


def _is_manifest(content: Any) -> bool:
    sections = [content.get(key) for key in ("settings", "sha256", "rows")] if isinstance(content, dict) else [None]
    return all(isinstance(section, dict) for section in sections)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
