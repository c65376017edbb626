"""What Ray reads from the environment when it is imported."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping

_AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def prepare(*, private: bool) -> None:
    """Set it; to be called before ``import ray``. private: a cluster of our own on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without devices keep what we set
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # Ray's own news of dead actors: ours says it once
    if private:
        if "ray" not in sys.modules:  # imported, it has read this already, and would refuse the cluster it starts
            os.environ.update(authentication(os.environ))
        # Ray takes 127.0.0.1 for the machine's outer address, and listens on all of them, unless it
        # believes to be on a system without clusters.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def authentication(environ: Mapping[str, str]) -> dict[str, str]:
    """What lets only a new cluster's own processes talk to it: a token made for it.

    Left to itself, Ray writes a token to the user's home, and then `ray start` asks for it where
    ``ray.init(address=...)`` does not offer it. Empty where the user has chosen (RAY_AUTH_MODE, RAY_AUTH_TOKEN,
    RAY_AUTH_TOKEN_PATH).
    """
    if any(environ.get(name) for name in _AUTHENTICATION):
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
