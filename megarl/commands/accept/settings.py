"""The settings of one acceptance: given on the command line, kept in its folder for stages and for `--resume`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.atomic_files import write_atomically
from megarl.errors import InputError

FILE = "settings.json"


@dataclass(frozen=True)
class Settings:
    """`device`: a kind of device, never "auto". `devices`: of this kind on this machine that stages may use."""

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
        """Whether stages have the sizes of a CPU."""
        return self.device == "cpu"


def write_settings(folder: Path, settings: Settings) -> None:
    write_atomically(folder / FILE, (json.dumps(asdict(settings), indent=1) + "\n").encode())


def read_settings(folder: Path) -> Settings:
    """Raises InputError where `folder` holds no acceptance."""
    try:
        entry = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return Settings(**{**entry, "stages": tuple(entry["stages"]), "overrides": tuple(entry["overrides"])})
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} holds no acceptance: it has no {FILE}. --resume takes the folder DIR of one."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / FILE} cannot be read: {error}. Start again without --resume.") from error


def parse_stages(text: str, known: tuple[int, ...]) -> tuple[int, ...]:
    """`"1-3,5"` -> (1, 2, 3, 5), in order. Raises InputError for a number that is no stage."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            numbers = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            numbers = range(0)
        if not numbers or not set(numbers) <= set(known):
            raise InputError(
                f"--stages is {text!r}, and {part.strip()!r} names no stages. Stages are {known[0]} to {known[-1]}: "
                "write 3, 1-4 or 0,2,5."
            )
        chosen |= set(numbers)
    return tuple(sorted(chosen))
