"""Environment variables of trainers and engines.

Precedence, highest first: the shell of the command, the recipe's `cluster.environment`, megarl's defaults. If a process
needs certain values of a variable (`Requirement`), another value in the recipe is an error, and another value in the shell
is overridden with a notice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from megarl.errors import RecipeError

# Copied at import: rank 0 under torchrun is a trainer too, which later adds its variables to os.environ.
_SHELL = dict(os.environ)
# Two names of one setting. torch_npu 2.10 rejects both together; torch ignores the device's name if the other is set.
_ALIASES = {"PYTORCH_NPU_ALLOC_CONF": "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}


@dataclass(frozen=True)
class Requirement:
    """Values of a variable that a process works with, and the reason."""

    why: str
    accepts: Callable[[str], bool]
    value: str = ""  # to set; empty only in NEEDED


def at_least(number: int, why: str) -> Requirement:
    """Require an integer of at least `number`."""
    return Requirement(why, lambda value: value.strip().isdecimal() and int(value) >= number, str(number))


def _needs(why: str, pattern: str) -> Requirement:
    """Require a full match of `pattern`, ignoring case."""
    return Requirement(why, lambda value: re.fullmatch(pattern, value, re.IGNORECASE) is not None)


_FIXED_ORDER = "train.deterministic needs sums in a fixed order"
# Requirements of the platforms, by (variable, default).
NEEDED = {
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False"): _needs(
        "engines that sleep cannot use expandable segments", r"(?!.*expandable_segments\s*:\s*true).*"
    ),
    ("TASK_QUEUE_ENABLE", "1"): _needs("graphs are not captured at 2", "[01]"),
    ("ASCEND_LAUNCH_BLOCKING", "0"): _needs(
        "graphs are not captured at 1; rollout.engine_args.enforce_eager=true (SGLang: disable_cuda_graph) runs without graphs",
        "0?",
    ),
    ("RANK_TABLE_FILE", ""): _needs(
        "a rank table describes one group of all devices, and trainers and engines form several groups", ""
    ),
    ("VLLM_ASCEND_ENABLE_NZ", "0"): _needs("weights in NZ format cannot be updated", "0"),
    ("VLLM_BATCH_INVARIANT", "1"): _needs("train.deterministic needs samples that do not depend on the batch", "1"),
    ("HCCL_DETERMINISTIC", "strict"): _needs(_FIXED_ORDER, "strict"),
    ("HCCL_DETERMINISTIC", "true"): _needs(_FIXED_ORDER, "true|strict"),
    ("LCCL_DETERMINISTIC", "1"): _needs(_FIXED_ORDER, "1"),
    ("CLOSE_MATMUL_K_SHIFT", "1"): _needs(_FIXED_ORDER, "1"),
    ("ATB_MATMUL_SHUFFLE_K_ENABLE", "0"): _needs(_FIXED_ORDER, "0"),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"): _needs(_FIXED_ORDER, ":4096:8|:16:8"),
    ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"): _needs(_FIXED_ORDER, "0"),
    ("NCCL_ALGO", "Ring"): _needs(_FIXED_ORDER, "ring"),
}


@dataclass(frozen=True)
class RoleSettings:
    """Environment variables of one role's processes, by source."""

    role: str  # "trainers" or "engines"
    defaults: Mapping[str, str]  # megarl's
    recipe: Mapping[str, str] = field(default_factory=dict)  # cluster.environment
    required: Mapping[str, Requirement] = field(default_factory=dict)  # computed from the recipe

    def check(self) -> None:
        """Raise RecipeError if a variable of the recipe does not meet its requirement."""
        for name, value in self.recipe.items():
            requirement = self._requirement(name)
            if requirement is not None and not requirement.accepts(value):
                defaults = self._before_shell(with_recipe=False)
                default = next(
                    f"{alias}={_shown(defaults[alias])}" for alias in self._aliases(name) if alias in defaults
                )
                remedy = f"leave it out: megarl sets {default}"
                raise RecipeError(f"cluster.environment.{self.role}.{name}", requirement.why, remedy, value=value)

    def environment(self, shell: Mapping[str, str] = _SHELL) -> dict[str, str]:
        """Return the variables of a process; `shell`: variables of the user's shell. Raises RecipeError like `check`."""
        self.check()
        shared = {  # under the shell's name of the setting: torch_npu rejects two names of it
            name: value if why else shell[name] for name, value, why in self._shared(shell)
        }
        settings = self._before_shell()
        return {name: value for name, value in settings.items() if not self._aliases(name) & shell.keys()} | shared

    def notices(self, shell: Mapping[str, str] = _SHELL) -> list[str]:
        """Notices about variables that have another value in the shell."""
        return [
            f"the environment has {name}={shell[name]}, which is overridden: {self.role} get {name}={_shown(value)}, since {why}"
            if why
            else f"the environment has {name}={shell[name]}, which is kept; otherwise {self.role} would get {name}={_shown(value)}"
            for name, value, why in self._shared(shell)
            if shell[name] != value
        ]

    def computed(self, shell: Mapping[str, str] = _SHELL) -> list[tuple[str, str, str]]:
        """(name, value, reason) of variables that have the value of the recipe or of a computed requirement."""
        environment, settings = self.environment(shell), self._before_shell()
        return [
            (name, settings[name], "cluster.environment" if name in self.recipe else self.required[name].why)
            for name in sorted({*self.recipe, *self.required} & settings.keys())
            if environment.get(name) == settings[name]  # otherwise the shell's value is kept
        ]

    def _before_shell(self, *, with_recipe: bool = True) -> dict[str, str]:
        """Defaults, computed requirements and the recipe's variables, without the shell's."""
        recipe = self.recipe if with_recipe else {}
        settings = dict(self.defaults) | {name: requirement.value for name, requirement in self.required.items()}
        kept = {name: value for name, value in settings.items() if not self._aliases(name) & recipe.keys()}
        return kept | dict(recipe)

    def _requirement(self, name: str) -> Requirement | None:
        if name in self.required:
            return self.required[name]
        defaults = (item for item in self.defaults.items() if name in self._aliases(item[0]))
        return next((NEEDED[item] for item in defaults if item in NEEDED), None)

    def _shared(self, shell: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        """Variables that the shell sets too: name, megarl's or the recipe's value, reason to reject the shell's or ""."""
        for name, value in self._before_shell().items():
            requirement = self._requirement(name)
            for alias in sorted(self._aliases(name) & shell.keys()):
                accepted = requirement is None or requirement.accepts(shell[alias])
                yield alias, value, "" if accepted or requirement is None else requirement.why

    def _aliases(self, name: str) -> set[str]:
        """Return `name` and the other names of the same setting on this device. Names of other devices have no effect."""
        aliases = {alias for pair in _ALIASES.items() for alias in pair if name in pair}
        return {name} | {alias for alias in aliases if alias not in _ALIASES or alias in self.defaults}


def users_first(defaults: Mapping[str, str], shell: Mapping[str, str] = _SHELL) -> dict[str, str]:
    """Return `defaults` with the shell's values where the shell has valid ones."""
    return RoleSettings("processes", defaults).environment(shell)


def _shown(value: str) -> str:
    return value or '""'
