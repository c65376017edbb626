"""With this folder on PYTHONPATH, vLLM's workers get the fixes of `tests/support/older_vllm.py`.

Python imports this module at the start of every process.
"""

from tests.support.worker_hook import install_in_workers

install_in_workers("tests.support.older_vllm")
