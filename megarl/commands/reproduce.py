"""`megarl reproduce`: compare this installation and a run's inputs with the run's provenance, and repeat the run under a new name."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.checkpoint.identity import data_digest, weights_digest
from megarl.checkpoint.next_commands import shown
from megarl.commands.bundle.modules import named_modules
from megarl.commands.child import STOP_SECONDS, run_child
from megarl.commands.replay import check_overrides, target_of
from megarl.commands.replay import differences as metric_differences
from megarl.errors import as_input_error, command_name
from megarl.hf import hub
from megarl.observe.metrics import read_metrics, without_times
from megarl.observe.run_dir import RunDirectory
from megarl.observe.sessions import devices_text, hosts_text
from megarl.platform.installed import differences, installation, megarl_text, versions_text
from megarl.preflight.load import load_recipe
from megarl.preflight.provenance import recipe_digest
from megarl.recipe.data import DataConfig
from megarl.recipe.hub_inputs import with_cached_inputs
from megarl.recipe.load import all_keys, setting_of
from megarl.recipe.schema import Recipe
from megarl.recipe.text import flat_settings

_FIXED = ("name", "runs_dir", "train.resume")  # settings of this command


@dataclass
class InputComparison:
    """Texts on installation and inputs: equal to the run's, different, and not comparable."""

    equal: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add(self, name: str, before: str, now: str | None, text: str) -> None:
        """Compare two digests. text: the difference, or why `now` is unknown (None)."""
        if before == now:
            self.equal.append(name)
        else:
            (self.unknown if now is None else self.different).append(f"{name}: {text}")


def reproduce(run: Path, name: str | None, overrides: Sequence[str], *, only_print: bool) -> int:
    """Print what differs from the provenance of `run`, then start its recipe in a new directory, from the run's beginning.

    name: see `target_of`. only_print: print the command on stdout, and the comparison on stderr; nothing starts. Returns the exit
    status of the training.
    """
    with as_input_error():
        recorded = RunDirectory(os.path.abspath(run))
        _check_recipe(recorded)
        target = target_of(recorded, name, "reproduced")
        if target.has_results() or target.path == recorded.path:
            raise ValueError(f"{target.path} already holds a run: remove it, or give this one another name (--name)")
        check_overrides(overrides, "reproduce", _FIXED)
        recipe = load_recipe(recorded.recipe, overrides)
        summary = _summary(recorded)
        settings = [
            setting_of("name", target.path.name),
            setting_of("runs_dir", str(target.path.parent)),
            setting_of("train.resume", _resume(recorded, recipe.train.resume)),
        ]
        arguments = ["train", str(shown(recorded.recipe)), *overrides, *settings]
        lines = [*_facts(recorded, summary), *_comparison_lines(_compare(recorded, summary, recipe))]
    print(*lines, sep="\n", file=sys.stderr if only_print else sys.stdout, flush=True)
    if only_print:
        print(f"{command_name()} {shlex.join(arguments)}")
        return 0
    command = [sys.executable, "-m", "megarl", *arguments]
    status = run_child(command, os.environ, stop_seconds=STOP_SECONDS + recipe.train.grace_seconds)
    if status == 0:
        print(*_metrics_lines(recorded, target), sep="\n")
    return status


def _check_recipe(recorded: RunDirectory) -> None:
    if not recorded.path.is_dir():
        raise ValueError(f"{recorded.path} is not a run's directory: it does not exist")
    if not recorded.recipe.is_file():
        raise ValueError(
            f"{recorded.recipe} is missing, so the run's settings are unknown: name the directory of a run, or start the recipe that "
            "you have with megarl train"
        )


def _summary(recorded: RunDirectory) -> dict[str, Any]:
    """Return the content of summary.json; empty if there is none."""
    if not recorded.summary.is_file():
        return {}
    try:
        summary: dict[str, Any] = json.loads(recorded.summary.read_text())
    except ValueError as error:
        raise ValueError(
            f"{recorded.summary} is damaged ({error}): move it away to reproduce the run without it"
        ) from error
    return summary


def _resume(recorded: RunDirectory, resume: str) -> str:
    """Return `train.resume` of the new run: the checkpoint of another run from which this one has started, else never."""
    if resume in ("auto", "never") or Path(resume).resolve().is_relative_to(recorded.path.resolve()):
        return "never"
    return resume


def _provenance(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of the run's last start; empty if it is unknown."""
    sessions = summary.get("sessions") or [{}]
    return dict(sessions[-1].get("provenance") or {})


def _facts(recorded: RunDirectory, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the run."""
    before = _provenance(summary)
    status = f": {summary['status']}, {summary['steps']} of {summary['total_steps']} steps" if before else ""
    yield f"{shown(recorded.path)}{status}"
    if not before:
        return
    yield f"  started with  {before['command']}  in {before['folder']}"
    yield f"  megarl        {megarl_text(before)}"
    yield f"  versions      {versions_text(before['versions'])}"
    if "hosts" in before:
        yield f"  ran on        {hosts_text(before['hosts'])}; trainers' devices: {devices_text(before['devices'])}"
    for number, session in enumerate(summary["sessions"][:-1], start=1):
        earlier = session.get("provenance")
        if earlier and (changes := [f"{key} {old}" for key, old, _ in differences(earlier, before)]):
            yield f"  start {number} ran with other versions: {', '.join(changes)}"


def _compare(recorded: RunDirectory, summary: Mapping[str, Any], recipe: Recipe) -> InputComparison:
    """Compare this installation and the inputs of `recipe` with the run's provenance. Reads all training data."""
    before, result, text = _provenance(summary), InputComparison(), recorded.recipe.read_text()
    if not before:
        result.unknown.append("installation, data and weights: the run has not recorded its provenance")
    else:
        changes = [f"{name}: {old} in the run, {new} here" for name, old, new in differences(before, installation())]
        result.different += changes
        result.equal += [] if changes else ["megarl and the versions of its stack"]
        result.add("recipe", before["recipe"], recipe_digest(text), "recipe.resolved.yaml was changed since")
        cached = with_cached_inputs(recipe)
        result.add("training data", before["data"], *_data_digest(cached.data))
        result.add("weights of the model", before["weights"], *_weights_digest(cached.model.path))
    recorded_keys = flat_settings(text)
    if new_keys := [key for key in all_keys() if key not in recorded_keys]:
        result.different.append(
            f"settings that the run's megarl did not have: {', '.join(new_keys)} have their defaults"
        )
    if before and named_modules(recipe) and before["folder"] != os.getcwd():
        modules = ", ".join(named_modules(recipe))
        result.unknown.append(f"{modules}: the run imported from {before['folder']}, and this is {os.getcwd()}")
    return result


def _data_digest(data: DataConfig) -> tuple[str | None, str]:
    """Return the digest of the training data and the text of a difference; or None and why there is none."""
    try:
        return data_digest(data), "other contents than in the run"
    except OSError as error:
        return None, _unread_text(str(error.filename))


def _weights_digest(path: str) -> tuple[str | None, str]:
    """Return the digest of a model's weights and the text of a difference; or None and why there is none."""
    if not Path(path).is_dir():
        return None, _unread_text(path)
    return weights_digest(Path(path)), "other weights than in the run"


def _unread_text(path: str) -> str:
    if path.startswith(hub.PREFIX):
        return f"{path} is not in this machine's cache; the training fetches this commit"
    return f"{path} cannot be read here"


def _comparison_lines(comparison: InputComparison) -> Iterator[str]:
    if comparison.equal:
        yield f"as in the run: {'; '.join(comparison.equal)}"
    for title, texts in (("not as in the run:", comparison.different), ("not compared:", comparison.unknown)):
        if texts:
            yield title
            yield from (f"  {text}" for text in texts)


def _metrics_lines(recorded: RunDirectory, target: RunDirectory) -> Iterator[str]:
    """Yield whether the metrics of both runs are equal in the steps that both have."""
    before, after = (without_times(read_metrics(each.metrics)) for each in (recorded, target))
    steps = {line["step"] for line in before}
    common = [line for line in after if line["step"] in steps]
    differing = metric_differences(before, common)
    if not common:
        yield "the runs have no step in common, so no metrics were compared"
    elif not differing:
        yield f"the metrics of {len(common)} steps are bitwise equal to the run's (times, rates and memory left out)"
    else:
        runs = shlex.join([str(shown(recorded.path)), str(shown(target.path))])
        yield f"{len(differing)} metrics differ, the first: {differing[0]}"
        yield f"compare the curves: {command_name()} compare {runs}"
