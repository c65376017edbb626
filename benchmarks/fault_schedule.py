"""The faults that `benchmarks.deaths` injects, drawn in turns: kinds, moments and victims; and their summary."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

KINDS = {"kill": 3, "close": 2, "stop": 1, "hang": 1, "disk": 1, "shm": 1}  # with their shares
MOMENTS = ("prefill", "decode", "scoring", "training", "update", "save", "start")


@dataclass(frozen=True)
class Fault:
    """`victims`: of a fault of processes. `seconds`: that a file system is full; until a process that starts is hit."""

    kind: str
    moment: str
    victims: tuple[str, ...]
    seconds: float


def in_turns(order: random.Random, values: Sequence[T]) -> Iterator[T]:
    while True:
        yield from order.sample(values, len(values))


def schedule(
    order: random.Random, kinds: Sequence[str], moments: Sequence[str], names: Sequence[str]
) -> Iterator[Fault]:
    """Draw faults without end."""
    shares = [kind for kind in kinds for _ in range(KINDS[kind])]
    for kind, moment in zip(in_turns(order, shares), in_turns(order, moments), strict=False):
        victims = order.sample(names, min(len(names), 2 if order.random() < 0.2 else 1))
        if "controller" in victims or (
            kind == "hang" and moment == "start"
        ):  # only rollout.start_timeout ends such a start
            kind = "kill" if kind not in ("disk", "shm") else kind
        if "controller" in victims and moment == "start":
            moment = "training"
        of_files = kind in ("disk", "shm")
        yield Fault(
            kind,
            "save" if kind == "disk" and moment == "start" else moment,
            () if of_files else tuple(victims),
            order.uniform(0.5, 5),
        )


def summary(faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the faults, and the seconds until the output named them and until the run was whole again."""
    seconds: dict[str, dict[str, list[float]]] = {"named_after": {}, "whole_after": {}}
    for fault in faults:
        hit = ", ".join(sorted({re.sub(r"\W*\d+$", "", name) for name in fault["hit"]}))
        for key, of_kinds in seconds.items():
            if fault[key] is not None:
                of_kinds.setdefault(f"{fault['kind']} {hit}".strip(), []).append(fault[key])
    counts = {key: dict(Counter(fault[key] for fault in faults)) for key in ("kind", "moment", "outcome")}
    victims = Counter(re.sub(r"\W*\d+$", "", name) for fault in faults for name in fault["hit"])
    return {
        **counts,
        "victims": dict(victims),
        "never_named": dict(Counter(fault["kind"] for fault in faults if fault["named_after"] is None)),
        **{
            key: {
                kind: {"faults": len(s), "mean": round(sum(s) / len(s), 1), "most": max(s)}
                for kind, s in sorted(of.items())
            }
            for key, of in seconds.items()
        },
    }
