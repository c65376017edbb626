"""The stand-in classes for Transformer Engine, and the imports of trainer processes over them; see `tests.support.forks`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins" / "nvidia"))

from megarl.platform.cpu import CPUPlatform
from tests.support.trainer_imports import import_trainer


class Devices(CPUPlatform):
    uses_native_layers = False  # type: ignore[assignment]


devices = Devices()
devices.prepare()
import_trainer()
