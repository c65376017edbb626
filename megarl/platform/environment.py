"""Whose settings a process's environment has: those of the person who started the command come first."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Before this process is made a trainer too, as rank 0 under torchrun is, whose settings are then in os.environ.
_STARTED_WITH = dict(os.environ)
# Two names of one setting, of which torch_npu 2.10 takes one alone.
_ALSO = {"PYTORCH_NPU_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}


def users_first(own: Mapping[str, str], users: Mapping[str, str] = _STARTED_WITH) -> dict[str, str]:
    """`own` settings, each as the user's environment has it where it does."""
    return {name: users.get(name, value) for name, value in own.items() if _ALSO.get(name) not in users}


def notices(role: str, own: Mapping[str, str], users: Mapping[str, str] = _STARTED_WITH) -> list[str]:
    """What is to be said of `own` settings of a role's processes that the user's environment has otherwise."""
    return [
        f"the environment has {theirs}={users[theirs]}, which stays; {role} would have {name}={value}"
        for name, value in own.items()
        for theirs in dict.fromkeys((name, _ALSO.get(name, name)))
        if theirs in users and users[theirs] != value
    ]
