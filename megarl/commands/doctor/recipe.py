"""What a recipe needs of machines, and whether everything that it names is there: what `train` would find, before it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.algorithms.advantages import uses_critic
from megarl.cluster.device_map import Demand, place
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.launch.topology import read_topology
from megarl.engines.routes import check_route, route_here
from megarl.engines.specs import fixed_models
from megarl.errors import RecipeError, plain
from megarl.hf import weights as hf_weights
from megarl.observe.run_dir import RunDirectory
from megarl.platform.kinds import kind_of
from megarl.preflight.environment import environment_notices
from megarl.preflight.run import STAGES, check_device, prepare_evaluation, prepare_training
from megarl.recipe.exchange import is_sharded
from megarl.recipe.judge import JUDGE
from megarl.recipe.schema import Recipe
from megarl.text import pluralize
from megarl.weight_sync.session import FULL_SLOTS, HOST_MEMORY_TRANSPORTS, SHARDED_SLOTS

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_RUNS_PROGRAMS = ("code", "code_all", "code_interpreter")  # in the sandbox
ALL_NODES = "launch/multinode.sh -- python -m megarl doctor RECIPE"


def demand_of(recipe: Recipe) -> Demand:
    """The devices that `train` places, or `eval`, where there is nothing to train on."""
    trains = not _only_evaluates(recipe)
    samples = recipe.train.source == "rollout"
    fixed = [section for section in fixed_models(recipe) if trains or section == JUDGE]
    critic = trains and uses_critic(recipe.algorithm)
    return Demand.of(recipe, trainers=trains, engines=samples, critic=critic, fixed=fixed)


def needs_of(recipe: Recipe | None, environ: dict[str, str]) -> Needs:
    """What a machine is to be good for. Paths of the recipe are absolute."""
    try:
        nodes = read_topology(environ).nodes
    except ValueError:  # the check `launch` says it
        nodes = 1
    if recipe is None:
        return Needs(nodes=nodes, runs_dir=os.path.abspath("runs"), ray_address=environ.get("RAY_ADDRESS", ""))
    demand, rl = demand_of(recipe), recipe.train.source == "rollout"
    sizes = hf_weights.sizes(Path(recipe.model.path))
    each, scorers = _BYTES[recipe.model.dtype], [recipe.reward.function or "", *recipe.reward.functions]
    bucket_bytes, buckets = max(recipe.exchange.bucket_mb << 20, each * max(sizes, default=0)), FULL_SLOTS
    if is_sharded(recipe):  # tensors are cut; every trainer has slots, and every rank of an engine that passes on
        bucket_bytes = recipe.exchange.bucket_mb << 20
        buckets = SHARDED_SLOTS * -(-(demand.trainers + demand.engine_devices) // nodes)
    runs = [name for name in [*recipe.agent.tools, *scorers] if name in _RUNS_PROGRAMS]
    return Needs(
        device=recipe.cluster.device,
        recipe=True,
        trains=not _only_evaluates(recipe),
        nodes=nodes,
        engines=rl,
        ray=recipe.cluster.transport != "torchrun",
        processes=demand.trainers + demand.critics + demand.engine_devices + demand.fixed_devices,
        runs_dir=recipe.runs_dir,
        bucket_bytes=bucket_bytes,
        buckets=buckets,
        shared_memory=recipe.exchange.transport in HOST_MEMORY_TRANSPORTS,
        checkpoint_bytes=checkpoint_bytes(recipe, sum(sizes)),
        checkpoints=checkpoints_at_a_time(recipe),
        sandbox=runs[0] if runs else "",
        ray_address=recipe.cluster.ray_address or environ.get("RAY_ADDRESS", ""),
    )


def checkpoint_bytes(recipe: Recipe, parameters: int) -> int:
    """Of one, of a model with so many parameters: weights, and of bfloat16 ones their float32 masters; the optimizer's two
    moments. 0 with adapters, which are small."""
    each = _BYTES[recipe.model.dtype]
    return 0 if recipe.lora.rank else parameters * (each + 8 + (4 if each == 2 else 0))


def checkpoints_at_a_time(recipe: Recipe) -> int:
    """The one being written included."""
    return (recipe.train.keep_checkpoints + 1) if recipe.train.save_every else int(recipe.train.save_at_end)


def stages(recipe: Recipe) -> Iterator[Finding]:
    """A line for each stage of what `train` reads and checks before it starts anything (`eval`, where the recipe names no
    training data). Those after one that fails are not reached, and the line says so."""
    begun: list[str] = []
    said = {"settings": f"the engine {recipe.rollout.engine}, its arguments and the algorithm's functions are known"}
    try:
        prepared = (prepare_evaluation if _only_evaluates(recipe) else prepare_training)(recipe, begun.append)
    except ValueError as error:  # RecipeError among them
        for stage in begun[:-1]:
            yield _named(stage, ok(said.get(stage, f"read: {STAGES[stage]}")))
        rest = list(STAGES)[len(begun) :]
        problem = _of(error)
        if rest:
            problem = fail(f"{problem.text} (not reached: {', '.join(rest)})", problem.remedy)
        yield _named(begun[-1], problem)
        return
    rows = sum(prepared.rows_of_sets.values())
    sources = ", ".join(prepared.data_sources)
    said |= {
        "rewards": f"what scores {sources} is ready" if sources else "nothing is scored",
        "model": f"{recipe.model.path} ({prepared.model.get('model_type', 'read')}), a tokenizer of {prepared.tokenizer.vocab_size} tokens",
        "data": f"{pluralize(rows, 'row')} to learn from" if rows else STAGES["data"],
    }
    for stage in STAGES:
        yield _named(stage, ok(said.get(stage, STAGES[stage])))
    for notice in prepared.notices:
        yield _named("data", warning(notice, "look whether it is meant"))


def _only_evaluates(recipe: Recipe) -> bool:
    return not recipe.data.train_files and not recipe.data.mix and bool(recipe.data.eval_files)


def _named(stage: str, finding: Finding) -> Finding:
    return Finding(finding.status, finding.text, finding.remedy, check=f"recipe: {stage}")


def _of(error: ValueError) -> Finding:
    """One line of what a recipe is refused for."""
    if isinstance(error, RecipeError):
        given = f" = {plain(error.value)}" if type(error.value) is not object else ""  # object(): none was given
        return fail(f"{error.key}{given}: {' '.join(error.problem.split())}", " ".join(error.remedy.split()))
    return fail(" ".join(str(error).split()), "change what it names")


def run_name(recipe: Recipe) -> Finding:
    """Whether `train` would begin in the run's directory, or go on."""
    directory = RunDirectory(Path(recipe.runs_dir) / recipe.name)
    place = os.path.relpath(directory.path)
    place = str(directory.path) if place.startswith("..") else place
    if recipe.train.resume == "never" and directory.holds_a_run():
        remedy = "train.resume=auto goes on with it, name=... makes another"
        return warning(f"{place} already holds a run, which `train` would refuse", remedy)
    return ok(f"{place} ({'the run there is resumed' if directory.holds_a_run() else 'free'})")


def device_demand(recipe: Recipe, device: str, machines: Sequence[tuple[str, int]]) -> Finding:
    """The recipe's devices against those found. `machines`: (host, devices) of each node."""
    try:
        check_device(recipe, device)
    except RecipeError as error:
        return _of(error)
    demand = demand_of(recipe)
    have = sum(count for _, count in machines)
    resource = kind_of(device).ray_resource
    if resource is None:
        return ok(f"{demand}: processes that share the cores of {pluralize(len(machines), 'machine')}")
    try:
        place(machines, demand, resource)
    except ValueError as error:
        remedy = (
            f"where there are other nodes, {ALL_NODES} counts theirs" if len(machines) == 1 else "see the nodes above"
        )
        return fail(" ".join(str(error).split()), remedy)
    return ok(f"{demand}: {demand.devices} of {pluralize(have, 'device')}")


def weights(recipe: Recipe) -> list[Finding]:
    """The route that weights will take with the engines of this environment."""
    if recipe.train.source != "rollout" or _only_evaluates(recipe):
        return [ok("engines are given no weights")]
    route = route_here(recipe)
    try:
        check_route(recipe, route)
    except RecipeError as error:
        return [_of(error)]
    if route.name == "export" and recipe.exchange.route == "auto":
        return [warning(str(route), "every engine rank receives the whole model; `megarl plan` estimates the seconds")]
    return [ok(str(route))]


def environment(recipe: Recipe, device: str) -> list[Finding]:
    """The variables that the recipe sets or needs on this kind of device, and those that the shell has otherwise."""
    try:
        notices = environment_notices(recipe, kind_of(device).platform())
    except RecipeError as error:
        return [_of(error)]
    conflicts = [one for one in notices if one.startswith("the environment has ")]
    others = [one for one in notices if one.startswith(("engines have ", "trainers have "))]
    found = [warning(one, "unset it in the shell, or leave it if it is meant") for one in conflicts]
    return [*found, ok("; ".join(others) or "nothing beside the platform's defaults")]
