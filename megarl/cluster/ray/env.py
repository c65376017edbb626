"""Environment variables that Ray reads at import."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping

_AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def prepare(*, private: bool) -> None:
    """Set the variables; call this before ``import ray``. private: whether megarl starts a cluster on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without devices keep our variables
    # Without a connection, e.g. after Ctrl-C, a call of Ray fails. By default it would connect to any cluster of this machine.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # drop Ray's messages on dead actors: megarl reports them
    if private:
        # If ray is already imported, it has read these variables and would reject the cluster that it starts.
        if "ray" not in sys.modules:
            os.environ.update(authentication(os.environ))
        # Ray replaces 127.0.0.1 by the machine's outer address and listens on all interfaces, unless this variable
        # marks a system without clusters.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def authentication(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with a new token, so that only processes of this cluster can connect to it.

    By default Ray writes a token to the user's home; `ray start` then requires it, while
    ``ray.init(address=...)`` does not send it. Empty if the user has set RAY_AUTH_MODE, RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH.
    """
    if any(environ.get(name) for name in _AUTHENTICATION):
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def node_resource(rank: int) -> str:
    """Ray resource that identifies the node with this rank of launch/multinode.sh."""
    return f"megarl_node_{rank}"
