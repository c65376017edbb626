"""Text of `accept --expect`: time, work, limits, and the command of each stage, on the given devices and for the recipe."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.commands.accept.bundle import VERDICT
from megarl.commands.accept.catalogue import BUNDLE, BUNDLE_MINUTES, OF_ALL_NODES, Stage
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.cut import CannotCut, fit_layout, layers_of, layout_text, split
from megarl.commands.accept.parity_rank import Case
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import collectives, engine, model_parity, weight_sync
from megarl.commands.accept.tiny_families import FAMILIES
from megarl.engines.specs import fixed_models
from megarl.platform.kinds import kind_of
from megarl.recipe.schema import Recipe

_WIDTH = 12
_NONE = "no recipe: only tiny models"


def expectation(
    settings: Settings,
    stages: Sequence[Stage],
    ends: dict[int, float],
    resumed: Path | None = None,
    out: Path = Path(),
) -> str:
    """Return the text. `ends`: deadline of each stage in seconds. `resumed`: the folder of `--resume`. `out`: of `--out`."""
    kind = kind_of(settings.device)
    context = StageContext(settings, Path(), Path(), math.inf)
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
            f"  {'here':<{_WIDTH}}{here(context, stage.number)}",
            f"  {'passes when':<{_WIDTH}}{stage.passes}",
            f"  {'alone':<{_WIDTH}}{command_of(settings, stage.number, resumed, out)}",
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


def command_of(settings: Settings, number: int, resumed: Path | None = None, out: Path = Path()) -> str:
    """Return the command that runs one stage alone, with the options of this call. Stages of one node need no launcher."""
    launcher = "bash launch/multinode.sh -- " if settings.nodes > 1 and number in OF_ALL_NODES else ""
    words = ["python", "-m", "megarl", "accept"]
    if resumed is not None:
        words += ["--resume", str(resumed)]
    else:
        words += [*filter(None, [_shown(settings.recipe)]), *settings.overrides, "--device", settings.device]
        words += ["--nodes", str(settings.nodes)] if launcher else []
        words += ["--minutes", f"{settings.minutes:g}"] if settings.minutes != Settings.minutes else []
        words += ["--out", str(out)] if out != Path() else []
    return launcher + shlex.join([*words, "--stages", str(number)])


def _shown(path: str) -> str:
    """Return the path as a user writes it: relative if it is below the current folder. "" stays."""
    return str(Path(path).relative_to(Path.cwd())) if path and Path(path).is_relative_to(Path.cwd()) else path


def here(context: StageContext, number: int) -> str:
    """Return what stage `number` does with the recipe on these devices."""
    if not context.settings.devices:
        return "depends on the devices of a node, which neither this machine nor the recipe's header has"
    return _HERE[number](context)


def _environment(context: StageContext) -> str:
    nodes, recipe = context.settings.nodes, context.recipe
    where = f"{nodes} nodes" if nodes > 1 else "this node"
    if recipe is None:
        return f"{where}; {_NONE}"
    return (
        f"{where}; weight_sync.route={recipe.weight_sync.route}, weight_sync.transport={recipe.weight_sync.transport}"
    )


def _kernels(context: StageContext) -> str:
    return f"one process on one of the {kind_of(context.device).plural}; no part of the recipe"


def _model_parity(context: StageContext) -> str:
    texts = []
    for family in FAMILIES:
        sizes = [size for size in (1, 2, 4) if size <= context.settings.devices]
        all_layouts = [layout for size in sizes for layout in model_parity.layouts(size, family, context.tiny)]
        names = dict.fromkeys(Case(family, "", "float32", layout).name.split()[1] for layout in all_layouts)
        texts.append(f"{family} {', '.join(names)}")
    return "; ".join(texts)


def _collectives(context: StageContext) -> str:
    if context.devices < 2:
        return "NOT RUN: one device"
    megatron, why = collectives.layout(context)
    return (
        f"{layout_text(megatron)} on {context.devices} devices, the recipe's layout" if why == "the recipe's" else why
    )


def _engine(context: StageContext) -> str:
    recipe, devices = context.recipe, context.settings.devices
    if recipe is None or recipe.train.source != "rollout":
        return _NONE if recipe is None else "only tiny models: the recipe samples nothing"
    if context.tiny:
        return "the recipe's engine is NOT RUN: stage 6 runs a tiny copy of the recipe"
    rollout = recipe.rollout
    if rollout.tensor_parallel > devices:
        return f"the recipe's engine is NOT RUN: rollout.tensor_parallel={rollout.tensor_parallel} of {devices} devices"
    size = math.gcd(rollout.data_parallel, devices // rollout.tensor_parallel)
    arguments = ", ".join(f"{name}={value}" for name, value in rollout.engine_args.items())
    return (
        f"the recipe's {rollout.engine}: {size} of {rollout.data_parallel} in a group, each TP{rollout.tensor_parallel}, "
        f"{engine.LAYERS} layers, dummy weights; {arguments or 'no engine_args'}"
    )


def _weight_sync(context: StageContext) -> str:
    return ", ".join(f"{route} by {transport}" for route, transport in weight_sync.ways(context)) + "; tiny models"


def _rl_step(context: StageContext) -> str:
    recipe = context.recipe
    if recipe is None:
        return _NONE
    if context.tiny:
        return "a tiny copy of the recipe"
    try:
        return _cut(recipe, context.settings.devices)
    except CannotCut as error:
        return f"a tiny copy of the recipe: {error}"


def _cut(recipe: Recipe, devices: int) -> str:
    if fixed := fixed_models(recipe):
        raise CannotCut(f"engines of {' and '.join(fixed)} need separate devices")
    megatron, trainers = fit_layout(recipe.megatron, recipe.cluster.trainers, split(recipe, devices)[0])
    return (
        f"the recipe's widths in {layers_of(megatron)} layers: {layout_text(megatron)} on {trainers} trainers "
        f"(the recipe: {recipe.cluster.trainers}); needs config.json and tokenizer in {_shown(recipe.model.path)}"
    )


def _speed(context: StageContext) -> str:
    devices = 1 if context.tiny else min(context.settings.devices, 8)
    return f"rates of {devices} device{'s' * (devices > 1)}, a trainer and an engine of tiny models"


_HERE: dict[int, Callable[[StageContext], str]] = {
    0: _environment,
    1: _kernels,
    2: _model_parity,
    3: _collectives,
    4: _engine,
    5: _weight_sync,
    6: _rl_step,
    7: _speed,
}
