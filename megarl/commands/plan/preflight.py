"""What of a recipe can be checked on this machine, beside memory and layout: settings, models, data, rewards, run.

The checks are `train`'s own (megarl/preflight*.py). What they need and this machine has not is said, and not refused; of
data a sample of the rows is read.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl import engines
from megarl.algorithms.advantages import uses_critic
from megarl.checkpoint.identity import identity_of
from megarl.cluster.device_map import place
from megarl.commands.doctor.recipe import checkpoint_bytes, checkpoints_at_a_time, demand_of
from megarl.commands.plan.count.types import Refusal
from megarl.commands.plan.score_once import score_once
from megarl.commands.plan.show.units import decimal
from megarl.data.dataset import RowDataset
from megarl.data.preferences import PreferenceDataset
from megarl.data.prompts import layout_of, with_source
from megarl.data.rows import Row, sample_rows
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engines.specs import fixed_models
from megarl.errors import InputError, NotHereError, RecipeError, plain
from megarl.hf.shape import model_shape
from megarl.megatron.config_fields import fields_of_megatron
from megarl.preflight.judge import check_judge, check_judge_model
from megarl.preflight.models import (
    CRITIC,
    JUDGE,
    POLICY,
    TEACHER,
    Config,
    check_critic,
    check_policy,
    check_teacher,
    check_teacher_tokens,
    config_of,
    models_of,
    read_tokenizer,
    read_weights_config,
)
from megarl.preflight.recipe.optimizer_extra import optimizer_notices
from megarl.preflight.run import check_demand, check_device, check_settings, find_place, read_data
from megarl.recipe.data import MixedSet, files_of
from megarl.recipe.header import hardware_of
from megarl.recipe.load import all_keys
from megarl.recipe.megatron_ddp import ddp_notice
from megarl.recipe.observe import traces_notice
from megarl.recipe.schema import Recipe
from megarl.recipe.seeded import seeds_notice
from megarl.rewards.weighted import needed_columns
from megarl.text import pluralize

ROWS = 256  # of each file
_KINDS: dict[str, type[RowDataset[Any]]] = {
    "sft": SFTDataset,
    "preferences": PreferenceDataset,
}


@dataclass
class Checked:
    """`refusals`: what `train` would refuse on any machine. `unchecked`: what could not be looked at on this one, and what
    stands in the way on it alone. `notes`: what was seen. `models`: the config.json of each model, by the setting that
    names it; without those that are refused."""

    refusals: list[Refusal] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: dict[str, Config] = field(default_factory=dict)

    @contextlib.contextmanager
    def refusing(self, key: str, *, needed: bool = False) -> Iterator[None]:
        """What is raised in here is noted. `key`: the setting to blame where the message names none. `needed`: without what
        is not here there is nothing to plan."""
        try:
            yield
        except RecipeError as error:
            if isinstance(error, NotHereError) and not needed:
                self.unchecked.append(f"{error.key}: {_joined(error.problem)}. To do: {_joined(error.remedy)}")
                return
            value = "" if type(error.value) is object else f" = {plain(error.value)}"
            self._refuse(Refusal(f"{error.key}{value}", _joined(error.problem), _joined(error.remedy)))
        except ValueError as error:
            self._refuse(Refusal(_first_key(str(error)) or key, _joined(str(error)), ""))

    def _refuse(self, refusal: Refusal) -> None:
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def require(self, *, strict: bool) -> None:
        """Raise InputError with all that is refused; `strict`: and with all that could not be looked at."""
        blocks = [_block(refusal) for refusal in self.refusals]
        if strict:
            blocks += [f"\n  --strict {line}" for line in self.unchecked]
        if blocks:
            raise InputError("\n".join(blocks))


def checked(recipe: Recipe, path: Path, model: str | None = None) -> Checked:
    """Look at all that is here. `path`: the recipe's file. `model`: the published model whose config.json stands for that
    of `model.path`; None: what is there, or what the recipe's head says."""
    found = Checked()
    with found.refusing("megatron.extra"):
        check_settings(recipe)
        if recipe.cluster.device == "auto":  # what is planned for are devices, and not this machine
            check_demand(recipe)
    with found.refusing("rollout.tensor_parallel"):
        _check_machines(recipe, path)
    _say_what_is_not_installed(recipe, found)
    _check_models(recipe, path, model, found)
    if found.refusals:  # of models and settings: what follows would say the same again
        return found
    with found.refusing("cluster.device"):
        if recipe.cluster.device != "auto" and Path(recipe.model.path).is_dir():
            check_device(recipe, recipe.cluster.device)
    tokenizer = _check_policys_files(recipe, found)
    _check_fixed_models(recipe, tokenizer, found)
    _check_data(recipe, tokenizer, found)
    _check_room(recipe, found)
    _check_run(recipe, found)
    return found


def _check_machines(recipe: Recipe, path: Path) -> None:
    """Refuse an engine that is larger than a machine of the kind that the recipe's head names, however many there are."""
    machine = hardware_of(path)
    if machine is not None:
        name, _, each = machine
        demand = demand_of(recipe)
        place([(name, each)] * -(-demand.devices // each), demand, "devices")


def _say_what_is_not_installed(recipe: Recipe, found: Checked) -> None:
    """Whose settings are then known when they are read, in a run."""
    samples = recipe.train.source == "rollout"
    for section in [*(["rollout"] if samples else []), *fixed_models(recipe)]:
        settings = getattr(recipe, section)
        with found.refusing(f"{section}.engine"):
            if settings.engine_args and not engines.can_check_args(settings.engine):
                found.unchecked.append(f"{section}.engine_args: {settings.engine} is not installed here")
    if recipe.megatron.extra and fields_of_megatron() is None:
        found.unchecked.append("megatron.extra: Megatron is not installed here")


# --- models ----------------------------------------------------------------------------------------------------------


def _check_models(recipe: Recipe, path: Path, model: str | None, found: Checked) -> None:
    """What every config.json tells; `found.models` has them then."""
    for key, directory in models_of(recipe).items():
        with found.refusing(key, needed=key in (POLICY, CRITIC)):
            found.models[key] = config_of(directory, path, key, model if key == POLICY else None)
    policy = found.models.get(POLICY)
    if policy is not None:
        with found.refusing("megatron"):
            check_policy(recipe, policy)
        critic = found.models.get(CRITIC) if recipe.critic.model_path else policy
        if uses_critic(recipe.algorithm) and critic is not None:
            with found.refusing("critic.megatron"):
                check_critic(recipe, critic)
    if TEACHER in found.models:
        with found.refusing(TEACHER):
            check_teacher(recipe, found.models[TEACHER])
    if JUDGE in found.models:
        with found.refusing(JUDGE):
            check_judge_model(recipe.judge, found.models[JUDGE])


def _check_policys_files(recipe: Recipe, found: Checked) -> Tokenizer | None:
    """Its weights and its tokenizer, which is returned where it is good."""
    if _is_here(recipe.model.path, POLICY, "its weights and tokenizer", found):
        with found.refusing(POLICY):
            read_weights_config(recipe.model.path, POLICY)
    separate, folder = recipe.model.tokenizer, Path(recipe.model.path)
    if separate is None and (not folder.is_dir() or _holds_config_alone(folder)):
        return None
    if separate is not None and not _is_here(separate, "model.tokenizer", "the tokenizer", found):
        return None
    with found.refusing(POLICY):
        return read_tokenizer(recipe, found.models[POLICY])
    return None


def _check_fixed_models(recipe: Recipe, tokenizer: Tokenizer | None, found: Checked) -> None:
    """Weights and tokenizers of critic, teacher and judge. A judge's question is looked at with the data."""
    for key, directory in list(models_of(recipe).items())[1:]:
        if not _is_here(directory, key, "its weights and tokenizer", found):
            continue
        with found.refusing(key):
            read_weights_config(directory, key)
            if key == TEACHER and tokenizer is not None:
                check_teacher_tokens(recipe, tokenizer, found.models[key])
            elif key == JUDGE:
                load_tokenizer(directory)


def _is_here(directory: str, key: str, what: str, found: Checked) -> bool:
    if not Path(directory).is_dir():
        found.unchecked.append(f"{key}: {directory} is not on this machine: {what}")
        return False
    if _holds_config_alone(Path(directory)):
        found.unchecked.append(f"{key}: {directory} holds a config.json alone: {what}")
        return False
    return True


def _holds_config_alone(directory: Path) -> bool:
    """Whether a folder describes a model without having any of it: enough for a plan, too little for a run."""
    names = {file.name for file in directory.iterdir()}
    return "config.json" in names and not any(
        name.endswith((".safetensors", ".bin", ".safetensors.index.json")) or name.startswith("tokenizer")
        for name in names
    )


# --- data and rewards ------------------------------------------------------------------------------------------------


def _check_data(recipe: Recipe, tokenizer: Tokenizer | None, found: Checked) -> None:
    """Columns, lengths and scores of a sample of the rows that are here."""
    here = {key: [file for file in files if _file_is_here(key, file, found)] for key, files in _files(recipe).items()}
    rows: list[Row] = []
    for key, files in here.items():
        for file in files:
            with found.refusing(key):
                rows += _sample(recipe, Path(file))
    if recipe.train.source == "rollout":
        score_once(recipe, rows, found)
    if tokenizer is None:
        if rows:
            found.unchecked.append("data.max_prompt_length: there is no tokenizer here to count the rows' tokens with")
        return
    if found.refusals:
        return
    with found.refusing("data.train_files"):
        _read_sample(recipe, tokenizer, here, found)


def _sample(recipe: Recipe, file: Path) -> list[Row]:
    if recipe.train.source != "rollout":
        kind = _KINDS[recipe.train.source]
        return sample_rows(file, ROWS, *kind.layouts, optional=kind.optional)[0]
    needed = needed_columns(recipe.reward.function, recipe.reward.functions)
    layouts, optional = layout_of(needed)
    return [with_source(row, file, needed) for row in sample_rows(file, ROWS, *layouts, optional=optional)[0]]


def _read_sample(recipe: Recipe, tokenizer: Tokenizer, here: Mapping[str, list[str]], found: Checked) -> None:
    data = recipe.data
    mix = {name: MixedSet(here[f"data.mix.{name}.files"], part.weight) for name, part in data.mix.items()}
    mix = {name: part for name, part in mix.items() if part.files}
    view = replace(data, train_files=here["data.train_files"], eval_files=here["data.eval_files"], mix=mix)
    if recipe.agent.mcp:
        found.unchecked.append(f"agent.mcp: {', '.join(recipe.agent.mcp)}: servers are not started here")
    agent = replace(recipe.agent, mcp={})
    training = bool(view.train_files or view.mix)
    prepared = read_data(replace(recipe, data=view, agent=agent), tokenizer, training=training, sample=ROWS)
    of_prompts = recipe.train.source == "rollout"
    limit = data.max_prompt_length + (0 if of_prompts else recipe.rollout.max_response_length)
    against = "data.max_prompt_length" if of_prompts else "data.max_prompt_length + rollout.max_response_length"
    for name, sampled in (
        ("training", prepared.prompts or prepared.examples),
        ("evaluation", prepared.evaluation or prepared.held_out),
    ):
        if sampled is not None:
            read, total = (sum(getattr(count, of) for count in sampled.counts) for of in ("rows", "total"))
            found.notes.append(
                f"Of {read:,} of {pluralize(total, f'{name} row')} the longest has {pluralize(sampled.longest, 'token')}; {against} "
                f"is {limit}"
            )
    found.notes += prepared.notices
    asked = [one for one in (prepared.prompts, prepared.evaluation) if one]
    if JUDGE in found.models and asked and Path(str(recipe.judge.path)).is_dir():
        check_judge(recipe, found.models[JUDGE], asked)


def _files(recipe: Recipe) -> dict[str, list[str]]:
    """The files that each setting names."""
    files: dict[str, list[str]] = {"data.train_files": [], "data.eval_files": []}
    for key, file in files_of(recipe.data):
        files.setdefault(key, []).append(file)
    return files


def _file_is_here(key: str, file: str, found: Checked) -> bool:
    """Where others of its folder are here, its name is wrong."""
    place = Path(file)
    if place.is_file() or (place.parent.is_dir() and any(place.parent.glob(f"*{place.suffix}"))):
        return True
    found.unchecked.append(f"{key}: {file} is not on this machine")
    return False


# --- the run ---------------------------------------------------------------------------------------------------------


def _check_room(recipe: Recipe, found: Checked) -> None:
    """Say how large checkpoints are, and whether this machine's disk, which may be another than the run's, has room."""
    learners = [found.models[POLICY]]
    if uses_critic(recipe.algorithm):
        learners.append(found.models.get(CRITIC, found.models[POLICY]))
    each = checkpoint_bytes(recipe, sum(model_shape(config).total for config in learners))
    wanted = each * checkpoints_at_a_time(recipe)
    place = Path(recipe.runs_dir).absolute()
    free = shutil.disk_usage(next(parent for parent in (place, *place.parents) if parent.is_dir())).free
    count = checkpoints_at_a_time(recipe)
    said = f"{pluralize(count, 'checkpoint')} of about {decimal(each)} {'is' if count == 1 else 'are'} there at a time"
    if wanted > free:
        found.unchecked.append(f"runs_dir: {said}, and {place} has {decimal(free)} free on this machine")
    elif wanted:
        found.notes.append(f"At most {said}; {place} has {decimal(free)} free.")


def _check_run(recipe: Recipe, found: Checked) -> None:
    """Whether the run may write where it wants to, and go on from what it names."""
    found.notes += [notice for notice in (seeds_notice(recipe), traces_notice(recipe)) if notice]
    found.notes += optimizer_notices(recipe)
    if POLICY in found.models:
        with found.refusing("megatron.ddp"):
            overlap = ddp_notice(recipe, with_images="vision_config" in found.models[POLICY])
            found.notes += [overlap] if overlap else []
    if recipe.train.resume == "never":
        identity: dict[str, Any] = {}
    elif not Path(recipe.model.path).is_dir():
        found.unchecked.append("train.resume: the model is not on this machine, and a checkpoint belongs to one")
        return
    else:
        critic = found.models.get(CRITIC, found.models[POLICY]) if uses_critic(recipe.algorithm) else None
        identity = identity_of(recipe, found.models[POLICY], critic, {})
        del identity["rows of the training data"]  # counting them is reading them all
    with found.refusing("train.resume"):
        sizes = replace(recipe.train, verify_checkpoints="sizes")  # every byte takes long
        place = find_place(replace(recipe, train=sizes), identity)
        found.notes += place.notices
        if place.checkpoint is not None:
            found.notes.append(f"The run would go on from {place.checkpoint}.")


# --- words -----------------------------------------------------------------------------------------------------------


def _block(refusal: Refusal) -> str:
    """As a RecipeError says it."""
    lines = [("key   ", refusal.key), ("what  ", refusal.problem), ("do    ", refusal.remedy)]
    return "".join(f"\n  {label} {text}" for label, text in lines if text)


def _first_key(text: str) -> str | None:
    """The setting that a message names first."""
    places = {text.find(key): key for key in all_keys() if "." in key and key in text}
    return places[min(places)] if places else None


def _joined(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
