"""Count the launch scripts in a checkout of verl or verl-recipe that become recipes, and list why others are refused.

    git clone https://github.com/verl-project/verl
    python -m benchmarks.verl_scripts verl

A launch script is a .sh file that names a training module (`python -m verl.trainer.main_ppo`, `recipe.prime.main_prime`, ...)
outside comments; scripts of evaluation and generation are not counted. Each script is converted as it stands, without
arguments. A recipe may leave paths and numbers of devices open (docs/from_verl.md); everything else of it has passed the checks
with which a recipe loads. Exit status 1 if a conversion crashes instead of refusing its script.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from megarl.commands.convert_verl.command import convert
from megarl.commands.convert_verl.shell.values import ScriptContext
from megarl.errors import InputError

_MODULE = re.compile(r"(?<![\w./-])(?:\w+[./])+(?!main_(?:eval|generation))(?:\w*main\w*|\w*sft_trainer\w*)\b(?!/)")
_SINGLE = re.compile(r"python3?\s+(?:-m\s+)?(main_\w+)")
_OPTION = re.compile(r"--accept ([\w.@*/-]+) to leave the option out")
_KEY = re.compile(r"key +([\w.]+)")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a script. cause: "" for a recipe; otherwise the options or the reason."""

    script: Path
    cause: str = ""
    crashed: bool = False


def is_launch_script(text: str) -> bool:
    """Return whether a script names a training module outside comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    code = "\n".join(lines)
    return bool(_MODULE.search(code) or _SINGLE.search(code))


def outcome_of(script: Path) -> Outcome:
    """Convert a script as it stands."""
    try:
        convert(script.read_text(errors="replace"), source=script.name, context=ScriptContext(str(script)))
    except InputError as error:
        return Outcome(script, cause_of(str(error)))
    except Exception:  # noqa: BLE001 - a crash is a result here
        return Outcome(script, traceback.format_exc(), crashed=True)
    return Outcome(script)


def cause_of(message: str) -> str:
    """Return what scripts with the same cause of a refusal share: the refused options, the recipe's key, or the first line
    without its line number."""
    if options := _OPTION.findall(message):
        return ", ".join(dict.fromkeys(options))
    if key := _KEY.search(message):
        return f"recipe: {key[1]}"
    return re.sub(r"^lines? [\d, ]+: ", "", message.splitlines()[0])[:120]


def report(folder: Path) -> tuple[str, bool]:
    """Return the count of a folder as text, and whether a conversion crashed."""
    scripts = [path for path in sorted(folder.rglob("*.sh")) if is_launch_script(path.read_text(errors="replace"))]
    outcomes = [outcome_of(script) for script in scripts]
    causes: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.cause:
            causes[outcome.cause].append(outcome)
    refused = sum(map(len, causes.values()))
    lines = [f"{folder}: {len(scripts) - refused} of {len(scripts)} launch scripts become recipes"]
    for cause, members in sorted(causes.items(), key=lambda item: -len(item[1])):
        kind = "CRASH " if members[0].crashed else ""
        lines.append(f"{len(members):4}  {kind}{cause}")
        lines += [f"        {member.script.relative_to(folder)}" for member in members]
    return "\n".join(lines), any(outcome.crashed for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="checkouts of verl or verl-recipe")
    crashed = False
    for folder in parser.parse_args().folders:
        text, crash = report(folder)
        print(text)
        crashed = crashed or crash
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
