"""The stages `data` and `rewards` of the survey: run the checks of data.py and judge.py, and collect the findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.batching.flops import model_flops
from megarl.data.dataset import RowDataset
from megarl.data.preferences import PreferenceDataset
from megarl.data.prompts import layout_of, with_source
from megarl.data.rows import Row, sample_rows
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import Tokenizer
from megarl.errors import pluralize
from megarl.hf.families.tables.family_table import FIELD, table_notice
from megarl.preflight.data import Prepared, check_rewards, file_errors, prepare_rewards, read_data
from megarl.preflight.engines_and_devices import route_notices
from megarl.preflight.findings import Survey
from megarl.preflight.judge import check_judge
from megarl.preflight.models import CRITIC, JUDGE_PATH, POLICY
from megarl.recipe.data import MixedSet, files_of
from megarl.rewards.weighted import needed_columns

ROWS = 256  # rows to read from each file for a sample
_KINDS: dict[str, type[RowDataset[Any]]] = {"sft": SFTDataset, "preferences": PreferenceDataset}


def check_without_rows(survey: Survey) -> None:
    """Check file names and the scorers that the recipe names, without reading rows."""
    survey.add(file_errors(survey.recipe.data, training=survey.available.training), "data.train_files")
    if survey.recipe.reward.function or survey.recipe.reward.functions:
        with survey.part("reward"):
            check_rewards(survey.recipe, [])


def check_data(survey: Survey) -> None:
    assert survey.tokenizer is not None, "without errors the tokenizer is loaded"
    recipe, training = survey.recipe, survey.available.training
    with survey.part("data.train_files"):
        prepared = read_data(recipe, survey.tokenizer, training=training)
        prepared.model = survey.configs[POLICY] if training else {}
        if training:
            prepared.flops = model_flops(prepared.model)
        if training and uses_critic(recipe.algorithm):
            prepared.critic_model = survey.configs[CRITIC if recipe.critic.model_path else POLICY]
            prepared.critic_flops = model_flops(prepared.critic_model)
        if FIELD in survey.configs[POLICY]:
            prepared.notices.append(table_notice(survey.configs[POLICY][FIELD]))
        survey.prepared = prepared


def check_scorers(survey: Survey) -> None:
    recipe, prepared = survey.recipe, survey.prepared
    assert prepared is not None
    with survey.part("reward"):
        prepare_rewards(recipe, prepared)
    if recipe.asks_judge:
        with survey.part(JUDGE_PATH):
            check_judge(recipe, survey.configs[JUDGE_PATH], prepared.prompt_sets)
    if survey.available.training:
        with survey.part("weight_sync.route"):
            prepared.notices += route_notices(recipe, prepared.model)


def check_sample(survey: Survey) -> None:
    """Read `ROWS` rows of each file that is on this machine."""
    files: dict[str, list[str]] = {"data.train_files": [], "data.eval_files": []}
    for key, file in files_of(survey.recipe.data):
        files.setdefault(key, [])
        if _file_is_here(survey, key, file):
            files[key].append(file)
    for key, names in files.items():
        for file in names:
            with survey.part(key):
                survey.rows += _sample(survey, Path(file))
    if survey.tokenizer is None:
        if survey.rows:
            survey.unavailable("data.max_prompt_length: the rows' tokens cannot be counted without a tokenizer")
    elif not survey.errors:
        with survey.part("data.train_files"):
            _read_sample(survey, survey.tokenizer, files)


def _file_is_here(survey: Survey, key: str, file: str) -> bool:
    """Return whether to read `file`: it exists, or its folder has files of the same format, so the name must be wrong."""
    path = Path(file)
    if path.is_file() or (path.parent.is_dir() and any(path.parent.glob(f"*{path.suffix}"))):
        return True
    survey.unavailable(f"{key}: {file} is not on this machine")
    return False


def _sample(survey: Survey, file: Path) -> list[Row]:
    recipe, names = survey.recipe, survey.recipe.data.columns
    if recipe.train.source != "rollout":
        kind = _KINDS[recipe.train.source]
        return sample_rows(file, ROWS, *kind.layouts, optional=kind.optional, names=names)[0]
    needed = needed_columns(recipe.reward.function, recipe.reward.functions)
    layouts, optional = layout_of(needed)
    rows, _ = sample_rows(file, ROWS, *layouts, optional=optional, names=names)
    return [with_source(row, file, needed) for row in rows]


def _read_sample(survey: Survey, tokenizer: Tokenizer, files: Mapping[str, list[str]]) -> None:
    recipe, data = survey.recipe, survey.recipe.data
    mix = {name: MixedSet(files[f"data.mix.{name}.files"], part.weight) for name, part in data.mix.items()}
    mix = {name: part for name, part in mix.items() if part.files}
    view = replace(data, train_files=files["data.train_files"], eval_files=files["data.eval_files"], mix=mix)
    if recipe.agent.mcp:
        survey.unavailable(f"agent.mcp: {', '.join(recipe.agent.mcp)}: servers are not started here")
    agent = replace(recipe.agent, mcp={})
    training = bool(view.train_files or view.mix)
    prepared = read_data(replace(recipe, data=view, agent=agent), tokenizer, training=training, sample=ROWS)
    _report_lengths(survey, prepared)
    for notice in prepared.notices:
        survey.notice(notice)
    if JUDGE_PATH in survey.configs and prepared.prompt_sets and Path(str(recipe.judge.path)).is_dir():
        check_judge(recipe, survey.configs[JUDGE_PATH], prepared.prompt_sets)


def _report_lengths(survey: Survey, prepared: Prepared) -> None:
    recipe = survey.recipe
    uses_rollout = recipe.train.source == "rollout"
    limit = recipe.data.max_prompt_length + (0 if uses_rollout else recipe.rollout.max_response_length)
    name_of_limit = "data.max_prompt_length" if uses_rollout else "data.max_prompt_length + rollout.max_response_length"
    for name, rows in (
        ("training", prepared.prompts or prepared.examples),
        ("evaluation", prepared.evaluation or prepared.held_out),
    ):
        if rows is not None:
            read, total = (sum(getattr(count, field) for count in rows.counts) for field in ("rows", "total"))
            survey.notice(
                f"Of {read:,} of {pluralize(total, f'{name} row')} the longest has {pluralize(rows.longest, 'token')}; "
                f"{name_of_limit} is {limit}"
            )
