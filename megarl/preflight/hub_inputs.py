"""Fetch the models and data sets that a recipe names on the hub, once, before anything starts.

Every name is resolved to a commit, which the run's recipe.resolved.yaml records; a resume and a replay use the recorded
commits. The recipe then has folders and files in this machine's cache, so nothing else knows the hub. Processes on other
nodes read the same commits from the cache of their node (`hub.local_model`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megarl.errors import NotHereError, raise_all
from megarl.hf import hub
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.models import JUDGE, POLICY, models_of
from megarl.recipe.data import files_of
from megarl.recipe.hub_inputs import with_inputs
from megarl.recipe.schema import Recipe

T = TypeVar("T")
_PINNED = re.compile(r"hf://([\w.-]+/[\w.-]+)@([0-9a-f]{40})(/.+)?")


class _Download:
    """Downloads the names in the settings `used`, and collects errors and notices. `recorded`: see `recorded_commits`.
    `downloads`: False to check the names alone, and to download only config.json and tokenizer of models."""

    def __init__(self, used: Collection[str], recorded: Mapping[tuple[hub.Kind, str], str], *, downloads: bool) -> None:
        self.used, self.recorded, self.downloads = used, recorded, downloads
        self.errors: list[ValueError] = []
        self.notices: list[str] = []
        self.has_models = False

    def model(self, key: str, path: str) -> str:
        if key not in self.used:
            return path
        has_weights = key != "model.tokenizer"

        def fetch() -> str:
            name = hub.model_name(path)
            if name is None:
                return path
            name = self._as_recorded(name, "model")
            pinned, notice = hub.pin_model(name, weights=has_weights, download=self.downloads)
            self._report(key, pinned, notice)
            self.has_models = True
            return str(hub.model_folder(pinned, weights=has_weights and self.downloads))

        return self._try(key, path, fetch, path)

    def files(self, key: str, files: list[str]) -> list[str]:
        if key not in self.used:
            return files
        return [path for file in files for path in self._try(key, file, partial(self._data, key, file), [file])]

    def _data(self, key: str, file: str) -> list[str]:
        name = hub.data_name(file)
        if name is None:
            return [file]
        pinned, notice = hub.pin_data(self._as_recorded(name, "dataset"))
        self._report(key, pinned[0], notice)
        return [str(path) for path in hub.data_files(pinned)]

    def _as_recorded(self, name: hub.HubName, kind: hub.Kind) -> hub.HubName:
        commit = self.recorded.get((kind, name.repo))
        if commit is None or name.is_pinned:
            return name
        return replace(name, revision=commit)

    def _report(self, key: str, pinned: hub.HubName, notice: str | None) -> None:
        kind: hub.Kind = "dataset" if pinned.path else "model"
        why = ", as recorded in the run" if self.recorded.get((kind, pinned.repo)) == pinned.revision else ""
        text = notice or f"{pinned.repo} of the hub, at commit {str(pinned.revision)[:12]}{why}"
        self.notices.append(f"{key}: {text}")

    def _try(self, key: str, value: str, fetch: Callable[[], T], otherwise: T) -> T:
        try:
            return fetch()
        except hub.HubError as error:
            self.errors.append(NotHereError(key, error.problem, error.remedy, value=value))
            return otherwise


def training_inputs(recipe: Recipe) -> list[str]:
    """Return the settings of the models and files that `train` reads."""
    adapter = ["lora.path"] if recipe.lora.rank else []
    return [*models_of(recipe), "model.tokenizer", *adapter, *(key for key, _ in files_of(recipe.data))]


def evaluation_inputs(*, asks_judge: bool) -> list[str]:
    """Return the settings of the models and files that `eval` reads."""
    return [POLICY, "model.tokenizer", "data.eval_files", *([JUDGE] if asks_judge else [])]


def fetch_inputs(
    recipe: Recipe, used: Collection[str], check: Callable[[Recipe], None] = lambda recipe: None
) -> tuple[Recipe, list[str]]:
    """Return the recipe with folders and files of this machine instead of names on the hub, and notices.

    `used`: the settings to fetch. `check`: called before weights and rows are downloaded, with folders that have config.json
    and tokenizer of the models. Raises RecipeErrors with every name that cannot be used.
    """
    recorded = recorded_commits(recipe)
    names = _Download(used, recorded, downloads=False)
    without_weights = with_inputs(recipe, names.model, names.files)
    raise_all(names.errors)
    if names.has_models:
        check(without_weights)
    download = _Download(used, recorded, downloads=True)
    local = with_inputs(recipe, download.model, download.files)
    raise_all(download.errors)
    if download.has_models:
        download.notices.append(
            "models of the hub: each node reads them from its own cache (HF_HOME), and downloads missing files"
        )
    return local, list(dict.fromkeys(download.notices))


def recorded_commits(recipe: Recipe) -> dict[tuple[hub.Kind, str], str]:
    """Return the commit of each repository, by kind and name, in the recipe of the run that is resumed or replayed.

    A repository that the recipe names at several commits is left out.
    """
    commits: dict[tuple[hub.Kind, str], set[str]] = {}
    for file in _recorded_recipes(recipe):
        for text in _texts(yaml.safe_load(file.read_text(encoding="utf-8"))):
            if match := _PINNED.fullmatch(text):
                commits.setdefault(("dataset" if match[3] else "model", match[1]), set()).add(match[2])
        if commits:
            break
    return {repository: only for repository, (only, *more) in commits.items() if not more}


def _recorded_recipes(recipe: Recipe) -> Iterator[Path]:
    """Yield the recorded recipes that exist, the one to follow first."""
    runs = [] if recipe.train.replay is None else [Path(recipe.train.replay)]
    if recipe.train.resume not in ("never", "auto"):
        runs += Path(recipe.train.resume).absolute().parents[1:2]  # runs/NAME/checkpoints/CHECKPOINT
    if recipe.train.resume != "never":
        runs.append(Path(recipe.runs_dir) / recipe.name)
    yield from (file for run in runs if (file := RunDirectory(run).recipe).is_file())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
