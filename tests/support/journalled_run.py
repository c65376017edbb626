"""A run of stand-ins of which everything is on disk, so that its controller can die at any moment and start again.

What an engine samples depends on the weights that it has, and the weights on all samples so far, in order. So a single group
that is lost, doubled or sampled with other weights changes every number that follows.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from megarl.algorithms.kl import KLWeight
from megarl.assembly import Run
from megarl.checkpoint import folder as checkpoints
from megarl.checkpoint.graceful_stop import GracefulStop
from megarl.checkpoint.next_commands import Repetition
from megarl.checkpoint.run_checkpoints import Checkpoints
from megarl.checkpoint.skipped_steps import SkippedSteps
from megarl.cluster.failures import WorkerFailed
from megarl.observe.log import RunLog
from megarl.observe.metrics import read_metrics, without_times
from megarl.observe.profiling import Profiling
from megarl.preflight.run_directory import RunPlace, find_place
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.evaluate import EvaluationResult
from megarl.rollout.source_engines import EnginesSource
from megarl.train import run_steps
from megarl.trainer.group import ActorGroup
from megarl.trainer.kept import Way, judge_kept
from megarl.trainer.repeatable_steps import keep_steps
from megarl.trainer.restarts import TrainerRestarts
from megarl.types import Group, InlineData, Metrics, Partial, Prompt, Sample, SampleTokens, Span
from megarl.weight_sync.placement import Placement
from tests.rollout.test_source import Prompts
from tests.support.collecting import CollectedService
from tests.support.training_stand_ins import Workers

STEPS, PROMPTS = 7, 2
IDENTITY = {"model": {"weights": "a digest"}, "critic": None, "lora": None, "train.seed": 0}
Point = Callable[[str], None]


class Killed(BaseException):
    """The controller dies."""


class Death:
    """Kills the controller at one of its calls, before or after its effect, and counts the calls.

    number: index of the call, among those of `place`, or among all calls without `place`. The number of all calls depends on threads, because
    groups arrive at any time; the number of calls of one place does not.
    """

    def __init__(self, number: int | None = None, place: str | None = None) -> None:
        self.number, self.place, self.points = number, place, list[str]()

    def __call__(self, place: str) -> None:
        self.points.append(place)
        if self.place is not None and place != self.place:
            return
        if (len(self.points) if self.place is None else self.points.count(place)) - 1 == self.number:
            raise Killed(place)


class RememberingWorkers(Workers):
    """Trainers with the list of all updates so far as weights. Texts with "spike" or "broken" cause skipped updates."""

    failure = None

    def __init__(self, point: Point) -> None:
        super().__init__("actor", [])
        self.point, self.weights = point, list[Any]()
        self.held: int | None = 0  # as `Worker.held_step`

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "describe":
            return super().call(method)
        if method == "held_step":
            return [self.held]
        self.point(f"before {method}")
        if method in ("hold", "load", "update_actor", "refresh_reference"):
            self.held = args[0] if method == "hold" else None
        if method == "update_actor":
            broken, spike = (any(word in text for text in self.texts) for word in ("broken", "spike"))
            norm = math.inf if broken else 500.0 if spike else 1.0 + digest(self.weights) % 7
            self.norms = iter([norm])
            self.weights += [] if norm > 100 else [["update", self.texts, args[0]]]
        if method == "refresh_reference" and self.weights[-1:] != ["reference"]:  # the same weights once more
            self.weights.append("reference")
        answer = super().call(method, *args)
        self.point(f"after {method}")
        return answer

    def shutdown(self) -> None:
        self.point("shutdown")


class Engine(CollectedService):
    """An engine that answers in another order than it was asked. `word`: of the texts of a group, by its number."""

    def __init__(self, word: Callable[[int], str], seed: int) -> None:
        super().__init__()
        self.word, self.weights, self.random = word, "", random.Random(seed)
        self.ended, self.asked = False, dict[int, tuple[Future[Any], str]]()
        self.lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        result: Any = None
        if method == "copy_partials":
            with self.lock:
                zero = np.zeros(1, np.float32)
                partial = Partial(np.ones(1, np.int32), zero, (Span(0, arguments[0]),), None)
                result = {number: (partial, partial) for number in self.asked}
        for request in arguments[0] if method == "submit" else []:
            self.promise(request.group, self.answer_to(request.group))
        done.set_result(result)
        return done

    def answer_to(self, number: int) -> Future[Any]:
        done: Future[Any] = Future()
        with self.lock:
            self.asked[number] = done, self.weights
        return done

    def _serve(self) -> None:
        while not self.ended:
            time.sleep(0.002)
            with self.lock:
                number = self.random.choice([*self.asked]) if self.asked else None
                done, weights = (None, "") if number is None else self.asked.pop(number)
            if number is not None and done is not None:
                done.set_result(self._group(number, weights))

    def _group(self, number: int, weights: str) -> tuple[Group, InlineData]:
        seed = zlib.crc32(f"{weights} {number}".encode())
        length = 3 + seed % 4
        mask, zeros = np.arange(length) > 0, np.zeros(length, np.float32)
        tokens = np.full(length, seed % 50, np.int32)
        vectors = [
            SampleTokens(tokens, mask, zeros, f"{self.word(number)} {number}.{index} of {weights}")
            for index in range(2)
        ]
        samples = [
            Sample(
                number,
                index,
                InlineData([]),
                1,
                length - 1,
                length - 1,
                reward=0.0 if self.word(number) == "flat" else float((seed + index) % 3),
            )
            for index in range(2)
        ]
        return Group(number, f"row/{number}", "test", samples), InlineData(vectors)


class GivingPlacement(Placement):
    """Gives the engine a digest of the weights. With `rollout.max_staleness` it may sample with the ones before meanwhile."""

    def __init__(self, actor: ActorGroup, engine: Engine, point: Point) -> None:
        self.actor, self.engine, self.point, self.versions = actor, engine, point, dict[int, Any]()

    def update_engines(self, version: int) -> Metrics:
        self.point("before the update of the engines")
        weights = cast(Any, self.actor.workers).weights
        self.engine.weights = f"{digest(weights):x}"
        self.versions[version] = digest(weights)
        self.point("after the update of the engines")
        return {}


class DiskSaver:
    """Writes the stand-ins' weights into real checkpoint folders. In the background it commits at the next look."""

    def __init__(self, folder: Path, actor: ActorGroup, recipe: Recipe, notice: Any, point: Point) -> None:
        self.folder, self.actor, self.train, self.notice, self.point = folder, actor, recipe.train, notice, point
        self.step: int | None = None

    @property
    def pending(self) -> bool:
        return self.step is not None

    def save(self, step: int, state: dict[str, Any]) -> Metrics:
        self.poll(wait=True)
        self.point("before a save")
        partial = checkpoints.begin(self.folder, step, state, self.notice)
        self.point("in a save")
        (partial / "weights.json").write_text(json.dumps(cast(Any, self.actor.workers).weights))
        self.step = step
        return {} if self.train.save_in_background else self.poll(wait=True)

    def poll(self, *, wait: bool = False) -> Metrics:
        if self.step is not None:
            self.point("before a commit")
            checkpoints.commit(self.folder, self.step, {})
            self.step = None
            self.point("after a commit")
            checkpoints.retain(self.folder, self.train.keep_checkpoints, 0, self.notice)
        return {}

    def give_up(self) -> None: ...

    def rescue(self, *, wait: bool) -> None: ...


def digest(weights: Sequence[Any]) -> int:
    """Return a checksum of the updates and of the reference policy, which a refresh of the same weights leaves."""
    return zlib.crc32(json.dumps(weights).encode())


def recipe_of(folder: Path, change: Callable[[Recipe], None] = lambda recipe: None) -> Recipe:
    recipe = Recipe()
    recipe.runs_dir, recipe.name = str(folder), "run"
    train, algorithm, evaluation, observe = recipe.train, recipe.algorithm, recipe.evaluation, recipe.observe
    train.steps, train.save_every, train.journal, train.resume = STEPS, 3, True, "auto"
    recipe.data.prompts_per_step, recipe.rollout.samples_per_prompt = PROMPTS, 2
    recipe.rollout.max_response_length = 20
    algorithm.kl_coef, algorithm.kl_target, algorithm.refresh_reference_every = 0.1, 0.2, 2
    evaluation.at_start = evaluation.at_end = True
    evaluation.every, observe.console, observe.samples_per_step = 2, "plain", 2
    observe.tensorboard = observe.report = False
    change(recipe)
    return recipe


def run_session(
    recipe: Recipe,
    point: Point,
    *,
    word: Callable[[int], str] = lambda number: "answer",
    failures: Callable[[], WorkerFailed | None] = lambda: None,
    outlived: RememberingWorkers | None = None,
    starts: Callable[[RememberingWorkers], None] = lambda workers: None,
) -> Run:
    """Start the run, or start it again, and take it to its end, unless `point` raises. failures: of a trainer, at its check.
    outlived: trainers of the session before. starts: called with new trainers."""
    place = find_place(recipe, IDENTITY)
    folder = place.directory
    folder.path.mkdir(parents=True, exist_ok=True)
    log = RunLog(recipe, folder, place.first_step, recipe.train.steps, place.trained_steps)
    engine = Engine(word, seed=len(folder.notices.read_text()))

    def new_workers() -> Any:
        workers = RememberingWorkers(point)
        starts(workers)
        return workers

    with log:
        for notice in place.notices:
            log.notice(notice)
        place.abandon_later_steps(log.notice)
        for warning in place.warnings:
            log.warn(warning)
        if outlived is not None:
            outlived.point, outlived.kept = point, True
        actor = ActorGroup(cast(Any, outlived or new_workers()), recipe)
        step, has_checkpoint = place.resumes
        if judge_kept([actor], recipe.algorithm, step, has_checkpoint=has_checkpoint) is Way.START:
            actor.workers = new_workers()
        actor.describe()
        run = _assembled(recipe, point, place, log, actor, engine, new_workers, failures)
        try:
            with run.closing():
                run_steps(run, place.checkpoint, place.journal)
        finally:
            engine.ended = True
    return run


def _assembled(
    recipe: Recipe,
    point: Point,
    place: RunPlace,
    log: RunLog,
    actor: ActorGroup,
    engine: Engine,
    new_workers: Callable[[], Any],
    failures: Callable[[], WorkerFailed | None],
) -> Run:
    folder = place.directory
    prompts = Prompts(Prompt(f"row/{i}", (1, 2, 3), "text", "test") for i in range(7))
    source = EnginesSource(recipe, prompts, [EngineHandle(cast(Any, engine))], [0], lambda: None)  # type: ignore[arg-type]
    saver = cast(Any, DiskSaver(folder.checkpoints, actor, recipe, log.notice, point))
    skipped, kl_weight = SkippedSteps(recipe.train, Repetition(folder, False, None)), KLWeight(0.1, 0.2, 10)

    def load(path: Path) -> list[None]:
        actor.workers.call("load", str(path))
        cast(Any, actor.workers).weights = json.loads((path / "weights.json").read_text())
        return [None]

    def start() -> None:
        actor.workers = new_workers()

    def check() -> None:
        if (failure := failures()) is not None:
            raise failure

    def evaluate() -> EvaluationResult:
        point("evaluation")
        return EvaluationResult({"eval/weights": float(digest(cast(Any, actor.workers).weights))})

    repeatable, journal = keep_steps(recipe, folder, place.journal, log.notice)
    stop = GracefulStop(60.0)
    most = recipe.train.trainer_restarts
    return Run(
        recipe, actor, None, None, source, GivingPlacement(actor, engine, point), evaluate,
        Checkpoints(recipe.train, saver, source, kl_weight, skipped, IDENTITY, load, log, stop, journal=journal),
        skipped, kl_weight, cast(Any, SimpleNamespace(decode=lambda ids, special=False: str(ids))),
        Profiling(recipe.observe, actor, [], log, folder.profile, 1.0, lambda: None), log, 1, None,
        repeatable, TrainerRestarts(most, start, check) if most else None,
    )  # fmt: skip


def numbers(recipe: Recipe) -> list[Metrics]:
    """Return the lines of metrics.jsonl without what depends on time, and on how often the run was started."""
    lines = without_times(read_metrics(Path(recipe.runs_dir) / recipe.name / "metrics.jsonl"))
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("rollout/waiting", "rollout/tokens_taken"))
        }
        for line in lines
    ]


def notices(recipe: Recipe) -> list[str]:
    path = Path(recipe.runs_dir) / recipe.name / "notices.jsonl"
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]
