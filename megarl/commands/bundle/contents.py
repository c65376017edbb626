"""Layout of a bundle: a tar file without compression. Its first member describes it.

::

    bundle.json            `Description`
    recorded/              a run directory: tape/, recipe.resolved.yaml, metrics.jsonl, the checkpoint that the step starts from
    files/                 model/, data/0/train.parquet, ...: what the recipe names. Its paths are relative to the bundle
    files/functions/       files of scorers, tools, interactions and loops that the recipe names: Python, and YAML of verl
    modules/               Python modules that the recipe names, and the local modules that they import
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from megarl import __version__
from megarl.platform.installed import installed_versions

BUNDLE_FORMAT = 1
ENDING = ".tar"
DESCRIPTION = "bundle.json"
RECORDED, FILES, MODULES = "recorded", "files", "modules"
FUNCTIONS = "functions"  # below FILES


@dataclass(frozen=True)
class Description:
    """The step that a bundle repeats, and the run that it belongs to.

    run: name of the recorded run. after: the step after which its start began; 0 without a checkpoint. step: the last step to
    repeat. failure: the error of a run that failed in this step (`portable_error`); None if the step was finished. processes:
    trainers and engines of the run. libraries: their versions at the time of packing. left_out: things that a replay may
    need and the bundle does not contain. members, size: number and bytes of the other files; a file that was cut short has less.
    """

    run: str
    after: int
    step: int
    failure: str | None
    processes: str
    libraries: dict[str, str]
    left_out: list[str]
    members: int
    size: int
    format: int = BUNDLE_FORMAT

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @staticmethod
    def from_json(data: bytes) -> Description:
        """Raises ValueError for other contents or another format."""
        values: dict[str, Any] = json.loads(data)
        if not isinstance(values, dict) or "format" not in values:
            raise ValueError(f"its {DESCRIPTION} does not describe a bundle")
        if values["format"] != BUNDLE_FORMAT:
            raise ValueError(
                f"it has format {values['format']}, and this megarl reads format {BUNDLE_FORMAT}: replay it with the megarl "
                "that wrote it"
            )
        missing = sorted({field.name for field in fields(Description)} - values.keys())
        if missing:
            raise ValueError(f"its {DESCRIPTION} lacks {', '.join(missing)}")
        return Description(**{field.name: values[field.name] for field in fields(Description)})


def installed_libraries() -> dict[str, str]:
    """Return the versions of megarl, of Python and of the libraries that determine a run's numbers; absent ones are left out."""
    return {"megarl": __version__, **installed_versions()}


def portable_error(text: str, folder: str) -> str:
    """Return an error's text without its machine and process, and with `folder`, the run's directory, replaced by RUN, so that
    the errors of two runs can be compared."""
    return re.sub(r" on \S+ \(pid \d+\)", "", text.replace(folder, "RUN"))
