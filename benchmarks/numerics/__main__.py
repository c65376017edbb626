"""Makes docs/numerics.md from real runs: ``python -m benchmarks.numerics [SECTION ...] [--quick]``

Each section of the page stands between two marks and is made by one function; sections that are not named keep their
text. Adding one: a function in SECTIONS that returns Markdown.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.numerics.engine_gap import engine_gap
from benchmarks.numerics.invariance import invariance
from benchmarks.numerics.parity import parity

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"
HEAD = """# Numbers

What megarl computes is held to references. Each figure is from a run of the command that stands above it.
"""
SECTIONS: dict[str, Callable[[bool], str]] = {"parity": parity, "engine_gap": engine_gap, "invariance": invariance}


def write(page: Path, made: dict[str, str]) -> None:
    """Put the sections `made` into `page`, in place of those of their name."""
    text = page.read_text() if page.exists() else ""
    kept = dict(re.findall(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", text, re.DOTALL))
    parts = [
        f"<!-- begin {name} -->\n{body}<!-- end {name} -->\n"
        for name in SECTIONS
        if (body := made.get(name, kept.get(name)))
    ]
    page.write_text("\n".join([HEAD, *parts]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make docs/numerics.md, or some of its sections.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--quick", action="store_true", help="fewer cases, each kind once")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"there is no section {sorted(unknown)}; choose from {', '.join(SECTIONS)}")
    for name in arguments.sections or SECTIONS:
        write(PAGE, {name: SECTIONS[name](arguments.quick)})
        print(f"{name}: written to {PAGE}")


if __name__ == "__main__":
    main()
