"""The settings of one acceptance: from the command line, saved in its folder for stages and for `--resume`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.atomic_files import write_atomically
from megarl.errors import InputError
from megarl.platform.kinds import is_accelerator

FILE = "settings.json"


@dataclass(frozen=True)
class Settings:
    """Settings of an acceptance. `device` is a kind, never "auto"; `devices` is their number on this machine."""

    device: str
    devices: int
    nodes: int = 1
    minutes: float = 60.0
    stages: tuple[int, ...] = ()
    recipe: str = ""  # absolute path; "": none
    overrides: tuple[str, ...] = ()
    ray_address: str = ""

    @property
    def tiny(self) -> bool:
        """True if stages use the sizes for a CPU."""
        return not is_accelerator(self.device)


def write_settings(folder: Path, settings: Settings) -> None:
    write_atomically(folder / FILE, (json.dumps(asdict(settings), indent=1) + "\n").encode())


def read_settings(folder: Path) -> Settings:
    """Read the settings in `folder`. Raises InputError if it is not the folder of an acceptance."""
    try:
        entry = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return Settings(**{**entry, "stages": tuple(entry["stages"]), "overrides": tuple(entry["overrides"])})
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} is not the folder of an acceptance: it has no {FILE}. --resume takes the folder DIR of one."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / FILE} cannot be read: {error}. Start again without --resume.") from error


def parse_stages(text: str, available: tuple[int, ...]) -> tuple[int, ...]:
    """Parse stage numbers: `"1-3,5"` is (1, 2, 3, 5). Raises InputError for other numbers and text."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            numbers = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            numbers = range(0)
        if not numbers or not set(numbers) <= set(available):
            raise InputError(
                f"--stages is {text!r}, and {part.strip()!r} names no stages. Stages are {available[0]} to {available[-1]}: "
                "write for example 3, 1-4 or 0,2,5."
            )
        chosen |= set(numbers)
    return tuple(sorted(chosen))
