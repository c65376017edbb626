"""All checks of a machine, in the order in which they run: a check that explains later failures comes first."""

from __future__ import annotations

import importlib

from megarl.commands.doctor import devices, network, packages, system
from megarl.commands.doctor.check import Check
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS


def checks_of(kind: DeviceKind) -> tuple[Check, ...]:
    """Return the checks that only this kind of device has."""
    return importlib.import_module(kind.checks).CHECKS if kind.checks else ()


CHECKS: list[Check] = [
    devices.platform,
    devices.devices,
    packages.python,
    packages.packages,
    packages.pairs,
    *(device_check for kind in reversed(KINDS) for device_check in checks_of(kind)),
    network.launch,
    network.ray_address,
    network.ports,
    network.interfaces,
    system.clocks,
    system.open_files,
    system.shared_memory,
    system.memory,
    system.run_directory,
    system.temporary_files,
    system.sandbox,
    system.hub,
    packages.imports,
]

# Checks that recipe.py and nodes.py add for a recipe or a cluster: name -> description.
RECIPE_AND_NODE_CHECKS = {
    "recipe: settings": "the engine, its arguments and the recipe's Python functions exist",
    "recipe: model": "config.json, weights, tokenizer and layout pass the checks of `train`, for critic and teacher too",
    "recipe: data": "every row can be read and tokenized (the result stays in the cache for the run)",
    "recipe: rewards": "the scorers can be prepared and the judge can be reached",
    "recipe: devices": "trainers, critic and engines fit on the visible devices",
    "recipe: weights": "the installed vLLM supports the recipe's weight sync; the finding names the route and the reason",
    "recipe: environment": "the shell has no other values of variables that the recipe sets or needs",
    "recipe: run": "the run directory is free, or `train.resume` allows the run in it to continue",
    "node": "each node of the Ray cluster answers; its clock and versions agree with the other nodes",
}
