"""One trainer process of tests/platform/test_mindspeed_layers.py: the cases of `megatron_worker`, through MindSpeed's modules.

Usage, with the environment of torchrun: python -m tests.support.mindspeed_ranks CASES.json OUTPUT_DIRECTORY
MEGARL_TEST_MINDSPEED names the unpacked checkout.
"""

from __future__ import annotations

from tests.support.preload_mindspeed import devices

from tests.support import megatron_training, megatron_worker  # isort: skip -- after MindSpeed has patched Megatron

megatron_training.platform = devices

if __name__ == "__main__":
    megatron_worker.main()
