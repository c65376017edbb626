"""Writes what docs/planner.md holds estimates to: ``python -m docs.generate.planner``. The rest of the page is by hand."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.published import SIZES, STEPS, Published
from megarl.commands.plan.count.types import Estimate
from megarl.commands.plan.time.calibration import RATES
from megarl.commands.plan.time.estimate import estimate, spans
from megarl.commands.plan.time.lengths import Lengths
from megarl.commands.plan.time.spread import RATIOS, STEP, Ratios, spreads
from megarl.hf import published as model_configs
from megarl.hf.shape import model_shape
from megarl.platform.devices import Device, FieldOfFile, device_named, devices, fields_of_file

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
BEGIN = "<!-- from here on made by `python -m docs.generate.planner` -->"
END = "<!-- made until here -->"
_WIDTH = 120

_FIELDS = """### Fields of a device in a file

Of an entry of `--devices FILE`. "needed" is what it must say itself, or have from the device that `like` names.

| field | unit | needed | what it is |
|---|---|---|---|
"""
_RATES = """
### Rates of a calibration

What an entry of `rates` means; all of one device, as reached.

| rate | unit | what it is |
|---|---|---|
"""
_DEVICES = """
### Devices

Of one device, as torch sees it: of a 910C one of its two dies. Sources are in
[`megarl/platform/devices.yaml`](../megarl/platform/devices.yaml), figure by figure.

| device | GiB | dense bf16 TFLOP/s | memory TB/s | link, network, host, host's network GB/s | per node | shares: train, prefill, decode, links |
|---|---|---|---|---|---|---|
"""
_SIZES = """
### Parameters beside published ones

Counted from each model's config.json by `megarl/hf/shape.py`, in billions; norms and biases are left out. A token meets
the output layer and its experts; publishers count the embedding as well, of which it meets one row, so it is counted here.
(Qwen2.5-32B's card says 32.5; the published tensors are what is counted.)

| model | published | counted | active: published | active: counted | source |
|---|---|---|---|---|---|
"""
_STEPS = """
### Steps beside published ones

No rate or share was tuned on them; lengths are the published means. What sources do not tell is taken as
`benchmarks/published.py` says. The weights' way to the engines is left out, since each project has its own and published no time of it. The one dense model
comes out near. Mixtures of experts come out too fast: a quarter to 0.6 of the timed step, and a fifth to 0.6 of the sampling
phases that are published. Take theirs for an upper bound of speed, and calibrate with a run of your own.
"""
_LEFT_OUT = """
### Published runs foretold from the others

`plan` multiplies a phase by the ratios of published runs of the same kind of model (with or without experts), and prints the
geometric mean and the range. Here each run is foretold from the others. A run that was published by its step alone stands for
each phase. The others do not foretell DeepSeek-V3 on 910C within a factor of 1.3: its sampling took longer than any other run
suggests, its trainers less, and where the step comes out near, errors cancel.

| run | phase | took, s | foretold, s | foretold / took | range, s | other runs |
|---|---|---|---|---|---|---|
"""


def block() -> str:
    """What stands between the two marks."""
    sizes = "".join(_size_row(size.model, size.total, size.active, size.source) for size in SIZES)
    table = "".join(_device_row(device) for device in devices().values())
    rates = "".join(f"| `{name}` | {unit} | {about} |\n" for name, (unit, about) in RATES.items())
    of_file = "".join(_field_row(one) for one in fields_of_file())
    return (
        f"{BEGIN}\n\n{_FIELDS}{of_file}{_RATES}{rates}{_DEVICES}{table}{_SIZES}{sizes}{_STEPS}"
        + "".join(_step(one) for one in STEPS)
        + _LEFT_OUT
        + left_out()
        + f"\n{END}\n"
    )


def document(page: str) -> str:
    """`page` with the block anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(f"{END}\n")
    return before + block() + after


def estimated(published: Published) -> Estimate:
    """With megarl's recipe for it, on its device, at its lengths; without the weights' way to the engines, which each project
    has a way of its own for, and none published."""
    recipe = published.recipe()
    lengths = Lengths.around(published.prompt, published.response, recipe.rollout.max_response_length, "as published")
    model = model_configs.read(published.model)
    found = estimate(recipe, model, None, device_named(published.device), lengths=lengths)
    phases = [phase for phase in found.phases if phase.name != "weight_exchange"]
    return replace(found, phases=phases, seconds=max(end for _, end in spans(phases)))


def ratios() -> list[dict[str, Any]]:
    """What published_ratios.yaml holds: measured / estimated seconds of the phases of each published run."""
    found = []
    for published in STEPS:
        of = {phase.name: phase.seconds for phase in estimated(published).phases} | {STEP: estimated(published).seconds}
        phases = [name for name in published.seconds if name in of and name != STEP] or [STEP]
        names = published.compared or phases
        experts = bool(model_shape(model_configs.read(published.model)).experts)
        each = {name: float(f"{published.seconds[name] / of[name]:.3g}") for name in names}
        found.append({"run": published.name, "model": published.model, "experts": experts, "ratios": each})
    return found


def left_out() -> str:
    """What other runs foretell of each run whose phases were published, and what it took."""
    known = [Ratios(one["run"], one["experts"], one["ratios"]) for one in ratios()]
    rows = []
    for published in STEPS:
        experts = bool(model_shape(model_configs.read(published.model)).experts)
        found = spreads(estimated(published), experts=experts, ratios=known, without=published.name)
        for one in found:
            if one.name in published.seconds and (not published.compared or one.name in published.compared):
                took = published.seconds[one.name]
                cells = [published.name, one.name, f"{took:,.1f}", f"{one.typical:,.1f}", f"{one.typical / took:.2f}"]
                rows.append(f"| {' | '.join([*cells, f'{one.low:,.0f} to {one.high:,.0f}', str(one.runs)])} |\n")
    return "".join(rows)


def _field_row(one: FieldOfFile) -> str:
    return f"| `{one.name}` | {one.unit} | {'yes' if one.needed else ''} | {one.about} |\n"


def _device_row(device: Device) -> str:
    rates = ", ".join(
        f"{rate / 1e9:.4g}" for rate in (device.link, device.network, device.host_link, device.host_network)
    )
    shares = ", ".join(
        f"{share:g}" for share in (device.train_share, device.prefill_share, device.decode_share, device.link_share)
    )
    cells = [device.name, f"{device.memory:g}", f"{device.flops / 1e12:.4g}", f"{device.bandwidth / 1e12:.3g}", rates]
    return f"| {' | '.join([*cells, str(device.per_node), shares])} |\n"


def _size_row(model: str, total: float, active: float | None, source: str) -> str:
    shape = model_shape(model_configs.read(model))
    met = (shape.active + (0 if shape.tied else shape.output)) / 1e9
    cells = [model, f"{total:g}", f"{shape.total / 1e9:.2f}"]
    cells += [f"{active:g}", f"{met:.2f}"] if active else ["", ""]
    return f"| {' | '.join([*cells, source])} |\n"


def _step(published: Published) -> str:
    found = estimated(published)
    seconds = {phase.name: phase.seconds for phase in found.phases}
    bounds = {phase.name: phase.bound for phase in found.phases}
    about = (
        f"**{published.name}**: mean prompt {published.prompt:g} and response {published.response:g} tokens. Source: "
        f"{published.source}."
    )
    lines = [
        f"\n{_filled(about)}\n",
        "| phase | published, s | estimated, s | estimated / published | bound by |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys([*published.seconds, *seconds]):
        if name != "step":
            lines.append(_phase_row(name, published.seconds.get(name), seconds.get(name), bounds.get(name, "")))
    lines.append(_phase_row("step", published.seconds["step"], found.seconds, ""))
    return "\n".join([*lines, "", _filled(published.why), ""])


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)


def _phase_row(name: str, measured: float | None, estimated: float | None, bound: str) -> str:
    cells = [f"{value:.1f}" if value else "" for value in (measured, estimated)]
    ratio = f"{estimated / measured:.2f}" if measured and estimated else ""
    return f"| {name} | {' | '.join([*cells, ratio, bound])} |"


if __name__ == "__main__":
    RATIOS.write_text(
        "# By `python -m docs.generate.planner`: measured / estimated seconds of published runs (published.py).\n"
        + yaml.safe_dump(ratios(), sort_keys=False),
        encoding="utf-8",
    )
    PAGE.write_text(document(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
