"""MindSpeed in a process on the CPU, and the imports of its trainer processes; see `tests.support.forks`.

MEGARL_TEST_MINDSPEED names the unpacked checkout.
"""

from __future__ import annotations

import os

from tests.support import mindspeed_source
from tests.support.trainer_imports import import_trainer

mindspeed_source.make_importable(os.environ["MEGARL_TEST_MINDSPEED"])
devices = mindspeed_source.activate()
import_trainer()
