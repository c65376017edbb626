"""`megarl replay RUN --bundle FILE`: pack what repeats a step of a run."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.catalogue import import_modules
from megarl.algorithms.objective import needs_teacher
from megarl.atomic_files import atomic_file, check_new, disk_errors
from megarl.checkpoint.folder import check_whole
from megarl.commands.bundle.choice import BundledStep, choose
from megarl.commands.bundle.contents import (
    DESCRIPTION,
    ENDING,
    FILES,
    FUNCTIONS,
    MODULES,
    RECORDED,
    Description,
    installed_libraries,
)
from megarl.commands.bundle.modules import local_files, named_files
from megarl.commands.bundle.recipe import bundled_recipe
from megarl.commands.replay import first_checkpoint
from megarl.engines.tape import Record, read_segments
from megarl.errors import command_name, pluralize, raise_all
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.replay import recipe_file
from megarl.recipe.data import files_of
from megarl.recipe.hub_inputs import with_cached_inputs
from megarl.recipe.load import read_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml

_MODEL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".safetensors")
_BLOCK = 512  # of a tar file
_SPARE = 1 << 20  # bytes that stay free on the disk


@dataclass(frozen=True)
class Member:
    """A file of the bundle. `part`: for the list of sizes. `source`: its path, or its contents."""

    name: str
    part: str
    source: Path | bytes

    @property
    def size(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @property
    def packed_size(self) -> int:
        """Bytes in the tar file: a name may take two further blocks."""
        return 3 * _BLOCK + -(-self.size // _BLOCK) * _BLOCK


def pack(run: Path, file: Path, step: int | None) -> None:
    """Write the bundle of `step` of a run to `file`, and print its contents and size before.

    step: None for the step in which the run failed, else the last one with metrics. Raises ValueError if the run has no tape of
    the step, if a file is missing, or if the disk is too small. The file appears when it is complete.
    """
    if file.suffix != ENDING:  # unpacking leaves it out of the folder's name
        name = file.parent / f"{file.stem}{ENDING}"
        raise ValueError(f"--bundle {file}: name it {name} (bundles end in {ENDING})")
    check_new("--bundle", file)
    recorded = RunDirectory(os.path.abspath(run))
    choice = choose(recorded, step)
    description, members = contents_of(recorded, choice)
    members.insert(0, Member(DESCRIPTION, "description", description.to_json()))
    size = sum(member.packed_size for member in members) + 20 * _BLOCK
    end = f"its failure: {description.failure.splitlines()[0]}" if description.failure is not None else "its end"
    begin = f"the checkpoint of step {description.after}" if description.after else "the model's folder"
    print(f"bundle of {run}: from {begin} to step {choice.step}, {end}")
    for part in dict.fromkeys(member.part for member in members):
        sizes = [member.size for member in members if member.part == part]
        print(f"  {part:<12} {_mib(sum(sizes)):>12}  {pluralize(len(sizes), 'file')}")
    print(f"  {'together':<12} {_mib(size):>12}", flush=True)
    for text in description.left_out:
        print(f"  left out: {text}")
    free = shutil.disk_usage(file.absolute().parent).free
    if free < size + _SPARE:
        raise ValueError(
            f"the bundle takes {_mib(size)}, and the disk of {file.absolute().parent} has {_mib(free)} free: free some space, or "
            "name a file on another disk (--bundle)"
        )
    _write(file, members)
    print(f"wrote {file}. Repeat it with: {command_name()} replay {shlex.quote(file.name)}")


def contents_of(recorded: RunDirectory, choice: BundledStep) -> tuple[Description, list[Member]]:
    """Return the description of a bundle and its members."""
    segment = choice.segment
    reading = read_recipe(recipe_file(recorded.tape, segment.number))
    raise_all(reading.errors)  # the bundle's recipe would lack these settings
    recipe = with_cached_inputs(reading.recipe)
    modules, installed = local_files(recipe)
    import_modules(recipe.algorithm)  # they register the loss, which decides which models the run has
    names, members = _files(recipe)
    members += [Member(f"{MODULES}/{name}", "modules", path) for name, path in modules.items()]
    portable, left_out = bundled_recipe(recipe, names)
    left_out += [f"{module}: an installed package" for module in installed]
    if (Path(recipe.model.path) / "preprocessor_config.json").is_file():
        left_out.append(f"images and frames of videos that rows name by a path: copy them into {FILES}/data/")
    members += _recorded(recorded, choice, to_yaml(portable).encode())
    if (checkpoint := first_checkpoint(recorded, segment, recipe.train.resume)) is not None:
        members += _checkpoint(checkpoint)
    description = Description(
        run=recipe.name,
        after=segment.after,
        step=choice.step,
        failure=choice.failure,
        processes=f"{pluralize(recipe.cluster.trainers, 'trainer')} and {pluralize(recipe.rollout.engines, 'engine')}",
        libraries=installed_libraries(),
        left_out=left_out,
        members=len(members),
        size=sum(member.size for member in members),
    )
    return description, members


def _files(recipe: Recipe) -> tuple[dict[str, str], list[Member]]:
    """Return the names of the models, rows and files that the recipe names, by their path, and their members.

    Models have their weights even if a checkpoint follows: trainers read them first, the reference policy has them, and a
    digest of them identifies the run. Data files are whole: the sampler's positions and a digest refer to all rows.
    """
    names: dict[str, str] = {}
    members: list[Member] = []
    models = {"model": recipe.model.path, "tokenizer": recipe.model.tokenizer}
    if recipe.lora.rank:
        models["adapter"] = recipe.lora.path
    if uses_critic(recipe.algorithm):
        models["critic"] = recipe.critic.model_path
    if needs_teacher(recipe.algorithm):
        models |= {f"teacher{number}": each.path for number, each in enumerate(recipe.teacher.by_key.values())}
    for part, path in models.items():
        if path is not None and path not in names:
            names[path] = f"{FILES}/{part}"
            members += [
                Member(f"{names[path]}/{file.relative_to(path).as_posix()}", part, file)
                for file in _model_files(Path(path))
            ]
    for number, path in enumerate(dict.fromkeys(file for _, file in files_of(recipe.data))):
        names[path] = f"{FILES}/data/{number}/{Path(path).name}"
        members.append(Member(names[path], "data", Path(path)))
    for number, path in enumerate(dict.fromkeys(file for file, _ in named_files(recipe))):
        names[path] = f"{FILES}/{FUNCTIONS}/{number}/{Path(path).name}"
        members.append(Member(names[path], "modules", Path(path)))
    missing = [
        str(member.source) for member in members if isinstance(member.source, Path) and not member.source.is_file()
    ]
    missing += [path for path in models.values() if path is not None and not Path(path).is_dir()]
    if missing:
        raise ValueError(
            f"the run's recipe names {missing[0]}, which does not exist here: pack where the run's files are"
        )
    return names, members


def _model_files(folder: Path) -> Iterator[Path]:
    """Yield configuration, tokenizer, code and safetensors of a model's folder. Links are followed."""
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        is_nested_weight = file.suffix == ".safetensors" and len(parts) > 1
        hidden = any(part.startswith(".") for part in parts)
        if file.suffix in _MODEL_FILES and file.is_file() and not hidden and not is_nested_weight:
            yield file


def _recorded(recorded: RunDirectory, choice: BundledStep, recipe: bytes) -> list[Member]:
    """Return the members of the run directory without its checkpoint: tape, recipe and metrics."""
    number = choice.segment.number
    header = read_segments(recorded.tape / "controller.jsonl")[number][0]
    identity = {
        name: {**value, "path": f"{FILES}/{name}"} if name in ("model", "critic") and value else value
        for name, value in header["identity"].items()
    }
    files = {
        f"tape/recipe-{number}.yaml": recipe,
        "recipe.resolved.yaml": recipe,
        "tape/controller.jsonl": _lines([{**header, "identity": identity}, *choice.controller_records()]),
        "metrics.jsonl": _metrics(recorded, choice),
    }
    for path in sorted(recorded.tape.glob("*.jsonl")):
        segment = read_segments(path).get(number)
        if path.name != "controller.jsonl" and segment is not None:
            files[f"tape/{path.name}"] = _lines([segment[0], *choice.engine_records(segment[1:])])
    return [Member(f"{RECORDED}/{name}", "recorded", data) for name, data in files.items()]


def _metrics(recorded: RunDirectory, choice: BundledStep) -> bytes:
    first = choice.segment.after + 1 if choice.segment.after else 0
    lines = recorded.metrics.read_bytes().splitlines(keepends=True) if recorded.metrics.is_file() else []
    return b"".join(line for line in lines if line.endswith(b"\n") and first <= json.loads(line)["step"] <= choice.step)


def _lines(records: Sequence[Record]) -> bytes:
    return b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)


def _checkpoint(folder: Path) -> list[Member]:
    check_whole(folder)
    return [
        Member(f"{RECORDED}/checkpoints/{folder.name}/{file.relative_to(folder).as_posix()}", "checkpoint", file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]


def _write(file: Path, members: Sequence[Member]) -> None:
    with disk_errors(file), atomic_file(file) as part, tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size, info.mode = member.size, 0o644
            if isinstance(member.source, bytes):
                archive.addfile(info, io.BytesIO(member.source))
            else:
                with member.source.open("rb") as stream:
                    archive.addfile(info, stream)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
