"""Checks of Python and its packages: versions, compatible pairs, and imports."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from packaging.version import InvalidVersion, Version

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.machine import Machine, Output
from megarl.commands.doctor.platform_detection import platform_of, torch_sees
from megarl.commands.doctor.versions import MINIMUM_VERSIONS, PYTHON, nearest_set
from megarl.engines.vllm.route_support import DISTRIBUTIONS
from megarl.platform.kinds import KINDS
from megarl.platform.version_sets import cuda_builds, cuda_builds_remedy, meets

_IMPORT_SECONDS = 120.0
# The imports of trainers and engines. They run in child processes.
_TRAINER = "from megarl import platform; platform.select('{device}').prepare(); import megarl.megatron.trainer"
_ENGINE = "from megarl.engines.vllm.compat import capabilities; print(capabilities().device)"
_SGLANG = "from sglang.srt.entrypoints.engine import Engine; Engine.begin_weight_update"


@check("python", "the version satisfies setup.cfg's `python_requires` and the set of packages")
def python(machine: Machine, needs: Needs) -> Iterator[Finding]:
    have = Version(".".join(map(str, machine.python)))
    if not Version(PYTHON[0]) <= have < Version(PYTHON[1]):
        yield fail(
            f"Python {have}",
            f"megarl needs {PYTHON[0]} or later, and earlier than {PYTHON[1]}: create another environment",
        )
        return
    minor, chosen = f"{have.major}.{have.minor}", nearest_set(machine, platform_of(machine, needs).kind.sets)
    if minor not in chosen.python:
        yield warning(
            f"Python {have}; the {chosen.name} set is for {', '.join(chosen.python)}",
            f"create an environment with Python {chosen.python[-1]}",
        )
        return
    yield ok(f"{have}, {machine.arch}")


@check("packages", "installed versions belong to one of the sets below and are not too old for megarl")
def packages(machine: Machine, needs: Needs) -> Iterator[Finding]:
    kind = platform_of(machine, needs).kind
    chosen = nearest_set(machine, kind.sets)
    have = {name: _installed(machine, name) for name in chosen.packages}
    how = f"the {chosen.name} set: {chosen.install}"
    missing = [name for name, version in have.items() if version is None and _is_needed(name, needs)]
    if missing:
        names = [f"{name}{_other_build(machine, name)}" for name in missing]
        yield fail(f"not installed: {', '.join(names)}", f"install {how}")
    if lacks_sglang := needs.engines and "sglang" in needs.libraries and _installed(machine, "sglang") is None:
        yield fail("not installed: sglang", f"{kind.install_sglang}, or set the recipe's engine to vllm")
    different = [
        f"{name} {version} (the set has {pin.removeprefix('==')})"
        for name, pin in chosen.packages.items()
        if (version := have[name]) is not None and not meets(version, pin)
    ]
    if different:
        text = f"versions differ from the {chosen.name} set: {', '.join(different)}"
        yield warning(text, f"they are untested together: install {how}")
    for minimum in MINIMUM_VERSIONS:
        version = have.get(minimum.package)
        if version is None or Version(version) >= Version(minimum.version):
            continue
        if not _is_needed(minimum.package, needs):
            continue
        required = not minimum.training_only or (needs.recipe and needs.trains)
        text = f"{minimum.package} {version}: {minimum.problem}"
        yield (fail if required else warning)(text, f"install {minimum.version} or later; {how}")
    if not missing and not different and not lacks_sglang:
        named = ", ".join(f"{name} {version}" for name, version in have.items() if version)
        yield ok(f"the {chosen.name} set: {named}" + (f" ({chosen.remark})" if chosen.remark else ""))


@check("pairs", "packages that are built against each other match; no package displaces another")
def pairs(machine: Machine, needs: Needs) -> Iterator[Finding]:
    for pair in (pair for kind in KINDS for pair in kind.built_against):
        name, other, numbers = pair.package, pair.other, pair.numbers
        left, right = machine.version(name), machine.version(other)
        if left is None or right is None or _numbers(left, numbers) == _numbers(right, numbers):
            continue
        pin = ".".join(map(str, _numbers(left, numbers))) + ".*" * (numbers < 3)
        text = f"{name} {left} with {other} {right}: {pair.why}"
        yield fail(text, f"pip install {other}=={pin}, or another {name}")
    for both in (both for kind in KINDS for both in kind.displaced):
        unwanted, expected = machine.version(both.wrong), machine.version(both.right)
        if unwanted and expected:
            yield fail(
                f"{both.wrong} {unwanted} is installed with {both.right} {expected}: {both.why}",
                f"pip uninstall -y {both.wrong} {both.right}, then install {both.right} again with --no-deps, because it depends on {both.wrong}",
            )
    if builds := cuda_builds(machine.version, machine.arch):
        yield fail("; ".join(builds.values()), cuda_builds_remedy(builds))


@check("imports", "the modules of a trainer and an engine can be imported", seconds=_IMPORT_SECONDS + 15)
def imports(machine: Machine, needs: Needs) -> Iterator[Finding]:
    device, sees = platform_of(machine, needs).kind.name, torch_sees(machine)
    if sees.error or sees.kind != device:  # the check `platform` reports it
        return
    trainer_code = _TRAINER.format(device=device)
    libraries = needs.libraries if needs.engines else ("vllm",)
    with ThreadPoolExecutor(3) as threads:
        training = threads.submit(machine.python_code, trainer_code, _IMPORT_SECONDS)
        vllm = threads.submit(_import_vllm, machine) if "vllm" in libraries else None
        sglang = threads.submit(machine.python_code, _SGLANG, _IMPORT_SECONDS) if "sglang" in libraries else None
    trainer = training.result()
    if not trainer.good:
        yield fail(f"a trainer's modules: {trainer.last_error}", _import_remedy(trainer_code, late=trainer.late))
    engines: dict[str, tuple[str, str]] = {}  # (error, "" if it can be imported; remedy), by name in the report
    if vllm is not None:
        output = vllm.result()
        engines[f"vLLM on {device}"] = _vllm_error(output, device), _import_remedy(_ENGINE, late=output.late)
    if sglang is not None:
        output = sglang.result()
        engines["SGLang"] = "" if output.good else output.last_error, _import_remedy(_SGLANG, late=output.late)
    problems = [(error, remedy) for error, remedy in engines.values() if error]
    for error, remedy in problems:
        yield (
            fail(f"an engine's modules: {error}", remedy)
            if needs.engines
            else warning(f"an engine's modules: {error}", f"RL and `megarl eval` need them; {remedy}")
        )
    if trainer.good and not problems:
        yield ok(f"trainer (Megatron, mbridge) and engine ({', '.join(engines)})")


def _import_remedy(code: str, *, late: bool) -> str:
    """Return what to do about a failed import by `code`. late: it did not end in time."""
    if not late:
        return f"for the whole traceback run: python -c {code!r}"
    return (
        "run the doctor again: the first import reads gigabytes, and later ones find them in memory. If it takes as long "
        "again, the environment's file system is slow or the CPUs are busy (top): copy the environment to a local disk. "
        f"To see where the import waits: python -X importtime -c {code!r}"
    )


def _import_vllm(machine: Machine) -> Output:
    return machine.python_code(_ENGINE, _IMPORT_SECONDS, VLLM_LOGGING_LEVEL="ERROR")


def _vllm_error(output: Output, device: str) -> str:
    """Return why vLLM's modules cannot run engines on `device`; "" if they can. output: the result of `_import_vllm`."""
    if not output.good:
        return output.last_error
    # vLLM's names for kinds of devices are the values of cluster.device.
    kind = output.text.split()[-1] if output.text.split() else ""
    return "" if kind == device else f"vLLM would run on {kind!r}, and the platform is {device}"


def _is_needed(package: str, needs: Needs) -> bool:
    """Return True if the recipe needs the package. SFT needs no engine, SGLang no vLLM, and torchrun no Ray."""
    vllm = needs.engines and "vllm" in needs.libraries
    return (vllm or not package.startswith("vllm")) and (needs.ray or package != "ray")


def _other_build(machine: Machine, package: str) -> str:
    """Return, in parentheses, the build of vLLM for other devices that is here instead of `package`; "" if there is none."""
    builds = [f"{name} {machine.version(name)}" for name in DISTRIBUTIONS if machine.version(name)]
    return (
        f" ({', '.join(builds)} is installed, a build for other devices)" if package in DISTRIBUTIONS and builds else ""
    )


def _numbers(version: str, count: int) -> tuple[int, ...]:
    return Version(version).release[:count]


def _installed(machine: Machine, name: str) -> str | None:
    """Return the version in a form that specifiers compare: vLLM's build without kernels is 0.23.0+empty."""
    version = machine.version(name)
    try:
        return None if version is None else str(Version(version))
    except InvalidVersion:
        return None
