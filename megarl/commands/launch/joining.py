"""Join the nodes of one run: free ports of the head, members' connections to it, and its connection to Ray."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from megarl.commands.launch.join_secret import JoinFile, secret_of_environment
from megarl.commands.launch.rendezvous import RendezvousClient
from megarl.commands.launch.topology import Topology


def taken_port(topology: Topology) -> int | None:
    """Return the first port of the head that another process listens to.

    Ray's head would end at once, and `ray.init` would wait for minutes for an answer of the other process.
    """
    for port in range(topology.port, topology.port + 3):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            return port
    return None


def join(topology: Topology, environ: dict[str, str], join_file: JoinFile) -> tuple[RendezvousClient, dict[str, str]]:
    """Connect to the head. Returns the connection and Ray's variables.

    Raises TimeoutError after MEGARL_JOIN_TIMEOUT, and ConnectionError if another program answers; both have the remedy. A file
    of an earlier run may be there until the head replaces it; then the head refuses its secret.
    """
    deadline, address = time.monotonic() + topology.join_timeout, (topology.master, topology.port + 1)
    secret, variables = secret_of_environment(environ), dict[str, str]()
    from_user, client = secret is not None, None
    while time.monotonic() < deadline:
        if not from_user:
            variables = join_file.read() or {}
            secret = variables.get("RAY_AUTH_TOKEN")
        if secret is not None:
            left = deadline - time.monotonic()
            try:
                client = RendezvousClient(*address, topology.node_rank, topology.nodes, left, secret)
            except TimeoutError as error:
                raise TimeoutError(f"{error}: is node rank 0 running, and MASTER_ADDR the same everywhere?") from error
            while not (client.ready or client.over or client.admitted):
                if time.monotonic() > deadline:
                    client.close()
                    silence = f"sends nothing, after {topology.join_timeout:g} s (MEGARL_JOIN_TIMEOUT)"
                    raise TimeoutError(_other_program(address, silence))
                time.sleep(0.05)
            if client.is_misled:
                raise ConnectionError(_other_program(address, "sends other messages than node rank 0 does"))
            if from_user or not client.has_wrong_secret:
                return client, variables
            client.close()
        time.sleep(0.2)
    problem = "is missing" if client is None else "is of another run"
    raise TimeoutError(
        f"{join_file.path} {problem}, after {topology.join_timeout:.0f} s (MEGARL_JOIN_TIMEOUT). Node rank 0 writes the secret of "
        "the run there: is it running, and does every node see this folder? Set MEGARL_JOIN_DIR to a folder that every node "
        "sees, or RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on every node."
    )


def _other_program(address: tuple[str, int], behaviour: str) -> str:
    return (
        f"the program at {address[0]}:{address[1]} {behaviour}. If it is not node rank 0's launcher, set MASTER_PORT to another "
        "port on every node."
    )


class RayConnection:
    """Connects to Ray's head in a thread: `ray.init` may wait for minutes, during which it handles no signal."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._result: Future[None] | None = None

    def poll(self) -> bool:
        """Return whether the connection exists. Waits for a fraction of a second; raises the error of `ray.init`."""
        if self._result is None:
            try:
                socket.create_connection((self._topology.master, self._topology.port), timeout=2).close()
            except OSError:  # it does not listen yet
                time.sleep(0.2)
                return False
            self._result = Future()
            threading.Thread(target=self._connect, args=(self._result,), daemon=True).start()
        try:
            self._result.result(0.2)
        except FutureTimeout:
            if self._result.done():
                raise
            return False
        except OSError:
            self._result = None
            return False
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # replaces Ray's native handler
        return True

    def _connect(self, result: Future[None]) -> None:
        import ray

        try:
            ray.init(address=self._topology.ray_address, logging_level="critical", log_to_driver=False)
            result.set_result(None)
        except BaseException as error:  # noqa: BLE001 -- `poll` raises it
            result.set_exception(error)
