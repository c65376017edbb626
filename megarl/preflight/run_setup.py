"""Check a recipe, fetch and read its inputs, and open the run's directory, before any process starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl import platform as platforms
from megarl.checkpoint.identity import CONTENTS, data_digest, identity_of, saved_provenance
from megarl.observe.restarts import restart_notices
from megarl.preflight.data import Prepared
from megarl.preflight.elastic import fit_to_devices
from megarl.preflight.engines_and_devices import check_device, check_installed
from megarl.preflight.hub_inputs import Commits, fetch_inputs, training_inputs
from megarl.preflight.provenance import changed_since, provenance_of
from megarl.preflight.recipe.general import validate
from megarl.preflight.replay import open_tape
from megarl.preflight.run_directory import RunPlace, open_run_directory
from megarl.preflight.survey import check_without_weights, prepare_training
from megarl.recipe import Recipe
from megarl.recipe.derived.epochs import with_steps
from megarl.recipe.paths import with_absolute_paths
from megarl.rollout.tape import RunTape


@dataclass(frozen=True)
class RunSetup:
    """A checked recipe and the data read for it, before any process starts."""

    recipe: Recipe
    prepared: Prepared
    platform: Any
    place: RunPlace
    tape: RunTape | None  # None: this run has no tape (`cannot_replay`)
    hub_commits: Commits = field(default_factory=dict)  # of models and data sets on the hub
    provenance: dict[str, Any] = field(default_factory=dict)  # of this start

    @property
    def notices(self) -> list[str]:
        return [*restart_notices(self.recipe.train), *self.prepared.notices, *self.place.notices]


def prepare_run(recipe: Recipe) -> RunSetup:
    """Check `recipe`, read data and models, and open the run's directory. Raises RecipeError or InputError."""
    recipe = with_absolute_paths(recipe)
    fetched = fetch_inputs(recipe, training_inputs(recipe), check_without_weights)
    recipe, commits = fetched.recipe, fetched.commits
    recipe, layout = fit_to_devices(recipe)
    prepared = prepare_training(recipe)
    recipe, length = with_steps(recipe, prepared.rows_of_sets)
    prepared.notices[:0] = layout + fetched.notices + length
    if length:
        validate(recipe)  # settings that the number of steps bounds
    platform = platforms.select(recipe.cluster.device)
    check_device(recipe, platform.name)
    check_installed(recipe)
    identity = identity_of(recipe, prepared.model, prepared.critic_model, prepared.rows_of_sets)
    identity[CONTENTS] = data_digest(recipe.data)
    place = open_run_directory(recipe, identity)
    provenance = provenance_of(recipe, identity)
    if place.checkpoint is not None and (before := saved_provenance(place.checkpoint)):
        place.notices.extend(changed_since(before, provenance))
    return RunSetup(recipe, prepared, platform, place, open_tape(recipe, place), commits, provenance)
