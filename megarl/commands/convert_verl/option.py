"""An option of verl in the table of options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option of verl.

    to: the recipe's key, or several keys separated by ", "; None: no counterpart, and `remark` has the reason.
    names: verl's value -> megarl's value. If it is not empty, other values have no counterpart.
    derived: a translate_* function computes the value from several options, as `remark` describes.
    same: values of an option without counterpart that match what megarl always does.
    changes: a recipe without the option, or with another value than `names` has, computes something else.
    differs: the result without the option is not exactly verl's; its note comes before the ones of options without effect.
    """

    verl: str
    to: str | None = None
    remark: str = ""
    names: dict[Any, Any] = field(default_factory=dict)
    derived: bool = False
    same: tuple[Any, ...] = ()
    changes: bool = False
    differs: bool = False


def no_counterpart(
    remark: str, *options: str, same: tuple[Any, ...] = (), changes: bool = False, differs: bool = False
) -> list[Option]:
    """Return options without counterpart that share a remark; see `Option`."""
    return [Option(option, None, remark, same=same, changes=changes, differs=differs) for option in options]
