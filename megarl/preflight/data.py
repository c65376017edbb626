"""Read and check a recipe's data and scorers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.agents.setup import AgentSetup, check_tools, image_notice
from megarl.batching.flops import ModelFlops
from megarl.data.images import ImageReader
from megarl.data.preferences import PreferenceDataset
from megarl.data.prompts import AGENT_NAME, PromptDataset
from megarl.data.rows import check_file
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import Tokenizer, turn_end_notice
from megarl.errors import NotHereError, RecipeError, errors_of
from megarl.preflight.recipe.reward import remote_notices
from megarl.recipe.data import DataConfig, files_of, training_sets
from megarl.recipe.derived.lengths import longest_sample
from megarl.recipe.judge import TeacherConfig
from megarl.recipe.schema import Recipe
from megarl.rewards import ScorerSettings
from megarl.rewards.weighted import Term, needed_columns, terms_of


@dataclass
class Prepared:
    """Everything outside the recipe that `train` and `eval` need, read and checked."""

    tokenizer: Tokenizer
    prompts: PromptDataset | None
    examples: SFTDataset | PreferenceDataset | None
    evaluation: PromptDataset | None  # held-out problems of RL
    held_out: SFTDataset | PreferenceDataset | None  # held-out rows of SFT and DPO
    notices: list[str]
    flops: ModelFlops | None = None  # None if nothing is trained
    critic_flops: ModelFlops | None = None  # of the critic's model; None without a critic
    model: dict[str, Any] = field(default_factory=dict)  # config.json of the policy
    critic_model: dict[str, Any] | None = None  # config.json of the critic; None without a critic

    @property
    def rows_of_sets(self) -> dict[str, int]:
        """Number of training rows of each set, by its name."""
        data = self.prompts or self.examples
        return {} if data is None else data.sets

    @property
    def prompt_sets(self) -> list[PromptDataset]:
        return [data for data in (self.prompts, self.evaluation) if data is not None]

    @property
    def data_sources(self) -> list[str]:
        return sorted({source for data in self.prompt_sets for source in data.data_sources})


def file_errors(data: DataConfig, *, training: bool) -> Iterator[ValueError]:
    """Yield an error for each data file that is missing or has an unknown format. Reads no rows."""
    for key, file in files_of(data):
        if training or key == "data.eval_files":
            yield from errors_of(check_file, Path(file))


def read_data(recipe: Recipe, tokenizer: Tokenizer, *, training: bool, sample: int | None = None) -> Prepared:
    """Read and tokenize the rows of the recipe's files.

    `training`: read the training files as well. `sample`: number of rows to read from each file; None reads all. Raises
    ValueError for rows that cannot be read or are too long.
    """
    data = recipe.data
    prepared = Prepared(tokenizer, None, None, None, None, [])
    if recipe.train.source != "rollout":
        kind = PreferenceDataset if recipe.train.source == "preferences" else SFTDataset
        longest = longest_sample(recipe)
        if training:
            prepared.examples = kind(training_sets(data), tokenizer, data, longest, data.curriculum, sample)
            _add_notices(prepared, "training examples", prepared.examples)
        if data.eval_files:
            prepared.held_out = kind(data.eval_files, tokenizer, data, longest, sample=sample)
            _add_notices(prepared, "evaluation examples", prepared.held_out)
        _check_pixel_limits(data, has_images=False)
        return prepared
    if isinstance(data.chat_template, str) and (notice := turn_end_notice(tokenizer)) is not None:
        prepared.notices.append(notice)
    setup = AgentSetup.of(recipe)
    tools = check_tools(setup, tokenizer) if setup is not None else []
    reader = ImageReader.of(recipe.model.path, data)
    tools_may_show = setup is not None and recipe.agent.uses_tools and reader.reads_images
    if setup is not None and tools_may_show and (notice := image_notice(setup, tokenizer, reader)) is not None:
        prepared.notices.append(notice)
    rows: dict[str, Any] = {"tools": tools, "images": reader, "sample": sample}
    rows["needed"] = needed_columns(recipe.reward.function, recipe.reward.functions)
    rows["with_messages"] = bool(recipe.reward.services or recipe.agent.interaction or recipe.agent.loop)
    rows["posted"] = "remote" in recipe.reward.services
    rows["into_extra_info"] = (AGENT_NAME,) if recipe.agent.loop else ()
    if training:
        prepared.prompts = PromptDataset(training_sets(data), tokenizer, data, data.curriculum, **rows)
        _add_notices(prepared, "training prompts", prepared.prompts)
        _check_teachers(recipe.teacher, prepared.prompts.data_sources)
    if data.eval_files:
        prepared.evaluation = PromptDataset(data.eval_files, tokenizer, data, **rows)
        _add_notices(prepared, "evaluation prompts", prepared.evaluation)
    if recipe.agent.loop and any(prompts.has_images for prompts in prepared.prompt_sets):
        problem = "rows have images or videos, and the requests of an agent loop of your own are token ids"
        raise RecipeError("agent.loop", problem, "leave it out, or use rows without them", value=recipe.agent.loop)
    if sample is None:  # a sample may miss the rows with images
        has_images = tools_may_show or any(prompts.has_images for prompts in prepared.prompt_sets)
        _check_pixel_limits(data, has_images=has_images)
    return prepared


def _check_teachers(settings: TeacherConfig, data_sources: Sequence[str]) -> None:
    """Raise RecipeError for a data source without a teacher, if the recipe has several."""
    if settings.by_source and (missing := [source for source in data_sources if source not in settings.by_source]):
        problem = f"no teacher for the data source {', '.join(map(repr, missing))} of training rows"
        raise RecipeError(
            "teacher.by_source", problem, "add a teacher, or leave the rows out", value=[*settings.by_source]
        )


def _check_pixel_limits(data: DataConfig, *, has_images: bool) -> None:
    """Raise RecipeError if the recipe limits image sizes and no row has an image or a video."""
    for key, value in (("data.min_pixels", data.min_pixels), ("data.max_pixels", data.max_pixels)):
        if value is not None and not has_images:
            raise RecipeError(key, "no row has an image or a video", "leave it out", value=value)


def _add_notices(prepared: Prepared, name: str, data: PromptDataset | SFTDataset | PreferenceDataset) -> None:
    prepared.notices += data.notices
    if data.filtered:
        total = len(data) + data.filtered
        prepared.notices.append(
            f"{data.filtered} of {total} {name} are longer than the limit and were left out: {data.too_long_by_file()}"
        )


def prepare_rewards(recipe: Recipe, prepared: Prepared) -> Prepared:
    """Check the scorers for the data sources of `prepared` and append their notices. Raises as `check_rewards` does."""
    check_rewards(recipe, prepared.data_sources)
    prepared.notices += remote_notices(recipe.reward)
    return prepared


def check_rewards(recipe: Recipe, data_sources: Sequence[str]) -> dict[str, tuple[Term, ...]]:
    """Return the terms of the reward of each data source, with their scorers prepared.

    Raises ValueError for an unknown scorer, and NotHereError for a scorer that this machine cannot run.
    """
    reward, settings = recipe.reward, ScorerSettings.of(recipe.reward, recipe.sandbox)
    terms = terms_of(reward.function, reward.functions, data_sources, settings)
    for scorer in {term.scorer.name: term.scorer for row in terms.values() for term in row}.values():
        try:
            if scorer.prepare is not None:
                scorer.prepare()
        except Exception as error:
            raise NotHereError(
                "reward",
                f"the scorer {scorer.name!r} cannot be used here: {type(error).__name__}: {error}",
                "install its dependencies, or set reward.function to another scorer",
            ) from error
    return terms
