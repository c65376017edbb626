"""Imports of the trainer processes on the CPU; see `tests.support.forks`."""

from __future__ import annotations

from megarl.platform import select
from tests.support.trainer_imports import import_trainer

select("cpu").prepare()
import_trainer()
