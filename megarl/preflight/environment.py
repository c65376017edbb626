"""Notices of environment variables that the shell, the recipe and megarl set differently, and of defaults of a loss."""

from __future__ import annotations

from typing import Any

from megarl.algorithms.catalogue import LOSSES
from megarl.algorithms.correction import rejects
from megarl.batching.limits import group_size_notice
from megarl.cluster import trainer_notices
from megarl.engines.specs import first_specs
from megarl.observe.webhook import unencrypted_notice
from megarl.platform.version_sets import refuse_cuda_builds
from megarl.preflight.engines_and_devices import unused_devices_notice
from megarl.preflight.recipe.fleet import step_timeout_notice
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.recipe.derived.at_update import update_notice
from megarl.recipe.derived.seeded import seeds_notice
from megarl.recipe.observe import traces_notice
from megarl.recipe.schema import Recipe, TrainConfig
from megarl.rollout.start_engines import engine_environment

_UNSAVED_STEPS = 100


def environment_notices(recipe: Recipe, platform: Any, *, training: bool = True) -> list[str]:
    """Return notices of variables that the recipe sets or requires, or that differ between this shell and the run's processes.

    `training`: false for `megarl eval`, which has no trainers. Raises RecipeError for a variable of `cluster.environment`
    that would break a process, and for packages that cannot be imported on a CPU.
    """
    if not platform.kind.accelerator:
        refuse_cuda_builds()
    notices = trainer_notices(recipe, platform) if training else []
    if training:
        notices += [
            notice
            for notice in (
                loss_notice(recipe.algorithm),
                mini_batch_notice(recipe),
                quantization_notice(recipe),
                group_size_notice(recipe),
                warmup_notice(recipe),
                checkpoints_notice(recipe.train),
                seeds_notice(recipe),
                step_timeout_notice(recipe.rollout),
                unused_devices_notice(recipe, accelerated=platform.kind.accelerator),
                update_notice(recipe),
                traces_notice(recipe),
                unencrypted_notice(recipe.observe.alerts),
            )
            if notice
        ]
    for engine, spec in first_specs(recipe, training=training):
        settings = engine_environment(recipe, platform, engine, spec)
        notices += settings.notices()
        notices += [f"engines have {name}={value}: {reason}" for name, value, reason in settings.computed()]
        if spec.deterministic and engine == "vllm" and platform.deterministic_rollout_env():
            notices.append(
                "train.deterministic: engines run in vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT=1), which is slower and in "
                "beta; see docs/numerics.md"
            )
    return list(dict.fromkeys(notices))


def warmup_notice(recipe: Recipe) -> str | None:
    """Return a notice if the run ends before the learning rate's warm-up does; None while the number of steps is unknown."""
    optimizer, steps = recipe.actor.optimizer, recipe.train.steps * recipe.actor.optimizer_steps
    warmup, first = optimizer.warmup_steps, optimizer.init_lr_ratio
    if warmup <= steps or recipe.train.epochs is not None:
        return None
    return (
        f"the run has {steps} optimizer steps, and actor.optimizer.warmup_steps is {warmup}: the learning rate reaches "
        f"{first + (1 - first) * steps / warmup:.0%} of actor.optimizer.lr"
    )


def checkpoints_notice(train: TrainConfig) -> str | None:
    """Return a notice if a failure may lose more than `_UNSAVED_STEPS` steps, because checkpoints are rare or off."""
    every, steps = train.save_every, train.steps
    wants_none = every == 0 and not train.save_at_end
    if steps <= _UNSAVED_STEPS or 0 < every <= _UNSAVED_STEPS or wants_none:
        return None
    when = f"only after every {every} steps" if 0 < every < steps else f"before the end of the run's {steps} steps"
    never = "no checkpoint is written " if every == 0 or every >= steps else "a checkpoint is written "
    return f"{never}{when} (train.save_every={every}): a failure loses all steps since the last one. Set train.save_every=20"


def loss_notice(algorithm: AlgorithmConfig) -> str | None:
    """Return a notice of the values of settings for which `algorithm.loss` has other defaults; None if it has none."""
    values = []
    for name, default in LOSSES[algorithm.loss].defaults.items():
        value = getattr(algorithm, name)
        values.append(f"{name} {value}" if value == default else f"{name} {value} (default of this loss: {default})")
    return f"algorithm.loss={algorithm.loss} trains with {', '.join(values)}" if values else None


def mini_batch_notice(recipe: Recipe) -> str | None:
    """Return a notice if `actor.mini_batch_order: balanced` changes the weights of tokens; None otherwise."""
    if recipe.actor.mini_batch_order != "balanced" or recipe.algorithm.aggregation != "token_mean":
        return None
    return (
        "actor.mini_batch_order=balanced with algorithm.aggregation=token_mean changes the loss: a token weighs less in a mini batch of "
        "long samples, and more in one of short samples. Set actor.mini_batch_order=as_sampled, or an aggregation over samples"
    )


def quantization_notice(recipe: Recipe) -> str | None:
    """Return a notice of what corrects the loss for quantized engines (`rollout.quantization`); None without them."""
    quantization, algorithm = recipe.rollout.quantization, recipe.algorithm
    if quantization is None or recipe.train.source != "rollout":
        return None
    engines = f"rollout.quantization={quantization}: engines sample from rounded weights (metrics rollout/mismatch_*)"
    correction = algorithm.correction
    if correction.weights != "none":
        by = f"algorithm.correction.weights={correction.weights}, truncated at {correction.truncate:g}"
    elif rejects(correction):
        by = "the limits of algorithm.correction.reject"
    elif algorithm.old_log_probs == "rollout":
        by = "its ratio to the engines' log-probs (algorithm.old_log_probs=rollout)"
    else:
        return f"{engines}, and nothing corrects the loss: set algorithm.correction.weights=token"
    return f"{engines}; the loss is corrected by {by}"
