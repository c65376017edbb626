"""Stage 5, weight_sync: weight sync to an engine by every route and transport, and a trainer that dies in an update."""

from __future__ import annotations

import re
import time
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from megarl.cluster.failures import CallFailed
from megarl.cluster.torchrun.local_service import LocalService
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.engine_probe import (
    START_SECONDS,
    gap,
    requests,
    shares_devices,
    start_engine,
    start_trainers,
    timed,
    tiny_recipe,
    visible,
)
from megarl.commands.accept.ranks import LocalRanks, rank_environment
from megarl.commands.accept.tiny_families import write_family
from megarl.rollout.engine_handle import EngineHandle
from megarl.trainer.group import ActorGroup
from megarl.weight_sync.connect import RouteRefused, open_weight_sync
from megarl.weight_sync.publish import publish
from megarl.weight_sync.session import Session

GAP = 0.02  # nats, mean
PROBED = 256  # bytes
READER = "megarl.commands.accept.engine_probe:MemoryReader"
DEATH = 5.0  # seconds after weight_sync.silence within which every wait for a dead rank must end
# (route, transport), the default first
WAYS = (
    ("sharded", "auto"),
    ("sharded", "collective"),
    ("sharded", "ipc"),
    ("full", "auto"),
    ("full", "collective"),
)


@dataclass(frozen=True)
class _Pair:
    """Trainers and an engine of a family's tiny model. `info`: the engine's description."""

    context: StageContext
    family: str
    trainers: LocalRanks
    engine: LocalService
    actor: ActorGroup
    info: dict[str, Any]

    @property
    def receiver(self) -> EngineHandle:
        return EngineHandle(self.engine)

    def open(self, name: str, route: str, transport: str) -> Session | None:
        """Connect the weight sync. If the route is refused, record NOT RUN for `name` and return None.

        An error while the engine joins propagates and fails the stage.
        """
        settings = self.actor.recipe.weight_sync
        settings.route, settings.transport = route, transport  # type: ignore[assignment]
        self.trainers.call("set_weight_sync", route, transport)
        try:
            return open_weight_sync(
                self.actor.recipe, self.actor, [self.receiver], [self.info], lambda text: print(text, flush=True)
            )
        except RouteRefused as error:
            self.context.not_run(name, str(error))
            return None


def run(context: StageContext) -> None:
    """Test the weight sync with tiny models: the dense one, on devices also MoE and MLA.

    The trainers have a different layout than the engine.
    """
    for family in ("dense",) if context.tiny else ("dense", "moe", "mla"):
        write_family(family, context.shared)
        size = 1 if context.settings.devices < 3 and not context.tiny else 2
        recipe = tiny_recipe(context, family, size, tensor_parallel=size)
        context.doing(f"starting {size} trainers and an engine of the {family} model")
        # An engine measures free memory when it starts, so on shared devices the trainers start after it.
        engine = start_engine(context, recipe, load_weights=False)
        try:
            info = timed(engine.call("start"), START_SECONDS)[0] if shares_devices(context) else None
            with closing(start_trainers(context, recipe, size, f"{family}-trainers")) as trainers:
                info = info or timed(engine.call("start"), START_SECONDS)[0]
                pair = _Pair(context, family, trainers, engine, ActorGroup(trainers, recipe), info)  # type: ignore[arg-type]
                _ways(pair)
                _death(pair)
        finally:
            engine.stop()


def ways(context: StageContext) -> list[tuple[str, str]]:
    """Return the (route, transport) pairs to test; transport "device" needs separate devices."""
    device = [("sharded", "device")] if not context.tiny and not shares_devices(context) else []
    return [*WAYS, *device]


def _ways(pair: _Pair) -> None:
    context, family, trainers, version = pair.context, pair.family, pair.trainers, 0
    for route, transport in ways(context):
        name = f"{family}: {route} by {transport}"
        if transport == "ipc" and not _maps_memory(context, name, trainers):
            continue
        context.doing(f"{name}: two updates")
        session = pair.open(name, route, transport)
        if session is None:
            continue
        for _ in range(2):
            version += 1
            trainers.call("change", version)
            began = time.monotonic()
            try:
                metrics = publish(pair.actor, [pair.receiver], session, version)
            except RuntimeError as error:
                context.equal(f"{name}: both sides agree on an update", False, True, cause=" ".join(str(error).split()))
                raise
            seconds = time.monotonic() - began
        _record_checks(pair, name, metrics["weight_sync/bytes"] / 2**20, seconds)
    context.not_run(f"{family}: device to device", "one device, or a CPU") if len(ways(context)) == len(WAYS) else None


def _record_checks(pair: _Pair, name: str, mib: float, seconds: float) -> None:
    """Record the checks of one route and transport. `mib`, `seconds`: of the last update."""
    context, family = pair.context, pair.family
    context.equal(f"{name}: both sides agree on an update", True, True)
    context.figure(f"{name}: seconds", seconds, unit="s")
    context.figure(f"{name}: bytes", mib, unit="MiB")
    sent = requests(family, 4, 16)
    sampled = timed(pair.engine.call("generate", sent))[0]
    context.at_most(
        f"{name}: log-probs after the update", gap(family, sent, sampled, pair.trainers), limit=GAP, unit="nats",
        cause="the engine's weights differ from the trainers'",
    )  # fmt: skip


def _maps_memory(context: StageContext, name: str, trainers: LocalRanks) -> bool:
    """Return True if another process can map a trainer's memory, as engines do with `weight_sync.transport: ipc`.

    Otherwise add a check: NOT RUN if the memory cannot be shared (an old driver) or mapped (a container may forbid it), FAIL
    if it has wrong bytes.
    If the recipe uses this transport, return True without a test: the update then fails with the reason.
    """
    if context.recipe is not None and context.recipe.weight_sync.transport == "ipc":
        return True
    context.doing("mapping a trainer's memory in another process")
    log = context.folder / "reader.log"
    # Like an engine, the reader does not see the trainer's device if there are several.
    env = rank_environment(context) | visible(context, [context.settings.devices - 1])
    reader = LocalService(READER, (context.device,), name="memory reader", log=log, env=env)
    try:
        handle = timed(trainers.services[0].call("share_memory", PROBED))[0]
        read = timed(reader.call("read", handle))[0]
    except CallFailed as error:
        context.not_run(name, " ".join(str(error).split()))
        return False
    finally:
        reader.stop()
    if read == list(range(PROBED)):
        return True
    differing = sum(byte != place for place, byte in enumerate(read))
    cause = f"a process that maps a trainer's memory reads {differing} of {PROBED} bytes wrong"
    context.equal(f"{name}: mapped memory has the trainer's bytes", False, True, cause=cause)
    return False


def _death(pair: _Pair) -> None:
    """Let the last trainer die in an update. The engine and the other trainers must notice it and name the rank."""
    context, family, trainers = pair.context, pair.family, pair.trainers
    if trainers.size < 2:
        context.not_run(f"{family}: a death in an update", "needs two trainers")
        return
    context.doing(f"{family}: a trainer dies in an update")
    session = pair.open(f"{family}: a death in an update", "sharded", "auto")
    if session is None:
        return
    publish(pair.actor, [pair.receiver], session, 999)
    began = time.monotonic()
    sending = trainers.begin("send_and_die", 1000)
    receiving = pair.engine.call("update_weights", 1000)
    limit = pair.actor.recipe.weight_sync.silence + DEATH
    errors = []
    for call in (receiving, *sending):
        left = began + limit - time.monotonic()
        try:
            call.result(max(left, 0.1))
            errors.append("returned")
        except FutureTimeout:
            errors.append("still waits")
        except Exception as error:  # noqa: BLE001 - any exception ends the wait
            errors.append(" ".join(str(error).split()))
    took = time.monotonic() - began
    context.at_most(
        f"{family}: a death in an update ends every wait", took, limit=limit, unit="s", cause="; ".join(errors)[:300]
    )
    named = names_trainer(errors[0], trainers.size - 1)
    context.equal(f"{family}: the engine names the dead rank", named, True, cause=errors[0][:300])


def names_trainer(text: str, rank: int) -> bool:
    """Return True if `text` names this trainer, and not only a number such as seconds."""
    return re.search(rf"\btrainer (rank )?{rank}\b", text) is not None
