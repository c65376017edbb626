"""Writes the tables of docs/algorithms.md from the registries: ``python -m megarl.algorithms.document``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl.algorithms.catalogue import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from megarl.algorithms.returns import gae

PAGE = Path(__file__).parent.parent.parent / "docs" / "algorithms.md"


def tables() -> dict[str, str]:
    """Each table of the page, by the word its markers hold."""
    return {
        "advantages": _table(
            (name, ADVANTAGES[name].function or ADVANTAGES[name].of_tokens or gae, ADVANTAGES[name].settings)
            for name in ADVANTAGES.names()
        ),
        "losses": _table((name, LOSSES[name].function, LOSSES[name].settings) for name in LOSSES.names()),
        "aggregations": _table((name, AGGREGATIONS[name], ()) for name in AGGREGATIONS.names()),
        "kl": _table((name, KL_ESTIMATORS[name], ()) for name in KL_ESTIMATORS.names()),
    }


def document(page: str) -> str:
    """`page` with its tables made anew: what stands between ``<!-- NAME -->`` and ``<!-- end -->``."""
    for name, table in tables().items():
        before, found, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert found and end, f"{PAGE} has no place for the table '{name}'"
        page = f"{before}{found}{table}\n{end}{after}"
    return page


def _table(rows: Iterable[tuple[str, Callable[..., Any], tuple[str, ...]]]) -> str:
    lines = ["| name | what it is | settings | where |", "|---|---|---|---|"]
    for name, function, settings in rows:
        text = " ".join((function.__doc__ or "").split()).replace("|", "\\|").replace("``", "`")
        where = f"{function.__module__.rpartition('.')[2]}.py"
        lines.append(f"| `{name}` | {text} | {', '.join(f'`{one}`' for one in settings)} | `{where}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text()))
    print(f"wrote {PAGE}")
