"""Stage 5, exchange: weight sync to an engine by every route and transport, and a trainer that dies in an update."""

from __future__ import annotations

import re
import time
from typing import Any

from megarl.cluster.failures import CallFailed
from megarl.cluster.torchrun.local_service import LocalService
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.engine_probe import (
    START_SECONDS,
    TRAINER,
    gap,
    requests,
    shares_devices,
    start_engine,
    timed,
    tiny_recipe,
    visible,
)
from megarl.commands.accept.families import write_family
from megarl.commands.accept.ranks import LocalRanks, rank_environment
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.trainer.group import ActorGroup
from megarl.weight_sync.connect import RouteRefused, open_exchange
from megarl.weight_sync.publish import publish

GAP = 0.02  # nats, mean
PROBED = 256  # bytes
READER = "megarl.commands.accept.engine_probe:MemoryReader"
DEATH = 5.0  # seconds after exchange.silence within which every wait for a dead rank must end
# (route, transport), the default first
WAYS = (
    ("planned", "auto"),
    ("planned", "collective"),
    ("planned", "ipc"),
    ("export", "auto"),
    ("export", "collective"),
)


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
            folder, env = context.folder / f"{family}-trainers", rank_environment(context)
            trainers = LocalRanks(folder, TRAINER, (recipe, 10), size, env)
            try:
                info = info or timed(engine.call("start"), START_SECONDS)[0]
                _ways(context, family, recipe, trainers, engine, info)
                _death(context, family, recipe, trainers, engine, info)
            finally:
                trainers.close()
        finally:
            engine.stop()


def ways(context: StageContext) -> list[tuple[str, str]]:
    """Return the (route, transport) pairs to test; transport "device" needs separate devices."""
    device = [("planned", "device")] if not context.tiny and not shares_devices(context) else []
    return [*WAYS, *device]


def _ways(
    context: StageContext, family: str, recipe: Recipe, trainers: LocalRanks, engine: LocalService, info: dict[str, Any]
) -> None:
    actor, receiver = ActorGroup(trainers, recipe), EngineHandle(engine)  # type: ignore[arg-type]
    version = 0
    for route, transport in ways(context):
        name = f"{family}: {route} by {transport}"
        if transport == "ipc" and not _maps_memory(context, name, trainers):
            continue
        context.doing(f"{name}: two updates")
        recipe.exchange.route, recipe.exchange.transport = route, transport  # type: ignore[assignment]
        trainers.call("set_exchange", route, transport)
        try:
            session = open_exchange(recipe, actor, [receiver], [info], lambda text: print(text, flush=True))
        except RouteRefused as error:  # what fails in joining fails the stage
            context.not_run(name, str(error))
            continue
        for _ in range(2):
            version += 1
            trainers.call("change", version)
            began = time.monotonic()
            try:
                metrics = publish(actor, [receiver], session, version)
            except RuntimeError as error:
                context.equal(f"{name}: both sides agree on an update", False, True, cause=" ".join(str(error).split()))
                raise
            seconds = time.monotonic() - began
        _judge(context, family, name, (metrics["exchange/bytes"] / 2**20, seconds), trainers, engine)
    context.not_run(f"{family}: device to device", "one device, or a CPU") if len(ways(context)) == len(WAYS) else None


def _judge(
    context: StageContext,
    family: str,
    name: str,
    update: tuple[float, float],
    trainers: LocalRanks,
    engine: LocalService,
) -> None:
    """Record the checks of one route and transport. `update`: MiB and seconds of the last update."""
    context.equal(f"{name}: both sides agree on an update", True, True)
    context.figure(f"{name}: seconds", update[1], unit="s")
    context.figure(f"{name}: bytes", update[0], unit="MiB")
    sent = requests(family, 4, 16)
    sampled = timed(engine.call("generate", sent))[0]
    context.at_most(
        f"{name}: log-probs after the update", gap(family, sent, sampled, trainers), limit=GAP, unit="nats",
        cause="the engine's weights differ from the trainers'",
    )  # fmt: skip


def _maps_memory(context: StageContext, name: str, trainers: LocalRanks) -> bool:
    """Return True if another process can map a trainer's memory, as engines do with `exchange.transport: ipc`.

    Otherwise add a check: NOT RUN if the memory cannot be mapped (a container may forbid it), FAIL if it has wrong bytes.
    If the recipe uses this transport, return True without a test: the update then fails with the reason.
    """
    if context.recipe is not None and context.recipe.exchange.transport == "ipc":
        return True
    context.doing("mapping a trainer's memory in another process")
    handle = timed(trainers.services[0].call("share_memory", PROBED))[0]
    log = context.folder / "reader.log"
    # Like an engine, the reader does not see the trainer's device if there are several.
    env = rank_environment(context) | visible(context, [context.settings.devices - 1])
    reader = LocalService(READER, (context.device,), name="memory reader", log=log, env=env)
    try:
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


def _death(
    context: StageContext, family: str, recipe: Recipe, trainers: LocalRanks, engine: LocalService, info: dict[str, Any]
) -> None:
    """Let the last trainer die in an update. The engine and the other trainers must notice it and name the rank."""
    if trainers.size < 2:
        context.not_run(f"{family}: a death in an update", "needs two trainers")
        return
    context.doing(f"{family}: a trainer dies in an update")
    recipe.exchange.route, recipe.exchange.transport = "planned", "auto"
    trainers.call("set_exchange", "planned", "auto")
    actor, receiver = ActorGroup(trainers, recipe), EngineHandle(engine)  # type: ignore[arg-type]
    try:
        session = open_exchange(recipe, actor, [receiver], [info], lambda text: print(text, flush=True))
    except RouteRefused as error:  # what fails in joining fails the stage
        context.not_run(f"{family}: a death in an update", str(error))
        return
    publish(actor, [receiver], session, 999)
    began = time.monotonic()
    sending = trainers.begin("send_and_die", [(1000,)] * trainers.size)
    receiving = engine.call("update_weights", 1000)
    limit = recipe.exchange.silence + DEATH
    errors = []
    for call in (receiving, *sending):
        left = began + limit - time.monotonic()
        try:
            call.result(max(left, 0.1))
            errors.append("returned")
        except TimeoutError:
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
