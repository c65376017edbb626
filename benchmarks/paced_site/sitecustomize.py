"""With this folder on PYTHONPATH, engines and trainers keep the pace of `benchmarks/pacing.py`.

Python imports this module at the start of every process.
"""

from benchmarks.pacing import install

install()
