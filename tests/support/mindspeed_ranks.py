"""One trainer process of tests/platform/test_mindspeed_layers.py: the cases of `megatron_worker`, through MindSpeed's modules.

Usage, with the environment of torchrun: python -m tests.support.mindspeed_ranks CASES.json OUTPUT_DIRECTORY
MEGARL_TEST_MINDSPEED names the unpacked checkout.
"""

from __future__ import annotations

import os

from tests.support import mindspeed_source

mindspeed_source.make_importable(os.environ["MEGARL_TEST_MINDSPEED"])
devices = mindspeed_source.activate()

from tests.support import megatron_training, megatron_worker  # noqa: E402

megatron_training.platform = devices

if __name__ == "__main__":
    megatron_worker.main()
