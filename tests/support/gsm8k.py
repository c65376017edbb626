"""The GSM8K data set of tests that need the whole of it. tests/fixtures/gsm8k has a sample for the other tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GSM8K = Path(os.environ.get("MEGARL_GSM8K", Path(__file__).parents[3] / "shared" / "data" / "gsm8k"))

needs_gsm8k = pytest.mark.skipif(
    not all((GSM8K / name).is_file() for name in ("train.jsonl", "test.jsonl")),
    reason="GSM8K is not here: set MEGARL_GSM8K to its folder of .jsonl files",
)
