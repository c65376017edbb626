"""Fetch the models and data sets that a recipe names on the hub, once, before anything starts.

Every name is resolved to a commit, which the run's recipe.resolved.yaml and hub.json record; a resume and a replay use the
recorded commits. The recipe then has folders and files in this machine's cache, so nothing else knows the hub. Processes on
other nodes read the same commits from the cache of their node (`hub.local_model`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from megarl.errors import NotHereError, raise_all
from megarl.hf import hub
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.models import JUDGE_PATH, POLICY, models_of
from megarl.recipe.data import files_of
from megarl.recipe.hub_inputs import needs_weights, with_inputs
from megarl.recipe.schema import Recipe

T = TypeVar("T")
Commits = dict[str, dict[str, str]]
"""Commit by setting and by repository with the revision that the recipe names: {"model.path": {"hf://org/name@v1": "0123..."}}."""


@dataclass
class _Names:
    """Resolves the names in the settings `used` of `recipe` to commits, and collects errors and notices."""

    recipe: Recipe
    used: Collection[str]
    models: dict[tuple[str, str], hub.HubName] = field(default_factory=dict)  # by setting and text in the recipe
    rows: dict[tuple[str, str], list[hub.HubName]] = field(default_factory=dict)
    commits: Commits = field(default_factory=dict)
    errors: list[ValueError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @cached_property
    def recorded(self) -> Commits:
        """Commits that the run has recorded: read only if they are needed, so that damage does not stop a command without need."""
        return _recorded_commits(self.recipe)

    def with_configs(self) -> Recipe:
        """Resolve all names. Returns the recipe with folders for models on the hub, which may lack the weights."""
        recipe = with_inputs(self.recipe, self._model, lambda _, files: files)
        for key, file in files_of(self.recipe.data):
            if key in self.used:
                self._try(key, file, partial(self._resolve_rows, key, file), None)
        return recipe

    def _model(self, key: str, path: str) -> str:
        """Return the folder with config.json and tokenizer of a model on the hub; other paths are unchanged."""

        def fetch() -> str:
            if (name := hub.model_name(path)) is None:
                return path
            weights = needs_weights(key)
            pinned, notice = hub.pin_model(self._as_recorded(key, name), weights=weights, download=False)
            self.models[key, path] = pinned
            self._record(key, name, pinned, notice)
            return str(hub.model_folder(pinned, weights=False))

        return self._try(key, path, fetch, path) if key in self.used else path

    def _resolve_rows(self, key: str, file: str) -> None:
        if (name := hub.data_name(file)) is not None:
            self.rows[key, file], notice = hub.pin_data(self._as_recorded(key, name))
            self._record(key, name, self.rows[key, file][0], notice)

    def _as_recorded(self, key: str, name: hub.HubName) -> hub.HubName:
        """Return the name at the commit that the run has recorded for it. Raises HubError if the recipe's revision changed."""
        if name.is_pinned:
            return name
        recorded = {text: commit for text, commit in self.recorded.get(key, {}).items() if _repo(text) == name.repo}
        if not recorded:
            return name
        requested = str(replace(name, path=""))
        if requested not in recorded:
            before = ", ".join(f"{text} (commit {commit[:12]})" for text, commit in recorded.items())
            raise hub.HubError(
                f"the run has recorded {before}, and the recipe now names {requested}",
                "restore the revision; to change it in this run name a commit (@ and 40 digits); or give the run another name",
            )
        return replace(name, revision=recorded[requested])

    def _record(self, key: str, name: hub.HubName, pinned: hub.HubName, notice: str | None) -> None:
        """Add the commit of a name, and a notice of it. Raises HubError if other rows of the data set are at another commit."""
        requested, commit = str(replace(name, path="")), str(pinned.revision)
        recorded = self.commits.setdefault(key, {}).setdefault(requested, commit)
        if recorded != commit:
            raise hub.HubError(
                f"its rows are at commit {commit[:12]}, and other rows of {requested} at {recorded[:12]}, but a run records one "
                "commit. The hub may have converted only one of the splits, or the data set has just changed",
                f"name converted rows with their revision: {replace(name, revision=hub.CONVERTED)}; or start again",
            )
        is_recorded = not name.is_pinned and commit in self.recorded.get(key, {}).values()
        why = ", as recorded in the run" if is_recorded else ""
        self.notices.append(f"{key}: {notice or f'{pinned.repo} from the hub, at commit {commit[:12]}{why}'}")

    def _try(self, key: str, value: str, fetch: Callable[[], T], otherwise: T) -> T:
        try:
            return fetch()
        except hub.HubError as error:
            self.errors.append(NotHereError(key, error.problem, error.remedy, value=value))
            return otherwise

    def download(self) -> Recipe:
        """Return the recipe with folders and files in the cache for the resolved names, after a download of missing ones."""

        def model(key: str, path: str) -> str:
            name = self.models.get((key, path))
            if name is None:
                return path
            return self._try(key, path, lambda: str(hub.model_folder(name, weights=needs_weights(key))), path)

        def rows(key: str, file: str) -> list[str]:
            names = self.rows.get((key, file))
            if names is None:
                return [file]
            return self._try(key, file, lambda: [str(path) for path in hub.data_files(names)], [file])

        return with_inputs(self.recipe, model, lambda key, files: [path for file in files for path in rows(key, file)])


def _repo(text: str) -> str:
    return text.removeprefix(hub.PREFIX).partition("@")[0]


def training_inputs(recipe: Recipe) -> list[str]:
    """Return the settings of the models and files that `train` reads."""
    adapter = ["lora.path"] if recipe.lora.rank else []
    return [*models_of(recipe), "model.tokenizer", *adapter, *(key for key, _ in files_of(recipe.data))]


def evaluation_inputs(*, asks_judge: bool) -> list[str]:
    """Return the settings of the models and files that `eval` reads."""
    return [POLICY, "model.tokenizer", "data.eval_files", *([JUDGE_PATH] if asks_judge else [])]


@dataclass(frozen=True)
class FetchedInputs:
    """A recipe with folders and files of this machine, and notices."""

    recipe: Recipe
    notices: list[str]
    _names: _Names

    @property
    def commits(self) -> Commits:
        """The commits to record in the run's directory, with earlier names of the same commits: a resume may use either name.

        Raises ValueError if the commits that the run has recorded cannot be read.
        """
        commits = {}
        for key, new in self._names.commits.items():
            earlier = self._names.recorded.get(key, {})
            commits[key] = {**{name: commit for name, commit in earlier.items() if commit in new.values()}, **new}
        return commits


def fetch_inputs(
    recipe: Recipe, used: Collection[str], check: Callable[[Recipe], None] = lambda recipe: None
) -> FetchedInputs:
    """Return the recipe with folders and files of this machine instead of names on the hub.

    `used`: the settings to fetch. `check`: called before weights and rows are downloaded, with folders that have config.json
    and tokenizer of the models. Raises RecipeErrors with every name that cannot be used, and ValueError if a name needs the
    commits that the run has recorded and they cannot be read.
    """
    names = _Names(recipe, used)
    without_weights = names.with_configs()
    raise_all(names.errors)
    if names.commits:
        check(without_weights)
    local = names.download()
    raise_all(names.errors)
    if names.models:
        names.notices.append(
            "models from the hub: each node reads them from its own cache (HF_HOME), and downloads missing files"
        )
    return FetchedInputs(local, list(dict.fromkeys(names.notices)), names)


def _recorded_commits(recipe: Recipe) -> Commits:
    """Return the commits of the run that is resumed or replayed. Raises ValueError, which names the file, if it cannot be read."""
    for file in _files_of_commits(recipe):
        try:
            commits: Commits = json.loads(file.read_text(encoding="utf-8"))
            if all(isinstance(commit, str) for of in commits.values() for commit in of.values()):
                return commits
            problem = "is damaged"
        except (ValueError, AttributeError):
            problem = "is damaged"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        raise ValueError(
            f"{file} {problem}, so the commits of the run's models and data are unknown: repair it; or copy them "
            "from recipe.resolved.yaml in the same directory into the recipe, and delete the file"
        )
    return {}


def _files_of_commits(recipe: Recipe) -> Iterator[Path]:
    """Yield the files with recorded commits that exist, in order of precedence."""
    runs = [] if recipe.train.replay is None else [Path(recipe.train.replay)]
    if recipe.train.resume not in ("never", "auto"):
        runs += Path(recipe.train.resume).absolute().parents[1:2]  # runs/NAME/checkpoints/CHECKPOINT
    if recipe.train.resume != "never":
        runs.append(Path(recipe.runs_dir) / recipe.name)
    yield from (file for run in runs if (file := RunDirectory(run).hub_commits).is_file())
