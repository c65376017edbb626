"""One rank of a case of `engine_gap`: rank 0 drives trainers and engine like the controller of a run.

Usage, with the environment of torchrun: python -m benchmarks.numerics.engine_gap_run CASE.json OUTPUT.json
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.numerics.engine_gap import Case, Gap, score
from megarl import platform as platforms
from megarl.algorithms.spikes import GradNorms
from megarl.cluster import connect, is_controller, serve
from megarl.cluster.base import Cluster
from megarl.cluster.calls import attach, wait
from megarl.engines import engine_env
from megarl.engines.base import EngineSpec
from megarl.hf.families import family_of
from megarl.recipe.schema import Recipe, RewardConfig
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.start_engines import ROLLOUT_SERVER
from megarl.trainer.actor import ActorWorker
from megarl.trainer.group import ActorGroup
from megarl.types import GenerationRequest, Group, Prompt, Sampling
from megarl.weight_sync.publish import publish
from megarl.weight_sync.session import Session

SOURCE = "benchmark"
PROMPTS = 6
LONGEST_PROMPT = 48


class DisturbingWorker(ActorWorker):
    """A trainer that can send tensors with their elements shifted by one, to test that the gap shows it."""

    disturbed: str | None = None

    def disturb(self, pattern: str | None) -> None:
        self.disturbed = pattern

    def send_weights(self, version: int) -> Any:
        export = self.trainer.export_weights

        def wrong() -> Iterator[tuple[str, Any]]:
            for name, tensor in export():
                matches = self.disturbed is not None and fnmatch.fnmatchcase(name, self.disturbed)
                yield name, tensor.flatten().roll(1).view_as(tensor) if matches else tensor

        self.trainer.export_weights = wrong  # type: ignore[method-assign]
        try:
            return super().send_weights(version)
        finally:
            self.trainer.export_weights = export  # type: ignore[method-assign]


def recipe_of(case: Case, model: Path, directory: Path) -> Recipe:
    recipe = Recipe(name="run", runs_dir=str(directory))
    recipe.model.path, recipe.model.dtype = str(model), case.dtype  # type: ignore[assignment]
    recipe.cluster.device, recipe.cluster.transport, recipe.cluster.trainers = "cpu", "torchrun", case.processes
    recipe.data.max_prompt_length, recipe.rollout.max_response_length = LONGEST_PROMPT, 24
    recipe.rollout.samples_per_prompt, recipe.rollout.temperature = 4, case.temperature
    recipe.actor.max_tokens_per_micro_batch = 256  # several micro batches, each of several sequences
    optimizer = recipe.actor.optimizer
    optimizer.lr, optimizer.weight_decay = 1e-2, 0.0  # each element moves by about 0.01 a step
    for name, value in case.megatron.items():
        setattr(recipe.megatron, name, value)
    config = json.loads((model / "config.json").read_text())
    if family_of(config).settings(config).get("moe_router_enable_expert_bias"):
        # The routing biases have no gradient. This rate makes Megatron change them, so that weight sync has new values.
        recipe.megatron.extra = {"moe_router_bias_update_rate": 0.03, **recipe.megatron.extra}
    return recipe


@dataclass
class Driver:
    """The controller's work: publish versions, sample, and compare log-probs."""

    recipe: Recipe
    cluster: Cluster
    actor: ActorGroup
    engine: EngineHandle
    session: Session
    vocabulary: int
    version: int = -1

    def publish(self) -> None:
        self.version += 1
        publish(self.actor, [self.engine], self.session, self.version)

    def sample(self) -> list[Group]:
        """Return the engine's samples of the current version. The prompts are always the same."""
        random, rollout = np.random.default_rng(0), self.recipe.rollout
        lengths = np.linspace(3, LONGEST_PROMPT, PROMPTS).astype(int)
        requests = [
            GenerationRequest(
                number,
                Prompt(f"p{number}", tuple(random.integers(3, self.vocabulary, length).tolist()), "", SOURCE),
                Sampling(rollout.samples_per_prompt, rollout.max_response_length, rollout.temperature),
                seed=1000 * (self.version + 1) + 10 * number,
            )
            for number, length in enumerate(lengths)
        ]
        submitted = self.engine.submit(requests)
        collected = [self.engine.collect(request.group) for request in requests]
        wait(submitted, self.cluster.check)
        return [attach(wait(result, self.cluster.check)) for result in collected]

    def gap(self, label: str, groups: list[Group]) -> Gap:
        """Load `groups` into the trainers and compare their log-probs with the engine's."""
        self.actor.load_shards(self.actor.plan(groups).shards)
        metrics = self.actor.compute_old_log_probs(self.version)
        mean, largest = metrics["rollout/logprob_gap_mean"], metrics["rollout/logprob_gap_max"]
        assert np.isfinite(mean), "a log-prob is not a number"
        tokens = sum(sample.loss_tokens for group in groups for sample in group.samples)
        return Gap(label, tokens, mean, largest)

    def learn(self) -> None:
        """Take one optimizer step on the groups that `gap` loaded last."""
        updated = self.actor.update(self.recipe.algorithm.kl_coef, None, GradNorms(self.recipe.train))
        metrics = next(steps for steps in updated if steps is not None)
        assert len(metrics) == 1 and not metrics[0]["actor/skipped_updates"], metrics


def drive(case: Case, driver: Driver, directory: Path) -> dict[str, Any]:
    gaps, changes = [], []
    before: dict[str, np.ndarray] = {}
    for update in range(case.updates + 1):
        driver.publish()
        groups = driver.sample()
        gaps.append(driver.gap(f"update {update}" if update else "start", groups))
        after = _weights(driver.actor, directory / f"hf{update}")
        changes += [(float(np.abs(after[name] - before[name]).max()), name) for name in before]
        before = after
        driver.learn()
    stale = driver.gap("not synced", groups)
    disturbed = []
    # A single expert may get no tokens, so all experts of a layer are sent wrong together.
    every = dict.fromkeys(re.sub(r"\.experts\.\d+\.", ".experts.*.", name) for name in before)
    for name in every if "*" in case.disturb else case.disturb:
        driver.actor.workers.call("disturb", name)  # a call that only `DisturbingWorker` has
        driver.publish()
        disturbed.append(driver.gap(name, driver.sample()))
    return {
        "gaps": [asdict(gap) for gap in gaps],
        "stale": asdict(stale),
        "disturbed": [asdict(gap) for gap in disturbed],
        "least_change": min(changes, default=(0.0, "")),
    }


def _weights(actor: ActorGroup, directory: Path) -> dict[str, np.ndarray]:
    """Return the trainers' exported weights, without layers that are not trained."""
    import torch
    from safetensors.torch import load_file

    actor.save_hf(directory)
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    return {
        name: tensor.to(torch.float32).numpy()
        for name, tensor in load_file(directory / "model.safetensors").items()
        if not name.startswith(f"model.layers.{layers}.")
    }


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    case, model, directory = Case(**request["case"]), Path(request["model"]), Path(request["directory"])
    recipe = recipe_of(case, model, directory)
    if not is_controller(recipe.cluster):
        serve(recipe)
        return
    platform = platforms.select(recipe.cluster.device)
    spec = EngineSpec(
        name="engine0",
        model_path=recipe.model.path,
        dtype=case.dtype,
        max_model_len=recipe.data.max_prompt_length + recipe.rollout.max_response_length,
        load_weights=False,
        temperature=case.temperature,
        fp32_head=recipe.megatron.fp32_head,
    )
    with connect(recipe, platform) as cluster:
        service = cluster.start_service(
            ROLLOUT_SERVER,
            (
                "vllm",
                spec,
                recipe.model.path,
                RewardConfig(function=f"{score.__module__}:score"),
                [SOURCE],
                recipe.sandbox,
            ),
            name=spec.name,
            devices=1,
            env=engine_env(
                "vllm",
                platform.engines_env(recipe.train.deterministic),
                recipe.cluster.threads,
                recipe.rollout.engine_args,
            ),
        )
        engine = EngineHandle(service)
        starting = engine.start()
        workers = cluster.start_trainers(
            f"{__spec__.name}:DisturbingWorker", case.processes, (recipe, case.updates + 1)
        )
        receivers = [(name, host) for name, host in wait(starting, cluster.check)["receivers"]]
        actor = ActorGroup(workers, recipe)
        actor.describe()
        session = actor.open_weight_sync(receivers, case.route)
        assert not isinstance(session, str), session
        engine.connect_weight_sync(session).result()
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        figures = drive(case, Driver(recipe, cluster, actor, engine, session, vocabulary), directory)
        actor.shutdown()
    Path(sys.argv[2]).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
