"""Models and data sets of a recipe that are on the hub, or in this machine's cache of it (megarl/hf/hub/)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megarl.hf import hub
from megarl.recipe.schema import Recipe


def with_inputs(
    recipe: Recipe, model: Callable[[str, str], str], files: Callable[[str, list[str]], list[str]]
) -> Recipe:
    """Return the recipe with each model's path replaced by `model(setting, path)`, and each list of data files by
    `files(setting, paths)`. Unset settings are left out."""

    def path(setting: str, value: str | None) -> str | None:
        return model(setting, value) if value else value

    data, policy = recipe.data, recipe.model
    mix = {name: replace(part, files=files(f"data.mix.{name}.files", part.files)) for name, part in data.mix.items()}
    teachers = {
        source: replace(part, path=path(f"teacher.by_source.{source}.path", part.path) or "")
        for source, part in recipe.teacher.by_source.items()
    }
    return replace(
        recipe,
        model=replace(
            policy,
            path=path("model.path", policy.path) or "",
            tokenizer=path("model.tokenizer", policy.tokenizer),
        ),
        lora=replace(recipe.lora, path=path("lora.path", recipe.lora.path)),
        critic=replace(recipe.critic, model_path=path("critic.model_path", recipe.critic.model_path)),
        teacher=replace(recipe.teacher, path=path("teacher.path", recipe.teacher.path), by_source=teachers),
        judge=replace(recipe.judge, path=path("judge.path", recipe.judge.path)),
        data=replace(
            data,
            train_files=files("data.train_files", data.train_files),
            mix=mix,
            eval_files=files("data.eval_files", data.eval_files),
        ),
    )


def needs_weights(setting: str) -> bool:
    """Return whether a run reads the weights of the model in `setting`."""
    return setting != "model.tokenizer"


def with_hub_names(recipe: Recipe) -> Recipe:
    """Return the recipe with hub names and commits instead of folders and files in this machine's cache, as recorded in a run."""
    return with_inputs(
        recipe,
        lambda _, path: str(hub.name_of_folder(path) or path),
        lambda _, files: [str(hub.name_of_file(file) or file) for file in files],
    )


def with_local_model(recipe: Recipe) -> Recipe:
    """Return the recipe with the folders of model and starting adapter on this node, fetched if they are of the hub and the
    node lacks them. `recipe` itself if it names folders."""
    adapter = recipe.lora.path
    model, start = hub.local_model(recipe.model.path), hub.local_model(adapter) if adapter else None
    if (model, start) == (recipe.model.path, adapter):
        return recipe
    return replace(recipe, model=replace(recipe.model, path=model), lora=replace(recipe.lora, path=start))


def with_cached_inputs(recipe: Recipe) -> Recipe:
    """Return the recipe with folders and files instead of the hub names that are in this machine's cache. Connects to nothing."""

    def model(setting: str, path: str) -> str:
        try:
            name = hub.model_name(path)
        except hub.HubError:
            return path  # `train` refuses it
        folder = hub.cached_model(name, weights=needs_weights(setting)) if name is not None else None
        return str(folder) if folder is not None else path

    def files(_: str, paths: list[str]) -> list[str]:
        return [file for path in paths for file in hub.cached_files(path) or [path]]

    return with_inputs(recipe, model, files)
