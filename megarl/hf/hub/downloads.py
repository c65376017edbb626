"""Downloads that a run would start: their files, and the command that fetches these files beforehand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from megarl.hf.hub.data import no_rows
from megarl.hf.hub.errors import download_command, hub_errors
from megarl.hf.hub.files import LEFT_OUT, TIMEOUT
from megarl.hf.hub.models import check_weights, model_patterns
from megarl.hf.hub.names import HubError, HubName, Kind, is_file
from megarl.hf.hub.splits import CONVERTED, check_one_form, files_of_split, form_of


@dataclass(frozen=True)
class FilesToDownload:
    """Files of a repository that megarl reads, and the `hf download` of them alone.

    `sizes`: bytes by file, from the hub's list. Empty for a split that only the README may name; the command then downloads
    the whole repository.
    """

    sizes: dict[str, int]
    command: str


def files_to_download(name: HubName, kind: Kind, *, weights: bool = True) -> FilesToDownload:
    """Return the files that megarl reads, by the hub's list of files. Downloads nothing.

    `weights`: of a model, with its weights. Raises HubError, also if the hub gives no answer, or has no such rows or weights.
    """
    with hub_errors(name, kind):
        sizes = _sizes(name, kind)
        return _rows(name, sizes) if kind == "dataset" else _model(name, sizes, weights=weights)


def _model(name: HubName, sizes: Mapping[str, int], *, weights: bool) -> FilesToDownload:
    if weights:
        check_weights(name, [*sizes])
    include = [pattern for pattern in model_patterns(weights) if any(_matching(sizes, [pattern]))]
    matches = [*_matching(sizes, include)]
    exclude = [pattern for pattern in LEFT_OUT if any(_matching(matches, [pattern]))]
    left_out = {*_matching(matches, exclude)}
    read = {file: sizes[file] for file in matches if file not in left_out}
    return FilesToDownload(read, _command(name, "model", include, exclude))


def _rows(name: HubName, sizes: Mapping[str, int]) -> FilesToDownload:
    """Return the files of a split, by their names: the README, which may name others, is not downloaded."""
    rows, splits = files_of_split(name.path, [*sizes], "")
    has_readme = "README.md" in sizes and not is_file(name.path)
    if not rows and has_readme:
        return FilesToDownload({}, _command(name, "dataset"))
    if not rows and name.revision is None and not is_file(name.path):
        converted = replace(name, revision=CONVERTED)
        try:
            with hub_errors(converted, "dataset"):
                sizes = _sizes(converted, "dataset")
        except HubError as error:
            if not error.is_definite:
                raise
        else:
            name = converted
            rows, converted_splits = files_of_split(name.path, [*sizes], "")
            splits = splits or converted_splits
    if not rows:
        raise no_rows(name, splits, [*sizes])
    if not has_readme:
        check_one_form(name, rows)
    forms = [name.path] if is_file(name.path) else dict.fromkeys(form_of(file) for file in rows)
    readme = ["README.md"] if has_readme else []
    return FilesToDownload(
        {file: sizes[file] for file in [*readme, *rows]}, _command(name, "dataset", [*readme, *forms])
    )


def _sizes(name: HubName, kind: Kind) -> dict[str, int]:
    from huggingface_hub import HfApi

    info = HfApi().repo_info(name.repo, revision=name.revision, repo_type=kind, files_metadata=True, timeout=TIMEOUT)
    return {sibling.rfilename: sibling.size or 0 for sibling in getattr(info, "siblings", None) or []}


def _matching(files: Sequence[str] | Mapping[str, int], patterns: Sequence[str]) -> Iterator[str]:
    return (file for file in files if any(fnmatchcase(file, pattern) for pattern in patterns))


def _command(name: HubName, kind: Kind, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> str:
    options = [
        *(f" --include {shlex.quote(each)}" for each in include),
        *(f" --exclude {shlex.quote(each)}" for each in exclude),
    ]
    return download_command(name, kind) + "".join(options)
