"""Stage 0, environment: the doctor's checks, versions, kernels of trainer and engine, and the route of weights."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl import platform as platforms
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.result import FAIL, PASS, REPORT, RecordedCheck
from megarl.commands.doctor.catalogue import CHECKS
from megarl.commands.doctor.check import AT_LIMIT, run_check, within
from megarl.commands.doctor.finding import Finding, Needs
from megarl.commands.doctor.machine import Machine, Output
from megarl.commands.doctor.nodes import check_all_nodes
from megarl.commands.doctor.recipe import device_demand, environment, needs_of, stages, weights
from megarl.platform.kinds import kind_of
from megarl.preflight.engines_and_devices import demand_of
from megarl.recipe.derived.weight_sync_route import why_not_sharded
from megarl.recipe.schema import Recipe

_SECONDS = 120.0
_READING, _RESERVE = 300.0, 60.0  # seconds to read a recipe's model and data, and for the rest of the stage
_VERDICTS = {"ok": PASS, "warning": REPORT, "FAIL": FAIL}
# The imports of a run's processes. Each program prints one JSON object in its last line.
_ENGINE = (
    "import dataclasses, json; from megarl.engines.vllm.compat import capabilities;"
    "print('\\n' + json.dumps(dataclasses.asdict(capabilities())))"
)
_TRAINER = (
    "import json; from megarl import platform; chosen = platform.select({device!r}); chosen.prepare();"
    "import megarl.megatron.trainer, megatron.core;"
    "print('\\n' + json.dumps(dict(native=chosen.uses_native_layers, megatron=megatron.core.__version__)))"
)

_TRANSPORTS = {
    "auto": "/dev/shm within a node, the network between nodes",
    "shared_memory": "/dev/shm",
    "ipc": "mapped device memory of the trainers within a node, the network between nodes",
    "collective": "gloo over the network, also within a node",
    "device": "from device to device",
    "files": "files",
}


def run(context: StageContext) -> None:
    """Run the doctor's checks, also for the recipe; then check imports, route and memory."""
    machine = Machine()
    needs = on_these_devices(
        context, dataclasses.replace(needs_of(context.recipe, machine.environ), device=context.device)
    )
    context.doing("importing the trainer's and the engine's modules, and the doctor's checks")
    with ThreadPoolExecutor(2) as threads:
        trainer = threads.submit(machine.python_code, _TRAINER.format(device=context.device), _SECONDS)
        engine = threads.submit(machine.python_code, _ENGINE, _SECONDS, VLLM_LOGGING_LEVEL="ERROR")
        machines = _doctor(context, machine, needs)
        _of_recipe(context, machines)
        _layers(context, trainer.result())
        capabilities = _engine(context, engine.result())
    _route(context, capabilities)
    _memory(context, machine)


def on_these_devices(context: StageContext, needs: Needs) -> Needs:
    """Reduce the ranks with weight-sync buckets to those on these nodes, for a recipe that needs more devices."""
    if context.recipe is None:
        return needs
    share = min(1.0, context.devices / max(demand_of(context.recipe).devices, 1))
    return dataclasses.replace(needs, sync_ranks=math.ceil(needs.sync_ranks * share), nodes=context.settings.nodes)


def _doctor(context: StageContext, machine: Machine, needs: Needs) -> list[tuple[str, int]]:
    """Record every finding as a check. Return (host, devices) of each node.

    On one node the doctor's check `imports` is skipped, since this stage tests the imports itself.
    """
    if context.settings.nodes == 1:
        for check in CHECKS:
            if check.name != "imports":
                context.record(*map(check_of, run_check(check, machine, needs)))
        return [(machine.host, context.settings.devices)]
    reports = check_all_nodes(dataclasses.replace(needs, ray_address=context.settings.ray_address))
    context.equal(
        "nodes", len(reports), context.settings.nodes, cause="other nodes than --nodes are in the Ray cluster"
    )
    for report in reports:
        context.record(*(check_of(finding) for finding in report.findings))
    return [(report.host, report.devices) for report in reports]


def _of_recipe(context: StageContext, machines: list[tuple[str, int]]) -> None:
    """Run the doctor's checks of the recipe. `machines`: (host, devices) of each node.

    Missing files and devices are NOT RUN, since an acceptance does not need them.
    """
    recipe = context.recipe
    if recipe is None:
        return
    context.doing("the doctor's checks of the recipe")
    kind, seconds = kind_of(context.device), max(min(context.seconds_left - _RESERVE, _READING), 1.0)
    for finding in within(lambda: list(stages(recipe)), seconds):
        reason = not_here(recipe, finding, seconds)
        named = finding.labelled("recipe: model")
        if reason:
            context.not_run(f"doctor: {named.check}", reason)
        else:
            context.record(check_of(named))
    if recipe.cluster.device not in ("auto", context.device):
        reason = f"the recipe has cluster.device={recipe.cluster.device}, and this acceptance uses {kind.plural}"
        for name in ("devices", "weights", "environment"):
            context.not_run(f"doctor: recipe: {name}", reason)
        return
    required = demand_of(recipe).devices
    if kind.ray_resource is not None and required > context.devices:
        text = f"the recipe needs {required} devices, and this acceptance has {context.devices}: see --nodes"
        context.not_run("doctor: recipe: devices", text)
    else:
        _named(context, "devices", [device_demand(recipe, context.device, machines)])
    _named(context, "weights", weights(recipe, context.device))
    _named(context, "environment", environment(recipe, context.device))


def _named(context: StageContext, name: str, findings: list[Finding]) -> None:
    context.record(*(check_of(finding.labelled(f"recipe: {name}")) for finding in findings))


def not_here(recipe: Recipe, finding: Finding, seconds: float) -> str:
    """Return the reason if a recipe's check failed because of missing files or too little time, else ""."""
    if finding.status != "FAIL":
        return ""
    if not finding.check and finding.text == AT_LIMIT.format(seconds=seconds):
        return (
            f"reading the recipe's model and data takes longer than {seconds:.0f} s: megarl doctor RECIPE waits for it"
        )
    paths: list[str] = []
    if finding.check == "recipe: model":
        teachers = [teacher.path for teacher in recipe.teacher.by_key.values()]
        models = (recipe.model.path, recipe.critic.model_path, *teachers, recipe.judge.path)
        paths = [str(Path(path) / "config.json") for path in models if path]
    elif finding.check == "recipe: data":
        mixed = [path for part in recipe.data.mix.values() for path in part.files]
        paths = [*recipe.data.train_files, *recipe.data.eval_files, *mixed]
    absent = [path for path in paths if not Path(path).exists()]
    return f"not fetched yet: {', '.join(absent[:3])}" if absent else ""


def check_of(finding: Finding) -> RecordedCheck:
    """Convert a finding of the doctor to a check. A warning is only reported."""
    where = f" on {finding.host}" if finding.rank is not None else ""
    cause = f"{finding.text} -> {finding.remedy}" if finding.status == "FAIL" else finding.remedy
    return RecordedCheck(f"doctor: {finding.check}{where}", _VERDICTS[finding.status], finding.text, cause=cause)  # type: ignore[arg-type]


def _layers(context: StageContext, output: Output) -> None:
    """Report which implementation computes the trainer's layers."""
    context.equal("trainer's modules import", output.good, True, cause=output.last_error)
    if not output.good:
        return
    modules = json.loads(output.text.strip().splitlines()[-1])
    context.figure("Megatron", modules["megatron"])
    layers = (
        "native (torch's own kernels)"
        if modules["native"]
        else "Transformer Engine's classes, as the platform has them"
    )
    context.figure("trainer's layers", layers)


def _engine(context: StageContext, output: Output) -> dict[str, object] | None:
    """Return the capabilities of the installed engine, or None if it is not needed or cannot be imported."""
    if context.recipe is not None and context.recipe.train.source != "rollout":
        context.not_run("engine's modules import", "the recipe samples nothing")
        return None
    if not output.good and "No module named 'vllm'" in output.last_error:
        context.not_run("engine's modules import", "vLLM is not installed")
        return None
    context.equal("engine's modules import", output.good, True, cause=output.last_error)
    if not output.good:
        return None
    capabilities: dict[str, object] = json.loads(output.text.strip().splitlines()[-1])
    context.equal("engine's device", str(capabilities["device"]), context.device, cause="vLLM runs on other devices")
    for name, value in capabilities.items():
        context.figure(f"engine: {name}", str(value))
    return capabilities


def _route(context: StageContext, capabilities: dict[str, object] | None) -> None:
    """Report route and transport of the weight sync. Fail if the recipe requires an impossible route."""
    recipe = context.recipe or Recipe()
    if capabilities is None:
        context.not_run("weight sync: route", "no engine takes weights here")
        return
    reason = why_exported(recipe, capabilities)
    route = "full" if reason else "sharded"
    requested = recipe.weight_sync.route
    if requested == "sharded":
        context.equal("weight sync: route", route, "sharded", cause=f"weight_sync.route=sharded: {reason}")
    else:
        context.figure("weight sync: route", f"{route}, because {reason}" if reason else route)
    platform = platforms.select(context.device)
    shared = recipe.cluster.placement == "colocated"
    transport = recipe.weight_sync.transport
    context.figure("weight sync: transport", f"{transport}: {_TRANSPORTS[transport]}")
    if platform.kind.ray_resource is not None:
        context.figure("weight sync: trainers and engines", "share devices" if shared else "use separate devices")


def why_exported(recipe: Recipe, capabilities: dict[str, object]) -> str | None:
    """Return why whole weights are exported, or None if engine ranks receive slices directly from the trainers."""
    if recipe.weight_sync.route == "full":
        return "weight_sync.route=full"
    if reason := why_not_sharded(recipe):
        return reason
    why = capabilities["no_sharded"]
    return None if why is None else str(why)


def _memory(context: StageContext, machine: Machine) -> None:
    """Report the free memory of the host, and the free space of /dev/shm and /tmp."""
    for line in (machine.read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable"):
            context.figure("host memory available", int(line.split()[1]) / 2**20, unit="GiB")
    context.figure("/dev/shm free", shutil.disk_usage("/dev/shm").free / 2**30, unit="GiB")
    context.figure("/tmp free", shutil.disk_usage("/tmp").free / 2**30, unit="GiB")
