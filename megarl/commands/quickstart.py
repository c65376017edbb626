"""`megarl quickstart`: create data, tokenizer and a random model, train with SFT and DAPO, print results."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from megarl.checkpoint.next_commands import shown
from megarl.errors import InputError, as_input_error
from megarl.observe.run_dir import RunDirectory
from megarl.platform.version_sets import refuse_cuda_builds
from megarl.preflight.load import load_recipe
from megarl.recipe.paths import recipes_folder
from megarl.recipe.text import flat_settings

DATA = Path("data/quickstart")
SFT_RECIPE, RL_RECIPE = "quickstart_sft.yaml", "quickstart.yaml"  # in the folder of megarl's recipes


def quickstart(overrides: list[str]) -> Path:
    """Run SFT and DAPO in the current folder: data/ and runs/. Return the directory of the DAPO run.

    `overrides` are settings of the DAPO run. Its seed is also used for the data, the model and SFT.
    """
    from megarl.commands.data.quickstart import prepare_quickstart
    from megarl.train import train

    began = time.monotonic()
    sft_recipe, rl_recipe = (recipes_folder() / name for name in (SFT_RECIPE, RL_RECIPE))
    rl = load_recipe(rl_recipe, overrides)
    sft = load_recipe(sft_recipe, [f"train.seed={rl.train.seed}"])
    refuse_cuda_builds()  # before the data: `train` would refuse them only after it
    earlier = [Path(recipe.runs_dir) / recipe.name for recipe in (sft, rl)]
    for run in earlier:
        refuse_live_run(run)
    refuse_readers(earlier, {run.parent for run in earlier})
    heading(f"1/3  data, tokenizer and a random model in {DATA}/")
    with as_input_error():
        prepare_quickstart(DATA, rl.train.seed)
    for run in earlier:
        set_aside(run)
    heading(f"2/3  SFT on demonstrations of mixed quality ({sft_recipe}, {sft.train.steps} steps)")
    train(sft)
    heading(f"3/3  DAPO from the SFT checkpoint ({rl_recipe}, {rl.train.steps} steps)")
    run = train(rl)
    print_results(run, time.monotonic() - began)
    return run


def refuse_live_run(run: Path) -> None:
    """Raise InputError if a process has the run's directory, or may have it."""
    holder = RunDirectory(run).holder()
    if holder is not None and holder.get("unlocked"):
        raise InputError(
            f"{run} may be in use by another run (process {holder.get('pid', '?')} on {holder.get('host', '?')}, since "
            f"{holder.get('since', '?')}): its file system has no locks that would tell. Wait for that run, or stop it; if it has "
            f"been killed, remove {run / 'run.lock'}"
        )
    if holder is not None:
        raise InputError(f"{run} is in use by another run (process {holder.get('pid', '?')}): wait for it, or stop it")


def refuse_readers(folders: Sequence[Path], runs_dirs: Iterable[Path]) -> None:
    """Raise InputError if the recipe of a live run in one of `runs_dirs` names a file or model in one of `folders`."""
    for run in (RunDirectory(path) for parent in runs_dirs if parent.is_dir() for path in sorted(parent.iterdir())):
        if run.path in folders or not run.recipe.is_file() or (holder := run.holder()) is None:
            continue
        for value in flat_settings(run.recipe.read_text()).values():
            inside = [folder for folder in folders if isinstance(value, str) and _is_inside(value, folder)]
            if inside:
                raise InputError(
                    f"{run.path}, a run of process {holder.get('pid', '?')}, reads {value}, and the quickstart would rename "
                    f"{inside[0]}: wait for that run, or stop it"
                )


def _is_inside(path: str, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def set_aside(run: Path) -> None:
    """Rename an earlier run with the same name, so that a repeated quickstart starts from scratch."""
    refuse_live_run(run)
    if run.exists():
        renamed = run.with_name(f"{run.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(run.stat().st_mtime))}")
        run.rename(renamed)
        print(f"the earlier {run} was renamed to {renamed}")


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def print_results(run: Path, seconds: float) -> None:
    """Print the figures of the run's summary. A recipe with fewer evaluations has fewer of them."""
    summary = json.loads((run / "summary.json").read_text())
    accuracies = [
        f"  {label:<9} {float(summary[f'{name}_before']):.2f} -> {float(summary[f'{name}_after']):.2f}"
        for label, name in (("sampled", "accuracy"), ("greedy", "accuracy_greedy"))
        if summary[f"{name}_after"] is not None
    ]
    print()
    if accuracies:
        print("accuracy on held-out problems, before -> after DAPO:", *accuracies, sep="\n")
    if (gap := summary["logprob_gap_max"]) is not None:
        print(f"largest difference of a log-prob between engine and trainer: {float(gap):.1e}")
    print(f"{seconds / 60:.1f} minutes; curves, timeline and samples: {shown(run / 'report.html')}")
