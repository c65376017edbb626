"""`megarl eval`: sample held-out problems with a model on disk, and score the samples."""

from __future__ import annotations

import json
import sys
from functools import partial

from megarl import platform as platforms
from megarl.assembly import connected
from megarl.cluster import is_controller, serve
from megarl.cluster.device_map import Demand
from megarl.engines.specs import fixed_models
from megarl.errors import as_input_error
from megarl.observe.stdout import output
from megarl.preflight.engines_and_devices import check_device, check_installed
from megarl.preflight.environment import environment_notices
from megarl.preflight.hub_inputs import evaluation_inputs, fetch_inputs
from megarl.preflight.survey import check_without_weights, prepare_evaluation
from megarl.recipe import Recipe
from megarl.recipe.observe import Event
from megarl.recipe.paths import with_absolute_paths
from megarl.rollout.evaluate import EvaluationResult, evaluate
from megarl.rollout.judge.service import with_judge
from megarl.rollout.samplers import check_for, connect_judge
from megarl.rollout.start_engines import load_engines, start_engines, start_judge, wait_for_start


def evaluate_model(recipe: Recipe) -> EvaluationResult:
    """Evaluate `model.path` on `data.eval_files` and print the metrics as one JSON object."""
    if not is_controller(recipe.cluster):
        serve(recipe)
        return EvaluationResult({})
    with as_input_error():
        recipe = with_absolute_paths(recipe)
        inputs = evaluation_inputs(asks_judge=recipe.asks_judge)
        fetched = fetch_inputs(recipe, inputs, partial(check_without_weights, training=False))
        recipe = fetched.recipe
        prepared = prepare_evaluation(recipe)
        platform = platforms.select(recipe.cluster.device)
        check_device(recipe, platform.name, training=False)
        check_installed(recipe, training=False)
    for notice in [*fetched.notices, *environment_notices(recipe, platform, training=False)]:
        print(notice, file=sys.stderr)
    assert prepared.evaluation is not None
    demand = Demand.of(recipe, trainers=False, engines=True, fixed=fixed_models(recipe, training=False))
    with connected(recipe, platform, demand) as cluster:
        sources, limit = prepared.data_sources, recipe.rollout.start_timeout
        engines = start_engines(recipe, sources, platform, cluster, traces=None, updated=False)
        judges = start_judge(recipe, platform, cluster)
        loading = [*(judge.start() for judge in judges), *load_engines(recipe.rollout, engines)]
        wait_for_start([*judges, *engines], loading, doing="load", limit=limit, check=cluster.check)
        check, outages = check_for(recipe.rollout, engines, cluster, _print)
        judge = connect_judge(recipe, platform, cluster, judges, _print)
        samplers = with_judge(recipe.judge, recipe.reward, engines, judge)
        result = evaluate(recipe, prepared.evaluation, samplers, prepared.tokenizer.stop_ids, check, outages=outages)
    for notice in result.notices:
        print(notice, file=sys.stderr)
    print(json.dumps(result.metrics), file=output(), flush=True)
    return result


def _print(text: str, event: Event | None) -> None:
    """Print a message for the user."""
    print(text, file=sys.stderr)
