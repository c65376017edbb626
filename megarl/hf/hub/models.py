"""Models on the hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megarl.hf.hub.errors import hub_errors, not_in_cache
from megarl.hf.hub.files import (
    LEFT_OUT,
    cached_snapshot,
    is_in_cache,
    listing,
    missing_files,
    name_of_snapshot,
    snapshot,
)
from megarl.hf.hub.names import HubError, HubName

_SMALL_FILES = (
    "*.json",
    "chat_template*.jinja",
    "additional_chat_templates/*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "tokenizer*.txt",
)
_WEIGHTS = ("*.safetensors",)


def pin_model(name: HubName, *, weights: bool = True, download: bool = True) -> tuple[HubName, str | None]:
    """Return the model at the commit of its revision, with its files in the cache, and a notice.

    `weights`: the model needs weights, which must be safetensors; they are downloaded with `download`. The notice, None if
    the hub answers, says that it does not, so that the commit in the cache is used. Raises HubError.
    """
    with hub_errors(name, "model"):
        listed = listing(name, "model")
        if weights and not _has_safetensors(listed.files):
            raise _no_safetensors(name, listed.files) if listed.is_whole else not_in_cache(None, name, "model")
        snapshot(listed.name, "model", model_patterns(weights and download))
        return listed.name, listed.notice


def model_folder(name: HubName, *, weights: bool = True) -> Path:
    """Return the folder of a pinned model in this machine's cache, after a download of missing files. Raises HubError."""
    with hub_errors(name, "model"):
        return snapshot(name, "model", model_patterns(weights))


def config_folder(name: HubName) -> Path:
    """Return the cached folder with the model's config.json. Only this file is downloaded if it is missing. Raises HubError."""
    with hub_errors(name, "model", "config.json"):
        listed = listing(name, "model")
        folder = snapshot(listed.name, "model", ["config.json"])
    is_missing = not (folder / "config.json").is_file()
    if is_missing and ("config.json" in listed.files or not listed.is_whole):
        raise not_in_cache(None, name, "model", "config.json")
    return folder


def weights_fault(name: HubName) -> tuple[str | None, str | None]:
    """Return why the trainer cannot read a model's weights, by the names of its files, and a notice if these are unknown.

    Both are None if the trainer can read them. Raises HubError.
    """
    with hub_errors(name, "model"):
        listed = listing(name, "model")
    if _has_safetensors(listed.files):
        return None, None
    if listed.is_whole:
        return str(_no_safetensors(name, listed.files)), None
    return None, f"{listed.notice}; the cache has no list of its files, so its weights are not checked"


def cached_model(name: HubName, *, weights: bool = True) -> Path | None:
    """Return the folder of a model in the cache, without any connection; None if it lacks weights or, without `weights`, a file
    of the tokenizer."""
    folder = cached_snapshot(name, "model")
    if folder is None:
        return None
    files = {file.name for file in folder.iterdir()}
    if weights:
        return folder if _has_safetensors([*files]) else None
    missing = missing_files(folder, "model", _SMALL_FILES)
    is_here = files > {"config.json"} if missing is None else not missing
    return folder if is_here else None


def local_model(path: str, *, weights: bool = True) -> str:
    """Return the folder of a model on this machine.

    `path`: its folder on the machine that started the run. If that is a model of the hub in the cache there, the same commit
    is read from this machine's cache, after a download of missing files. Raises HubError.
    """
    name = name_of_snapshot(Path(path), "model")
    if name is None or (os.path.isdir(path) and not is_in_cache(Path(path))):
        return path
    return str(model_folder(name, weights=weights))


def name_of_folder(path: str) -> HubName | None:
    """Return the hub name, with its commit, of a model's folder in this machine's cache; None for any other folder."""
    return name_of_snapshot(Path(path), "model") if is_in_cache(Path(path)) else None


def check_weights(name: HubName, files: Sequence[str]) -> None:
    """Raise HubError if none of the files of a repository are weights that the trainer reads."""
    if not _has_safetensors(files):
        raise _no_safetensors(name, files)


def model_patterns(weights: bool) -> tuple[str, ...]:
    return (*_SMALL_FILES, *_WEIGHTS) if weights else _SMALL_FILES


def _has_safetensors(files: Sequence[str]) -> bool:
    return any(
        file.endswith(".safetensors") and not any(fnmatchcase(file, each) for each in LEFT_OUT) for file in files
    )


def _no_safetensors(name: HubName, files: Sequence[str]) -> HubError:
    weights = [
        file for file in files if file.endswith((".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".safetensors"))
    ]
    has = f"weights in {', '.join(sorted(weights)[:2])}" if weights else f"{', '.join(sorted(files)[:4]) or 'no files'}"
    remedy = (
        "name a repository or a revision with safetensors (for many models the hub has a pull request with them: "
        f"{name.repo}@refs/pr/N), or convert the model in a trusted place with save_pretrained"
    )
    absent = "no model*.safetensors" if any(file.endswith(".safetensors") for file in files) else "no *.safetensors"
    return HubError(f"{name.repo} has {absent}, but {has}; megarl reads no pickles", remedy)
