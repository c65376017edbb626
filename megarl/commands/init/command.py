"""Ask, choose a layout, check the recipe, and write it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import typer

from megarl.atomic_files import disk_errors
from megarl.commands.init import answers as checks
from megarl.commands.init.answers import ROWS, TASKS, Answers
from megarl.commands.init.layout import first_layout
from megarl.commands.init.text import recipe_text
from megarl.errors import InputError, RecipeError, as_input_error
from megarl.hf.config import context_length
from megarl.preflight.load import load_recipe
from megarl.preflight.models import config_of

T = TypeVar("T")
_DATA = {"sft": "data/demonstrations.parquet", "dpo": "data/pairs.parquet"}


class InitOptions(NamedTuple):
    """Answers from the command line; None: ask."""

    task: str | None
    model: str | None
    data: str | None
    devices: str | None
    reward: str | None


def init(file: Path, options: InitOptions, *, ask: bool) -> None:
    """Write the recipe `file`. ask: ask the questions that `options` leaves open; else they have their defaults.

    Raises InputError for an existing file, a wrong answer from the command line, and a missing answer.
    """
    with as_input_error():
        if file.exists():
            raise ValueError(f"{file} exists: name another file, or move it away")
        if file.suffix not in (".yaml", ".yml"):
            raise ValueError(f"{file}: a recipe's name ends in .yaml")
        answers = _answers(options, ask)
        text, notice = _checked_text(file, answers)
        with disk_errors(file), file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    typer.echo(f"wrote {file}")
    for line in _remarks(answers, notice):
        typer.echo(line)
    typer.echo(f"next: megarl plan {file}, then megarl train {file}")


def _answers(options: InitOptions, ask: bool) -> Answers:
    tasks = "\n".join(f"  {name:<6} {meaning}" for name, meaning in TASKS.items())
    task = _answer("--task", f"Task\n{tasks}\n", options.task, "grpo", checks.check_task, ask)
    model = _answer(
        "--model", "Model (folder, or name on the hub)", options.model, "Qwen/Qwen3-8B", checks.check_model, ask
    )
    data = _DATA.get(task, "data/gsm8k/train.parquet")
    files = _answer("--data", "Training rows (.parquet, .jsonl, hf://...)", options.data, data, checks.check_files, ask)
    here = checks.devices_here()
    machines = _answer("--devices", "Devices (e.g. 8 H100, 2 cpu)", options.devices, here, checks.read_machines, ask)
    reward = None
    if checks.samples(task):
        question = "Reward (a scorer such as gsm8k or math, your module:function, or rows)"
        reward = _answer("--reward", question, options.reward, ROWS, checks.check_reward, ask)
    elif options.reward is not None:
        raise ValueError(f"--reward: the task {task} has no reward, leave it out")
    return Answers(task, model, files, machines, reward)


def _answer(option: str, question: str, value: str | None, default: str, check: Callable[[str], T], ask: bool) -> T:
    """Return the checked answer to a question. On a terminal it repeats the question after a wrong answer."""
    if value is not None or not ask:
        try:
            return check(default if value is None else value)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error
    while True:
        try:
            text = typer.prompt(question, default=default)
        except typer.Abort as error:
            raise InputError(f"no answer to {option}: give the option, or --defaults") from error
        try:
            return check(text)
        except ValueError as error:
            typer.echo(str(error), err=True)


def _checked_text(file: Path, answers: Answers) -> tuple[str, str | None]:
    """Return the text of the recipe, which loads, and a notice about its layout."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / file.name
        draft.write_text(recipe_text(file, answers, None, {}), encoding="utf-8")
        try:
            model = config_of(answers.model, draft)
        except (RecipeError, OSError):  # the model is not on this machine, and the hub does not answer
            model = None
        context = context_length(model) if model is not None else None
        draft.write_text(recipe_text(file, answers, context, {}), encoding="utf-8")
        layout, notice = first_layout(draft, answers.machines, model)
        text = recipe_text(file, answers, context, layout)
        draft.write_text(text, encoding="utf-8")
        load_recipe(draft)
    return text, notice


def _remarks(answers: Answers, notice: str | None) -> list[str]:
    """Return what the user has to know or to do before training."""
    remarks = [notice] if notice is not None else []
    missing = [file for file in answers.files if "://" not in file and not Path(file).exists()]
    if missing:
        remarks.append(
            f"{', '.join(missing)} does not exist yet: megarl data --help prepares data sets, docs/data.md has the columns"
        )
    if answers.reward == ROWS:
        remarks.append("each row's data_source selects its scorer: docs/rewards.md has the list")
    return [f"  {remark}" for remark in remarks]
