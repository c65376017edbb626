"""`megarl quickstart`: create data, tokenizer and a random model, train with SFT and DAPO, print results."""

from __future__ import annotations

import json
import time
from pathlib import Path

from megarl.checkpoint.next_commands import shown
from megarl.commands.shipped_recipes import recipes_folder
from megarl.errors import InputError
from megarl.observe.run_dir import RunDirectory
from megarl.platform.version_sets import refuse_cuda_builds
from megarl.preflight.load import load_recipe

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
    for recipe in (sft, rl):
        set_aside(Path(recipe.runs_dir) / recipe.name)
    heading(f"1/3  data, tokenizer and a random model in {DATA}/")
    prepare_quickstart(DATA, rl.train.seed)
    heading(f"2/3  SFT on demonstrations of mixed quality ({sft_recipe}, {sft.train.steps} steps)")
    train(sft)
    heading(f"3/3  DAPO from the SFT checkpoint ({rl_recipe}, {rl.train.steps} steps)")
    run = train(rl)
    print_results(run, time.monotonic() - began)
    return run


def set_aside(run: Path) -> None:
    """Rename an earlier run with the same name, so that a repeated quickstart starts from scratch."""
    holder = RunDirectory(run).holder()
    if holder is not None and holder.get("unlocked"):
        raise InputError(
            f"{run} may be in use by another run (process {holder.get('pid', '?')} on {holder.get('host', '?')}, since "
            f"{holder.get('since', '?')}): its file system has no locks that would tell. Wait for that run, or stop it; if it has "
            f"been killed, remove {run / 'run.lock'}"
        )
    if holder is not None:
        raise InputError(f"{run} is in use by another run (process {holder.get('pid', '?')}): wait for it, or stop it")
    if run.exists():
        renamed = run.with_name(f"{run.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(run.stat().st_mtime))}")
        run.rename(renamed)
        print(f"the earlier {run} was renamed to {renamed}")


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def print_results(run: Path, seconds: float) -> None:
    summary = json.loads((run / "summary.json").read_text())
    print(
        f"\naccuracy on held-out problems, before -> after DAPO:\n"
        f"  sampled   {summary['accuracy_before']:.2f} -> {summary['accuracy_after']:.2f}\n"
        f"  greedy    {summary['accuracy_greedy_before']:.2f} -> {summary['accuracy_greedy_after']:.2f}\n"
        f"largest difference of a log-prob between engine and trainer: {float(summary['logprob_gap_max']):.1e}\n"
        f"{seconds / 60:.1f} minutes; curves, timeline and samples: {shown(run / 'report.html')}"
    )
