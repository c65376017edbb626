"""``python -m megarl engines RUN_DIRECTORY [list | N | +N | -N]``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.stacks.live_run import ask_live_run
from megarl.commands.live_controller import find_controller, unreachable
from megarl.errors import InputError, pluralize

_COLUMNS = ("engine", "state", "host", "devices", "version", "groups", "deaths")


def show_engines(directory: Path, request: str, *, as_json: bool) -> None:
    """Print the engines of the run in `directory`, after a change of their wanted number if `request` is one.

    Raises InputError if no run lives there, its controller does not answer, or the run refuses the change.
    """
    if request != "list" and re.fullmatch(r"[+-]?[0-9]{1,6}", request) is None:
        raise InputError(
            f"{request!r} is not a number of engines: write list, a number such as 4, or a change such as +2 or -1."
        )
    answer = ask(directory, ["engines", *([] if request == "list" else [request])])
    if "refused" in answer:
        raise InputError(f"the run in {directory} does not change its engines: {answer['refused']}.")
    print(json.dumps(answer, indent=1) if as_json else "\n".join(text_of(answer)), flush=True)


def ask(directory: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the answer of the run in `directory`. Raises InputError as `show_engines` does."""
    pid, user = find_controller(directory)
    try:
        return ask_live_run(pid, user, words)
    except TimeoutError as error:
        raise InputError(
            f"the controller of the run in {directory} (pid {pid}) has not answered in time. See what it does: megarl doctor {directory}"
        ) from error
    except OSError as error:
        raise unreachable(directory, pid, error) from error
    except ValueError as error:  # no JSON
        raise InputError(
            f"the answer of the run in {directory} (pid {pid}) was cut off ({error}): its controller ends. Try again if the run goes on."
        ) from error


def text_of(answer: Mapping[str, Any]) -> list[str]:
    """Format the answer of a run: a table of its engines, the number wanted, and what may change."""
    rows = [_COLUMNS, *(_row(engine) for engine in answer["engines"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if answer["fixed"] is not None:
        return [*lines, f"The number of engines is fixed: {answer['fixed']}."]
    target, before = answer["wanted"], answer.get("before")
    change = f"{before} -> " if before not in (None, target) else ""
    lines.append(
        f"{change}{pluralize(target, 'engine')} wanted; at least {answer['least']} (rollout.min_engines), {_free(answer['free'])}"
    )
    if change:
        lines.append(
            "Further engines load now, and sample from the next update of the weights on."
            if target > before
            else "Leaving engines get no further groups, and end when the others have their groups or they have finished them."
        )
    return lines


def _row(engine: Mapping[str, Any]) -> tuple[str, ...]:
    version = "-" if engine["version"] is None else str(engine["version"])
    place = engine["host"] or "-", engine["devices"] or "-"
    return engine["name"], engine["state"], *place, version, str(engine["groups"]), str(engine["deaths"])


def _free(free: int | None) -> str:
    if free is None:
        return "any number more, since they need no devices"
    return f"{free} more on free devices"
