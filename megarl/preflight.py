"""What is read and checked before any process starts: model files, tokenizer, layout, data, rewards, run directory.

Whatever is wrong here ends the command in seconds with one message (exit status 2).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl import engines
from megarl.agents.build import AgentSetup, check_tools
from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import needs_teacher, teacher_top_k
from megarl.algorithms.trial import try_own_functions
from megarl.checkpoint import checkpoint_step, find_checkpoint
from megarl.cluster import transport
from megarl.config.critic import ONE_LAYOUT, critic_view
from megarl.config.data import training_sets
from megarl.config.errors import RecipeError, plain
from megarl.config.judge import uses_judge
from megarl.config.load import flat_settings, to_yaml
from megarl.config.remote import remote_notices
from megarl.config.schema import Recipe
from megarl.data.images import ImageReader
from megarl.data.preferences import PreferenceDataset
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import Tokenizer, check_same_tokens, check_vocabulary, load_tokenizer
from megarl.engines.specs import first_specs
from megarl.flops import ModelFlops, model_flops
from megarl.identity import check_identity
from megarl.megatron.config_fields import check_extra, check_extra_names
from megarl.megatron.layout import check_layout
from megarl.megatron.lora.targets import check_lora
from megarl.megatron.model_checks import check_model
from megarl.model_config import context_length
from megarl.observe.metrics import read_metrics
from megarl.observe.run_dir import RunDirectory
from megarl.preflight_engines import check_engines, check_experts
from megarl.preflight_judge import check_judge
from megarl.rewards import ScorerSettings
from megarl.rewards.weighted import terms_of

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
    if not recipe.data.train_files and not recipe.data.mix:
        raise RecipeError("data.train_files", "there is nothing to train on", "name .parquet or .jsonl files", value=[])
    check_engines(recipe.rollout)
    check_extra_names(recipe, "megatron")
    try_own_functions(recipe.algorithm)
    begin("model")
    tokenizer, config = _read_model(recipe)
    check_model(config)
    check_layout(config, recipe.megatron, recipe.cluster.trainers)
    check_lora(config, recipe.lora, recipe.megatron)
    check_extra(recipe, config, "megatron")
    critic = _read_critic(recipe, tokenizer) if uses_critic(recipe.algorithm) else None
    if needs_teacher(recipe.algorithm):
        _check_teacher(recipe, tokenizer)
    begin("data")
    prepared = _read_data(recipe, tokenizer, training=True)
    begin("rewards")
    prepared = _with_rewards(recipe, prepared)
    if uses_judge(recipe):
        check_judge(
            recipe,
            read_weights_config(str(recipe.judge.path), "judge.path"),
            [data for data in (prepared.prompts, prepared.evaluation) if data is not None],
        )
    prepared.model, prepared.flops = config, model_flops(config)
    if critic is not None:
        prepared.critic_model, prepared.critic_flops = critic, model_flops(critic)
    return prepared


def check_device(recipe: Recipe, device: str, *, training: bool = True) -> None:
    """Refuse what the engines of `device` can never do, in training or in `megarl eval`."""
    if recipe.train.source == "rollout":
        for engine, spec in first_specs(recipe, training=training):
            engines.check_plan(engine, spec, device)


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
    begin("model")
    tokenizer, _ = _read_model(recipe)
    begin("data")
    prepared = _read_data(recipe, tokenizer, training=False)
    begin("rewards")
    prepared = _with_rewards(recipe, prepared)
    if uses_judge(recipe):
        assert prepared.evaluation is not None
        check_judge(recipe, read_weights_config(str(recipe.judge.path), "judge.path"), [prepared.evaluation])
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
    """The run's directory and the checkpoint to go on from. Refuses to mix two runs, or a run with other data."""
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    notices: list[str] = []
    checksums = recipe.train.verify_checkpoints == "checksums"
    checkpoint = find_checkpoint(recipe.train.resume, directory.checkpoints, checksums=checksums, notice=notices.append)
    if recipe.train.resume == "never" and directory.holds_a_run():
        raise RecipeError(
            "train.resume",
            f"{directory.path} already holds a run",
            "set train.resume=auto to go on with it, name=... for another directory, or move it away",
            value="never",
        )
    if checkpoint is not None:
        check_identity(checkpoint, identity)
        notices += _changed_settings(directory, recipe)
    _check_disk(directory.path)
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "name a directory that can be written to"
        raise RecipeError("runs_dir", f"{directory.path}: {error.strerror}", remedy, value=recipe.runs_dir) from error
    if checkpoint is None:
        return RunPlace(directory, None, 1, identity, notices)
    step = checkpoint_step(checkpoint)
    own = checkpoint.parent.resolve() == directory.checkpoints.resolve()
    written = not own or any(line["step"] == step for line in read_metrics(directory.metrics))
    return RunPlace(directory, checkpoint, step + 1 if written else step, identity, notices)


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


def read_hf_config(path: str, key: str = "model.path") -> dict[str, Any]:
    """config.json of the Hugging Face directory that `key` names. Raises RecipeError where it is missing or no JSON."""
    directory = Path(path)
    if not directory.is_dir():
        raise RecipeError(
            key,
            f"there is no such directory (seen from {Path.cwd()})",
            "give the model's Hugging Face directory (recipes/quickstart_sft.yaml makes the quickstart's)",
            value=path,
        )
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        remedy = "give a Hugging Face directory: config.json, *.safetensors and a tokenizer"
        raise RecipeError(key, "it holds no config.json", remedy, value=path) from None
    except ValueError as error:
        raise RecipeError(key, f"its config.json is no JSON: {error}", "mend the file", value=path) from error
    assert isinstance(config, dict)
    return config


def _read_model(recipe: Recipe) -> tuple[Tokenizer, dict[str, Any]]:
    config = read_weights_config(recipe.model.path, "model.path")
    tokenizer = load_tokenizer(recipe.model.tokenizer or recipe.model.path, recipe.model.path)
    check_vocabulary(tokenizer, config)
    _check_context(recipe, config)
    if recipe.train.source == "rollout":
        check_experts(recipe.rollout, config)
    return tokenizer, config


def read_weights_config(path: str, key: str) -> dict[str, Any]:
    config = read_hf_config(path, key)
    if not any(Path(path).glob("*.safetensors")):
        remedy = "convert the weights to safetensors (save_pretrained does)"
        raise RecipeError(key, "it holds no *.safetensors", remedy, value=path)
    return config


def _read_critic(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json of the critic's model, which reads the policy's tokens; checked, and its layout with it."""
    if transport(recipe) == "torchrun":
        raise RecipeError("cluster.transport", ONE_LAYOUT, "start it without torchrun", value=recipe.cluster.transport)
    view = critic_view(recipe)
    key = "critic.model_path" if recipe.critic.model_path else "model.path"
    config = read_weights_config(view.model.path, key)
    check_vocabulary(tokenizer, config)
    check_model(config)
    if "vision_config" in config:
        remedy = "name a language model in critic.model_path, or use another algorithm.advantage"
        raise RecipeError(key, "a critic cannot be made of a vision-language model yet", remedy, value=view.model.path)
    try:
        check_layout(config, view.megatron, view.cluster.trainers)
    except ValueError as error:
        raise ValueError(
            f"The critic cannot be laid out (critic.megatron and critic.trainers stand for megatron and "
            f"cluster.trainers here). {error}"
        ) from error
    check_extra(view, config, "critic.megatron")
    return config


def _check_teacher(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse a teacher for whom the policy's tokens mean something else."""
    teacher = recipe.teacher
    assert teacher.path is not None
    engines.check_known(teacher.engine, "teacher.engine")
    engines.check_args(teacher.engine, teacher.engine_args, "teacher")
    config = read_weights_config(teacher.path, "teacher.path")
    check_same_tokens(tokenizer, load_tokenizer(teacher.path))
    check_vocabulary(tokenizer, config)
    top_k = teacher_top_k(recipe.algorithm)
    if top_k > tokenizer.vocab_size:
        what = f"the tokenizer in {tokenizer.directory} has {tokenizer.vocab_size} tokens"
        raise RecipeError("algorithm.distill_top_k", what, "ask for no more", value=top_k)


def _check_context(recipe: Recipe, config: dict[str, Any]) -> None:
    """Refuse samples longer than the policy was made for, which its engine would refuse once it loads."""
    known, data, rollout = context_length(config), recipe.data, recipe.rollout
    longest = data.max_prompt_length + rollout.max_response_length
    if recipe.train.source != "rollout" or known is None or "hf_overrides" in rollout.engine_args or longest <= known:
        return
    raise RecipeError(
        "rollout.max_response_length",
        f"with data.max_prompt_length = {data.max_prompt_length} a sample may have {longest} tokens, and the model was made "
        f"for {known} (max_position_embeddings of its config.json)",
        "lower the two together to that",
        value=rollout.max_response_length,
    )


def _read_data(recipe: Recipe, tokenizer: Tokenizer, *, training: bool) -> Prepared:
    data = recipe.data
    prepared = Prepared(tokenizer, None, None, None, None, [])
    if recipe.train.source != "rollout":
        longest = data.max_prompt_length + recipe.rollout.max_response_length
        kind = PreferenceDataset if recipe.train.source == "preferences" else SFTDataset
        prepared.examples = kind(training_sets(data), tokenizer, data, longest, data.curriculum)
        _note(prepared, "training examples", prepared.examples)
        if data.eval_files:
            prepared.held_out = kind(data.eval_files, tokenizer, data, longest)
            _note(prepared, "evaluation examples", prepared.held_out)
        _check_pixels(recipe, has_images=False)
        return prepared
    setup = AgentSetup.of(recipe)
    tools = check_tools(setup, tokenizer) if setup is not None else []
    images = ImageReader.of(recipe.model.path, data)
    if training:
        prepared.prompts = PromptDataset(training_sets(data), tokenizer, data, data.curriculum, tools, images)
        _note(prepared, "training prompts", prepared.prompts)
    if data.eval_files:
        prepared.evaluation = PromptDataset(data.eval_files, tokenizer, data, tools=tools, images=images)
        _note(prepared, "evaluation prompts", prepared.evaluation)
    _check_pixels(recipe, any(one is not None and one.has_images for one in (prepared.prompts, prepared.evaluation)))
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
    reward, settings = recipe.reward, ScorerSettings(recipe.reward.remote, recipe.sandbox)
    terms = terms_of(reward.function, reward.functions, prepared.data_sources, settings)
    prepared.notices += remote_notices(reward)
    for scorer in {term.scorer.name: term.scorer for row in terms.values() for term in row}.values():
        try:
            if scorer.prepare is not None:
                scorer.prepare()
        except Exception as error:
            raise ValueError(
                f"the scorer {scorer.name!r} cannot be used here: {type(error).__name__}: {error}. "
                "Install what it needs, or set reward.function to another"
            ) from error
    return prepared


def _check_disk(path: Path) -> None:
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < LEAST_FREE_BYTES:
        raise RecipeError(
            "runs_dir",
            f"{existing} has {free >> 20} MiB free, and even a small run needs {LEAST_FREE_BYTES >> 20}",
            "free some space, or set runs_dir to another disk",
            value=str(path),
        )
