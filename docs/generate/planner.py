"""Write the generated part of docs/planner.md: ``python -m docs.generate.planner``. The rest is written by hand."""

from __future__ import annotations

import textwrap
from dataclasses import MISSING, dataclass, fields, replace
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
from megarl.platform.device_table import Device, device_named, devices

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
BEGIN = "<!-- from here on made by `python -m docs.generate.planner` -->"
END = "<!-- made until here -->"
_WIDTH = 120

_FIELDS = """### Fields of a device in a file

Fields of an entry of `--devices FILE`. "needed": the entry, or the device that it is `like`, must have the field.

| field | unit | needed | meaning |
|---|---|---|---|
"""
_RATES = """
### Rates of a calibration

Entries of `rates`; all are per device, as measured.

| rate | unit | meaning |
|---|---|---|
"""
_DEVICES = """
### Devices

Per device, as torch sees it: for a 910C one of its two dies. Sources are in
[`megarl/platform/devices.yaml`](../megarl/platform/devices.yaml), figure by figure.

| device | GiB | dense bf16 TFLOP/s | memory TB/s | link, network, host, host's network GB/s | per node (full mesh) | shares: train, prefill, decode, links |
|---|---|---|---|---|---|---|
"""
_SIZES = """
### Parameters compared with published ones

Counted from each model's config.json by `megarl/hf/shape.py`, in billions, without norms and biases. "active" includes the
output layer and a token's experts; publishers include the embedding, although a token reads one row of it, so it is included
here. (Qwen2.5-32B's card says 32.5; the published tensors have the counted number.)

| model | published | counted | active: published | active: counted | source |
|---|---|---|---|---|---|
"""
_STEPS = """
### Steps compared with published ones

No rate or share was tuned on these runs; lengths are the published means. `benchmarks/published.py` has the assumptions for
details that the sources leave open. Weight sync is left out, since each project does it differently and none published its
time. The estimate of the one dense model is close. Mixtures of experts are estimated too fast: a quarter to 0.6 of the timed
step, and a fifth to 0.6 of the published sampling phases. Use them as an upper bound of speed, and calibrate with a run.
"""
_LEFT_OUT = """
### Published runs predicted from the others

`plan` multiplies a phase by the ratios of published runs of the same kind of model (with or without experts), and prints the
geometric mean and the range. Here each run is predicted from the others. If only the step of a run was published, its ratio
counts for each phase. DeepSeek-V3 on 910C is not predicted within a factor of 1.3: its sampling took longer than any other run
suggests, its trainers less, and where the step is close, errors cancel.

| run | phase | took, s | predicted, s | predicted / took | range, s | other runs |
|---|---|---|---|---|---|---|
"""


def block() -> str:
    """Return the generated part of the page, with its marks."""
    sizes = "".join(_size_row(size.model, size.total, size.active, size.source) for size in SIZES)
    table = "".join(_device_row(device) for device in devices().values())
    rates = "".join(f"| `{name}` | {unit} | {about} |\n" for name, (unit, about) in RATES.items())
    of_file = "".join(_field_row(entry) for entry in fields_of_file())
    return (
        f"{BEGIN}\n\n{_FIELDS}{of_file}{_RATES}{rates}{_DEVICES}{table}{_SIZES}{sizes}{_STEPS}"
        + "".join(_step(entry) for entry in STEPS)
        + _LEFT_OUT
        + left_out()
        + f"\n{END}\n"
    )


def document(page: str) -> str:
    """Return `page` with a new generated part."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(f"{END}\n")
    return before + block() + after


def estimated(published: Published) -> Estimate:
    """Estimate a published run with megarl's recipe for it, on its device, at its lengths; without weight sync, since each
    project does it differently and none published its time."""
    recipe = published.recipe()
    lengths = Lengths.around(published.prompt, published.response, recipe.rollout.max_response_length, "as published")
    model = model_configs.read(published.model)
    whole_estimate = estimate(recipe, {"rollout": model}, device_named(published.device), lengths=lengths)
    phases = [phase for phase in whole_estimate.phases if phase.name != "weight_sync"]
    return replace(whole_estimate, phases=phases, seconds=max(end for _, end in spans(phases)))


def ratios() -> list[dict[str, Any]]:
    """Return the content of published_ratios.yaml: measured / estimated seconds of the phases of each published run."""
    result = []
    for published in STEPS:
        of = {phase.name: phase.seconds for phase in estimated(published).phases} | {STEP: estimated(published).seconds}
        phases = [name for name in published.seconds if name in of and name != STEP] or [STEP]
        names = published.compared or phases
        experts = bool(model_shape(model_configs.read(published.model)).experts)
        each = {name: float(f"{published.seconds[name] / of[name]:.3g}") for name in names}
        result.append({"run": published.name, "model": published.model, "experts": experts, "ratios": each})
    return result


def left_out() -> str:
    """Return table rows: each published phase as predicted from the other runs, compared with its time."""
    all_ratios = [Ratios(entry["run"], entry["experts"], entry["ratios"]) for entry in ratios()]
    rows = []
    for published in STEPS:
        experts = bool(model_shape(model_configs.read(published.model)).experts)
        other_runs = [entry for entry in all_ratios if entry.run != published.name]
        predicted = spreads(estimated(published), experts=experts, ratios=other_runs)
        for spread in predicted:
            if spread.name in published.seconds and (not published.compared or spread.name in published.compared):
                took = published.seconds[spread.name]
                cells = [
                    published.name,
                    spread.name,
                    f"{took:,.1f}",
                    f"{spread.typical:,.1f}",
                    f"{spread.typical / took:.2f}",
                ]
                rows.append(
                    f"| {' | '.join([*cells, f'{spread.low:,.0f} to {spread.high:,.0f}', str(spread.runs)])} |\n"
                )
    return "".join(rows)


@dataclass(frozen=True)
class FieldOfFile:
    """A key of an entry of a device file. `needed`: required unless inherited through `like`."""

    name: str
    unit: str
    needed: bool
    about: str


def fields_of_file() -> list[FieldOfFile]:
    """Return all keys of an entry."""
    like = FieldOfFile("like", "name", False, "device to inherit absent fields from, except `torch`")
    keys = [key for key in fields(Device) if key.name != "name"]
    needed = {key.name for key in keys if key.default is MISSING and key.default_factory is MISSING}
    return [
        like,
        *(FieldOfFile(key.name, key.metadata["unit"], key.name in needed, key.metadata["about"]) for key in keys),
    ]


def _field_row(field: FieldOfFile) -> str:
    return f"| `{field.name}` | {field.unit} | {'yes' if field.needed else ''} | {field.about} |\n"


def _device_row(device: Device) -> str:
    rates = ", ".join(
        f"{rate / 1e9:.4g}" for rate in (device.link, device.network, device.host_link, device.host_network)
    )
    shares = ", ".join(
        f"{share:g}" for share in (device.train_share, device.prefill_share, device.decode_share, device.link_share)
    )
    cells = [device.name, f"{device.memory:g}", f"{device.flops / 1e12:.4g}", f"{device.bandwidth / 1e12:.3g}", rates]
    per_node = f"{device.per_node} ({device.mesh})" if device.mesh else str(device.per_node)
    return f"| {' | '.join([*cells, per_node, shares])} |\n"


def _size_row(model: str, total: float, active: float | None, source: str) -> str:
    shape = model_shape(model_configs.read(model))
    met = (shape.active + (0 if shape.tied else shape.output)) / 1e9
    cells = [model, f"{total:g}", f"{shape.total / 1e9:.2f}"]
    cells += [f"{active:g}", f"{met:.2f}"] if active else ["", ""]
    return f"| {' | '.join([*cells, source])} |\n"


def _step(published: Published) -> str:
    estimate_of_run = estimated(published)
    seconds = {phase.name: phase.seconds for phase in estimate_of_run.phases}
    bounds = {phase.name: phase.bound for phase in estimate_of_run.phases}
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
    lines.append(_phase_row("step", published.seconds["step"], estimate_of_run.seconds, ""))
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
