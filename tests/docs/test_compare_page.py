"""docs/compare.md: the example gives the printed output, and the tables list existing options and fields."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from megarl import cli
from megarl.commands.compare.rules import LOSS, REWARD
from megarl.exit_status import guarded

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text()


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the example as written, from the root of the repository; the page prints the same figures."""
    match = re.search(r"```bash\n(python -m megarl compare tests/.*?)\n```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert match is not None
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    arguments = shlex.split(match[1])[3:]
    assert guarded(lambda: cli.app(args=arguments, standalone_mode=False), debug=False) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.strip() == match[2].strip()


def test_options_equal_those_of_the_command() -> None:
    command = typer.main.get_command(cli.app).commands["compare"]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    shown = set(re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE))
    assert shown == options - {"--debug"}


def test_rules_equal_those_of_the_code() -> None:
    for rule in (REWARD, LOSS):
        row = next(line for line in PAGE.splitlines() if f"`{rule.metrics[0]}`" in line and line.startswith("|"))
        assert row.endswith(f"| {rule.bound:.0%} |".replace("%", " %"))
        assert all(f"`{metric}`" in row for metric in rule.metrics)
