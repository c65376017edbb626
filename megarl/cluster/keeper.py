"""Keeper: a process that owns the workers of a run, so that they outlive a controller that dies (`train.keep_workers`).

`megarl train` starts it (`KeeperProcess`), next to the controller, which it starts again after a death (`train.restarts`). The keeper
runs `megarl.cluster.ray.keeper_main`: it starts or joins Ray, and writes its `KeeperAddress` into a file. The controller finds the file
by the variable `VARIABLE`, and starts its processes through the keeper.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import megarl
from megarl.atomic_files import write_atomically
from megarl.cluster.keeper_folder import KeeperFolder, remove_stale_folders, stale_text
from megarl.cluster.ray.env import authentication
from megarl.cluster.sigstop_watch import process_fields
from megarl.errors import ProcessFailure
from megarl.recipe.schema import Recipe

VARIABLE = "MEGARL_KEEPER"  # the keeper's process id, a colon, and the path of the file with its address
MODULE = "megarl.cluster.ray.keeper_main"
START_SECONDS = 180.0  # time for the keeper to start Ray
END_SECONDS = 30.0  # time for the keeper to end
_POLL = 0.05  # seconds between looks at the file


@dataclass(frozen=True)
class KeeperAddress:
    """Address of a keeper.

    address: of Ray. namespace: Ray's, of the keeper's actor. mark: value of the orphan reaper's variable in the processes that end
    with the keeper. private: the keeper has started Ray, and `processes` are (name, pid, log) of the processes of Ray that must live.
    seconds: `train.keep_workers`. pid: of the keeper. problem: why the keeper could not start; "" if it runs.
    """

    address: str = ""
    namespace: str = ""
    mark: str = ""
    private: bool = False
    processes: tuple[tuple[str, int, str], ...] = ()
    seconds: float = 0.0
    pid: int = 0
    problem: str = ""

    def write(self, file: Path) -> None:
        write_atomically(file, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, file: Path) -> KeeperAddress | None:
        """Return the address in `file`; None if the keeper has not written it yet."""
        if not file.exists():
            return None
        values = json.loads(file.read_text())
        return cls(**{**values, "processes": tuple((name, pid, log) for name, pid, log in values["processes"])})

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> KeeperAddress | None:
        """Return the address of this controller's keeper; None if the controller owns its processes.

        Waits until the keeper has started. Raises ProcessFailure if it cannot start.
        """
        if not environ.get(VARIABLE):
            return None
        pid, _, path = environ[VARIABLE].partition(":")
        deadline = time.monotonic() + START_SECONDS
        while (keeper := cls.read(Path(path))) is None:
            if time.monotonic() > deadline:
                raise ProcessFailure(
                    f"the process that keeps the workers (train.keep_workers) has not started Ray within {START_SECONDS:.0f} s. Try again "
                    "when the machine's load is lower; Ray's logs are in /tmp/ray/session_latest/logs."
                )
            if process_fields(int(pid))[:1] in ([], ["Z"]) and not Path(path).exists():
                raise ProcessFailure("the process that keeps the workers (train.keep_workers) has ended, or was killed")
            time.sleep(_POLL)
        if keeper.problem:
            raise ProcessFailure(
                f"the process that keeps the workers (train.keep_workers) has failed: {keeper.problem}"
            )
        return keeper


class KeeperProcess:
    """The keeper of one run, for the command that starts the run again. address: of a Ray cluster to join; "" starts a private one.
    seconds: `train.keep_workers`. environ: of the keeper and its processes."""

    def __init__(self, address: str, seconds: float, environ: Mapping[str, str]) -> None:
        self._folder = KeeperFolder()
        self._file = self._folder.path / "keeper.json"
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(self._file), address, repr(seconds)],
            env=dict(environ),
            stdin=subprocess.PIPE,  # its end tells the keeper that this process has ended
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal must not end it
        )
        self._folder.set_owners(os.getpid(), self._process.pid)

    @property
    def env(self) -> dict[str, str]:
        """Variables by which the controller finds the keeper."""
        return {VARIABLE: f"{self._process.pid}:{self._file}"}

    def alive(self) -> bool:
        """Return whether the keeper can serve another controller."""
        address = KeeperAddress.read(self._file)
        return self._process.poll() is None and not (address is not None and address.problem)

    def close(self) -> None:
        """End the keeper and all processes that it owns."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its orphan reaper ends the others
            self._process.wait()
        self._folder.remove()


class Keepers:
    """The keeper of a run, for the command that starts the run again: a new one if the last has failed; none without `train.keep_workers`."""

    def __init__(self, recipe: Recipe) -> None:
        self._seconds = recipe.train.keep_workers
        self._address = recipe.cluster.ray_address or os.environ.get("RAY_ADDRESS") or ""
        self._keeper: KeeperProcess | None = None
        self._shared: dict[str, str] = {}

    def environment(self) -> dict[str, str]:
        """Return the environment of the next controller: it finds the workers of the last one, if there are any."""
        if not self._seconds:
            return {**os.environ}
        if self._keeper is None or not self._keeper.alive():
            self.close()
            if removed := remove_stale_folders():
                print(stale_text(removed), file=sys.stderr)
            # Ray's token, which the keeper and each controller need.
            self._shared = {} if self._address else authentication(os.environ)
            self._keeper = KeeperProcess(self._address, self._seconds, {**os.environ, **self._shared})
        return {**os.environ, **self._shared, **self._keeper.env}

    def close(self) -> None:
        """End the keeper and all processes that it owns."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def __enter__(self) -> Keepers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digest_of(*settings: Any) -> str:
    """Return a digest of the settings with which a worker was constructed: only a process with an equal digest is kept.

    It contains the `repr` of the settings and megarl's version. A value without a readable `repr` makes it unique.
    """
    return hashlib.blake2b(repr((megarl.__version__, os.getcwd(), settings)).encode(), digest_size=16).hexdigest()
