"""Write docs/numerics.md from real runs: ``python -m benchmarks.numerics [SECTION ...] [--quick]``

Each section of the page is between two marks, and one function in SECTIONS returns its Markdown. Sections that the command
does not name keep their text.
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

megarl's results compared with reference implementations. Each figure comes from a run of the command above it.
"""
SECTIONS: dict[str, Callable[[bool], str]] = {"parity": parity, "engine_gap": engine_gap, "invariance": invariance}


def write(page: Path, sections: dict[str, str]) -> None:
    """Replace the sections of `page` that `sections` has, by name."""
    text = page.read_text() if page.exists() else ""
    kept = dict(re.findall(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", text, re.DOTALL))
    parts = [
        f"<!-- begin {name} -->\n{body}<!-- end {name} -->\n"
        for name in SECTIONS
        if (body := sections.get(name, kept.get(name)))
    ]
    page.write_text("\n".join([HEAD, *parts]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/numerics.md, or some of its sections.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer cases: each kind once")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}; choose from {', '.join(SECTIONS)}")
    for name in arguments.sections or SECTIONS:
        write(PAGE, {name: SECTIONS[name](arguments.quick)})
        print(f"{name}: written to {PAGE}")


if __name__ == "__main__":
    main()
