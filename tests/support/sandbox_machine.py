"""Availability of the sandbox on this machine, for the tests that need it."""

from __future__ import annotations

import os

import pytest

from megarl.sandbox import detect

# For root, all requirements are known without a trial run. If only the trial run fails, the sandbox is broken, and skipped
# tests would hide it. Limits on other users' namespaces (AppArmor, a container's filter) appear only in a trial run.
LACKING = detect.lacking_parts() if os.geteuid() == 0 else detect.missing()
needs_sandbox = pytest.mark.skipif(bool(LACKING), reason=f"this machine has no sandbox: {LACKING}")
