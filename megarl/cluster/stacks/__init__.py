"""Stacks of the run's processes: read from outside (`channel.py`), summarized (`report.py`), watched during calls (`stall.py`)."""
