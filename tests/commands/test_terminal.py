"""Commands on a terminal: examples that parse, and completion in a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from megarl.cli import app
from megarl.commands.examples import EXAMPLES

ROOT = Path(__file__).parent.parent.parent


def visible_commands() -> list[str]:
    """Names of the commands and groups that `--help` lists, and of the commands of each group: "data gsm8k"."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    visible = {name: command for name, command in commands.items() if not command.hidden}
    return [*visible, *(f"{name} {part}" for name, group in visible.items() for part in getattr(group, "commands", {}))]


def test_every_command_has_an_example() -> None:
    assert set(EXAMPLES) == set(visible_commands())


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_parse(line: str) -> None:
    program, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    assert program == "megarl"
    command.make_context(name, arguments)  # raises UsageError for unknown options and missing arguments
    for argument in arguments:
        if argument.startswith("recipes/"):
            assert (ROOT / argument).is_file()


def test_an_example_with_a_wrong_option_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_examples_parse("megarl report runs/first --htm")


@pytest.mark.parametrize("name", ["plan", "data", "data aime", "model check"])
def test_help_shows_them(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megarl", *name.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert all(line in done.stdout for line in ("Examples:", *EXAMPLES[name]))


@pytest.mark.skipif(shutil.which("bash") is None, reason="completion is tried in bash")
def test_completion_in_bash(tmp_path: Path) -> None:
    """The installed script completes commands and options; the user's shell sources it."""
    program = tmp_path / "bin" / "megarl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megarl "$@"\n')
    program.chmod(0o755)
    environ = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    install = ["bash", "-c", "megarl --install-completion; exit $?"]  # the shell is found among the parent processes
    installed = subprocess.run(install, env=environ, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    script = f"""
    source {tmp_path}/.bash_completions/megarl.sh
    complete -p megarl
    COMP_WORDS=(megarl repr) COMP_CWORD=1; _megarl_completion megarl; echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(megarl plan --ho) COMP_CWORD=2; _megarl_completion megarl; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["reproduce", "--host-memory"]
    assert "megarl.sh" in (tmp_path / ".bashrc").read_text()
