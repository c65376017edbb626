"""What an Ascend machine needs beside Python packages: CANN, NNAL, the driver, and devices that are well.

Where things lie, and what files and `npu-smi info` say, is as CANN 8.0 to 9.1 and npu-smi 24.1 to 26.0 have it in users'
reports; nothing of it was run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from packaging.version import Version

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.found import busy, platform_of
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.nearest_versions import nearest_set
from megarl.platform.npu_kind import CANN, DRIVER, NPU, RELEASED_WITH
from megarl.platform.version_sets import VersionSet

ASCEND = "/usr/local/Ascend"
SOURCE_CANN = f"source {ASCEND}/ascend-toolkit/set_env.sh"
SOURCE_NNAL = f"source {ASCEND}/nnal/atb/set_env.sh"
_MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_INSTALL_INFO = ("ascend_toolkit_install.info", "ascend_all_cann_install.info")
_LOAD_SECONDS = 10.0


def concerns(machine: Machine, needs: Needs) -> bool:
    """Whether there is an NPU stack here, or one is asked for."""
    present = machine.glob(NPU.files) or machine.path(f"{ASCEND}/driver").exists()
    return bool(present) or platform_of(machine, needs).kind is NPU


@check("cann", "that CANN is installed, its environment sourced, libascendcl and libhccl load; the version its set names", seconds=40)  # fmt: skip
def cann(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not concerns(machine, needs):
        return
    chosen = set_of(machine)
    wanted = chosen.system[CANN]
    home = machine.environ.get("ASCEND_HOME_PATH") or machine.environ.get("ASCEND_TOOLKIT_HOME")
    version = cann_version(machine, home)
    if version is None:
        where = f"{home} (ASCEND_HOME_PATH)" if home else f"{ASCEND}/ascend-toolkit/latest or {ASCEND}/cann"
        yield fail(
            f"no CANN in {where}",
            f"install CANN {wanted} with the kernels of its chips, or source the set_env.sh of where it is; "
            f"an image has it: {chosen.install}",
        )
        return
    if home is None:
        yield fail(f"CANN {version} is installed and not in the environment (no ASCEND_HOME_PATH)", SOURCE_CANN)
        return
    for library in ("libascendcl.so", "libhccl.so"):
        if error := _cannot_load(machine, library):
            yield fail(f"{library} of CANN {version} does not load: {error}", SOURCE_CANN)
            return
    if _lower(version) != _lower(wanted):
        other = _set_of_cann(version)
        torch = f" (torch_npu {npu})" if (npu := machine.version("torch-npu")) else ""
        remedy = f"the set for {version}: {other.install}" if other and other is not chosen else "docs/doctor.md"
        yield warning(
            f"CANN {version}; the {chosen.name} set{torch} is put together for {wanted}",
            f"install CANN {wanted}, or {remedy}"
            if other is not chosen
            else f"install CANN {wanted}; {chosen.install}",
        )
    else:
        yield ok(f"{version} in {home}")


@check("nnal", "that NNAL (ATB) is installed, sourced, of CANN's version, and libatb loads: vllm-ascend calls it", seconds=25)  # fmt: skip
def nnal(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not concerns(machine, needs):
        return
    home = machine.environ.get("ATB_HOME_PATH")
    folders = [str(PurePosixPath(home).parent.parent), home] if home else []
    texts = [machine.read(f"{folder}/version.info") for folder in [*folders, f"{ASCEND}/nnal/atb/latest"]]
    found = re.search(r"Ascend-cann-atb\s*:\s*(\S+)", "\n".join(filter(None, texts)))
    if found is None:
        yield fail("no NNAL in " + (home or f"{ASCEND}/nnal/atb/latest"), "install the NNAL package of CANN's version")
        return
    if home is None:
        yield fail(f"NNAL {found[1]} is installed and not in the environment (no ATB_HOME_PATH)", SOURCE_NNAL)
        return
    toolkit = cann_version(machine, machine.environ.get("ASCEND_HOME_PATH"))
    if toolkit is not None and _lower(found[1]) != _lower(toolkit):
        said = f"NNAL {found[1]} beside CANN {toolkit}: symbols of libatb.so may be undefined"
        yield fail(said, f"install NNAL {toolkit}")
    elif error := _cannot_load(machine, "libatb.so"):
        yield fail(f"libatb.so of NNAL {found[1]} does not load: {error}", f"{SOURCE_CANN}; {SOURCE_NNAL}")
    else:
        yield ok(found[1])


@check("npu driver", "`/usr/local/Ascend/driver/version.info` against what the set's CANN works with, and the best set for it; the managers' files in /dev")  # fmt: skip
def driver(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not concerns(machine, needs):
        return
    text = machine.read(f"{ASCEND}/driver/version.info") or ""
    version = _driver_version(text)
    if version is None:
        remedy = f"install the driver; in a container, mount the host's {ASCEND}/driver"
        yield fail(f"no {ASCEND}/driver/version.info", remedy)
        return
    absent = [file for file in _MANAGERS if not machine.path(file).exists()]
    if absent:
        yield fail(
            f"driver {version}, without {', '.join(absent)}", "pass them into the container (Dockerfile.npu's head)"
        )
        return
    yield _judge_driver(machine, version)


@check("npu health", "`npu-smi info`: chips that are not OK, chips without a file in /dev, memory that others hold")
def health(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not concerns(machine, needs):
        return
    output = machine.run(["npu-smi", "info"], 10.0)
    if output is None:
        yield warning(
            "npu-smi is not installed", "in a container, mount the host's /usr/local/bin/npu-smi and /usr/local/dcmi"
        )
        return
    found = chips(output.text) if output.good else []
    if not found:
        yield fail(f"npu-smi info: {output.last_error}", "the driver does not answer: its log is in /var/log/npu")
        return
    for chip in found:
        if chip.health != "OK":
            remedy = f"npu-smi info -t health -i {chip.card}; leave it out by ASCEND_RT_VISIBLE_DEVICES, or reset it"
            yield fail(f"chip {chip.number} ({chip.name}) is {chip.health}", remedy)
    files = len(machine.glob(NPU.files))
    if files < len(found):
        remedy = "in a container, pass every /dev/davinci* in"
        yield warning(f"npu-smi sees {len(found)} chips, {files} have a file /dev/davinci*", remedy)
    yield from busy({str(chip.number): (chip.used, chip.total) for chip in found})
    if all(chip.health == "OK" for chip in found):
        yield ok(f"{len(found)} x {found[0].name}")


@check("npu environment", "variables that break engines or collectives where they are set for every process")
def environment(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if platform_of(machine, needs).kind is not NPU:
        return
    setting = machine.environ.get("PYTORCH_NPU_ALLOC_CONF", "")
    if "expandable_segments:true" in setting.lower() and needs.engines:
        remedy = "unset PYTORCH_NPU_ALLOC_CONF: megarl sets it for trainers alone, and overrules it for engines"
        yield warning(f"PYTORCH_NPU_ALLOC_CONF={setting}, which vllm-ascend's sleep mode refuses", remedy)
    if machine.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield warning("TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch does not load torch_npu by itself", "unset it")


CHECKS = (driver, cann, nnal, health, environment)  # the driver first: it decides which sets are possible


# --- sets of versions ---------------------------------------------------------------------------


def set_of(machine: Machine) -> VersionSet:
    """The version set that a machine's packages are nearest to. Without torch_npu: the set of the CANN that is installed,
    else the newest set that works with the driver, else the default."""
    if machine.version("torch-npu") is not None:
        return nearest_set(machine, NPU.sets)
    version = cann_version(machine, machine.environ.get("ASCEND_HOME_PATH"))
    driver = _driver_version(machine.read(f"{ASCEND}/driver/version.info") or "")
    return (version and _set_of_cann(version)) or (driver and newest_set_for(driver)) or NPU.sets[0]


def newest_set_for(driver: str) -> VersionSet | None:
    """The first set in `NPU.sets` (the default comes first) whose CANN works with this driver; None if the driver is older
    than all of them need, or if no set's demand is documented."""
    return next(
        (one for one in NPU.sets if DRIVER in one.system and _release(driver) >= _release(one.system[DRIVER])), None
    )


def _set_of_cann(version: str) -> VersionSet | None:
    """The set with this CANN, or else with another patch of the same minor version (8.5.2: the set of 8.5.1)."""
    exact = [one for one in NPU.sets if _lower(one.system[CANN]) == _lower(version)]
    minor = [one for one in NPU.sets if _release(one.system[CANN]).release[:2] == _release(version).release[:2]]
    return next(iter(exact + minor), None)


def _judge_driver(machine: Machine, version: str) -> Finding:
    """Compare the driver with the demand of the machine's set. A driver that CANN's release notes exclude is a failure."""
    chosen = set_of(machine)
    least, usual = chosen.system.get(DRIVER), chosen.system.get(RELEASED_WITH)
    best = newest_set_for(version)
    if least and _release(version) < _release(least):
        other = f", or take the {best.name} set, which works with it: {best.install}" if best else ""
        said = f"driver {version}; CANN {chosen.system[CANN]} works with {least} and later"
        return fail(said, f"update the driver and firmware to {least} or later{other}")
    if least is None and usual and _release(version) < _release(usual):
        return warning(
            f"driver {version}; CANN {chosen.system[CANN]} was released with {usual}", f"update the driver to {usual}"
        )
    documented = f"works with {least} and later, and " if least else ""
    words = f"{version}; CANN {chosen.system[CANN]} {documented}was released with {usual}"
    if machine.version("torch-npu") is None and best is not None:
        words += f". Nothing is installed yet; the newest set for this driver is {best.name}: {best.install}"
    return ok(words)


# --- what files and npu-smi say -----------------------------------------------------------------


def _driver_version(text: str) -> str | None:
    """The version in the text of the driver's version.info; None if there is none."""
    found = re.search(r"^package_version=(\S+)", text, re.M) or re.search(r"^Version=(\S+)", text, re.M)
    return found[1] if found else None


def cann_version(machine: Machine, home: str | None) -> str | None:
    """Of the toolkit in `home` (None: where it is installed by default), as "8.3.RC1"; None where none is found.

    Read in this order: ascend_toolkit_install.info, in CANN 9 ascend_all_cann_install.info (version=8.3.RC1), version.cfg (runtime_running_version=[7.6.0:8.3.RC1]),
    runtime/version.info (Version=9.0.0, which for CANN 8 is the runtime's own number and says nothing).
    """
    for folder in [home] if home else [f"{ASCEND}/ascend-toolkit/latest", f"{ASCEND}/cann"]:
        names = [f"{place}{file}" for place in ("*-linux/", "") for file in _INSTALL_INFO]
        for file in (path for name in names for path in machine.glob(f"{folder}/{name}")):
            if found := re.search(r"^version=(\S+)", machine.read(file) or "", re.M):
                return found[1]
        config = machine.read(f"{folder}/version.cfg") or ""
        if found := re.search(r"^(?:runtime|toolkit)_running_version=\[[^:\]]*:([^\]]+)\]", config, re.M):
            return found[1]
        runtime = machine.read(f"{folder}/runtime/version.info") or ""
        if (found := re.search(r"^Version=(\d+)(\S*)", runtime, re.M)) and int(found[1]) >= 9:
            return found[1] + found[2]
    return None


@dataclass(frozen=True)
class Chip:
    """A row of `npu-smi info`: what torch counts as one device. `used`, `total`: MiB of its high-bandwidth memory."""

    card: int
    number: int  # among all chips: of an A3, whose cards have two, the Phy-ID
    name: str
    health: str
    used: float
    total: float


_CARD_ROW = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\S+)\s*\|\s*[\d.-]+|^\|\s*(\d+)\s+(\S+)\s*\|\s*(\w+)\s*\|\s*NA")
_CHIP_ROW = re.compile(r"^\|\s*\d+(?:\s+(\d+))?\s*\|\s*[0-9A-Fa-f]{4}:\S+\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|?$")


def chips(text: str) -> list[Chip]:
    """The chips in the table that `npu-smi info` writes: two rows a chip, and processes below."""
    found: list[Chip] = []
    card: tuple[int, str, str] | None = None
    for line in map(str.rstrip, text.splitlines()):
        if chip := _CHIP_ROW.match(line):
            if card is not None:
                number = int(chip[1]) if chip[1] else len(found)
                found.append(Chip(card[0], number, card[1], card[2], float(chip[2]), float(chip[3])))
            card = None
        elif row := _CARD_ROW.match(line):
            index, name, state = row.groups()[:3] if row[1] else row.groups()[3:]
            card = (int(index), name, state)
    return found


def _cannot_load(machine: Machine, library: str) -> str:
    """Why the loader does not load it, in a process of its own, since what a library does at its start may crash; "" where
    it does."""
    output = machine.python_code(f"import ctypes; ctypes.CDLL({library!r})", _LOAD_SECONDS)
    return "" if output.good else output.last_error.removeprefix("OSError: ")


def _lower(version: str) -> str:
    return version.lower()


def _release(version: str) -> Version:
    """Comparable: "26.0.rc1" and "25.2.0" are versions as PEP 440 knows them, but for a trailing letter or two."""
    found = re.match(r"\d+(?:\.\d+)*(?:\.?rc\d+)?", version.lower())
    return Version(found[0]) if found else Version("0")
