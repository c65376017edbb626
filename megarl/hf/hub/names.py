"""Names of models and data sets on the hub. Pure, except that a folder of the same name comes first."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["model", "dataset"]
PREFIX = "hf://"
COMMIT = re.compile(r"[0-9a-f]{40}")

_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_MODEL = re.compile(rf"({_REPOSITORY})(?:@([\w./-]+))?")
_DATA = re.compile(rf"(?:datasets/)?({_REPOSITORY})(?:@((?:refs/(?:convert|pr)/)?[^/@]+))?/(.+)")

_FOLDERS = re.compile(
    "artifacts|cache|(?:checkpoint|ckpt|dataset|experiment|export|llm|log|model|output|result|run|save|weight)s?|data|exp|hf|home"
    "|local|mnt|out|pretrained(?:_models)?|saved|scratch|spaces|tmp|work|workspace",
    re.IGNORECASE,
)
"""Usual names of folders, which are read as paths even if they do not exist; the hub reserves several of them."""

_FILE = re.compile(r".*\.(?:jsonl?|ya?ml|safetensors|bin|pth?|ckpt|parquet|gguf|py|txt)", re.IGNORECASE)


class HubError(ValueError):
    """A name on the hub that cannot be used: the problem, and what to change.

    is_definite: the hub has no such repository or revision, or gives it only to other accounts; trying again does not help.
    """

    def __init__(self, problem: str, remedy: str, *, is_definite: bool = False):
        self.problem, self.remedy, self.is_definite = problem, remedy, is_definite
        super().__init__(f"{problem}: {remedy}")


@dataclass(frozen=True)
class HubName:
    """A model or a data set on the hub.

    `revision`: branch, tag or commit; None: the default branch. `path`: for a data set, `CONFIG/SPLIT`, `SPLIT` or a file in
    the repository; "" for a model.
    """

    repo: str
    revision: str | None = None
    path: str = ""

    @property
    def is_pinned(self) -> bool:
        """Return whether the revision is a commit."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repo}{revision}{f'/{self.path}' if self.path else ''}"


def model_name(text: str) -> HubName | None:
    """Return the hub name in the value of a setting such as `model.path`; None if it is the path of a folder.

    `hf://OWNER/NAME[@REVISION]` is always a hub name. `OWNER/NAME[@REVISION]` is one if neither it nor `OWNER` is a folder
    here, `OWNER` is not a usual name of folders (models, data, ...), and it does not end as a file does. Raises HubError for
    another text after `hf://`.
    """
    match = _MODEL.fullmatch(text.removeprefix(PREFIX))
    if text.startswith(PREFIX):
        if match is None:
            raise HubError(
                f"{text} does not name a model on the hub", "write hf://OWNER/NAME or hf://OWNER/NAME@REVISION"
            )
    elif match is None or not _is_free(text):
        return None
    return HubName(match[1], match[2])


def _is_free(text: str) -> bool:
    owner = text.split("/")[0]
    return (
        _FOLDERS.fullmatch(owner) is None
        and _FILE.fullmatch(text) is None
        and not os.path.exists(text)
        and not os.path.isdir(owner)
    )


def data_name(text: str) -> HubName | None:
    """Return the hub name in an item of `data.train_files`; None if it does not start with ``hf://``. Raises HubError."""
    if not text.startswith(PREFIX):
        return None
    match = _DATA.fullmatch(text.removeprefix(PREFIX))
    if match is None:
        example = "hf://openai/gsm8k/main/train, or hf://openai/gsm8k/main/train-00000-of-00001.parquet"
        raise HubError(
            f"{text} does not name rows on the hub",
            f"write hf://OWNER/NAME[@REVISION]/[CONFIG/]SPLIT or a file in place of the split, e.g. {example}",
        )
    return HubName(match[1], match[2], match[3])


def is_file(path: str) -> bool:
    """Return whether the `path` of a data set's name is a file, not a split."""
    return path.endswith((".parquet", ".jsonl"))
