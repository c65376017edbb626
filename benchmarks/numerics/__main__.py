"""Write docs/numerics.md from real runs: ``python -m benchmarks.numerics [SECTION ...] [--quick]``

Each section is between two marks, and one function in SECTIONS returns its Markdown. All other text of the page is kept.
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
    """Replace the sections of `page` that `sections` has, by name. Text outside them stays; a new section goes to the end."""
    text = page.read_text() if page.exists() else HEAD
    for name, body in sections.items():
        section = f"<!-- begin {name} -->\n{body}<!-- end {name} -->\n"
        pattern = rf"<!-- begin {name} -->\n.*?<!-- end {name} -->\n"
        text, replaced = re.subn(pattern, section.replace("\\", r"\\"), text, flags=re.DOTALL)
        if not replaced:
            text += f"\n{section}"
    page.write_text(text)


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
