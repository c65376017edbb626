"""Ask, choose a layout, check the recipe, and write it."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import typer

from megarl.atomic_files import check_new
from megarl.commands.init import answers as checks
from megarl.commands.init.answers import ROWS, TASKS, Answers
from megarl.commands.init.columns import column_remarks, columns_of, lack_data_source, scorer_of
from megarl.commands.init.layout import first_layout
from megarl.commands.init.published_models import published_name, quantized_notice, recipes_notice
from megarl.commands.init.text import recipe_text
from megarl.errors import InputError, NotHereError, RecipeError, all_of, as_input_error, command_name
from megarl.hf import hub
from megarl.hf.config import context_length
from megarl.preflight.load import load_recipe
from megarl.preflight.models import POLICY, check_known_model, config_of
from megarl.registry import can_be_found

T = TypeVar("T")
_DEFAULT_FILES = {"sft": "data/demonstrations.parquet", "dpo": "data/pairs.parquet"}
_CHECKS: dict[str, Callable[[str], Any]] = {
    "task": checks.check_task,
    "model": checks.check_model,
    "data": checks.check_files,
    "devices": checks.read_machines,
    "reward": checks.check_reward,
}


class InitOptions(NamedTuple):
    """Answers from the command line; None: not given."""

    task: str | None
    model: str | None
    data: str | None
    devices: str | None
    reward: str | None


def init(file: Path, options: InitOptions, *, ask: bool) -> None:
    """Write the recipe `file`. ask: ask the questions that `options` leaves open; else they have their defaults.

    Raises InputError for a file that exists, is not named like a recipe or cannot be written, a wrong answer from the command
    line, and a missing answer; RecipeError for a model that megarl cannot train, and answers that make no valid recipe.
    """
    with as_input_error():
        if file.suffix not in (".yaml", ".yml"):
            name = file.parent / f"{file.stem or 'recipe'}.yaml"
            raise ValueError(f"{file}: name it {name} (recipes end in .yaml or .yml)")
        check_new("FILE", file)
        answers = _answers(options, ask)
        text, notices = _checked_text(file, answers)
        write_new(file, text)
    typer.echo(f"wrote {file}")
    for line in [*notices, *_remarks(answers)]:
        typer.echo(f"  {line}")
    command, recipe = command_name(), shlex.quote(str(file))
    typer.echo(f"next: {command} plan {recipe}, then {command} train {recipe}")


def write_new(file: Path, text: str) -> None:
    """Write a file that does not exist yet. Raises ValueError, without a part of the file, if that fails."""
    try:
        stream = file.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise ValueError(f"{file} exists: name another file, or move it away") from error
    try:
        with stream:
            stream.write(text)
    except OSError as error:
        file.unlink()
        raise ValueError(f"{file} could not be written: {error.strerror}. Name a file on another disk.") from error


def _answers(options: InitOptions, ask: bool) -> Answers:
    """Check the options, then ask the open questions."""
    from_options = {name: _checked(name, text) for name, text in options._asdict().items() if text is not None}
    if "task" in from_options:
        _check_task_has_reward(from_options["task"], options)

    def answer(name: str, question: str, default: str) -> Any:
        if name in from_options:
            return from_options[name]
        return _ask(name, question, default) if ask else _checked(name, default)

    tasks = "\n".join(f"  {name:<6} {meaning}" for name, meaning in TASKS.items())
    task = answer("task", f"Task\n{tasks}\n", "grpo")
    _check_task_has_reward(task, options)
    model = answer("model", "Model (folder, or name on the hub)", "Qwen/Qwen3-8B")
    default_files = _DEFAULT_FILES.get(task, "data/gsm8k/train.parquet")
    files = answer("data", "Training rows (.parquet, .jsonl, hf://...)", default_files)
    machines = answer("devices", "Devices (e.g. 8 H100, 2 cpu)", checks.devices_here())
    reward = None
    if checks.samples(task):
        question = "Reward (a scorer such as gsm8k or math, your module:function or file.py:function, or rows)"
        reward = answer("reward", question, scorer_of(files) or ROWS)
    return Answers(task, model, files, machines, reward, columns_of(task, files))


def _check_task_has_reward(task: str, options: InitOptions) -> None:
    if options.reward is not None and not checks.samples(task):
        raise ValueError(f"--reward: the task {task} has no reward, leave it out")


def _checked(name: str, text: str) -> Any:
    """Return the answer to the question `name`. Raises ValueError that names the option."""
    try:
        return _CHECKS[name](text)
    except ValueError as error:
        raise ValueError(f"--{name}: {error}") from error


def _ask(name: str, question: str, default: str) -> Any:
    """Ask until an answer passes its check. Raises InputError at the end of the input."""
    while True:
        try:
            text = typer.prompt(question, default=default)
        except typer.Abort as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise
            raise InputError(f"no answer to --{name}: give the option, or --defaults") from error
        try:
            return _CHECKS[name](text)
        except ValueError as error:
            typer.echo(str(error), err=True)


def _checked_text(file: Path, answers: Answers) -> tuple[str, list[str]]:
    """Return the text of the recipe, which loads, and notices about its layout."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / file.name
        try:
            return _text(file, draft, answers)
        except RecipeError as error:
            for each in (error, *all_of(error)):
                if isinstance(each, RecipeError) and each.origin is not None:
                    each.origin = each.origin.replace(str(draft), str(file))
            raise


def _text(file: Path, draft: Path, answers: Answers) -> tuple[str, list[str]]:
    """Return the text of the recipe `file`, and notices. `draft`: a temporary file, which the checks read."""

    def write(context: int | None, layout: dict[str, Any], *remarks: str) -> str:
        text = recipe_text(file, answers, context, layout, remarks)
        draft.write_text(text, encoding="utf-8")
        return text

    write(None, {})
    model, unread = _model_config(answers.model, draft)
    context = context_length(model) if model is not None else None
    write(context, {})
    layout, notice = first_layout(draft, answers.machines, model)
    guesses = (
        None if unread is None else f"no config.json of {answers.model} here, so the lengths and the layout are guesses"
    )
    text = write(context, layout, *(line for line in (guesses, notice) if line is not None))
    load_recipe(draft)
    notices = [line for line in (answers.machines.notice, notice) if line is not None]
    if unread is not None:
        notices.append(
            f"{guesses}, and `plan` needs it: {unread}. Then write the recipe anew: its lengths and layout will fit the model"
        )
    if model is not None:
        notices += _notices_of_published(answers, model, has_notice=notice is not None)
    return text, notices


def _notices_of_published(answers: Answers, config: dict[str, Any], *, has_notice: bool) -> list[str]:
    """Return notices about the published model that the answer names or describes. has_notice: the layout has one, too."""
    name = published_name(answers.model, config)
    if name is None:
        return []
    recipes = recipes_notice(name, answers.machines.kind, other_kinds=has_notice)
    return [line for line in (quantized_notice(answers.model), recipes) if line is not None]


def _model_config(path: str, draft: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return (config.json of the model, None), or (None, reason) if it is not here and the hub gives no definite answer.

    Raises RecipeError for a model that megarl cannot train, and for one that the hub does not have or does not give.
    """
    try:
        config = config_of(path, draft)
    except NotHereError as error:
        refusal = error.__cause__  # without the remedy for recipes
        assert isinstance(refusal, hub.HubError), "the answer is a folder or a name on the hub"
        if refusal.is_definite:
            raise RecipeError(POLICY, refusal.problem, refusal.remedy, value=path) from error
        return None, str(refusal)
    check_known_model(config, POLICY, path)
    return config, None


def _remarks(answers: Answers) -> list[str]:
    """Return what the user has to know or to do before training."""
    remarks = []
    missing = [file for file in answers.files if not file.startswith(hub.PREFIX) and not Path(file).exists()]
    if missing:
        remarks.append(
            f"not found yet: {', '.join(missing)}. `{command_name()} data --help` prepares data sets, docs/data.md has the columns"
        )
    module, is_function, _ = (answers.reward or "").partition(":")
    if is_function and not (Path(module).exists() if module.endswith(".py") else can_be_found(module)):
        remarks.append(f"not found yet: {module}, which `plan` and `train` import")
    function = None if answers.reward == ROWS else answers.reward
    remarks += column_remarks(answers.task, answers.files, answers.columns, function)
    if answers.reward == ROWS and (scorer := scorer_of(answers.files)) is not None:
        remarks.append(f"these rows have no data_source, which selects a scorer: add reward: {{function: {scorer}}}")
    elif answers.reward == ROWS and not lack_data_source(answers.files):
        remarks.append("each row's data_source selects its scorer: docs/rewards.md has the list")
    return remarks
