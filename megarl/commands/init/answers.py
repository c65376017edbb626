"""The answers that determine a recipe, and their checks."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass, field
from pathlib import Path

from megarl.data.rows import column_names
from megarl.errors import pluralize
from megarl.hf import hub
from megarl.platform.device_table import (
    DEVICES_OF,
    PER_NODE_OF,
    Device,
    device_named,
    device_of_machine,
    devices,
    generation_hint,
)
from megarl.platform.kinds import KINDS, is_accelerator
from megarl.preflight.recipe.data import path_problem
from megarl.recipe.remote import SERVICES
from megarl.registry import did_you_mean
from megarl.rewards.base import SCORERS

TASKS = {
    "grpo": "reinforcement learning, GRPO",
    "dapo": "reinforcement learning, DAPO: for long answers",
    "sft": "supervised fine-tuning on demonstrations",
    "dpo": "preferences: pairs of a chosen and a rejected answer",
}
ROWS = "rows"
"""Reward: the `data_source` of each row selects the scorer."""
_NOT_OFFERED = (*SERVICES, "unscored")  # services need an address in the recipe; `unscored` gives every sample 0


@dataclass(frozen=True)
class Machines:
    """Machines of a run. kind: value of cluster.device. name: as a recipe's header names them; None: not in the table.
    notice: what was assumed about them, and how to write the alternative."""

    nodes: int
    per_node: int
    kind: str
    name: str | None = None
    notice: str | None = field(default=None, compare=False)

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @property
    def device(self) -> Device | None:
        """The device's entry in the table; None: its memory is unknown."""
        name = device_of_machine(self.name) if self.name is not None else None
        return device_named(name) if name is not None else None

    @property
    def accelerated(self) -> bool:
        return is_accelerator(self.kind)


@dataclass(frozen=True)
class Answers:
    """Checked answers. files: of the training rows. reward: None for tasks without one. columns: `data.columns` of the files."""

    task: str
    model: str
    files: tuple[str, ...]
    machines: Machines
    reward: str | None
    columns: dict[str, str]

    @property
    def samples(self) -> bool:
        """True if engines sample responses."""
        return samples(self.task)


def samples(task: str) -> bool:
    return task in ("grpo", "dapo")


def check_task(text: str) -> str:
    if text.lower() not in TASKS:
        raise ValueError(f"the task {text!r} is unknown: {', '.join(TASKS)}")
    return text.lower()


def check_model(text: str) -> str:
    """Return the model. Raises ValueError if it is neither a folder nor a name on the hub."""
    if Path(text).is_dir():
        if not (Path(text) / "config.json").is_file():
            raise ValueError(f"the folder {text} has no config.json, so it is not a Hugging Face model")
    elif hub.model_name(text) is None:
        raise ValueError(
            f"{text} is neither a folder here nor a name on the hub: owner/name, such as Qwen/Qwen3-8B. For weights that are downloaded "
            "later give that name, and write the folder into model.path afterwards"
        )
    return text


def check_files(text: str) -> tuple[str, ...]:
    """Return the files of the training rows. Files that do not exist yet are allowed, and others are read."""
    files = tuple(filter(None, (file.strip() for file in text.split(","))))
    if not files:
        raise ValueError("name at least one file or data set")
    for file in files:
        hub.data_name(file)  # refuses a name without a split
        if "://" in file and not file.startswith(hub.PREFIX):
            raise ValueError(
                f"{file} is neither a file on this machine nor a data set on the hub ({hub.PREFIX}...): copy it here"
            )
        if not file.startswith(hub.PREFIX) and (wrong := path_problem(file)) is not None:
            raise ValueError(f"{file}: {'; '.join(wrong)} (several files have commas between them)")
        if not file.startswith(hub.PREFIX) and not file.endswith((".parquet", ".jsonl")):
            raise ValueError(
                f"{file} ends neither in .parquet nor in .jsonl, and a data set on the hub begins with {hub.PREFIX}"
            )
        if not file.startswith(hub.PREFIX) and Path(file).exists():
            try:
                column_names(Path(file))
            except OSError as error:
                raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    return files


def check_reward(text: str) -> str:
    """Return the reward: `rows`, a scorer, or the user's function, which may not exist yet."""
    names = [ROWS, *(name for name in SCORERS.names() if name not in _NOT_OFFERED)]
    if text in names or re.fullmatch(r"(?:[\w.]+|.+\.py):\w+", text):
        return text
    raise ValueError(
        f"the scorer {text!r} is unknown{did_you_mean(text, names)} Known: {', '.join(names)}; or your module:function or file.py:function"
    )


def read_machines(text: str) -> Machines:
    """Parse ``8 H100``, ``2 x 8 910B``, ``16 Atlas 800T A3``, ``8 cuda`` or ``2 cpu``. Raises ValueError."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?(\d+)\s+(\S.*?)\s*", text)
    kinds = [kind.name for kind in KINDS]
    by_lower = {machine.lower(): machine for machine in known_machines()}
    times = re.fullmatch(r"\s*([1-9]\d*)\s*[x*]\s*(\S.*?)\s*", text)
    if times is not None and times[2].lower() in (*by_lower, *kinds):
        count, name = int(times[1]), times[2]
        most = _per_machine(by_lower[name.lower()]) if name.lower() in by_lower else 8
        raise ValueError(
            f"{text!r}: write '{count} {name}' for {pluralize(count, 'device')}, or '{count} x {most} {name}' for "
            f"{pluralize(count, 'machine')} of {most}"
        )
    if match is None:
        raise ValueError(f"{text!r} is not a number and kind of devices: write e.g. '8 H100', '2 x 8 H100' or '2 cpu'")
    nodes, count, name = int(match[1] or 1), int(match[2]), match[3]
    if nodes < 1 or count < 1:
        raise ValueError(f"{text!r}: a run needs at least one device")
    if name.lower() in kinds:
        return Machines(nodes, count, name.lower())
    if name.lower() not in by_lower:
        raise ValueError(
            f"the device {name!r} is unknown{did_you_mean(name, [*by_lower.values(), *kinds])} Known: {', '.join([*by_lower.values(), *kinds])}.{generation_hint(name)}"
        )
    machine = by_lower[name.lower()]
    device = device_named(str(device_of_machine(machine)))
    most, notice = _per_machine(machine), None
    if match[1] is None and count > most:  # several machines
        if count % most:
            raise ValueError(
                f"{text!r}: a machine has {pluralize(most, 'device')} of this kind; write e.g. '2 x {most} {machine}'"
            )
        nodes, count = count // most, most
        notice = f"--devices {text.strip()!r} is taken as {pluralize(nodes, 'machine')} of {most}: {_larger(nodes * most, device, machine)}"
    return Machines(nodes, count, device.kind, machine, notice)


def _per_machine(machine: str) -> int:
    """Return the number of devices of one machine of this name."""
    return PER_NODE_OF.get(machine, device_named(str(device_of_machine(machine))).per_node)


def _larger(count: int, device: Device, machine: str) -> str:
    """Return how to write `count` devices of one machine: by the name of a machine that has as many, else by numbers."""
    for name, size in PER_NODE_OF.items():
        if DEVICES_OF[name] == device.name and count % size == 0 and name != machine:
            return f"write '{count // size} x {size} {name}' for machines of {size}"
    return f"write '1 x {count} {machine}' for one machine"


def known_machines() -> list[str]:
    """Return the names of accelerators and their machines that the table has."""
    kinds = {kind.name for kind in KINDS}  # the table's CPU is a kind, too
    return [name for name in dict.fromkeys([*DEVICES_OF, *devices()]) if name.lower() not in kinds]


def devices_here() -> str:
    """Return this machine's devices as an answer: ``8 cuda``, or ``2 cpu`` without an accelerator."""
    for kind in KINDS:
        count = len(glob.glob(kind.files)) if kind.files else 0
        if count:
            return f"{count} {kind.name}"
    return "2 cpu"
