"""`megarl export`: write a run's checkpoint as a Hugging Face model, and compare it with the checkpoint."""

from __future__ import annotations

from pathlib import Path

from megarl import platform as platforms
from megarl.algorithms.advantages import uses_critic
from megarl.assembly import connected
from megarl.atomic_files import make_empty_folder
from megarl.checkpoint.folder import check_whole, checkpoint_name, list_checkpoints
from megarl.checkpoint.identity import check_base
from megarl.cluster import is_controller, serve
from megarl.cluster.device_map import Demand
from megarl.errors import as_input_error
from megarl.observe.run_dir import RunDirectory
from megarl.preflight.hub_inputs import fetch_inputs
from megarl.preflight.load import load_recipe
from megarl.preflight.models import CRITIC as CRITIC_MODEL
from megarl.preflight.models import POLICY
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.paths import with_absolute_paths
from megarl.trainer.group import TrainerGroup, adapter_folder
from megarl.trainer.start import ACTOR, CRITIC


def export(run_path: Path, out: Path, step: int | None = None, *, critic: bool = False) -> Path:
    """Write a run's checkpoint as a Hugging Face model to `out`, read it back and compare it.

    step: None: the newest checkpoint. critic: export the critic, as a token classification model, instead of the actor.
    """
    with as_input_error():
        run_dir = RunDirectory(run_path)
        if not run_dir.is_run_directory():
            raise ValueError(f"{run_path} is not a run's directory: recipe.resolved.yaml is missing")
        recipe = with_absolute_paths(load_recipe(run_dir.recipe))
        if critic and not uses_critic(recipe.algorithm):
            raise ValueError(f"{run_path} has no critic: its algorithm.advantage is {recipe.algorithm.advantage}")
        checkpoint = _choose_checkpoint(run_dir, step)
        recipe = fetch_inputs(recipe, [POLICY, "model.tokenizer", *([CRITIC_MODEL] if critic else [])]).recipe
        if recipe.lora.rank and not critic:
            check_base(checkpoint, recipe.model)
        for folder in (out, adapter_folder(out)) if recipe.lora.rank else (out,):
            make_empty_folder("--out", folder)
        platform = platforms.select(recipe.cluster.device)
    if not is_controller(recipe.cluster):
        serve(recipe)
        return out
    if critic:
        recipe = critic_view(recipe)
    with connected(recipe, platform, Demand.of(recipe, trainers=True, engines=False)) as cluster:
        worker, steps, weights_only = CRITIC if critic else ACTOR, 0, True
        workers = cluster.start_trainers(worker, recipe.cluster.trainers, (recipe, steps, weights_only))
        trainers = TrainerGroup(workers, recipe)
        trainers.load_checkpoint(checkpoint / ("critic" if critic else "trainer"))
        equal, untrained = trainers.export_hf(out)
        trainers.shutdown()
    print(f"{out}: {equal} tensors of {checkpoint.name}, read back equal to the trainer's, bit for bit")
    if recipe.lora.rank:
        print(f"{adapter_folder(out)}: the adapters alone, for PEFT, on {recipe.model.path}")
    if untrained:
        print(f"{untrained} more, which are not trained, are equal to the starting model's")
    return out


def _choose_checkpoint(run_dir: RunDirectory, step: int | None) -> Path:
    """Return the checkpoint of `step`, or the newest. Raises ValueError if it does not exist or is damaged."""
    checkpoints = list_checkpoints(run_dir.checkpoints)
    if not checkpoints:
        raise ValueError(f"{run_dir.path} holds no whole checkpoint: set train.save_every or train.save_at_end")
    checkpoint = checkpoints[-1] if step is None else run_dir.checkpoints / checkpoint_name(step)
    if checkpoint not in checkpoints:
        names = ", ".join(path.name for path in checkpoints)
        raise ValueError(f"{run_dir.path} has no checkpoint of step {step}; it has {names}")
    check_whole(checkpoint)
    return checkpoint
