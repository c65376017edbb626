"""Files of the hub in this machine's cache, through huggingface_hub, and the hub names of such files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.hf.hub.errors import cache_folder, endpoint, is_offline, is_unreachable
from megarl.hf.hub.names import COMMIT, HubName, Kind

_LEFT_OUT = ("original/*", "onnx/*", "openvino/*", "consolidated*", "*/*.safetensors")
"""Copies of the weights in other formats, which some repositories have."""


def listing(name: HubName, kind: Kind) -> tuple[list[str], str | None]:
    """Return the files of a repository; without an answer of the hub those in the cache, and a notice."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().repo_info(name.repo, revision=name.revision, repo_type=kind)
        return [sibling.rfilename for sibling in getattr(info, "siblings", None) or []], None
    except Exception as error:
        if not is_unreachable(error):
            raise
        folder = cached_snapshot(name, kind)
        if folder is None:
            raise
    why = "HF_HUB_OFFLINE is set" if is_offline() else f"{endpoint()} does not answer"
    return files_in(folder), f"{why}: {name.repo} is taken from the cache, at commit {folder.name[:12]}"


def files_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def snapshot(name: HubName, kind: Kind, patterns: Sequence[str]) -> Path:
    """Return the snapshot folder with the files that match `patterns`, after a download of missing ones."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    left_out = list(_LEFT_OUT) if kind == "model" else None
    return Path(
        snapshot_download(
            name.repo, repo_type=kind, revision=name.revision, allow_patterns=list(patterns), ignore_patterns=left_out
        )
    )


def name_of_snapshot(path: Path, kind: Kind) -> HubName | None:
    """Return the name of a path in a cache: .../models--OWNER--NAME/snapshots/COMMIT, for a data set with /FILE."""
    parts = path.parts
    for number in range(1, len(parts) - 1):
        folder, commit = parts[number - 1].split("--"), parts[number + 1]
        if parts[number] == "snapshots" and folder[0] == f"{kind}s" and len(folder) == 3 and COMMIT.fullmatch(commit):
            file = "/".join(parts[number + 2 :])
            if bool(file) == (kind == "dataset"):
                return HubName(f"{folder[1]}/{folder[2]}", commit, file)
    return None


def is_in_cache(path: Path) -> bool:
    return path.is_relative_to(cache_folder()) if "snapshots" in path.parts else False


def cached_snapshot(name: HubName, kind: Kind) -> Path | None:
    """Return the snapshot folder in the cache, complete or not; None if there is none."""
    folder = cache_folder() / f"{kind}s--{name.repo.replace('/', '--')}"
    commit = name.revision
    if not name.is_pinned:
        try:
            commit = (folder / "refs" / (name.revision or "main")).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
    snapshot = folder / "snapshots" / str(commit)
    return snapshot if snapshot.is_dir() else None
