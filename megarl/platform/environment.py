"""Whose settings a process's environment has: those of the person who started the command come first, but where megarl's
would then not be right."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Before this process is made a trainer too, as rank 0 under torchrun is, whose settings are then in os.environ.
_STARTED_WITH = dict(os.environ)
# Two names of one setting, of which torch_npu 2.10 takes one alone.
_ALSO = {"PYTORCH_NPU_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}


@dataclass(frozen=True)
class _Need:
    """Why a process needs a setting, and which of the user's values also do (a pattern of the whole, case aside)."""

    why: str
    goes: str


_FIXED_ORDER = "train.deterministic needs sums in a fixed order"
# Settings that are no mere wish, as the platforms have them.
NEEDED = {
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False"): _Need(
        "engines that sleep cannot have expandable segments", r"(?!.*expandable_segments:\s*true).*"
    ),
    ("TASK_QUEUE_ENABLE", "1"): _Need("graphs are not captured at 2", "[01]"),
    ("VLLM_ASCEND_ENABLE_NZ", "0"): _Need("weights in NZ format cannot be updated", "0"),
    ("VLLM_BATCH_INVARIANT", "1"): _Need("train.deterministic needs samples that do not depend on the batch", "1"),
    ("HCCL_DETERMINISTIC", "strict"): _Need(_FIXED_ORDER, "strict"),
    ("HCCL_DETERMINISTIC", "true"): _Need(_FIXED_ORDER, "true|strict"),
    ("LCCL_DETERMINISTIC", "1"): _Need(_FIXED_ORDER, "1"),
    ("CLOSE_MATMUL_K_SHIFT", "1"): _Need(_FIXED_ORDER, "1"),
    ("ATB_MATMUL_SHUFFLE_K_ENABLE", "0"): _Need(_FIXED_ORDER, "0"),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"): _Need(_FIXED_ORDER, ":4096:8|:16:8"),
    ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"): _Need(_FIXED_ORDER, "0"),
    ("NCCL_ALGO", "Ring"): _Need(_FIXED_ORDER, "ring"),
}


def users_first(own: Mapping[str, str], users: Mapping[str, str] = _STARTED_WITH) -> dict[str, str]:
    """`own` settings, each as the user's environment has it where it does and that goes."""
    theirs = {
        name: value if why else users[name] for name, value, why in _theirs(own, users)
    }  # under the user's name of it: torch_npu refuses both
    return {name: value for name, value in own.items() if not _names(name) & users.keys()} | theirs


def notices(role: str, own: Mapping[str, str], users: Mapping[str, str] = _STARTED_WITH) -> list[str]:
    """What is to be said of `own` settings of a role's processes that the user's environment has otherwise."""
    return [
        f"the environment has {name}={users[name]}, which is overruled: {role} have {name}={value}, since {why}"
        if why
        else f"the environment has {name}={users[name]}, which stays; {role} would have {name}={value}"
        for name, value, why in _theirs(own, users)
        if users[name] != value
    ]


def _names(name: str) -> set[str]:
    return {name, _ALSO.get(name, name)}


def _theirs(own: Mapping[str, str], users: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Of what the user has set: the variable, the value that is our own, and why the user's does not go ("": it does)."""
    for name, value in own.items():
        need = NEEDED.get((name, value))
        for theirs in sorted(_names(name) & users.keys()):
            goes = need is None or re.fullmatch(need.goes, users[theirs], re.IGNORECASE)
            yield theirs, value, "" if goes or need is None else need.why
