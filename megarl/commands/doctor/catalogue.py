"""Every check of a machine, in the order in which they run: what says why others fail comes first."""

from __future__ import annotations

import importlib

from megarl.commands.doctor import devices, network, packages, system
from megarl.commands.doctor.check import Check
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS


def checks_of(kind: DeviceKind) -> tuple[Check, ...]:
    """Return the checks that concern one kind of device alone."""
    return importlib.import_module(kind.checks).CHECKS if kind.checks else ()


CHECKS: list[Check] = [
    devices.platform,
    devices.devices,
    packages.python,
    packages.packages,
    packages.pairs,
    *(one for kind in reversed(KINDS) for one in checks_of(kind)),
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

# Those that a recipe, and a cluster, add: made by recipe.py and nodes.py.
MORE = {
    "recipe: settings": "engines, their arguments, and functions of the recipe's own are known",
    "recipe: model": "config.json, weights, tokenizer and layout, as `train` checks them; of critic and teacher, too",
    "recipe: data": "every row is read and tokenised (and kept in the cache for the run)",
    "recipe: rewards": "scorers are prepared, the judge can be asked",
    "recipe: devices": "trainers, critic and engines placed on the devices that were found",
    "recipe: weights": "the route that weights will take to the engines with the vLLM installed here, and why",
    "recipe: environment": "variables that the recipe sets or needs, computed from model and layout, against the shell's",
    "recipe: run": "the run's directory is free, or `train.resume` says to go on",
    "node": "each node of the Ray cluster answers, with its clock and its versions those of the others",
}
