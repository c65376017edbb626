"""Checks of a recipe: `train`'s preflight, devices, environment, weight sync and run directory, before a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megarl import platform as platforms
from megarl.cluster.device_map import place
from megarl.commands.doctor.downloads import downloads_of
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.launch.topology import read_topology
from megarl.data.rows import MissingFile
from megarl.engines.routes import check_route, route_here, routes_of_sets
from megarl.engines.specs import fixed_models
from megarl.errors import RecipeError, command_name, pluralize
from megarl.hf import weights as hf_weights
from megarl.megatron.extra_settings import attention_needs
from megarl.observe.run_dir import RunDirectory
from megarl.platform.kinds import kind_of
from megarl.platform.transformer_engine import AttentionNeeds
from megarl.preflight.engines_and_devices import check_device, demand_of, only_evaluates
from megarl.preflight.environment import environment_notices
from megarl.preflight.findings import STAGES, Available, Survey
from megarl.preflight.models import read_hf_config, with_family_table
from megarl.preflight.survey import survey
from megarl.recipe.derived.weight_sync_route import is_sharded
from megarl.recipe.schema import Recipe, TrainConfig
from megarl.weight_sync.session import HOST_MEMORY_TRANSPORTS

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_RUNS_PROGRAMS = ("code", "code_all", "code_interpreter")  # in the sandbox
_SKIPPED = {"data": "the rows", "rewards": "the scorers"}  # stages that errors of earlier ones prevent
_PAGES = {"data": "docs/data.md", "reward": "docs/rewards.md", "judge": "docs/rewards.md", "model": "docs/models.md"}
ALL_NODES = "launch/multinode.sh -- python -m megarl doctor RECIPE"


def needs_of(recipe: Recipe | None, environ: dict[str, str]) -> Needs:
    """Return what the recipe needs of a machine. Its paths must be absolute. None: no recipe, so the needs of any run."""
    try:
        nodes = read_topology(environ).nodes
    except ValueError:  # the check `launch` reports it
        nodes = 1
    if recipe is None:
        return Needs(nodes=nodes, runs_dir=os.path.abspath("runs"), ray_address=environ.get("RAY_ADDRESS", ""))
    demand, rl = demand_of(recipe), recipe.train.source == "rollout"
    sizes = hf_weights.sizes(Path(recipe.model.path))
    each, scorers = _BYTES[recipe.model.dtype], [recipe.reward.function or "", *recipe.reward.functions]
    bucket_bytes, sync_ranks = max(recipe.weight_sync.bucket_mb << 20, each * max(sizes, default=0)), 0
    if is_sharded(recipe):  # a bucket may hold a part of a tensor; trainer ranks and relaying engine ranks have slots
        bucket_bytes, sync_ranks = recipe.weight_sync.bucket_mb << 20, demand.trainers + demand.engine_devices
    runs = [name for name in [*recipe.agent.tools, *scorers] if name in _RUNS_PROGRAMS]
    return Needs(
        device=recipe.cluster.device,
        recipe=True,
        trains=not only_evaluates(recipe.data),
        nodes=nodes,
        engines=rl,
        libraries=tuple(_libraries(recipe)),
        ray=recipe.cluster.transport != "torchrun",
        processes=demand.trainers + demand.critics + demand.engine_devices + demand.fixed_devices,
        runs_dir=recipe.runs_dir,
        bucket_bytes=bucket_bytes,
        sync_ranks=sync_ranks,
        shared_memory=recipe.weight_sync.transport in HOST_MEMORY_TRANSPORTS,
        device_memory=recipe.weight_sync.transport == "ipc",
        checkpoint_bytes=checkpoint_bytes(recipe, sum(sizes)),
        checkpoints=checkpoints_at_a_time(recipe.train),
        attention=_attention(recipe),
        sandbox=runs[0] if runs else "",
        ray_address=recipe.cluster.ray_address or environ.get("RAY_ADDRESS", ""),
    )


def _attention(recipe: Recipe) -> AttentionNeeds | None:
    """Return what the policy's attention needs; None if its config.json is not here or faulty, which `stages` reports."""
    try:
        return attention_needs(recipe, with_family_table(read_hf_config(recipe.model.path), recipe.model))
    except (ValueError, KeyError):
        return None


def _libraries(recipe: Recipe) -> list[str]:
    """Return the names of the engines that a run or an evaluation of the recipe starts, each once."""
    fixed = fixed_models(recipe, training=not only_evaluates(recipe.data))
    names = [recipe.rollout.engine] if recipe.train.source == "rollout" else []
    return list(dict.fromkeys([*names, *(getattr(recipe, section).engine for section in fixed)]))


def checkpoint_bytes(recipe: Recipe, parameters: int) -> int:
    """Return the bytes of one checkpoint of a model with `parameters` parameters.

    It holds weights, float32 masters of bfloat16 weights and two moments of the optimizer. 0 with adapters, which are small.
    """
    each = _BYTES[recipe.model.dtype]
    return 0 if recipe.lora.rank else parameters * (each + 8 + (4 if each == 2 else 0))


def checkpoints_at_a_time(train: TrainConfig) -> int:
    """Return the largest number of checkpoints on disk, including the one being written."""
    return (train.keep_checkpoints + 1) if train.save_every else int(train.save_at_end)


def stages(recipe: Recipe) -> Iterator[Finding]:
    """Yield a line for each stage of the preflight of `train` (`eval` without training data), one for each error, and a
    warning for each model and each item of data that `train` downloads.

    The last error or warning names the checks that the preflight did not reach.
    """
    training = not only_evaluates(recipe.data)
    downloads = downloads_of(recipe, training=training)
    result = survey(recipe, Available(training=training))
    lines: list[Finding] = []
    for stage in STAGES:
        errors = [error for error in result.errors_in(stage) if not any(each.explains(error) for each in downloads)]
        problems = [_failure(error, result.key_of(error)) for error in errors]
        problems += [download.finding() for download in downloads if download.stage == stage]
        if not problems and stage in result.stages:
            problems = [ok(_summary(stage, result))]
        lines += [finding.labelled(f"recipe: {stage}") for finding in problems]
    skipped = ", ".join(text for stage, text in _SKIPPED.items() if stage not in result.stages)
    faulty = [number for number, finding in enumerate(lines) if finding.status != "ok"]
    if faulty and skipped:
        last = lines[faulty[-1]]
        lines[faulty[-1]] = replace(last, text=f"{last.text} (not reached: {skipped})")
    yield from lines
    for notice in result.prepared.notices if result.prepared is not None else []:
        yield warning(notice, "check that this is intended").labelled("recipe: data")


def _summary(stage: str, result: Survey) -> str:
    """Return the text of a stage without errors."""
    recipe, prepared = result.recipe, result.prepared
    if stage == "settings":
        return f"the engine {recipe.rollout.engine}, its arguments and the algorithm's functions are known"
    if prepared is None:
        return f"read: {STAGES[stage]}"
    if stage == "model":
        family = prepared.model.get("model_type", "read")
        return f"{recipe.model.path} ({family}), a tokenizer of {prepared.tokenizer.vocab_size} tokens"
    if stage == "data":
        rows = sum(prepared.rows_of_sets.values())
        return f"{pluralize(rows, 'row')} to learn from" if rows else STAGES["data"]
    sources = ", ".join(prepared.data_sources)
    return f"scorers for {sources} are ready" if sources else "no rows to score"


def _failure(error: ValueError, key: str = "") -> Finding:
    """Return the failure of `error`. `key`: the setting that was checked, for the remedy of an error that has none."""
    if isinstance(error, RecipeError):
        return fail(f"{error.setting}: {' '.join(error.problem.split())}", " ".join(error.remedy.split()))
    if isinstance(error, MissingFile):
        return fail(error.problem, error.remedy)
    section = key.split(".")[0]
    page = f"{_PAGES[section]} describes it, and " if section in _PAGES else ""
    remedy = (
        f"change `{section}` in the recipe, or the file: {page}`{command_name()} keys {section}` lists the settings"
    )
    return fail(" ".join(str(error).split()), remedy)


def run_name(recipe: Recipe) -> Finding:
    """Check that `train` can start in the run's directory, or resume there."""
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    place = os.path.relpath(directory.path)
    place = str(directory.path) if place.startswith("..") else place
    if recipe.train.resume == "never" and directory.has_results():
        remedy = "set train.resume=auto to resume it, or name=... for a new run"
        return warning(f"{place} already holds a run, so `train` would refuse to start", remedy)
    return ok(f"{place} ({'its run is resumed' if directory.has_results() else 'free'})")


def device_demand(recipe: Recipe, device: str, machines: Sequence[tuple[str, int]]) -> Finding:
    """Check that the recipe's processes fit on the visible devices. `machines`: (host, devices) of each node."""
    try:
        check_device(recipe, device)
    except RecipeError as error:
        return _failure(error)
    demand = demand_of(recipe)
    have = sum(count for _, count in machines)
    resource = kind_of(device).ray_resource
    if resource is None:
        return ok(f"{demand}: processes that share the cores of {pluralize(len(machines), 'machine')}")
    try:
        place(machines, demand, resource)
    except ValueError as error:
        remedy = (
            f"to count the devices of several nodes, run {ALL_NODES}" if len(machines) == 1 else "see the nodes above"
        )
        return fail(" ".join(str(error).split()), remedy)
    return ok(f"{demand}: {demand.devices} of {pluralize(have, 'device')}")


def weights(recipe: Recipe, device: str) -> list[Finding]:
    """Report the route of the weight sync with the vLLM here; with the default set's if this machine has no `device`."""
    if recipe.train.source != "rollout" or only_evaluates(recipe.data):
        return [ok("this recipe has no weight sync")]
    is_here = device == platforms.kind() or recipe.rollout.engine != "vllm"
    set_routes = [] if is_here else routes_of_sets(recipe, kind_of(device).sets)
    route = set_routes[0] if set_routes else route_here(recipe)
    try:
        check_route(recipe, route)
    except RecipeError as error:
        return [_failure(error)]
    if route.name == "full" and recipe.weight_sync.route == "auto":
        return [
            warning(
                f"weight sync: {route}",
                "every engine rank receives the whole model; `megarl plan` estimates the seconds",
            )
        ]
    return [ok(f"weight sync: {route}")]


def environment(recipe: Recipe, device: str) -> list[Finding]:
    """Report the variables that the recipe sets or needs on this kind of device, and warn of different values in the shell."""
    try:
        notices = environment_notices(recipe, kind_of(device).platform())
    except RecipeError as error:
        return [_failure(error)]
    conflicts = [notice for notice in notices if notice.startswith("the environment has ")]
    settings = [notice for notice in notices if notice.startswith(("engines have ", "trainers have "))]
    warnings = [warning(notice, "unset it in the shell, or leave it if it is intended") for notice in conflicts]
    return [*warnings, ok("; ".join(settings) or "only the platform's defaults")]
