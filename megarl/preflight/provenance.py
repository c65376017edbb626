"""Provenance of a run's start: installation, command line, and digests of recipe, model and data.

summary.json has it of each start, and so has each checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.checkpoint.identity import CONTENTS
from megarl.hf.hub.errors import without_secrets
from megarl.platform.installed import differences, installation
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml
from megarl.recipe.urls import names_secret

_HIDDEN = "***"
_INNER_NAME = re.compile(r"[\w-]+(?=['\"]?\s*[:=])")  # of an entry of a mapping


def provenance_of(recipe: Recipe, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of this start as plain values.

    recipe: the one that the run writes. identity: of its checkpoints. ``command``: without secrets; ``folder``: where it was
    started. ``recipe``: see `recipe_digest`. ``data``, ``weights``: digests of the training data and of the model's weights.
    """
    return {
        **installation(),
        "command": command_line(sys.argv),
        "folder": os.getcwd(),
        "recipe": recipe_digest(to_yaml(recipe)),
        "data": identity[CONTENTS],
        "weights": identity["model"]["weights"],
    }


def recipe_digest(text: str) -> str:
    """Return the SHA-256, in hex, of the settings in recipe.resolved.yaml.

    `name`, `runs_dir` and `train.resume` are left out, so that a repetition of the run has the same digest.
    """
    settings: dict[str, Any] = yaml.safe_load(text)
    kept = {key: value for key, value in settings.items() if key not in ("name", "runs_dir")}
    kept["train"] = {key: value for key, value in settings.get("train", {}).items() if key != "resume"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def command_line(arguments: Sequence[str]) -> str:
    """Return a command as a shell reads it. `arguments`: `sys.argv`.

    Secrets are replaced by ***: values with a secret's name (`hf_token`), also within a mapping, and user, password and query
    of URLs.
    """
    program = Path(arguments[0] if arguments else "")
    if program.name == "__main__.py":
        words = ["python", "-m", program.parent.name]
    else:
        words = ["python", str(program)] if program.suffix == ".py" else [program.name or "python"]
    return shlex.join([*words, *_without_secrets(arguments[1:])])


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    words: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        inner = any(names_secret(word) for word in _INNER_NAME.findall(value))
        if equals and (inner or names_secret(name.rpartition(".")[2])):
            words.append(f"{name}={_HIDDEN}")
        elif words and words[-1].startswith("--") and "=" not in words[-1] and names_secret(words[-1]):
            words.append(_HIDDEN)
        else:
            words.append(without_secrets(argument))
    return words


def hosts_and_devices(device: str, machines: Iterable[tuple[str, str]], device_names: Iterable[str]) -> dict[str, Any]:
    """Return ``hosts`` (machine -> role -> number of processes) and ``devices`` (kind, and number of trainers by device name).

    device: value of cluster.device. machines: role and machine of each process. device_names: of each trainer.
    """
    hosts: dict[str, Counter[str]] = {}
    for role, machine in machines:
        hosts.setdefault(machine, Counter())[role] += 1
    return {
        "hosts": {machine: dict(roles) for machine, roles in hosts.items()},
        "devices": {"kind": device, "trainers": dict(Counter(device_names))},
    }


def changed_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a notice of what differs between the installation that wrote a checkpoint and this one; none if nothing does."""
    changes = [f"{name} {old} -> {new}" for name, old, new in differences(before, now)]
    if not changes:
        return []
    return [f"changed since the checkpoint was written, so numbers may be rounded differently: {', '.join(changes)}"]
