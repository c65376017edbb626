"""Files of the hub in this machine's cache, through huggingface_hub, and the hub names of such files."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.atomic_files import write_atomically
from megarl.hf.hub.errors import cache_folder, endpoint, http_status, is_offline, is_refused, is_unreachable
from megarl.hf.hub.names import COMMIT, HubName, Kind

LEFT_OUT = (
    *("original/*", "onnx/*", "openvino/*", "consolidated*"),
    *(f"*/*.{suffix}" for suffix in ("safetensors", "json", "model", "tiktoken", "txt")),
)
"""Copies of the weights in other formats, and files of other programs in subfolders, which some repositories have."""

TIMEOUT = 10.0  # s, for an answer without files


@dataclass(frozen=True)
class Listing:
    """Files of the repository `name`; its revision is a commit.

    `is_whole`: False if these are the files that the cache has, and the repository may have more. `notice`: that the hub
    gives no answer, so that the commit is the one in the cache; None otherwise.
    """

    name: HubName
    files: list[str]
    is_whole: bool = True
    notice: str | None = None


def listing(name: HubName, kind: Kind) -> Listing:
    """Return the files of a repository: the cached list of a commit, else the hub's, else the cached files if the hub is down."""
    from huggingface_hub import HfApi

    folder = cached_snapshot(name, kind)
    if name.is_pinned and folder is not None and (tree := cached_tree(folder)) is not None:
        return Listing(name, tree)
    try:
        info = HfApi().repo_info(name.repo, revision=name.revision, repo_type=kind, timeout=TIMEOUT)
    except Exception as error:
        if folder is None or not (is_unreachable(error) or (name.is_pinned and is_refused(error))):
            raise
        status = http_status(error)
        answer = f"{endpoint()} {'does not answer' if status is None else f'answers with HTTP status {status}'}"
    else:
        commit = str(info.sha)
        _record_revision(name, kind, commit)
        files = [sibling.rfilename for sibling in getattr(info, "siblings", None) or []]
        return Listing(replace(name, revision=commit), files)
    notice = (
        f"{'HF_HUB_OFFLINE is set' if is_offline() else answer}: {name.repo} is taken from the cache, at commit "
        f"{folder.name[:12]}"
    )
    tree = cached_tree(folder)
    pinned = replace(name, revision=folder.name)
    return Listing(pinned, files_in(folder) if tree is None else tree, is_whole=tree is not None, notice=notice)


def _record_revision(name: HubName, kind: Kind, commit: str) -> None:
    """Write the commit of a branch or tag into the cache, as a download by its name does, for later runs without the hub."""
    if name.is_pinned:
        return
    file = _repository_folder(name, kind) / "refs" / (name.revision or "main")
    with contextlib.suppress(OSError, ValueError):  # a cache that cannot be written to is read all the same
        if not file.is_file() or file.read_text() != commit:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, commit.encode())


def cached_tree(folder: Path) -> list[str] | None:
    """Return the list of all files of a commit that huggingface_hub keeps next to its snapshot folder; None if it has none."""
    try:
        files = json.loads((folder.parents[1] / "trees" / f"{folder.name}.json").read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [*files] if isinstance(files, dict) else None


def files_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def missing_files(folder: Path, kind: Kind, patterns: Sequence[str]) -> list[str] | None:
    """Return the files of a commit that match `patterns` and that its snapshot folder lacks; None if the cache has no list of
    the commit's files."""
    from huggingface_hub.utils import filter_repo_objects

    tree = cached_tree(folder)
    if tree is None:
        return None
    needed = filter_repo_objects(tree, allow_patterns=list(patterns), ignore_patterns=_left_out(kind))
    return [file for file in needed if not (folder / file).is_file()]


def _left_out(kind: Kind) -> list[str] | None:
    return list(LEFT_OUT) if kind == "model" else None


def snapshot(name: HubName, kind: Kind, patterns: Sequence[str]) -> Path:
    """Return the snapshot folder with the files that match `patterns`, after a download of missing ones.

    If the cache has all files of a commit, the hub is not contacted.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = cached_snapshot(name, kind) if name.is_pinned else None
    if folder is not None and missing_files(folder, kind, patterns) == []:
        return folder
    return Path(
        snapshot_download(
            name.repo,
            repo_type=kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=_left_out(kind),
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


def _repository_folder(name: HubName, kind: Kind) -> Path:
    return cache_folder() / f"{kind}s--{name.repo.replace('/', '--')}"


def cached_snapshot(name: HubName, kind: Kind) -> Path | None:
    """Return the snapshot folder in the cache, complete or not; None if there is none."""
    folder = _repository_folder(name, kind)
    commit = name.revision
    if not name.is_pinned:
        try:
            commit = (folder / "refs" / (name.revision or "main")).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
    snapshot = folder / "snapshots" / str(commit)
    return snapshot if snapshot.is_dir() else None
