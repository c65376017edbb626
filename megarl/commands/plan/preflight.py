"""The preflight of `plan`: the checks of `train` that this machine can run, and checks of scorers, disk space and the run.

What this machine lacks is reported and does not refuse the recipe. Of each data file a sample of the rows is read.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.batching.limits import group_size_notice
from megarl.checkpoint.identity import identity_of
from megarl.commands.doctor.machine import existing_path
from megarl.commands.doctor.recipe import checkpoint_bytes, checkpoints_at_a_time
from megarl.commands.plan.score_once import score_once
from megarl.commands.plan.show.units import decimal
from megarl.errors import InputError, RecipeError, block, join_blocks, pluralize
from megarl.hf.families import has_tower
from megarl.hf.shape import model_shape
from megarl.platform.kinds import is_accelerator
from megarl.preflight.engines_and_devices import unused_devices_notice
from megarl.preflight.findings import Available, Survey, one_line
from megarl.preflight.models import CRITIC, POLICY
from megarl.preflight.recipe.fleet import step_timeout_notice
from megarl.preflight.recipe.optimizer_extra import optimizer_notices
from megarl.preflight.run_directory import find_place
from megarl.preflight.survey import survey
from megarl.recipe.derived.at_update import update_notice
from megarl.recipe.derived.megatron_ddp import ddp_notice
from megarl.recipe.derived.seeded import seeds_notice
from megarl.recipe.load import all_keys
from megarl.recipe.observe import traces_notice
from megarl.recipe.schema import Recipe


def checked(recipe: Recipe, path: Path, model: str | None = None) -> Survey:
    """Check everything that this machine can check of `recipe`.

    `path`: the recipe's file. `model`: a published model, or a folder; its config.json is used instead of the one in
    `model.path`. None: the model itself, or the one that the recipe's header names.
    """
    result = survey(recipe, Available(recipe_file=path, shape=model))
    if "data" in result.stages:  # settings and models have no errors
        if recipe.train.source == "rollout":
            score_once(recipe, result.rows, result)
        _check_disk_space(recipe, result)
        check_run(recipe, result)
    return result


def _check_disk_space(recipe: Recipe, result: Survey) -> None:
    """Report the size of checkpoints, and whether this machine's disk, perhaps not the run's, has room for them."""
    learners = [result.configs[POLICY]]
    if uses_critic(recipe.algorithm):
        learners.append(result.configs.get(CRITIC, result.configs[POLICY]))
    each = checkpoint_bytes(recipe, sum(model_shape(config).total for config in learners))
    count = checkpoints_at_a_time(recipe.train)
    place = Path(recipe.runs_dir).absolute()
    free = shutil.disk_usage(existing_path(place)).free
    text = f"{pluralize(count, 'checkpoint')} of about {decimal(each)} {'is' if count == 1 else 'are'} there at a time"
    if each * count > free:
        result.unavailable(f"runs_dir: {text}, and {place} has {decimal(free)} free on this machine")
    elif each * count:
        result.notice(f"At most {text}; {place} has {decimal(free)} free.")


def check_run(recipe: Recipe, result: Survey) -> None:
    """Report notices of the run, and check its directory and the checkpoint to resume from."""
    notices = (
        group_size_notice(recipe),
        seeds_notice(recipe),
        step_timeout_notice(recipe.rollout),
        unused_devices_notice(recipe, accelerated=is_accelerator(recipe.cluster.device)),
        update_notice(recipe),
        traces_notice(recipe),
    )
    for notice in (*notices, *optimizer_notices(recipe)):
        if notice:
            result.notice(notice)
    policy = result.configs.get(POLICY)
    if policy is not None:
        with result.part("megatron.ddp"):
            if overlap := ddp_notice(recipe, with_images=has_tower(policy)):
                result.notice(overlap)
    identity: dict[str, Any] = {}
    if recipe.train.resume != "never":
        if policy is None or not Path(recipe.model.path).is_dir():
            result.unavailable("train.resume: the model, which a checkpoint belongs to, is not on this machine")
            return
        critic = result.configs.get(CRITIC, policy) if uses_critic(recipe.algorithm) else None
        identity = identity_of(recipe, policy, critic, {})
        del identity["rows of the training data"]  # counting them would read all of them
    with result.part("train.resume"):
        sizes = replace(recipe.train, verify_checkpoints="sizes")  # checksums would take long
        place = find_place(replace(recipe, train=sizes), identity)
        for notice in [*place.warnings, *place.notices]:
            result.notice(notice)
        if place.state is not None:
            result.notice(f"The run would go on from {place.state}.")


def require(result: Survey, *, strict: bool) -> None:
    """Raise InputError with the errors, which `train` refuses on every machine. `strict`: also with everything that this
    machine cannot check, and what would stop the run only here."""
    blocks = [_block(error, result.key_of(error)) for error in result.errors]
    if strict:
        blocks += [f"\n  --strict {line}" for line in result.texts("unavailable")]
    if blocks:
        raise InputError(join_blocks(blocks, result.hidden))


def _block(error: ValueError, key: str) -> str:
    """Format an error for a message. `key`: the setting to blame if the error names none."""
    if isinstance(error, RecipeError):
        return block(key=error.setting, what=one_line(error.problem), do=one_line(error.remedy))
    return block(key=_first_key(str(error)) or key, what=one_line(str(error)))


def _first_key(text: str) -> str | None:
    """Return the setting that `text` names first."""
    places = {text.find(key): key for key in all_keys() if "." in key and key in text}
    return places[min(places)] if places else None
