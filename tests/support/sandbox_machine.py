"""Whether this machine has what the sandbox is made of, for the tests that need it."""

from __future__ import annotations

import os

import pytest

from megarl.sandbox import detect

# As root all that it takes is known without a trial run: where that alone fails, the sandbox is broken, and tests that were
# skipped would hide it. What keeps other users from namespaces (AppArmor, a container's filter) only a trial run shows.
LACKING = detect.lacking_parts() if os.geteuid() == 0 else detect.missing()
needs_sandbox = pytest.mark.skipif(bool(LACKING), reason=f"this machine has no sandbox: {LACKING}")
