"""Python, the packages, whether they go together, and whether they can be imported at all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from packaging.version import InvalidVersion, Version

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.found import platform_of, torch_sees
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.nearest_versions import nearest_set
from megarl.commands.doctor.versions import LEAST, PYTHON
from megarl.platform.kinds import KINDS
from megarl.platform.version_sets import meets

_IMPORT_SECONDS = 120.0
# As trainers and engines do it, in processes of their own.
_TRAINER = "from megarl import platform; platform.select('{device}').prepare(); import megarl.megatron.trainer"
_ENGINE = "from megarl.engines.vllm.compat import capabilities; print(capabilities().device)"


@check("python", "the version, against setup.cfg's `python_requires` and what the set of packages is built for")
def python(machine: Machine, needs: Needs) -> Iterator[Finding]:
    have = Version(".".join(map(str, machine.python)))
    if not Version(PYTHON[0]) <= have < Version(PYTHON[1]):
        yield fail(
            f"Python {have}", f"megarl runs with {PYTHON[0]} and later, before {PYTHON[1]}: make another environment"
        )
        return
    minor, chosen = f"{have.major}.{have.minor}", nearest_set(machine, platform_of(machine, needs).kind.sets)
    if minor not in chosen.python:
        yield warning(
            f"Python {have}; the {chosen.name} set is put together for {', '.join(chosen.python)}",
            f"make an environment with Python {chosen.python[-1]}",
        )
        return
    yield ok(f"{have}, {machine.arch}")


@check("packages", "installed versions, against the sets that go together (below); the oldest that megarl works with")
def packages(machine: Machine, needs: Needs) -> Iterator[Finding]:
    chosen = nearest_set(machine, platform_of(machine, needs).kind.sets)
    have = {name: _installed(machine, name) for name in chosen.packages}
    how = f"the {chosen.name} set: {chosen.install}"
    missing = [name for name, version in have.items() if version is None and _is_needed(name, needs)]
    if missing:
        yield fail(f"not installed: {', '.join(missing)}", f"install {how}")
    other = [
        f"{name} {version} (there {wanted.removeprefix('==')})"
        for name, wanted in chosen.packages.items()
        if (version := have[name]) is not None and not meets(version, wanted)
    ]
    if other:
        yield warning(f"other versions than the {chosen.name} set has: {', '.join(other)}", f"untested together; {how}")
    for least in LEAST:
        version = have.get(least.package)
        if version is None or Version(version) >= Version(least.version):
            continue
        if not _is_needed(least.package, needs):
            continue
        decided = not least.training_alone or (needs.recipe and needs.trains)
        said = f"{least.package} {version}: {least.what}"
        yield (fail if decided else warning)(said, f"install {least.version} or later; {how}")
    if not missing and not other:
        named = ", ".join(f"{name} {version}" for name, version in have.items() if version)
        yield ok(f"the {chosen.name} set: {named}" + (f" ({chosen.remark})" if chosen.remark else ""))


@check("pairs", "packages of which one is built against the other, and those that must not lie side by side")
def pairs(machine: Machine, needs: Needs) -> Iterator[Finding]:
    for pair in (pair for kind in KINDS for pair in kind.built_against):
        name, other, numbers = pair.package, pair.other, pair.numbers
        left, right = (machine.version(one) for one in (name, other))
        if left is None or right is None or _numbers(left, numbers) == _numbers(right, numbers):
            continue
        wanted = ".".join(map(str, _numbers(left, numbers))) + ".*" * (numbers < 3)
        said = f"{name} {left} beside {other} {right}: {pair.why}"
        yield fail(said, f"pip install {other}=={wanted}, or another {name}")
    for both in (both for kind in KINDS for both in kind.displaced):
        wrong, good = (machine.version(one) for one in (both.wrong, both.right))
        if wrong and good:
            yield fail(
                f"{both.wrong} {wrong} beside {both.right} {good}: {both.why}",
                f"pip uninstall -y {both.wrong} {both.right}, then install {both.right} again with --no-deps: it names {both.wrong} itself",
            )
    torch = machine.version("torch") or ""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = machine.version(name)
        if torch.endswith("+cpu") and version and "+cpu" not in version and machine.arch == "x86_64":
            yield fail(
                f"{name} {version} is a CUDA build, torch {torch} is for CPUs: `import vllm` fails",
                f"pip uninstall -y {name}, or install its +cpu build from PyTorch's index for CPU wheels",
            )


@check(
    "imports", "that a trainer's and an engine's modules can be imported, as they will be", seconds=_IMPORT_SECONDS + 15
)
def imports(machine: Machine, needs: Needs) -> Iterator[Finding]:
    device, sees = platform_of(machine, needs).kind.name, torch_sees(machine)
    if sees.error or sees.kind != device:  # the check of the platform says it
        return
    trainer, engine = _TRAINER.format(device=device), _ENGINE
    with ThreadPoolExecutor(2) as threads:
        learns = threads.submit(machine.python_code, trainer, _IMPORT_SECONDS)
        samples = threads.submit(machine.python_code, engine, _IMPORT_SECONDS, VLLM_LOGGING_LEVEL="ERROR")
    if not learns.result().good:
        yield fail(f"a trainer's modules: {learns.result().last_error}", f"run: python -c {trainer!r}")
    said = samples.result()
    kind = said.text.split()[-1] if said.good and said.text.split() else ""
    # vLLM calls kinds of devices as cluster.device does.
    if not said.good or kind != device:
        text = said.last_error if not said.good else f"vLLM would run on {kind!r}, and the platform is {device}"
        remedy = f"run: python -c {engine!r}"
        yield (
            fail(f"an engine's modules: {text}", remedy)
            if needs.engines
            else warning(f"an engine's modules: {text}", f"RL and `megarl eval` need them; {remedy}")
        )
    elif learns.result().good:
        yield ok(f"trainer (Megatron, mbridge) and engine (vLLM on {kind})")


def _is_needed(package: str, needs: Needs) -> bool:
    """Whether the recipe does not work without; SFT samples nothing, and torchrun reaches processes without Ray."""
    return (needs.engines or not package.startswith("vllm")) and (needs.ray or package != "ray")


def _numbers(version: str, count: int) -> tuple[int, ...]:
    return Version(version).release[:count]


def _installed(machine: Machine, name: str) -> str | None:
    """The version that specifiers compare: vLLM calls a build without kernels of its own 0.23.0+empty."""
    version = machine.version(name)
    try:
        return None if version is None else str(Version(version))
    except InvalidVersion:
        return None
