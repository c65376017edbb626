"""`needs_sandbox`: skip a test if the machine cannot run the sandbox."""

from __future__ import annotations

import os

import pytest

from megarl.sandbox import detect

# As root, the parts can be checked without a trial run: if only the trial run fails, the sandbox is broken, and skipped
# tests would hide it. For other users, only a trial run detects blocked namespaces (AppArmor, a container's filter).
LACKING = detect.lacking_parts() if os.geteuid() == 0 else detect.missing()
needs_sandbox = pytest.mark.skipif(bool(LACKING), reason=f"this machine has no sandbox: {LACKING}")
