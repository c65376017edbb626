"""The environment of a role's processes: megarl's defaults, then the recipe's `cluster.environment`, then the shell of the
command, which comes first. A required setting is neither: the recipe's other value is refused, the shell's overruled with a
notice."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from megarl.errors import RecipeError

# Before this process is made a trainer too, as rank 0 under torchrun is, whose settings are then in os.environ.
_STARTED_WITH = dict(os.environ)
# Two names of one setting. torch_npu 2.10 refuses both together; torch ignores the device's name where the other is set.
_ALSO = {"PYTORCH_NPU_ALLOC_CONF": "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}


@dataclass(frozen=True)
class Requirement:
    """Why a process needs a setting, and which other values also do."""

    why: str
    goes: Callable[[str], bool]
    value: str = ""  # computed from a recipe; "": the platform's own


def at_least(number: int, why: str) -> Requirement:
    """A setting that must be `number` or more."""
    return Requirement(why, lambda given: given.strip().isdecimal() and int(given) >= number, str(number))


def _needs(why: str, pattern: str) -> Requirement:
    """A setting that must match `pattern` as a whole, case aside."""
    return Requirement(why, lambda given: re.fullmatch(pattern, given, re.IGNORECASE) is not None)


_FIXED_ORDER = "train.deterministic needs sums in a fixed order"
# Required settings of the platforms.
NEEDED = {
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False"): _needs(
        "engines that sleep cannot have expandable segments", r"(?!.*expandable_segments:\s*true).*"
    ),
    ("TASK_QUEUE_ENABLE", "1"): _needs("graphs are not captured at 2", "[01]"),
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
    """Settings of one role's processes by who decides them."""

    role: str  # "trainers" or "engines"
    own: Mapping[str, str]  # megarl's defaults
    recipe: Mapping[str, str] = field(default_factory=dict)  # cluster.environment
    required: Mapping[str, Requirement] = field(default_factory=dict)  # computed from the recipe

    def check(self) -> None:
        """Raise RecipeError for a variable of the recipe with which the processes would be wrong."""
        for name, value in self.recipe.items():
            need = self._need(name)
            if need is not None and not need.goes(value):
                remedy = f"leave it out: megarl sets {self._settled(with_recipe=False).get(name) or 'what is needed'}"
                raise RecipeError(f"cluster.environment.{self.role}.{name}", need.why, remedy, value=value)

    def environment(self, users: Mapping[str, str] = _STARTED_WITH) -> dict[str, str]:
        """Variables for a process; `users`: the shell's. Raises RecipeError as `check` does."""
        self.check()
        theirs = {  # under the user's name of it: torch_npu refuses both
            name: value if why else users[name] for name, value, why in self._theirs(users)
        }
        settled = self._settled()
        return {name: value for name, value in settled.items() if not _names(name) & users.keys()} | theirs

    def notices(self, users: Mapping[str, str] = _STARTED_WITH) -> list[str]:
        """A sentence for each setting that the shell has otherwise."""
        return [
            f"the environment has {name}={users[name]}, which is overruled: {self.role} have {name}={value}, since {why}"
            if why
            else f"the environment has {name}={users[name]}, which stays; {self.role} would have {name}={value}"
            for name, value, why in self._theirs(users)
            if users[name] != value
        ]

    def computed(self, users: Mapping[str, str] = _STARTED_WITH) -> list[tuple[str, str, str]]:
        """(name, value, reason) of variables that the recipe sets or needs, as processes will have them."""
        environment = self.environment(users)
        return [
            (name, environment[name], need.why if name not in self.recipe and need else "cluster.environment")
            for name in sorted({*self.recipe, *self.required})
            if name in environment
            for need in [self.required.get(name)]
        ]

    def _settled(self, *, with_recipe: bool = True) -> dict[str, str]:
        """Settings before the shell's."""
        recipe = self.recipe if with_recipe else {}
        settled = dict(self.own) | {name: need.value for name, need in self.required.items()}
        return {name: value for name, value in settled.items() if not _names(name) & recipe.keys()} | dict(recipe)

    def _need(self, name: str) -> Requirement | None:
        if name in self.required:
            return self.required[name]
        return next(
            (NEEDED[one, value] for one, value in self.own.items() if name in _names(one) and (one, value) in NEEDED),
            None,
        )

    def _theirs(self, users: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        """Variables of the shell: name, the value that megarl or the recipe would set, and why the shell's does not go
        ("": it does)."""
        for name, value in self._settled().items():
            need = self._need(name)
            for theirs in sorted(_names(name) & users.keys()):
                yield theirs, value, "" if need is None or need.goes(users[theirs]) else need.why


def users_first(own: Mapping[str, str], users: Mapping[str, str] = _STARTED_WITH) -> dict[str, str]:
    """`own` settings, each as the shell has it where it does and that goes."""
    return RoleSettings("processes", own).environment(users)


def notices(role: str, own: Mapping[str, str], users: Mapping[str, str] = _STARTED_WITH) -> list[str]:
    """A sentence for each of `own` settings of a role's processes that the shell has otherwise."""
    return RoleSettings(role, own).notices(users)


def _names(name: str) -> set[str]:
    """The variable, and another name of the same setting."""
    return {name} | {other for pair in _ALSO.items() for other in pair if name in pair}
