"""What is read and checked before any process starts: model files, tokenizer, layout, data, rewards, run directory.

Whatever is wrong here ends the command in seconds with one message (exit status 2).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl import engines
from megarl import platform as platforms
from megarl.agents.setup import AgentSetup, check_tools
from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import needs_teacher
from megarl.batching.flops import ModelFlops, model_flops
from megarl.checkpoint.folder import checkpoint_step, find_checkpoint
from megarl.checkpoint.identity import check_identity
from megarl.cluster import transport
from megarl.cluster.device_map import Demand
from megarl.data.images import ImageReader
from megarl.data.preferences import PreferenceDataset
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import Tokenizer, check_vocabulary
from megarl.engines.routes import check_route, route_here
from megarl.engines.specs import first_specs, fixed_models, longest_sample
from megarl.errors import NotHereError, RecipeError, as_recipe_error, plain
from megarl.hf.shape import model_shape
from megarl.megatron.config_fields import check_extra_names
from megarl.observe.metrics import read_metrics
from megarl.observe.run_dir import RunDirectory
from megarl.platform.kinds import kind_of
from megarl.preflight.engines import check_adapters, check_engine, check_engines
from megarl.preflight.judge import check_judge
from megarl.preflight.models import (
    CRITIC,
    JUDGE,
    POLICY,
    TEACHER,
    check_critic,
    check_policy,
    check_sampled,
    check_teacher,
    check_teacher_tokens,
    read_tokenizer,
    read_weights_config,
)
from megarl.preflight.recipe.critic import ONE_LAYOUT
from megarl.preflight.recipe.observe import check_traces
from megarl.preflight.recipe.reward import remote_notices
from megarl.preflight.user_functions import try_own_functions
from megarl.recipe.critic import critic_view
from megarl.recipe.data import training_sets
from megarl.recipe.exchange import weights_directory
from megarl.recipe.judge import uses_judge
from megarl.recipe.load import flat_settings, to_yaml
from megarl.recipe.schema import Recipe
from megarl.rewards import ScorerSettings
from megarl.rewards.weighted import Term, needed_columns, terms_of
from megarl.text import pluralize

LEAST_FREE_BYTES = 64 << 20
_SHOWN = 8  # changed settings in a notice


@dataclass
class Prepared:
    """What `train` and `eval` need of the outside world, read and found good."""

    tokenizer: Tokenizer
    prompts: PromptDataset | None
    examples: SFTDataset | PreferenceDataset | None
    evaluation: PromptDataset | None  # held-out problems of RL
    held_out: SFTDataset | PreferenceDataset | None  # held-out rows of SFT and DPO
    notices: list[str]
    flops: ModelFlops | None = None  # None: not trained
    critic_flops: ModelFlops | None = None  # of the critic's model; None: no critic
    model: dict[str, Any] = field(default_factory=dict)  # its config.json
    critic_model: dict[str, Any] | None = None  # the critic's config.json; None: no critic

    @property
    def rows_of_sets(self) -> dict[str, int]:
        """Of the training data, by the name of the set."""
        data = self.prompts or self.examples
        return {} if data is None else data.sets

    @property
    def data_sources(self) -> list[str]:
        sets = [data for data in (self.prompts, self.evaluation) if data is not None]
        return sorted({source for data in sets for source in data.data_sources})


# What preparing goes through, in order, and what it reads there.
STAGES = {
    "settings": "names of engines, their arguments, megatron.extra, functions of the recipe's own",
    "model": "config.json, weights' files, tokenizer, layout; of the critic and the teacher as well",
    "data": "every row, through the tokenizer; tools",
    "rewards": "scorers, prepared; the judge and its question",
}


def prepare_training(recipe: Recipe, begin: Callable[[str], None] = lambda stage: None) -> Prepared:
    """Check and read everything that `train` needs. Raises ValueError (RecipeError where one key is to blame).

    `begin` is called with each of `STAGES` before it."""
    begin("settings")
    check_settings(recipe)
    begin("model")
    config = read_weights_config(recipe.model.path, POLICY)
    tokenizer = read_tokenizer(recipe, config)
    check_policy(recipe, config)
    critic = _read_critic(recipe, tokenizer) if uses_critic(recipe.algorithm) else None
    if needs_teacher(recipe.algorithm):
        teacher = read_weights_config(str(recipe.teacher.path), TEACHER)
        check_teacher(recipe, teacher)
        check_teacher_tokens(recipe, tokenizer, teacher)
    begin("data")
    prepared = read_data(recipe, tokenizer, training=True)
    begin("rewards")
    prepared = _with_rewards(recipe, prepared)
    if uses_judge(recipe):
        check_judge(
            recipe,
            read_weights_config(str(recipe.judge.path), JUDGE),
            [data for data in (prepared.prompts, prepared.evaluation) if data is not None],
        )
    prepared.model, prepared.flops = config, model_flops(config)
    prepared.notices += route_notices(recipe, config)
    if critic is not None:
        prepared.critic_model, prepared.critic_flops = critic, model_flops(critic)
    return prepared


def check_settings(recipe: Recipe) -> None:
    """Refuse what the recipe alone shows and training cannot have: names and arguments of engines, settings of Megatron's
    and of what adapts it, functions of the recipe's own, devices. Nothing but code is read."""
    if not recipe.data.train_files and not recipe.data.mix:
        raise RecipeError("data.train_files", "there is nothing to train on", "name .parquet or .jsonl files", value=[])
    check_engines(recipe.rollout)
    if needs_teacher(recipe.algorithm):
        check_engine("teacher", recipe.teacher)
    if uses_judge(recipe):
        check_engine("judge", recipe.judge)
    check_extra_names(recipe, "megatron")
    if uses_critic(recipe.algorithm):
        check_extra_names(critic_view(recipe), "critic.megatron")
    try_own_functions(recipe.algorithm)
    if kind_of(platforms.kind(recipe.cluster.device)).ray_resource is not None:  # on a CPU there are none to run out of
        check_demand(recipe)


def route_notices(recipe: Recipe, config: dict[str, Any]) -> list[str]:
    """A notice where weights will go by export although the recipe leaves the route open, with what that moves. Raises
    RecipeError for a route that the engines of this environment cannot take."""
    if recipe.train.source != "rollout":
        return []
    route = route_here(recipe)
    check_route(recipe, route)
    if route.name != "export" or recipe.exchange.route != "auto":
        return []
    ranks, size = recipe.rollout.engines * recipe.rollout.tensor_parallel, model_shape(config).total
    size *= 4 if recipe.model.dtype == "float32" else 2
    moved = f"each of {pluralize(ranks, 'engine rank')} receives the whole model, {size / 2**30:,.1f} GiB an update"
    return [f"weights go by {route}; {moved}, from rank 0 (plan RECIPE estimates the seconds)"]


def check_demand(recipe: Recipe) -> None:
    """Refuse more engines or critics on the trainers' devices than there are of these."""
    samples, critic = recipe.train.source == "rollout", uses_critic(recipe.algorithm)
    demand = Demand.of(recipe, trainers=True, engines=samples, critic=critic, fixed=fixed_models(recipe))
    demand.require_trainers_devices_suffice()


def check_device(recipe: Recipe, device: str, *, training: bool = True) -> None:
    """Refuse what the engines and the profiler of `device` can never do, in training or in `megarl eval`."""
    if training:
        check_traces(recipe, kind_of(device))
    if recipe.train.source == "rollout":
        for engine, spec in first_specs(recipe, training=training):
            engines.check_plan(engine, spec, device)
            if recipe.exchange.adapters == "only" and spec.adapters is not None:
                check_adapters(engine, spec, device)


def prepare_evaluation(recipe: Recipe, begin: Callable[[str], None] = lambda stage: None) -> Prepared:
    """Check and read everything that `eval` needs. `begin`: as of `prepare_training`."""
    begin("settings")
    if recipe.train.source != "rollout":
        raise RecipeError(
            "train.source",
            "`megarl eval` samples answers and scores them; of these rows only the loss is known",
            "set evaluation.at_start or at_end, and the run itself computes it; or give an RL recipe",
            value=recipe.train.source,
        )
    if not recipe.data.eval_files:
        raise RecipeError(
            "data.eval_files", "there is nothing to evaluate on", "name .parquet or .jsonl files", value=[]
        )
    check_engines(recipe.rollout)
    if uses_judge(recipe):
        check_engine("judge", recipe.judge)
    begin("model")
    config = read_weights_config(recipe.model.path, POLICY)
    tokenizer = read_tokenizer(recipe, config)
    check_sampled(recipe, config)
    begin("data")
    prepared = read_data(recipe, tokenizer, training=False)
    begin("rewards")
    prepared = _with_rewards(recipe, prepared)
    if uses_judge(recipe):
        assert prepared.evaluation is not None
        check_judge(recipe, read_weights_config(str(recipe.judge.path), JUDGE), [prepared.evaluation])
    return prepared


@dataclass
class RunPlace:
    """Where a run writes, and where it begins."""

    directory: RunDirectory
    checkpoint: Path | None  # what train.resume means
    first_step: int  # the first whose line is still to be written
    identity: dict[str, Any]  # what its checkpoints belong to; see identity.py
    notices: list[str]  # what was passed over to find the checkpoint, and why


def open_run_directory(recipe: Recipe, identity: dict[str, Any]) -> RunPlace:
    """The run's directory, made where it is not there, and the checkpoint to go on from. Refuses as `find_place`."""
    place = find_place(recipe, identity)
    path = place.directory.path
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(recipe, f"{path}: {error.strerror}") from error
    if recipe.exchange.transport == "files":
        _make_weights_directory(recipe)
    return place


def _make_weights_directory(recipe: Recipe) -> None:
    where = weights_directory(recipe)
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "name a directory that trainers can write to and engines read, or leave it out"
        given = recipe.exchange.directory
        raise RecipeError("exchange.directory", f"{where}: {error.strerror}", remedy, value=given) from error


def find_place(recipe: Recipe, identity: dict[str, Any]) -> RunPlace:
    """Where the run would write and begin; nothing is made. Refuses to mix two runs, or a run with other data, and a
    directory that cannot be written to."""
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    notices: list[str] = []
    checksums = recipe.train.verify_checkpoints == "checksums"
    checkpoint = find_checkpoint(recipe.train.resume, directory.checkpoints, checksums=checksums, notice=notices.append)
    if recipe.train.resume == "never" and directory.holds_a_run():
        raise NotHereError(
            "train.resume",
            f"{directory.path} already holds a run",
            "set train.resume=auto to go on with it, name=... for another directory, or move it away",
            value="never",
        )
    if checkpoint is not None:
        check_identity(checkpoint, identity)
        notices += _changed_settings(directory, recipe)
    _check_disk(recipe, directory.path)
    if checkpoint is None:
        return RunPlace(directory, None, 1, identity, notices)
    step = checkpoint_step(checkpoint)
    own = checkpoint.parent.resolve() == directory.checkpoints.resolve()
    written = not own or any(line["step"] == step for line in read_metrics(directory.metrics))
    return RunPlace(directory, checkpoint, step + 1 if written else step, identity, notices)


def _not_writable(recipe: Recipe, what: str) -> RecipeError:
    return RecipeError("runs_dir", what, "name a directory that can be written to", value=recipe.runs_dir)


def _changed_settings(directory: RunDirectory, recipe: Recipe) -> list[str]:
    """A notice of the settings that are not those with which the run was last started."""
    if not directory.recipe.is_file():
        return []
    before, now = (flat_settings(text) for text in (directory.recipe.read_text(), to_yaml(recipe)))
    changed = [key for key in now if key in before and before[key] != now[key] and key != "train.resume"]
    if not changed:
        return []
    said = ", ".join(f"{key} {plain(before[key])} -> {plain(now[key])}" for key in changed[:_SHOWN])
    more = f", and {len(changed) - _SHOWN} more (recipe.resolved.yaml)" if len(changed) > _SHOWN else ""
    return [f"changed since the run was last started: {said}{more}"]


def _read_critic(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json of the critic's model, which reads the policy's tokens; checked, and its layout with it."""
    if transport(recipe) == "torchrun":
        raise RecipeError("cluster.transport", ONE_LAYOUT, "start it without torchrun", value=recipe.cluster.transport)
    path = critic_view(recipe).model.path
    key = CRITIC if recipe.critic.model_path else POLICY
    config = read_weights_config(path, key)
    with as_recipe_error(key, "name a model with the policy's tokens", path):
        check_vocabulary(tokenizer, config)
    check_critic(recipe, config)
    return config


def read_data(recipe: Recipe, tokenizer: Tokenizer, *, training: bool, sample: int | None = None) -> Prepared:
    """The rows of the recipe's files, `training`: those to learn from as well; `sample`: so many of each file alone, None:
    all. Raises ValueError for what cannot be read, or does not fit."""
    data = recipe.data
    prepared = Prepared(tokenizer, None, None, None, None, [])
    if recipe.train.source != "rollout":
        kind = PreferenceDataset if recipe.train.source == "preferences" else SFTDataset
        longest = longest_sample(recipe)
        if training:
            prepared.examples = kind(training_sets(data), tokenizer, data, longest, data.curriculum, sample)
            _note(prepared, "training examples", prepared.examples)
        if data.eval_files:
            prepared.held_out = kind(data.eval_files, tokenizer, data, longest, sample=sample)
            _note(prepared, "evaluation examples", prepared.held_out)
        _check_pixels(recipe, has_images=False)
        return prepared
    setup = AgentSetup.of(recipe)
    tools = check_tools(setup, tokenizer) if setup is not None else []
    rows: dict[str, Any] = {"tools": tools, "images": ImageReader.of(recipe.model.path, data), "sample": sample}
    rows["needed"] = needed_columns(recipe.reward.function, recipe.reward.functions)
    if training:
        prepared.prompts = PromptDataset(training_sets(data), tokenizer, data, data.curriculum, **rows)
        _note(prepared, "training prompts", prepared.prompts)
    if data.eval_files:
        prepared.evaluation = PromptDataset(data.eval_files, tokenizer, data, **rows)
        _note(prepared, "evaluation prompts", prepared.evaluation)
    if sample is None:  # else an image may be among the other rows
        _check_pixels(
            recipe, any(one is not None and one.has_images for one in (prepared.prompts, prepared.evaluation))
        )
    return prepared


def _check_pixels(recipe: Recipe, has_images: bool) -> None:
    """Refuse limits to images where there are none."""
    for key, value in (("data.min_pixels", recipe.data.min_pixels), ("data.max_pixels", recipe.data.max_pixels)):
        if value is not None and not has_images:
            raise RecipeError(key, "no row has an image that it would apply to", "leave it out", value=value)


def _note(prepared: Prepared, what: str, data: PromptDataset | SFTDataset | PreferenceDataset) -> None:
    prepared.notices += data.notices
    if data.filtered:
        total = len(data) + data.filtered
        prepared.notices.append(
            f"{data.filtered} of {total} {what} are longer than the limit and were left out: {data.too_long_by_file()}"
        )


def _with_rewards(recipe: Recipe, prepared: Prepared) -> Prepared:
    check_rewards(recipe, prepared.data_sources)
    prepared.notices += remote_notices(recipe.reward)
    return prepared


def check_rewards(recipe: Recipe, data_sources: Sequence[str]) -> dict[str, tuple[Term, ...]]:
    """What rows of each data source are scored by, ready to be called. Raises ValueError where there is no such scorer, and
    NotHereError for one that cannot be used on this machine."""
    reward, settings = recipe.reward, ScorerSettings(recipe.reward.remote, recipe.sandbox)
    terms = terms_of(reward.function, reward.functions, data_sources, settings)
    for scorer in {term.scorer.name: term.scorer for row in terms.values() for term in row}.values():
        try:
            if scorer.prepare is not None:
                scorer.prepare()
        except Exception as error:
            raise NotHereError(
                "reward",
                f"the scorer {scorer.name!r} cannot be used here: {type(error).__name__}: {error}",
                "install what it needs, or set reward.function to another",
            ) from error
    return terms


def _check_disk(recipe: Recipe, path: Path) -> None:
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise _not_writable(recipe, f"{existing} is no directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _not_writable(recipe, f"{existing} cannot be written to")
    free = shutil.disk_usage(existing).free
    if free < LEAST_FREE_BYTES:
        raise RecipeError(
            "runs_dir",
            f"{existing} has {free >> 20} MiB free, and even a small run needs {LEAST_FREE_BYTES >> 20}",
            "free some space, or set runs_dir to another disk",
            value=str(path),
        )
