"""`megarl convert-weights`: convert a Hugging Face model with quantized weights to bfloat16, on a CPU.

Each shard gets its final name when it is complete, and config.json is written last, so an unfinished folder does not load
as a model. `conversion.megarl.json` lists the finished shards with a fingerprint of their source. The same command
resumes an interrupted conversion.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megarl.atomic_files import disk_errors, make_folder, sync, write_synced
from megarl.cluster.process import die_with_parent, ignore_interrupt
from megarl.commands.convert_weights.fp8 import Fp8Blocks
from megarl.commands.convert_weights.layout import Layout, read_layout
from megarl.commands.convert_weights.mxfp4 import Mxfp4
from megarl.commands.convert_weights.shards import (
    Format,
    ShardJob,
    ShardResult,
    check_source,
    convert_shard,
    converted_layout,
    fingerprint,
    partial_path,
)
from megarl.errors import InputError, as_input_error, pluralize
from megarl.hf.weights import CONVERSION, INDEX, read_index
from megarl.observe.console import clock

MOST_WORKERS = 4  # by default
_STOP_SECONDS = 5.0  # time limit for processes to end
_SLACK = 64 << 20  # bytes reserved for small files
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".safetensors", INDEX)


@dataclass
class Source:
    """A checked folder of quantized weights. `config`: its config.json."""

    folder: Path
    config: dict[str, Any]
    format: Format
    layouts: dict[str, Layout]  # by file name
    files: dict[str, str]  # name of a tensor -> its file


def convert(folder: Path, out: Path, workers: int | None = None) -> None:
    """Convert the model in `folder` to bfloat16 in `out`, or resume an interrupted conversion.

    workers: number of processes, each converting one file at a time (1: no child processes); None: `MOST_WORKERS`, or
    the number of CPU cores if that is smaller. Raises InputError (a ValueError), before writing, if the source has
    another format or changed since the conversion began, `out` has other files, or the disk is too small.
    """
    source = read_source(folder)
    if out.resolve() == folder.resolve():
        raise InputError(f"--out {out} is the source itself: name another folder")
    _read_manifest(out, folder)  # rejects a folder with other files before creating a lock file in it
    with _locked(out), _resume_notice(source, out):
        done = _read_manifest(out, folder)  # another call may have finished meanwhile
        prints = {name: fingerprint(folder / name) for name in source.layouts}
        _check_unchanged(folder, done, prints)
        kept = {name: record for name, record in done.items() if _is_whole(source, out / name, record)}
        todo = [name for name in source.layouts if name not in kept]
        _check_room(out, source, todo)
        count = min(workers or min(MOST_WORKERS, os.cpu_count() or 1), max(len(todo), 1))
        _print(f"{folder}: {pluralize(len(source.layouts), 'file')}, {source.format}")
        if kept:
            _print(
                f"{pluralize(len(kept), 'file')} of them {'is' if len(kept) == 1 else 'are'} already complete in {out}"
            )
        _write_manifest(source, out, kept)
        _convert_files(source, out, todo, kept, prints, count)
        _write_small_files(source, out)
    _print(f"{out}: the model in bfloat16. To use it in a recipe, set model.path={out}")


def read_source(folder: Path) -> Source:
    """Read config.json and the header of every file. Raises InputError unless the model is complete and in a supported format."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: name the folder of a Hugging Face model")
    config = json.loads((folder / "config.json").read_text())
    format = _format_of(folder, config)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise InputError(f"{folder} has no *.safetensors")
    try:
        layouts = {name: read_layout(folder / name) for name in names}
        files = {tensor: name for name, layout in layouts.items() for tensor in layout.entries}
        source = Source(folder, config, format, layouts, files)
        _check_index(source)
        entries = {tensor: layouts[name].entries[tensor] for tensor, name in files.items()}
        for name, layout in layouts.items():
            check_source(name, layout, format, entries)
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error
    if not any(format.is_quantized(entry) for entry in entries.values()):
        raise InputError(f"{folder} has quantization_config in its config.json, but no tensor in {format.name}")
    return source


def _format_of(folder: Path, config: dict[str, Any]) -> Format:
    """Return the format of `quantization_config`. Raises InputError for other quantization methods."""
    quantization = config.get("quantization_config")
    if not quantization:
        raise InputError(f"{folder}: config.json has no quantization_config, so the model is not quantized")
    method = str(quantization.get("quant_method"))
    if method == "mxfp4":
        return Mxfp4()
    if method != "fp8":
        raise InputError(
            f"{folder} is quantized by {method!r}. convert-weights reads FP8 with block scales ('fp8', as DeepSeek-V3 and "
            "Qwen3's FP8 models are published) and MXFP4 ('mxfp4', as gpt-oss is). Take the unquantized model of the same name"
        )
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise InputError(f"{folder}: the FP8 format {quantization['fmt']!r} is not supported, only e4m3")
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise InputError(
            f"{folder}: weight_block_size in quantization_config is {block!r}, not [rows, columns] as in [128, 128]. FP8 with "
            "one scale per tensor is not supported"
        )
    return Fp8Blocks(block[0], block[1])


def _check_index(source: Source) -> None:
    """Check that every file of the index exists and has the tensors that the index lists for it."""
    placed = read_index(source.folder, source.layouts.keys())
    if not placed and len(source.layouts) > 1:
        raise ValueError(f"there are {len(source.layouts)} files and no {INDEX}, or an empty one")
    for tensor, name in placed.items():
        if tensor not in source.layouts[name].entries:
            raise ValueError(f"{INDEX} says that {tensor} is in {name}, which has no such tensor")


def _read_manifest(out: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Read the records of an earlier call: fingerprint of the source and size of each finished file."""
    if out.is_file():
        raise InputError(f"--out {out} is a file")
    if (out / CONVERSION).is_file():
        return _recorded(out)
    if out.is_dir() and any(item.name != f".{CONVERSION}.lock" for item in out.iterdir()):
        raise InputError(f"--out {out} is not empty and has no unfinished conversion of {folder}: name another folder")
    return {}


def _recorded(out: Path) -> dict[str, dict[str, Any]]:
    path = out / CONVERSION
    return dict(json.loads(path.read_text())["files"]) if path.is_file() else {}


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the folder against a second conversion. Raises InputError if it is already locked."""
    with as_input_error():
        make_folder(out)
    path = out / f".{CONVERSION}.lock"
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another convert-weights is writing to {out}") from None
            if not _is_at(file, path):  # another process removed the lock file after this one opened it: try again
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _resume_notice(source: Source, out: Path) -> Iterator[None]:
    """After Ctrl-C or SIGTERM, print the number of complete files and how to resume."""
    try:
        yield
    except Exception:
        raise
    except BaseException:
        count = len(_recorded(out))
        _print(f"{count} of {pluralize(len(source.layouts), 'file')} are complete in {out}; the same command resumes")
        raise


def _check_unchanged(folder: Path, done: dict[str, dict[str, Any]], prints: dict[str, str]) -> None:
    changed = sorted(name for name, record in done.items() if prints.get(name) != record["source"])
    if changed:
        raise InputError(
            f"{folder} changed since the conversion began: {changed[0]} differs ({pluralize(len(changed), 'file')} in "
            "total). Delete the output folder, or name another"
        )


def _is_whole(source: Source, path: Path, record: dict[str, Any]) -> bool:
    """Check that the converted file at `path` exists with the recorded size and the expected header."""
    if not path.is_file() or path.stat().st_size != record["size"]:
        return False
    try:
        return read_layout(path) == _converted(source)[path.name]
    except ValueError:
        return False


def _check_room(out: Path, source: Source, todo: list[str]) -> None:
    sizes = {name: layout.size for name, layout in _converted(source).items()}
    needed = sum(sizes[name] for name in todo) + _SLACK
    partial = sum(path.stat().st_size for path in map(partial_path, map(out.joinpath, todo)) if path.exists())
    free = shutil.disk_usage(out).free + partial  # partial files of an interrupted call are overwritten
    if todo and free < needed:
        written = sum(sizes.values()) - sum(sizes[name] for name in todo)
        raise InputError(
            f"the disk of {out} is too small: the model in bfloat16 is {_gb(sum(sizes.values()))}, {_gb(written)} are "
            f"already written, so {_gb(needed)} are needed, and {_gb(free)} are free"
        )


def _convert_files(
    source: Source, out: Path, todo: list[str], done: dict[str, Any], prints: dict[str, str], workers: int
) -> None:
    """Convert the files `todo`, and add each to the manifest when it is complete."""
    began, written = time.monotonic(), 0
    layouts = _converted(source)
    total = sum(layouts[name].size for name in todo)
    for number, result in enumerate(_results(source, out, todo, workers), start=1):
        done[result.name] = {"source": prints[result.name], "size": result.size}
        _write_manifest(source, out, done)
        written += result.size
        seconds = max(time.monotonic() - began, 1e-6)
        left = (total - written) * seconds / written
        _print(
            f"{len(done)}/{len(source.layouts)} {result.name} | {_gb(result.size)} | {written / seconds / 1e9:.2f} GB/s"
            f" | {number} in {clock(seconds)}, left {clock(left)}"
        )


def _results(source: Source, out: Path, todo: list[str], workers: int) -> Iterator[ShardResult]:
    if not todo:
        return
    jobs = [
        ShardJob(source.folder / name, out / name, source.format, _scales_of(source, source.layouts[name]))
        for name in todo
    ]
    if workers == 1:
        for job in jobs:
            with disk_errors(out):
                yield convert_shard(job)
        return
    context, before = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with, initargs=(os.getpid(),))
    running: dict[Future[ShardResult], str] = {}
    try:
        running = {pool.submit(convert_shard, job): job.source.name for job in jobs}
        for future in as_completed(running):
            with disk_errors(out):
                yield future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker process was killed (out of memory? each of {workers} needs about 0.5 GB). Finished "
            f"files stay in {out}: the same command resumes; use fewer --workers if memory is short"
        ) from error
    finally:
        if sys.exc_info()[0] is not None:  # end the processes now: a repeated call must not meet them
            _end_processes(set(multiprocessing.active_children()) - before)
        pool.shutdown(wait=sys.exc_info()[0] is None, cancel_futures=True)


def _end_processes(processes: set[Any]) -> None:
    """Terminate processes, and kill the ones that still run after `_STOP_SECONDS`."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + _STOP_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()


def _end_with(parent: int) -> None:
    """Initialize a worker process: use one core, ignore Ctrl-C, and end with the parent process."""
    import torch

    torch.set_num_threads(1)
    ignore_interrupt()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before this process asked for the signal
        os._exit(1)


def _scales_of(source: Source, layout: Layout) -> dict[str, Path]:
    return {
        entry.name: source.folder / source.files[source.format.scales_of(entry)]
        for entry in layout.entries.values()
        if source.format.is_quantized(entry)
    }


def _converted(source: Source) -> dict[str, Layout]:
    """Return the layouts of the converted files, by name."""
    return {name: converted_layout(layout, source.format)[1] for name, layout in source.layouts.items()}


def _write_manifest(source: Source, out: Path, done: dict[str, Any]) -> None:
    content = {
        "source": str(source.folder.absolute()),
        "format": str(source.format),
        "files": dict(sorted(done.items())),
    }
    part = partial_path(out / CONVERSION)
    with disk_errors(out):
        write_synced(part, json.dumps(content, indent=1).encode())
        part.replace(out / CONVERSION)
        sync(out)


def _write_small_files(source: Source, out: Path) -> None:
    """Copy the tokenizer and other small files, write the index, and write config.json last."""
    omitted = []
    for path in sorted(source.folder.iterdir()):
        if path.name in ("config.json", INDEX, CONVERSION) or path.name.startswith("."):
            continue
        if path.is_file() and not path.name.endswith((*_OTHER_WEIGHTS, ".py")):
            shutil.copyfile(path, out / path.name)
        elif not path.name.endswith(".safetensors"):
            omitted.append(f"{path.name}{'/' if path.is_dir() else ''}")
    if omitted:
        _print(f"not copied, because megarl does not read them: {', '.join(omitted)}")
    layouts = _converted(source)
    if (source.folder / INDEX).is_file():
        files = {tensor: name for name, layout in layouts.items() for tensor in layout.entries}
        total = sum(entry.size for layout in layouts.values() for entry in layout.entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        write_synced(out / INDEX, json.dumps(index, indent=2).encode())
    removed = ("quantization_config", "auto_map")  # auto_map names Python files, which are not copied
    config = {name: value for name, value in source.config.items() if name not in removed}
    config |= dict.fromkeys(({"dtype", "torch_dtype"} & config.keys()) or {"torch_dtype"}, "bfloat16")
    write_synced(partial_path(out / "config.json"), json.dumps(config, indent=2).encode() + b"\n")
    partial_path(out / "config.json").replace(out / "config.json")
    sync(out)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _print(line: str) -> None:
    print(line, flush=True)
