"""Fixtures shared by several test files."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A process started in the background by a script ignores Ctrl-C. Child processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's folder: data/*.parquet and a random tiny model/ with its tokenizer."""
    from megarl.commands.data.quickstart import prepare_quickstart

    out = tmp_path_factory.mktemp("quickstart")
    prepare_quickstart(out, seed=0)
    return out
