"""Checks of Ascend machines apart from Python packages: CANN, NNAL, driver, device health and environment.

Paths, file formats and the output of `npu-smi info` follow users' reports of CANN 8.0 to 9.1 and npu-smi 24.1 to 26.0.
None of these checks has run on an Ascend machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from packaging.version import Version

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.platform_detection import busy, platform_of
from megarl.commands.doctor.versions import nearest_set
from megarl.platform.npu_kind import CANN, DRIVER, NPU, RELEASED_WITH, SHARES_MEMORY
from megarl.platform.version_sets import VersionSet

ASCEND = "/usr/local/Ascend"
SOURCE_CANN = f"source {ASCEND}/ascend-toolkit/set_env.sh"
SOURCE_NNAL = f"source {ASCEND}/nnal/atb/set_env.sh"
_MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_INSTALL_INFO = ("ascend_toolkit_install.info", "ascend_all_cann_install.info")
_LOAD_SECONDS = 10.0


def applies_to(machine: Machine, needs: Needs) -> bool:
    """Return True if the machine has NPU files or a driver, or NPUs are selected."""
    present = machine.glob(NPU.files) or machine.path(f"{ASCEND}/driver").exists()
    return bool(present) or platform_of(machine, needs).kind is NPU


@check("cann", "CANN is installed and sourced, in the version of its set; libascendcl and libhccl load", seconds=40)
def cann(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not applies_to(machine, needs):
        return
    chosen = set_of(machine)
    expected = chosen.system[CANN]
    home = machine.environ.get("ASCEND_HOME_PATH") or machine.environ.get("ASCEND_TOOLKIT_HOME")
    version = cann_version(machine, home)
    if version is None:
        where = f"{home} (ASCEND_HOME_PATH)" if home else f"{ASCEND}/ascend-toolkit/latest or {ASCEND}/cann"
        yield fail(
            f"no CANN in {where}",
            f"install CANN {expected} with the kernels of its chips, or source the set_env.sh of another folder; "
            f"or use {chosen.install}",
        )
        return
    if home is None:
        yield fail(f"CANN {version} is installed and not in the environment (no ASCEND_HOME_PATH)", SOURCE_CANN)
        return
    for library in ("libascendcl.so", "libhccl.so"):
        if error := _cannot_load(machine, library):
            yield fail(f"{library} of CANN {version} does not load: {error}", SOURCE_CANN)
            return
    if version.lower() != expected.lower():
        other = _set_of_cann(version)
        torch = f" (torch_npu {npu})" if (npu := machine.version("torch-npu")) else ""
        remedy = f"the set for {version}: {other.install}" if other and other is not chosen else "docs/doctor.md"
        yield warning(
            f"CANN {version}; the {chosen.name} set{torch} is for {expected}",
            f"install CANN {expected}, or {remedy}"
            if other is not chosen
            else f"install CANN {expected}; {chosen.install}",
        )
    else:
        yield ok(f"{version} in {home}")


@check("nnal", "NNAL (ATB, for vllm-ascend) is installed and sourced, in CANN's version, and libatb loads", seconds=25)
def nnal(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not applies_to(machine, needs):
        return
    home = machine.environ.get("ATB_HOME_PATH")
    folders = [str(PurePosixPath(home).parent.parent), home] if home else []
    texts = [machine.read(f"{folder}/version.info") for folder in [*folders, f"{ASCEND}/nnal/atb/latest"]]
    match = re.search(r"Ascend-cann-atb\s*:\s*(\S+)", "\n".join(filter(None, texts)))
    if match is None:
        yield fail("no NNAL in " + (home or f"{ASCEND}/nnal/atb/latest"), "install the NNAL package of CANN's version")
        return
    if home is None:
        yield fail(f"NNAL {match[1]} is installed and not in the environment (no ATB_HOME_PATH)", SOURCE_NNAL)
        return
    toolkit = cann_version(machine, machine.environ.get("ASCEND_HOME_PATH"))
    if toolkit is not None and match[1].lower() != toolkit.lower():
        text = f"NNAL {match[1]} with CANN {toolkit}: symbols of libatb.so may be undefined"
        yield fail(text, f"install NNAL {toolkit}")
    elif error := _cannot_load(machine, "libatb.so"):
        yield fail(f"libatb.so of NNAL {match[1]} does not load: {error}", f"{SOURCE_CANN}; {SOURCE_NNAL}")
    else:
        yield ok(match[1])


@check(
    "npu driver",
    "the driver (`/usr/local/Ascend/driver/version.info`) supports the set's CANN (else the finding names a set that it supports); with `weight_sync.transport: ipc`, it can share device memory; /dev has the managers' files",
)
def driver(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not applies_to(machine, needs):
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
            f"driver {version}, without {', '.join(absent)}",
            "pass them into the container, as launch/container.sh does",
        )
        return
    yield _compare_driver(machine, version)
    if needs.device_memory and _release(version) < _release(SHARES_MEMORY):
        yield warning(
            f"driver {version}; weight_sync.transport=ipc needs {SHARES_MEMORY} or later to share device memory",
            f"update the driver to {SHARES_MEMORY} or later, or set weight_sync.transport=auto",
        )


@check("npu health", "`npu-smi info`: all chips are OK and have a file in /dev; no other process uses their memory")
def health(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not applies_to(machine, needs):
        return
    output = machine.run(["npu-smi", "info"], 10.0)
    if output is None:
        yield warning(
            "npu-smi is not installed",
            "in a container, mount the host's npu-smi (/usr/local/bin or /usr/local/sbin) and /usr/local/dcmi",
        )
        return
    listed = chips(output.text) if output.good else []
    if not listed:
        yield fail(f"npu-smi info: {output.last_error}", "the driver does not answer: its log is in /var/log/npu")
        return
    for chip in listed:
        if chip.health != "OK":
            remedy = f"npu-smi info -t health -i {chip.card}; exclude it with ASCEND_RT_VISIBLE_DEVICES, or reset it"
            yield fail(f"chip {chip.number} ({chip.name}) is {chip.health}", remedy)
    files = len(machine.glob(NPU.files))
    if files < len(listed):
        remedy = "pass every /dev/davinci* into the container"
        yield warning(f"npu-smi sees {len(listed)} chips, {files} have a file /dev/davinci*", remedy)
    yield from busy({str(chip.number): (chip.used, chip.total) for chip in listed})
    if all(chip.health == "OK" for chip in listed):
        yield ok(f"{len(listed)} x {listed[0].name}")


@check("npu environment", "no variable is set that breaks engines or collectives")
def environment(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if platform_of(machine, needs).kind is not NPU:
        return
    setting = machine.environ.get("PYTORCH_NPU_ALLOC_CONF", "")
    if "expandable_segments:true" in setting.lower().replace(" ", "") and needs.engines:
        remedy = "unset PYTORCH_NPU_ALLOC_CONF: megarl sets it for trainers only, and overrides it for engines"
        yield warning(f"PYTORCH_NPU_ALLOC_CONF={setting}, which vllm-ascend's sleep mode rejects", remedy)
    if table := machine.environ.get("RANK_TABLE_FILE"):
        text = f"RANK_TABLE_FILE={table}: it describes one group of all devices, and megarl's processes form several"
        yield warning(text, "unset RANK_TABLE_FILE: megarl empties it for trainers and engines")
    if machine.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield warning("TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch does not load torch_npu automatically", "unset it")


CHECKS = (driver, cann, nnal, health, environment)  # the driver first: it decides which sets are possible


# --- sets of versions ---------------------------------------------------------------------------


def set_of(machine: Machine) -> VersionSet:
    """Return the version set that the machine's packages fit best.

    Without torch_npu: the set of the installed CANN, else the newest set that works with the driver, else the default.
    """
    if machine.version("torch-npu") is not None:
        return nearest_set(machine, NPU.sets)
    version = cann_version(machine, machine.environ.get("ASCEND_HOME_PATH"))
    driver = _driver_version(machine.read(f"{ASCEND}/driver/version.info") or "")
    return (version and _set_of_cann(version)) or (driver and newest_set_for(driver)) or NPU.sets[0]


def newest_set_for(driver: str) -> VersionSet | None:
    """Return the first set in `NPU.sets` (the default comes first) with a CANN that works with this driver.

    None if the driver is older than every documented minimum.
    """
    documented = (versions for versions in NPU.sets if DRIVER in versions.system)
    return next((versions for versions in documented if _release(driver) >= _release(versions.system[DRIVER])), None)


def _set_of_cann(version: str) -> VersionSet | None:
    """Return the set with this CANN, else the set with another patch of the same minor version (8.5.2: 8.5.1's)."""
    exact = [chosen for chosen in NPU.sets if chosen.system[CANN].lower() == version.lower()]
    release = _release(version).release[:2]
    same_minor = [chosen for chosen in NPU.sets if _release(chosen.system[CANN]).release[:2] == release]
    return next(iter(exact + same_minor), None)


def _compare_driver(machine: Machine, version: str) -> Finding:
    """Compare the driver with the minimum of the machine's set. A driver that CANN's release notes exclude fails."""
    chosen = set_of(machine)
    least, usual = chosen.system.get(DRIVER), chosen.system.get(RELEASED_WITH)
    best = newest_set_for(version)
    if least and _release(version) < _release(least):
        other = f", or use the {best.name} set, which works with it: {best.install}" if best else ""
        text = f"driver {version}; CANN {chosen.system[CANN]} works with {least} and later"
        return fail(text, f"update the driver and firmware to {least} or later{other}")
    if least is None and usual and _release(version) < _release(usual):
        return warning(
            f"driver {version}; CANN {chosen.system[CANN]} was released with {usual}", f"update the driver to {usual}"
        )
    documented = f"works with {least} and later, and " if least else ""
    summary = f"{version}; CANN {chosen.system[CANN]} {documented}was released with {usual}"
    if machine.version("torch-npu") is None and best is not None:
        summary += f". Nothing is installed yet; the newest set for this driver is {best.name}: {best.install}"
    return ok(summary)


# --- files and npu-smi --------------------------------------------------------------------------


def _driver_version(text: str) -> str | None:
    """Return the version in the text of the driver's version.info, or None."""
    match = re.search(r"^package_version=(\S+)", text, re.M) or re.search(r"^Version=(\S+)", text, re.M)
    return match[1] if match else None


def cann_version(machine: Machine, home: str | None) -> str | None:
    """Return the version of the toolkit in `home` (None: the default folders), such as "8.3.RC1", or None.

    The files, in this order: ascend_toolkit_install.info, for CANN 9 ascend_all_cann_install.info (version=8.3.RC1);
    version.cfg (runtime_running_version=[7.6.0:8.3.RC1]); runtime/version.info (Version=9.0.0). For CANN 8 the last one
    has the version of the runtime, not of CANN, and is ignored.
    """
    for folder in [home] if home else [f"{ASCEND}/ascend-toolkit/latest", f"{ASCEND}/cann"]:
        names = [f"{place}{file}" for place in ("*-linux/", "") for file in _INSTALL_INFO]
        for file in (path for name in names for path in machine.glob(f"{folder}/{name}")):
            if match := re.search(r"^version=(\S+)", machine.read(file) or "", re.M):
                return match[1]
        config = machine.read(f"{folder}/version.cfg") or ""
        if match := re.search(r"^(?:runtime|toolkit)_running_version=\[[^:\]]*:([^\]]+)\]", config, re.M):
            return match[1]
        runtime = machine.read(f"{folder}/runtime/version.info") or ""
        if (match := re.search(r"^Version=(\d+)(\S*)", runtime, re.M)) and int(match[1]) >= 9:
            return match[1] + match[2]
    return None


@dataclass(frozen=True)
class Chip:
    """A row of `npu-smi info`, which torch counts as one device. `used` and `total`: MiB of high-bandwidth memory."""

    card: int
    number: int  # among all chips: the Phy-ID on an A3, which has two chips per card
    name: str
    health: str
    used: float
    total: float


_CARD_ROW = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\S+)\s*\|\s*[\d.-]+|^\|\s*(\d+)\s+(\S+)\s*\|\s*(\w+)\s*\|\s*NA")
_CHIP_ROW = re.compile(r"^\|\s*\d+(?:\s+(\d+))?\s*\|\s*[0-9A-Fa-f]{4}:\S+\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|?$")


def chips(text: str) -> list[Chip]:
    """Parse the chips from the table of `npu-smi info`: two rows per chip, followed by rows of processes."""
    listed: list[Chip] = []
    card: tuple[int, str, str] | None = None
    for line in map(str.rstrip, text.splitlines()):
        if chip := _CHIP_ROW.match(line):
            if card is not None:
                number = int(chip[1]) if chip[1] else len(listed)
                listed.append(Chip(card[0], number, card[1], card[2], float(chip[2]), float(chip[3])))
            card = None
        elif row := _CARD_ROW.match(line):
            index, name, state = row.groups()[:3] if row[1] else row.groups()[3:]
            card = (int(index), name, state)
    return listed


def _cannot_load(machine: Machine, library: str) -> str:
    """Return why the library cannot be loaded, or "". It is loaded in a child process, since its start may crash."""
    output = machine.python_code(f"import ctypes; ctypes.CDLL({library!r})", _LOAD_SECONDS)
    return "" if output.good else output.last_error.removeprefix("OSError: ")


def _release(version: str) -> Version:
    """Parse the part of "26.0.rc1", "25.2.0" or "25.5.0.b012" that PEP 440 can compare."""
    match = re.match(r"\d+(?:\.\d+)*(?:\.?rc\d+)?", version.lower())
    return Version(match[0]) if match else Version("0")
