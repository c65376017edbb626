"""The bundle: one archive with verdict.md, results.json, packages, environment, device status, traces and ends of logs."""

from __future__ import annotations

import datetime
import importlib.metadata
import io
import os
import platform
import re
import stat
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.atomic_files import atomic_file
from megarl.commands.accept.result import FAIL, StageResult, shown, verdict_of
from megarl.commands.accept.settings import Settings
from megarl.commands.doctor.machine import run
from megarl.errors import cut_end
from megarl.platform.kinds import KINDS, kind_of

VERDICT = "verdict.md"
TAIL = 256 * 1024  # longer logs are cut to their last bytes
MOST = 1 << 20  # larger files other than logs are omitted, bytes
TRACES = "profile"  # folder of a run's traces
ALL_TRACES = 64 << 20  # limit on all traces together, bytes
DEVICE_LOGS = 20  # newest files of the driver's and runtime's logs
STATUS_SECONDS = 30.0
_CELL = 160  # characters of a cause in a table

# Allowed prefixes of variables in the bundle. Each DeviceKind adds more.
PREFIXES = ("GLOO_", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "MASTER_", "MEGARL_", "OMP_", "PATH", "PYTHON", "PYTORCH_",
            "RANK", "RAY_", "TORCH", "VLLM_", "WORLD_SIZE")  # fmt: skip
OMITTED = {"shared", "checkpoints"}  # folders
WEIGHTS = {".safetensors", ".parquet", ".pt"}
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|PROXY", re.IGNORECASE)


def write_bundle(directory: Path, settings: Settings, results: Sequence[StageResult], archive: Path) -> list[str]:
    """Write all parts into `directory` and pack them into `archive`. Return one line for each missing part."""
    problems: list[str] = []
    (directory / VERDICT).write_text(verdict_page(settings, results), encoding="utf-8")
    (directory / "packages.txt").write_text(packages(), encoding="utf-8")
    (directory / "environment.txt").write_text(environment(os.environ), encoding="utf-8")
    (directory / "devices.txt").write_text(device_status(settings, problems), encoding="utf-8")
    with atomic_file(archive) as part, tarfile.open(part, "w:gz") as tar:
        _add_all(tar, directory, archive.name.removesuffix(".tar.gz"), settings, problems)
    return problems


def _add_all(tar: tarfile.TarFile, directory: Path, root: str, settings: Settings, problems: list[str]) -> None:
    """Add the files of `directory` and the device's logs below the folder `root` of the archive."""
    files = sorted(_files(directory))
    traces = _traces(directory, files)
    for path in files:
        if TRACES not in path.relative_to(directory).parts or path in traces:
            _add(tar, path, f"{root}/{path.relative_to(directory)}", problems, most=traces.get(path, MOST))
    omitted = [path for path in files if TRACES in path.relative_to(directory).parts and path not in traces]
    if omitted:
        problems.append(f"{len(omitted)} files of traces, above {ALL_TRACES >> 20} MiB: {omitted[0].parent}")
    for path in _device_logs(settings.device, problems):
        _add(tar, path, f"{root}/device_logs/{str(path).lstrip('/').replace('/', '__')}", problems)


def verdict_page(settings: Settings, results: Sequence[StageResult]) -> str:
    """Return the text of verdict.md: the verdict, a table of stages, and all checks with limits, failures first."""
    verdict, reason = verdict_of(results)
    lines = [
        f"# {verdict}" + (f": {reason}" if reason else ""),
        "",
        f"{platform.node()}, {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}: {settings.nodes} x "
        f"{settings.devices} {kind_of(settings.device).plural}, recipe {settings.recipe or '(none)'}",
        "",
        "| stage | verdict | seconds | checks | reason |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        passed = sum(check.verdict == "PASS" for check in result.checks)
        limited = sum(check.verdict in ("PASS", "FAIL") for check in result.checks)
        row = (f"{result.number} {result.name}", result.verdict, f"{result.seconds:.0f}", f"{passed} of {limited}")
        lines.append(f"| {' | '.join(row)} | {_cell(result.reason)} |")
    for result in results:
        lines += [
            "",
            f"## {result.number} {result.name}",
            "",
            "| check | verdict | value | limit | unit | cause |",
            "|---|---|---|---|---|---|",
        ]
        for check in sorted(result.checks, key=lambda check: check.verdict != FAIL):
            limit = f"{check.relation} {shown(check.limit)}" if check.relation else ""
            value = "" if check.value is None else shown(check.value)
            cells = (check.name, check.verdict, value, limit, check.unit, check.cause)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return cut_end(" ".join(text.split()).replace("|", "\\|"), _CELL)


def packages() -> str:
    """Return the installed distributions, one `name==version` per line."""
    rows = {f"{entry.metadata['Name']}=={entry.version}" for entry in importlib.metadata.distributions()}
    return (
        f"Python {platform.python_version()}, {platform.platform()}\n" + "\n".join(sorted(rows, key=str.lower)) + "\n"
    )


def environment(variables: Mapping[str, str]) -> str:
    """Return the allowed variables, one per line, without names that look like secrets."""
    prefixes = (*PREFIXES, *(prefix for kind in KINDS for prefix in kind.environment))
    rows = [
        f"{name}={value}"
        for name, value in sorted(variables.items())
        if name.startswith(prefixes) and not SECRET.search(name)
    ]
    return "\n".join(rows) + "\n"


def device_status(settings: Settings, problems: list[str]) -> str:
    """Return the output of the vendor's commands: for all devices together, then for each device of this node."""
    kind = kind_of(settings.device)
    each = [
        tuple(word.format(device=number) for word in words)
        for number in range(settings.devices)
        for words in kind.device_commands
    ]
    texts, absent = [], set()
    for words in (*kind.status_commands, *each):
        if words[0] in absent:
            continue
        output = run(list(words), dict(os.environ), STATUS_SECONDS)
        if output is None:
            absent.add(words[0])
            problems.append(f"{words[0]}: command not found")
        else:
            texts.append(f"$ {' '.join(words)}\n{output.text}{output.errors}")
    return "\n".join(texts)


def _device_logs(device: str, problems: list[str]) -> list[Path]:
    """Return the newest logs of runtime and driver. Logs that this user may not see are added to `problems`."""
    patterns = [os.path.expanduser(pattern).lstrip("/") for pattern in kind_of(device).logs]
    times: dict[Path, float] = {}
    for path in (path for pattern in patterns for path in Path("/").glob(pattern)):
        try:
            status = path.stat()
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if stat.S_ISREG(status.st_mode):
            times[path] = status.st_mtime
    return sorted(times, key=lambda path: times[path])[-DEVICE_LOGS:]


def _files(directory: Path) -> list[Path]:
    """Return the files for the bundle: all but weights, checkpoints and rows."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return [
        path for path in files if path.suffix not in WEIGHTS and not OMITTED & set(path.relative_to(directory).parts)
    ]


def _traces(directory: Path, files: Sequence[Path]) -> dict[Path, int]:
    """Return the smallest trace files that fit into ALL_TRACES bytes together, with their sizes."""
    sizes = {path: path.stat().st_size for path in files if TRACES in path.relative_to(directory).parts}
    selected: dict[Path, int] = {}
    for path in sorted(sizes, key=lambda path: sizes[path]):
        if sum(selected.values()) + sizes[path] > ALL_TRACES:
            break
        selected[path] = sizes[path]
    return selected


def _add(tar: tarfile.TarFile, path: Path, name: str, problems: list[str], most: int = MOST) -> None:
    """Add the end of a log, or another file of at most `most` bytes. A file that cannot be read becomes a problem."""
    try:
        content, status = _content(path, most), path.stat()
    except OSError as error:
        problems.append(f"{name}: {error.strerror}")
        return
    if content is None:
        problems.append(f"{name}: omitted, {status.st_size >> 20} MiB")
        return
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(status.st_mtime)
    tar.addfile(entry, io.BytesIO(content))


def _content(path: Path, most: int) -> bytes | None:
    """Return the content of a file, of a long log its end. None for another file above `most` bytes."""
    size, is_text = path.stat().st_size, path.suffix in (".log", ".txt", ".jsonl")
    if size > most and not is_text:
        return None
    with path.open("rb") as stream:
        if size <= (TAIL if is_text else most):
            return stream.read()
        stream.seek(-TAIL, os.SEEK_END)
        return f"... the last {TAIL >> 10} KiB of {size >> 10}\n".encode() + stream.read(TAIL)
