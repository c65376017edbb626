"""What Ray reads from the environment when it is imported."""

from __future__ import annotations

import os


def prepare(*, private: bool) -> None:
    """Set it; to be called before ``import ray``. private: a cluster of our own on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without devices keep what we set
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # Ray's own news of dead actors: ours says it once
    if private:
        # Ray takes 127.0.0.1 for the machine's outer address, and listens on all of them, unless it
        # believes to be on a system without clusters.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
