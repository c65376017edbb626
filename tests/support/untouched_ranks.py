"""One process of `megatron_worker`, in which nothing has been imported or mended before.

Usage, with the environment of torchrun: python -m tests.support.untouched_ranks CASES.json OUTPUT_DIRECTORY
"""

from __future__ import annotations

from tests.support import megatron_worker

if __name__ == "__main__":
    megatron_worker.main()
