"""Entry point of `python -m megarl accept [RECIPE] [KEY=VALUE ...]`."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl import platform as platforms
from megarl.atomic_files import make_folder, write_atomically
from megarl.commands.accept.bundle import VERDICT, write_bundle
from megarl.commands.accept.catalogue import BUNDLE, OF_ALL_NODES, STAGES, shares, stage_numbers
from megarl.commands.accept.result import FAIL, PASS, to_json, verdict_of
from megarl.commands.accept.runner import RESULTS, read_results, run_stages
from megarl.commands.accept.settings import FILE, Settings, parse_stages, read_settings, write_settings
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.platform_detection import torch_sees
from megarl.errors import InputError, as_input_error
from megarl.platform.device_table import device_named, device_of_machine
from megarl.platform.kinds import kind_of
from megarl.preflight.load import load_recipe
from megarl.recipe.text import hardware_of

CPU_PROCESSES = 2  # ranks on a CPU
CPU_TOGETHER = 3  # concurrent stages on a CPU, where no stage measures speed against a limit


@dataclass(frozen=True)
class AcceptOptions:
    """Command line options. `out`: the directory for the folder and the archive of the acceptance."""

    device: str = "auto"
    nodes: int = 1
    minutes: float = 60.0
    stages: str | None = None
    resume: Path | None = None
    out: Path = Path(".")
    expect: bool = False


def accept(recipe: Path | None, overrides: Sequence[str], options: AcceptOptions) -> int:
    """Run the selected stages, print one line for each, and write the archive.

    Returns the exit status: 0 if no stage failed and at least one passed, else 1.

    Raises InputError and RecipeError before anything starts.
    """
    began = time.monotonic()
    with as_input_error():
        settings, directory = _prepare(recipe, overrides, options)
    stages = [stage for stage in STAGES if stage.number in settings.stages]
    ends = shares(stages, settings.minutes)
    if options.expect:
        from megarl.commands.accept.stages.expected import expectation

        print(expectation(settings, stages, ends, options.resume, options.out))
        return 0
    with as_input_error():
        make_folder(directory)
    if not (directory / FILE).exists():
        write_settings(directory, settings)
    print(f"stages run in {directory}; to resume after an interruption: --resume {directory}", flush=True)
    if notice := _one_node_notice(settings):
        print(notice, flush=True)
    together = CPU_TOGETHER if settings.tiny else 1
    if together > 1:  # the longest first, so that none runs alone at the end
        stages = sorted(stages, key=lambda stage: -stage.minutes)
        ends = shares(stages, settings.minutes)
    results = run_stages(directory, stages, ends, lambda text: print(text, flush=True), together=together)
    archive = directory.with_name(f"{directory.name}.tar.gz")
    verdict, reason = verdict_of(results)
    print(f"{verdict}{': ' + reason if reason else ''} ({time.monotonic() - began:.0f} s)", flush=True)
    if BUNDLE in settings.stages:
        for problem in write_bundle(directory, settings, results, archive):
            print(f"  not in the bundle: {problem}")
        print(f"report: {directory / VERDICT}, bundle: {archive}")
    return 0 if verdict == PASS or (not stages and verdict != FAIL) else 1


def _prepare(recipe: Path | None, overrides: Sequence[str], options: AcceptOptions) -> tuple[Settings, Path]:
    if options.resume is not None:
        if recipe is not None:
            raise InputError(f"--resume {options.resume} uses that acceptance's recipe: omit {recipe}.")
        return _resumed(options), options.resume.absolute()
    device = platforms.kind(options.device)
    kind = kind_of(device)
    chosen = parse_stages(options.stages, stage_numbers()) if options.stages else stage_numbers()
    path = ""
    if recipe is not None:
        path = str(recipe.absolute())
        load_recipe(recipe, list(overrides))  # raises RecipeError
    if not kind.files:
        devices = CPU_PROCESSES
    elif options.expect and not kind.is_here():
        devices = _planned_devices(recipe, device)
    else:
        devices = _devices(options.device)
    settings = Settings(
        device,
        devices,
        options.nodes,
        options.minutes,
        chosen,
        path,
        tuple(overrides),
        Machine().environ.get("RAY_ADDRESS", ""),
    )
    if settings.nodes > 1 and not settings.ray_address and not options.expect:
        raise _needs_ray(settings.nodes, f"--nodes {settings.nodes}")
    name = f"accept-{platform.node()}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return settings, (options.out / name).absolute()


def _resumed(options: AcceptOptions) -> Settings:
    """Read the settings in the folder of `--resume`. Stages named by `--stages` lose their results and run again; with
    `--expect` nothing is written.

    Raises InputError for an option that cannot be changed by `--resume`, and if a stage of all nodes is missing without Ray.
    """
    assert options.resume is not None
    settings, fresh = read_settings(options.resume), AcceptOptions()
    for name in ("device", "nodes", "minutes", "out"):
        if getattr(options, name) != getattr(fresh, name):
            raise InputError(
                f"--resume {options.resume} keeps that acceptance's options: omit --{name} {getattr(options, name)}, "
                "or start another acceptance without --resume."
            )
    again = parse_stages(options.stages, stage_numbers()) if options.stages is not None else ()
    kept = [result for result in read_results(options.resume) if result.number not in again]
    settings = replace(
        settings,
        stages=tuple(sorted({*settings.stages, *again})),
        ray_address=Machine().environ.get("RAY_ADDRESS", ""),  # of this call: an earlier cluster has ended
    )
    if options.expect:
        return settings
    missing = set(settings.stages) - {result.number for result in kept}
    if settings.nodes > 1 and not settings.ray_address and missing & set(OF_ALL_NODES):
        raise _needs_ray(settings.nodes, f"--resume {options.resume}")
    if again:
        write_atomically(options.resume / RESULTS, to_json(kept).encode())
    write_settings(options.resume, settings)
    return settings


def _one_node_notice(settings: Settings) -> str:
    """Return a notice if an acceptance of one node runs stages of all nodes in a Ray cluster, else ""."""
    if settings.nodes > 1 or not settings.ray_address or not set(OF_ALL_NODES) & set(settings.stages):
        return ""
    return (
        f"this acceptance is of one node: it leaves out other nodes of the Ray cluster at {settings.ray_address}. To test "
        "them start another acceptance, with --nodes N and without --resume."
    )


def _needs_ray(nodes: int, option: str) -> InputError:
    return InputError(
        f"{option} needs a Ray cluster over {nodes} nodes: set RAY_ADDRESS, or start\n"
        "  launch/multinode.sh -- python -m megarl accept ... on each of them."
    )


def _planned_devices(recipe: Path | None, device: str) -> int:
    """Return the devices of a node for `--expect` on a machine without such devices: of the recipe's header, else 0 (unknown)."""
    machine = None if recipe is None else hardware_of(recipe)
    name = None if machine is None else device_of_machine(machine[0])
    return machine[2] if machine is not None and name is not None and device_named(name).kind == device else 0


def _devices(device: str) -> int:
    """Return the number of devices that torch sees. Raises InputError if it sees none."""
    platforms.select(device)  # raises ValueError if this machine has no such devices
    sees = torch_sees(Machine())
    if not sees.names:
        raise InputError(f"torch sees no {kind_of(platforms.kind(device)).plural}: {sees.error or 'run megarl doctor'}")
    return len(sees.names)
