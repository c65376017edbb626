"""Stacks of the run's processes: read from outside (`channel.py`), summarized (`report.py`), watched during calls (`stall.py`).

`live_run.py` is the socket through which commands reach a run: `megarl doctor RUN_DIRECTORY` asks for stacks, `megarl engines`
for other numbers of engines.
"""
