"""Checks of `rollout.min_engines`, engines that may die while the run goes on, and of `cluster.elastic`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.errors import RecipeError
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.schema import ClusterConfig, Recipe, RolloutConfig

_SGLANG_WATCHDOG = 300  # default of watchdog_timeout, in seconds (sglang/srt/arg_groups/fields/device.py)


def fleet_errors(recipe: Recipe) -> Iterator[RecipeError]:
    least, rollout = recipe.rollout.min_engines, recipe.rollout
    if least is None:
        if rollout.step_timeout != RolloutConfig().step_timeout:
            problem = (
                "without rollout.min_engines an engine that hangs is not replaced, and rollout.timeout ends the run"
            )
            yield RecipeError(
                "rollout.step_timeout", problem, "leave it out, or set rollout.min_engines", value=rollout.step_timeout
            )
        return
    size = rollout.data_parallel
    most = rollout.engines if recipe.cluster.elastic else rollout.engines - size  # a smaller layout may have just these
    if least > most:
        of_groups = f" in groups of {size} (rollout.data_parallel), which end together" if size > 1 else ""
        problem = f"with rollout.engines={rollout.engines}{of_groups}, each death would leave fewer"
        yield _error(least, problem, f"set it to {most} at most" if most else "leave it out")
    if recipe.cluster.placement == "colocated":
        problem = "an engine that starts again would load its model while trainers use its devices"
        yield _error(least, problem, "set cluster.placement=disaggregated, or leave it out and set train.restarts")
    if update_rule(recipe) == "finish":
        problem = (
            "with rollout.at_update=finish a weight sync that is opened again, without the dead engine, would change the weights of "
            "samples that run"
        )
        yield _error(least, problem, "set rollout.at_update=refresh, keep or drain")
    if recipe.observe.profile_engines and recipe.observe.profile_steps:
        problem = (
            "a new process of an engine has no traces, for which a profiled step would wait (observe.profile_engines)"
        )
        yield _error(least, problem, "leave one of them out")
    if recipe.train.deterministic:
        problem = "the moment of a death changes which engine samples which groups, so a run with train.deterministic would not repeat"
        yield _error(least, problem, "leave it out, and set train.restarts")


def step_timeout_notice(rollout: RolloutConfig) -> str | None:
    """Return a notice if engines are replaced when they hang, but `rollout.step_timeout` does not limit their steps."""
    if rollout.min_engines is None or rollout.engine != "sglang":
        return None
    limit = rollout.engine_args.get("watchdog_timeout", _SGLANG_WATCHDOG)
    return (
        f"rollout.step_timeout ({rollout.step_timeout:g} s) is not a limit of SGLang's steps, which run in other processes: "
        f"SGLang ends an engine after a step of rollout.engine_args.watchdog_timeout ({limit} s)"
    )


def elastic_errors(cluster: ClusterConfig) -> Iterator[RecipeError]:
    """Errors of `cluster.elastic` and `cluster.elastic_wait`."""
    if cluster.elastic and cluster.transport == "torchrun":
        problem = "torchrun starts a fixed number of trainers (--nproc-per-node)"
        yield RecipeError("cluster.elastic", problem, "leave it out, or use Ray", value=True)
    if not cluster.elastic and cluster.elastic_wait != ClusterConfig().elastic_wait:
        problem = "without cluster.elastic a start takes all devices of the recipe at once"
        remedy = "set cluster.elastic=true, or leave it out"
        yield RecipeError("cluster.elastic_wait", problem, remedy, value=cluster.elastic_wait)


def _error(least: int, problem: str, remedy: str) -> RecipeError:
    return RecipeError("rollout.min_engines", problem, remedy, value=least)
