"""Entry point of `python -m megarl accept [RECIPE] [KEY=VALUE ...]`."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl import platform as platforms
from megarl.atomic_files import write_atomically
from megarl.commands.accept.bundle import VERDICT, write_bundle
from megarl.commands.accept.catalogue import BUNDLE, BUNDLE_MINUTES, STAGES, Stage, shares, stage_numbers
from megarl.commands.accept.result import FAIL, PASS, to_json, verdict_of
from megarl.commands.accept.runner import RESULTS, read_results, run_stages
from megarl.commands.accept.settings import FILE, Settings, parse_stages, read_settings, write_settings
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.platform_detection import torch_sees
from megarl.errors import InputError, as_input_error
from megarl.platform.kinds import kind_of
from megarl.preflight.load import load_recipe

CPU_PROCESSES = 2  # ranks on a CPU
CPU_TOGETHER = 2  # concurrent stages on a CPU, where no stage measures speed against a limit
_WIDTH = 12


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
        print(expectation(settings, stages, ends))
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / FILE).exists():
        write_settings(directory, settings)
    print(f"stages run in {directory}; to resume after an interruption: --resume {directory}", flush=True)
    together = CPU_TOGETHER if settings.tiny else 1
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
        devices = 0  # --expect is used on a machine without such devices
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
        raise InputError(
            f"--nodes {settings.nodes} needs a Ray cluster over these nodes: set RAY_ADDRESS, or start\n"
            "  launch/multinode.sh -- python -m megarl accept ... on each of them."
        )
    name = f"accept-{platform.node()}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return settings, (options.out / name).absolute()


def _resumed(options: AcceptOptions) -> Settings:
    """Read the settings in the folder of `--resume`. Stages named by `--stages` lose their results and run again; with
    `--expect` nothing is written.

    Raises InputError for an option that cannot be changed by `--resume`.
    """
    assert options.resume is not None
    settings, fresh = read_settings(options.resume), AcceptOptions()
    for name in ("device", "nodes", "minutes", "out"):
        if getattr(options, name) != getattr(fresh, name):
            raise InputError(
                f"--resume {options.resume} keeps that acceptance's options: omit --{name} {getattr(options, name)}, "
                "or start another acceptance without --resume."
            )
    results = read_results(options.resume)
    if options.stages is None:
        return settings
    again = parse_stages(options.stages, stage_numbers())
    settings = replace(settings, stages=tuple(sorted({*settings.stages, *again})))
    if not options.expect:
        kept = [result for result in results if result.number not in again]
        write_atomically(options.resume / RESULTS, to_json(kept).encode())
        write_settings(options.resume, settings)
    return settings


def _devices(device: str) -> int:
    """Return the number of devices that torch sees. Raises InputError if it sees none."""
    platforms.select(device)  # raises ValueError if this machine has no such devices
    sees = torch_sees(Machine())
    if not sees.names:
        raise InputError(f"torch sees no {kind_of(platforms.kind(device)).plural}: {sees.error or 'run megarl doctor'}")
    return len(sees.names)


def expectation(settings: Settings, stages: Sequence[Stage], ends: dict[int, float]) -> str:
    """Return the text of `--expect`: for each stage the time, the work and the conditions."""
    kind = kind_of(settings.device)
    lines = [
        f"{settings.nodes} x {settings.devices or 'all'} {kind.plural}; recipe: {settings.recipe or 'none'}; "
        f"{settings.minutes:g} minutes in total; nothing is downloaded",
    ]
    before = 0.0
    for stage in stages:
        lines += [
            "",
            f"{stage.number} {stage.name}, {(ends[stage.number] - before) / 60:.1f} minutes and unused time of earlier stages",
            f"  {'runs':<{_WIDTH}}{stage.runs}",
            f"  {'passes when':<{_WIDTH}}{stage.passes}",
        ]
        before = ends[stage.number]
    if BUNDLE in settings.stages:
        status = [" ".join(words) for words in kind.status_commands]
        status += [f"{name} of each device" for name in sorted({words[0] for words in kind.device_commands})]
        lines += [
            "",
            f"{BUNDLE} bundle, {BUNDLE_MINUTES:g} minute",
            f"  {'writes':<{_WIDTH}}{VERDICT}, results.json, packages, environment (an allow-list), "
            f"{', '.join(status) or 'no status of devices'}, traces of stage 6, ends of logs",
        ]
    return "\n".join(lines)
