"""Checks of `train`: restarts, the journal, and the answer to spikes."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.algorithms.advantages import uses_critic
from megarl.errors import RecipeError, pluralize
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.schema import Recipe, TrainConfig

Errors = Iterator[RecipeError]


def restart_errors(recipe: Recipe) -> Errors:
    """Errors of `train.restarts` and `train.trainer_restarts`."""
    for name in ("restarts", "trainer_restarts"):
        value, key = getattr(recipe.train, name), f"train.{name}"
        if value and recipe.train.save_every == 0:
            problem = "a restart continues from the newest checkpoint, and train.save_every = 0 writes none"
            yield RecipeError(key, problem, "set train.save_every, e.g. to 20", value=value)
        if value and recipe.cluster.transport == "torchrun":
            yield RecipeError(
                key,
                "torchrun starts its processes again itself, all together",
                "set it to 0, and torchrun --max-restarts",
                value=value,
            )


def trainer_restart_errors(recipe: Recipe) -> Errors:
    if recipe.train.trainer_restarts and update_rule(recipe) == "finish":
        problem = "with rollout.at_update=finish the weight sync that new trainers open would change the weights of samples that run"
        remedy = "set rollout.at_update=refresh, keep or drain, or leave it out and set train.restarts"
        yield RecipeError("train.trainer_restarts", problem, remedy, value=recipe.train.trainer_restarts)


def journal_errors(train: TrainConfig) -> Errors:
    if not train.journal:
        return
    if train.source != "rollout":
        problem = f"train.source={train.source} samples nothing, and a resume repeats the training since the newest checkpoint"
        yield RecipeError("train.journal", problem, "leave it out, and lower train.save_every", value=True)
    elif train.save_every == 0:
        problem = "it keeps the batches since the newest checkpoint, and train.save_every = 0 writes none"
        yield RecipeError("train.journal", problem, "set train.save_every, e.g. to 20", value=True)


def keep_workers_errors(recipe: Recipe) -> Errors:
    """Errors of `train.keep_workers`."""
    train = recipe.train
    if not train.keep_workers:
        return
    missing = [f"train.{name}" for name in ("restarts", "journal") if not getattr(train, name)]
    if missing:
        problem = f"the workers wait for a controller that train.restarts starts and that goes on with train.journal; {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        yield _keep_error(train, problem, "set train.restarts, e.g. to 10, and train.journal=true, or leave it out")
    if recipe.cluster.transport == "torchrun":
        yield _keep_error(
            train,
            "torchrun ends all its processes with the controller",
            "leave it out, or start the run without torchrun",
        )
    if recipe.cluster.placement == "colocated":
        problem = "a new controller does not know whether trainers or engines have the devices that they share (cluster.placement=colocated)"
        yield _keep_error(train, problem, "set cluster.placement=disaggregated, or leave it out")
    if recipe.cluster.elastic:
        problem = "workers that wait hold their devices, so a new controller would find fewer free ones and take a smaller layout (cluster.elastic)"
        yield _keep_error(train, problem, "leave one of the two out")
    learners = {"": recipe} | ({"critic.": critic_view(recipe)} if uses_critic(recipe.algorithm) else {})
    for prefix, learner in learners.items():
        if learner.megatron.offload:
            problem = (
                f"a new controller does not know whether the trainers are offloaded ({prefix}megatron.offload=true)"
            )
            yield _keep_error(train, problem, f"set {prefix}megatron.offload=false, or leave it out")


def _keep_error(train: TrainConfig, problem: str, remedy: str) -> RecipeError:
    return RecipeError("train.keep_workers", problem, remedy, value=train.keep_workers)


def spike_errors(recipe: Recipe) -> Errors:
    train = recipe.train
    for name in ("spike_factor", "spike_window"):
        value = getattr(train, name)
        if train.on_spike is None and value != getattr(TrainConfig(), name):
            problem, remedy = (
                "train.on_spike is not set, so this has no effect",
                "set train.on_spike=warn, or leave it out",
            )
            yield RecipeError(f"train.{name}", problem, remedy, value=value)
    for name in ("spikes_before_rollback", "rollbacks"):
        value = getattr(train, name)
        if train.on_spike != "rollback" and value != getattr(TrainConfig(), name):
            problem, remedy = "it needs train.on_spike=rollback", "set that, or leave it out"
            yield RecipeError(f"train.{name}", problem, remedy, value=value)
    if train.on_spike != "rollback":
        return
    if train.save_every == 0:
        problem = "a rollback goes to the newest checkpoint before the spikes, and train.save_every = 0 writes none"
        yield RecipeError(
            "train.on_spike", problem, "set train.save_every, e.g. to 20, or on_spike=skip", value="rollback"
        )
    elif (most := train.save_every * _updates_per_step(recipe)) < train.spikes_before_rollback:
        yield RecipeError(
            "train.spikes_before_rollback",
            f"spikes of the last {pluralize(train.save_every, 'step')} count (train.save_every), which have {pluralize(most, 'update')}",
            f"set it to at most {most}, or raise train.save_every",
            value=train.spikes_before_rollback,
        )
    if train.keep_checkpoints == 1:
        yield RecipeError(
            "train.keep_checkpoints",
            "a rollback goes to the newest checkpoint before the spikes, and the only one that is kept may have been saved among them",
            "set it to 2 or more",
            value=1,
        )
    if 0 < train.stop_after_skipped <= train.spikes_before_rollback:
        yield RecipeError(
            "train.stop_after_skipped",
            f"the run would end before {pluralize(train.spikes_before_rollback, 'spike')} in a row (train.spikes_before_rollback) "
            "can cause a rollback",
            f"set it to {train.spikes_before_rollback + 1} or more, or to 0, or lower train.spikes_before_rollback",
            value=train.stop_after_skipped,
        )


def _updates_per_step(recipe: Recipe) -> int:
    """Return the number of optimizer steps of actor and critic in a controller step."""
    critic = critic_view(recipe).actor.optimizer_steps if uses_critic(recipe.algorithm) else 0
    return recipe.actor.optimizer_steps + critic
