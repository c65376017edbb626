"""Calls to the trainer actors of a group, and their arguments. Call `ray.env.prepare` before importing this module."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray._private.serialization import _object_ref_deserializer
from ray.exceptions import RayActorError, RayError

from megarl.cluster.failures import Failure, ProcessInfo, Raised, Returned
from megarl.cluster.ray.failures import death_cause
from megarl.cluster.ray.service import RayData
from megarl.cluster.ray.signals import ray_get, ray_wait

PUT_BYTES = 64 << 10  # arguments of this size and more go through Ray's store, once per machine


class Calls:
    """Calls in progress, one per rank. refs: of their answers. places: of the ranks."""

    def __init__(self, refs: Sequence[Any], places: Sequence[ProcessInfo]) -> None:
        self._unread, self._places = {ref: rank for rank, ref in enumerate(refs)}, places

    @property
    def unread(self) -> list[Any]:
        """The references of answers that have not been read."""
        return list(self._unread)

    def poll(self, seconds: float) -> list[tuple[int, Returned | Failure]]:
        """Wait for `seconds` at most, and return the outcomes (rank, outcome) of ranks that have answered since the last poll."""
        ready, _ = ray_wait(self.unread, num_returns=len(self._unread), timeout=seconds)
        return [(rank, _outcome(self._places[rank], ref)) for ref in ready for rank in [self._unread.pop(ref)]]


def _outcome(place: ProcessInfo, ref: Any) -> Returned | Failure:
    try:
        outcome = ray_get(ref)
    except RayActorError as error:
        return Failure.death(place, death_cause(error))
    except RayError as error:
        return Failure.raised(place, Raised.of(error))
    return outcome if isinstance(outcome, Returned) else Failure.raised(place, outcome)


class PackedArguments:
    """Arguments of one scatter, serialized once for all ranks that receive the same tuple (the same object).

    Ray does not count the references to vectors (`RayData`) in them, so the caller must keep the arguments until all ranks have
    answered. Counted references make a shard of groups of 16 take three times as long to serialize.
    """

    def __init__(self) -> None:
        self._packed: dict[int, Any] = {}  # by id of the tuple
        self._references: dict[Any, tuple[Any, ...]] = {}

    def of(self, per_rank: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Return each rank's argument of `TrainerActor.call_packed`: bytes, or a reference to them."""
        return [self._of(args) for args in per_rank]

    def _of(self, args: tuple[Any, ...]) -> Any:
        if id(args) not in self._packed:
            data = self._pack(args)
            self._packed[id(args)] = data if len(data) < PUT_BYTES else ray.put(data)
        return self._packed[id(args)]

    def _pack(self, args: tuple[Any, ...]) -> bytes:
        file = io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = copyreg.dispatch_table | {RayData: self._reduce}
        pickler.dump(args)
        return file.getvalue()

    def _reduce(self, data: RayData) -> tuple[Any, ...]:
        if data.ref not in self._references:
            ref, owner, status = ray._private.worker.global_worker.core_worker.serialize_object_ref(data.ref)
            self._references[data.ref] = ref.binary(), owner, status, ref.tensor_transport()
        return uncounted, self._references[data.ref]


def uncounted(binary: bytes, owner: bytes, status: bytes, transport: Any) -> RayData:
    """Return a reference to an object of the process `owner`, which keeps it. `status`: whether it is in the store, or its value."""
    return RayData(_object_ref_deserializer(binary, "", owner, status, transport))
