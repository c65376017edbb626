"""The text of a first recipe."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.commands.init.answers import ROWS, TASKS, Answers
from megarl.errors import command_name
from megarl.recipe.key import RecipeDumper

_ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean", "kl_coef": 0.001},
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "dynamic_sampling": {"enabled": True, "metric": "accuracy"},
    },
    "sft": {"advantage": "none", "loss": "sft", "aggregation": "token_mean"},
    "dpo": {"advantage": "none", "loss": "dpo", "aggregation": "seq_mean_token_mean"},
}
_SOURCES = {"sft": "sft", "dpo": "preferences"}
_RATES = {"grpo": 1e-6, "dapo": 1e-6, "sft": 1e-5, "dpo": 5e-7}
_RESPONSES = {"grpo": 1024, "dapo": 4096, "sft": 1024, "dpo": 1024}


def recipe_text(
    file: Path, answers: Answers, context: int | None, layout: Mapping[str, Any], remarks: Sequence[str] = ()
) -> str:
    """Return the recipe.

    context: longest sequence of the model; None: unknown. layout: settings by dotted key, for the devices. remarks: about
    guesses in it, for its head.
    """
    settings = _settings(file.stem, answers, context)
    for key, value in layout.items():
        section, _, field = key.partition(".")
        settings.setdefault(section, {})[field] = value
    body = yaml.dump(settings, Dumper=RecipeDumper, sort_keys=False, default_flow_style=None, width=100)
    return "\n".join([*_head(file, answers), *_comments(remarks), body])


def _head(file: Path, answers: Answers) -> list[str]:
    machines = answers.machines
    lines = [f"# {TASKS[answers.task]}. Written by megarl init."]
    if machines.name is not None:
        lines.append(f"# Hardware: {machines.name}, {machines.nodes} x {machines.per_node}")
    search = " (--search: faster layouts)" if machines.accelerated else ""
    command, recipe = command_name(), shlex.quote(str(file))
    return [
        *lines,
        f"#   {command} plan {recipe}    memory and time of this recipe{search}",
        f"#   {command} train {recipe}",
        f"#   {command} keys temperature    other settings",
        "# Evaluation during training: set data.eval_files and evaluation.every",
    ]


def _comments(remarks: Sequence[str]) -> list[str]:
    return [
        line for each in remarks for line in textwrap.wrap(each, 100, initial_indent="# ", subsequent_indent="#   ")
    ]


def _settings(name: str, answers: Answers, context: int | None) -> dict[str, Any]:
    """Return the settings of all sections, but for the layout."""
    accelerated, task = answers.machines.accelerated, answers.task
    prompt, response = (1024, _RESPONSES[task]) if accelerated else (512, 256)
    if context is not None and prompt + response > context:
        prompt = response = context // 2
    prompts = (64 if answers.samples else 32) if accelerated else 8
    settings: dict[str, Any] = {
        "name": name,
        "model": {"path": answers.model} | ({} if accelerated else {"dtype": "float32"}),
        "data": {
            "train_files": list(answers.files),
            "prompts_per_step": prompts,
            "max_prompt_length": prompt,
            "overlong_prompts": "filter",
        },
        "algorithm": dict(_ALGORITHMS[task]),
        "rollout": {"max_response_length": response},
        "actor": {"optimizer": {"lr": _RATES[task]}},
    }
    if answers.columns:
        settings["data"]["columns"] = answers.columns
    if answers.samples:
        settings["rollout"]["samples_per_prompt"] = 8 if accelerated else 4
        settings["actor"]["mini_batches"] = 2
    if task == "dapo":
        settings["algorithm"]["overlong"] = {"penalty_buffer": response // 4, "penalty_factor": 1.0}
        if ":" in (answers.reward or ""):  # a user's function need not report the part `accuracy`
            settings["algorithm"]["dynamic_sampling"] = {"enabled": True, "metric": "reward"}
    if answers.reward not in (None, ROWS):
        settings["reward"] = {"function": answers.reward}
    settings["cluster"] = {"device": answers.machines.kind, "trainers": answers.machines.devices}
    if not accelerated:
        settings["cluster"]["threads"] = 1
    length = {"steps": 100 if accelerated else 10} if answers.samples else {"epochs": 1}
    settings["train"] = {"source": _SOURCES[task]} if task in _SOURCES else {}
    settings["train"] |= {**length, "save_every": 20}
    if accelerated:
        settings["train"]["restarts"] = 3
    return settings
