"""Checks of a Markdown page: its links lead to files and headings that exist, and the settings that it names exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FREE_MAPPINGS = ("rollout.engine_args", "megatron.extra", "cluster.environment.engines")
"""Settings that are mappings with any keys."""


@cache
def setting_names() -> frozenset[str]:
    """Return the dotted keys in the tables of docs/recipes.md."""
    return frozenset(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "recipes.md").read_text(), re.M))


def broken_links(page: Path) -> list[str]:
    """Return the page's links to files or headings that do not exist. Links to web pages are not checked."""
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in _anchors(path.read_text())):
            broken.append(target)
    return broken


def unknown_settings(text: str) -> list[str]:
    """Return dotted names in backticks that begin with a section of the recipe, and are neither a setting, nor a section, nor a
    key of a free mapping."""
    names = setting_names()
    sections = {name.split(".")[0] for name in names if "." in name}
    unknown = []
    for code in re.findall(r"`([^`\n]+)`", text):
        key = re.split(r"[=: ]", code)[0]
        if key.split(".")[0] not in sections or not re.fullmatch(r"\w+(\.\w+)+", key) or key.endswith(".py"):
            continue
        is_section = any(name.startswith(f"{key}.") for name in names)
        if key not in names and not is_section and key.rsplit(".", 1)[0] not in FREE_MAPPINGS:
            unknown.append(key)
    return unknown


def _anchors(text: str) -> list[str]:
    outside_code = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)", outside_code, re.M)
    return [re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles]
