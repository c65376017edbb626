"""Models and data of a recipe that are on the hub and not in this machine's cache: `train` downloads them at its start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.commands.doctor.finding import Finding, fail, warning
from megarl.data.rows import RowsNotCached
from megarl.errors import RecipeError
from megarl.hf import hub
from megarl.hf.hub.errors import cache_folder, is_offline, is_unreachable, not_in_cache
from megarl.preflight.hub_inputs import evaluation_inputs, training_inputs
from megarl.recipe.data import files_of
from megarl.recipe.hub_inputs import needs_weights, with_inputs
from megarl.recipe.schema import Recipe


@dataclass(frozen=True)
class Download:
    """A name on the hub in the setting `key` that is not in the cache. `text`: as the recipe has it."""

    key: str
    text: str
    name: hub.HubName
    kind: hub.Kind

    @property
    def stage(self) -> str:
        """Stage of the preflight that reads it."""
        return "data" if self.kind == "dataset" else "model"

    def explains(self, error: ValueError) -> bool:
        """Return whether a check raised `error` because this model or these rows are not here."""
        if isinstance(error, RecipeError):
            return error.key == self.key
        return isinstance(error, RowsNotCached) and error.name == self.text

    def finding(self) -> Finding:
        """Return a warning with the size. It is a failure offline, and if the hub has no such files for this account."""
        where = f"{self.key}: {self.name}"
        if is_offline():
            error = not_in_cache(None, self.name, "model" if self.kind == "model" else "data set")
            return fail(f"{where}: {error.problem}", error.remedy)
        starts = f"{where} is not in the cache {cache_folder()}; `train` downloads it"
        try:
            needed = hub.files_to_download(self.name, self.kind, weights=needs_weights(self.key))
        except hub.HubError as error:
            if error.__cause__ is not None and is_unreachable(error.__cause__):
                return warning(f"{starts}, but {error.problem}", error.remedy)
            return fail(f"{where}: {error.problem}", error.remedy)
        remedy = f"`{needed.command}` before the run, so that no device waits for the download"
        size = sum(needed.sizes.values())
        if self.kind == "dataset" and not needed.sizes:
            unread = (
                "no file is named after these rows, and the README.md may name their files, so the split is not checked"
            )
            return warning(f"{starts}; {unread}", remedy)
        return warning(starts + (f" ({_size(size)})" if size else ""), remedy)


def downloads_of(recipe: Recipe, *, training: bool) -> list[Download]:
    """Return the names on the hub that `train` (without `training`, `eval`) reads. `recipe` has files of the cache already."""
    used = training_inputs(recipe) if training else evaluation_inputs(asks_judge=recipe.asks_judge)
    models: dict[str, str] = {}
    with_inputs(recipe, lambda key, path: models.setdefault(key, path), lambda _, files: files)
    downloads = [*_named(models, "model")]
    for key, file in dict.fromkeys(files_of(recipe.data)):
        downloads += _named({key: file}, "dataset")
    return [download for download in downloads if download.key in used]


def _named(texts: dict[str, str], kind: hub.Kind) -> Iterator[Download]:
    for key, text in texts.items():
        try:
            name = hub.model_name(text) if kind == "model" else hub.data_name(text)
        except hub.HubError:
            continue  # the preflight reports it
        if name is not None:
            yield Download(key, text, name, kind)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6))} MB"
