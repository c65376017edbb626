"""References to token vectors in Ray's object store. Call `ray.env.prepare` before importing this module.

Ray keeps an object above 100 KB on the machine of the process that returned it, and the object is lost with this machine. So the
controller copies the objects of a machine that leaves. Objects of a machine that is lost without notice are marked as lost, unless
Ray has a copy elsewhere: the source of the samples samples them again.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from megarl.cluster.failures import SamplesLost
from megarl.cluster.ray.devices import is_alive
from megarl.cluster.ray.signals import ray_get


class RayData:
    """A DataRef into Ray's object store."""

    def __init__(self, ref: Any, node: str = "", source: str = "") -> None:
        """ref: ray.ObjectRef, owned by the controller. node: id of the machine that stores it; "": one that cannot leave.
        source: the service and its machine, for messages; "": a trainer."""
        self.ref, self.node, self.source = ref, node, source
        self.is_lost = False

    def get(self) -> Any:
        """Fetch the samples' vectors from the object store. Raises SamplesLost if the machine of the service that returned them is
        lost."""
        try:
            return ray_get(self.ref)
        except ObjectLostError as error:
            if not self.source:
                raise
            raise SamplesLost(
                f"samples of {self.source} are lost: they were stored on its machine, which has left the Ray cluster, or whose Ray has "
                "stopped. A run that starts again from its newest checkpoint or journal samples their prompts again: set "
                f"train.restarts, or start the same command with train.resume=auto. ({type(error).__name__})"
            ) from error

    def copy_here(self) -> None:
        """Store the vectors on this machine, for references that are sent from now on, or mark them as lost."""
        try:
            self.ref = ray.put(self.get())
        except SamplesLost:
            self.is_lost = True
        self.node = ""


class StoredData:
    """The data of services that the controller still refers to. Thread-safe."""

    def __init__(self) -> None:
        self._living: weakref.WeakSet[RayData] = weakref.WeakSet()
        self._lock, self._copying = threading.Lock(), threading.Lock()

    def add(self, ref: Any, node: str, source: str) -> RayData:
        """Return a reference to data that a service on the machine `node` has returned."""
        data = RayData(ref, node, source)
        with self._lock:
            self._living.add(data)
        return data

    def copy_from(self, node: str) -> None:
        """Copy the data of a machine that leaves or has left to this machine, as far as Ray still has them."""
        with self._copying:  # so that a second call returns when all are copied
            with self._lock:
                here = [data for data in self._living if data.node == node]
            for data in here:
                data.copy_here()

    def mark_lost(self) -> None:
        """Find machines that are lost, and mark their data."""
        with self._lock:
            nodes = {data.node for data in self._living if data.node}
        for node in nodes:
            if not is_alive(node):
                self.copy_from(node)
