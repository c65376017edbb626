"""Destinations of metrics in addition to metrics.jsonl: TensorBoard, Prometheus, wandb, SwanLab, MLflow, trackio.

TensorBoard's event files are files of the run: a failure to write them ends the run. Trackers depend on servers: a tracker
that fails during the run warns once and gets no more metrics.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from megarl.atomic_files import disk_errors, write_atomically
from megarl.observe.prometheus import PrometheusSink
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.hub_inputs import with_hub_names
from megarl.recipe.schema import Recipe


class Sink(Protocol):
    """Receives the metrics of each step, in order. A step may come twice, with other keys (a late evaluation)."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, status: str) -> None: ...


class TensorBoardSink:
    """Event files under tensorboard/, one per session.

    Written with the record writer of the `tensorboard` package, without torch, and flushed at every step. Values are
    float32, TensorBoard's type; metrics.jsonl has full precision. ``first_step`` makes TensorBoard hide the values that an
    earlier session wrote at or after it: the steps that a resume repeats.
    """

    def __init__(self, run_dir: RunDirectory, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{first_step}"
        self._path = run_dir.tensorboard / name
        with disk_errors(self._path):
            run_dir.tensorboard.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb", buffering=0)
        self._writer = RecordWriter(self._file)
        self._record(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._record(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._record(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self, status: str) -> None:
        self._file.close()

    def _record(self, event: Any) -> None:
        with disk_errors(self._path):
            self._writer.write(event.SerializeToString())


class WandbSink:
    """Weights & Biases. A resumed run continues under its id, kept in trackers.json."""

    def __init__(self, recipe: Recipe, run_dir: RunDirectory) -> None:
        wandb = _tracker_package("wandb")
        self._run = wandb.init(
            project=recipe.observe.project,
            name=recipe.name,
            dir=str(run_dir.path),
            config=dataclasses.asdict(recipe),
            id=_tracker_id(run_dir, "wandb"),
            resume="allow",
        )
        # wandb's step must not decrease, but a resume goes back: our step is a column, and the x axis of every chart.
        self._run.define_metric("*", step_metric="step")
        _keep_tracker_id(run_dir, "wandb", self._run.id)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class SwanlabSink:
    """SwanLab. A resumed run continues under its id, kept in trackers.json."""

    def __init__(self, recipe: Recipe, run_dir: RunDirectory) -> None:
        self._swanlab = _tracker_package("swanlab")
        earlier_id = _tracker_id(run_dir, "swanlab")
        run = self._swanlab.init(
            project=recipe.observe.project,
            experiment_name=recipe.name,
            logdir=str(run_dir.path / "swanlab"),
            config=dataclasses.asdict(recipe),
            **({"id": earlier_id, "resume": "allow"} if earlier_id else {}),
        )
        _keep_tracker_id(run_dir, "swanlab", run.id)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        if status == "finished":
            self._swanlab.finish()
        else:
            self._swanlab.finish(state="crashed", error=status)


class MlflowSink:
    """MLflow; MLFLOW_TRACKING_URI names the server. A resumed run continues under its id, kept in trackers.json."""

    def __init__(self, recipe: Recipe, run_dir: RunDirectory) -> None:
        self._mlflow = _tracker_package("mlflow")
        # Its default of 7 retries holds a step up for over 4 minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        self._mlflow.set_experiment(recipe.observe.project)
        earlier_id = _tracker_id(run_dir, "mlflow")
        run = self._mlflow.start_run(run_id=earlier_id) if earlier_id else self._mlflow.start_run(run_name=recipe.name)
        _keep_tracker_id(run_dir, "mlflow", run.info.run_id)
        self._mlflow.log_dict(dataclasses.asdict(recipe), "recipe.resolved.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({mlflow_name(name): value for name, value in metrics.items()}, step=step)

    def close(self, status: str) -> None:
        self._mlflow.end_run(status="FINISHED" if status == "finished" else "FAILED")


class TrackioSink:
    """trackio, in a local database unless its environment variables name a server or a Space.

    trackio finds a run by its name, so the name contains the start of the first session. A resumed run continues under the name in
    trackers.json.
    """

    def __init__(self, recipe: Recipe, run_dir: RunDirectory) -> None:
        self._trackio = _tracker_package("trackio")
        if folder := os.environ.get("TRACKIO_DIR"):
            Path(folder).mkdir(parents=True, exist_ok=True)  # trackio loses the metrics silently if this fails
        earlier_name = _tracker_id(run_dir, "trackio")
        self._run = self._trackio.init(
            project=recipe.observe.project,
            name=earlier_name or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}",
            config=dataclasses.asdict(recipe),
            resume="allow" if earlier_name else "never",
            embed=False,
            auto_log_gpu=False,  # the metrics host/... have the load of all machines
            auto_log_cpu=False,
        )
        _keep_tracker_id(run_dir, "trackio", self._run.name)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        self._trackio.finish()  # run.finish() would leave it to the interpreter's exit as well


def mlflow_name(name: str) -> str:
    """Replace characters that MLflow rejects in a metric's name: "@", and others from names of data sources."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))


class GuardedTracker:
    """Wrapper of a tracker: the first failure is a warning, and the tracker gets no more calls."""

    def __init__(self, name: str, sink: Sink, warn: Callable[[str], None]) -> None:
        self._name, self._sink, self._warn = name, sink, warn
        self._failed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda: self._sink.write(step, metrics), f"at step {step}")

    def close(self, status: str) -> None:
        self._attempt(lambda: self._sink.close(status), "when closing")

    def _attempt(self, call: Callable[[], None], when: str) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the network client of a tracker may raise any exception
            self._failed = True
            self._warn(
                f"{self._name} failed {when} and gets no more metrics in this session "
                f"({type(error).__name__}: {error}). metrics.jsonl has all metrics."
            )


TRACKERS: dict[str, Callable[[Recipe, RunDirectory], Sink]] = {
    "wandb": WandbSink,
    "swanlab": SwanlabSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}

_REMEDIES = {
    "wandb": "Log in (wandb login), record to files of the run (WANDB_MODE=offline)",
    "swanlab": "Log in (swanlab login), record to files of the run (SWANLAB_MODE=offline)",
    "mlflow": "Let MLFLOW_TRACKING_URI name a server that runs, or a file (sqlite:///mlflow.db)",
    "trackio": "Let TRACKIO_DIR name a folder that can be written",
}


def make_sinks(recipe: Recipe, run_dir: RunDirectory, first_step: int, warn: Callable[[str], None]) -> list[Sink]:
    """Return the sinks that ``recipe.observe`` selects.

    Raises ValueError if a tracker is unknown, is not installed or cannot start (no login, no server): the run does not begin
    without its trackers. Then the trackers that have started are closed as failed.
    """
    unknown = [name for name in recipe.observe.trackers if name not in TRACKERS]
    if unknown:
        raise ValueError(f"observe.trackers: {unknown[0]!r} is an unknown tracker. Choose from {', '.join(TRACKERS)}.")
    sinks: list[Sink] = [TensorBoardSink(run_dir, first_step)] if recipe.observe.tensorboard else []
    if recipe.observe.prometheus is not None:
        sinks.append(PrometheusSink(recipe.name, recipe.observe.prometheus_host, recipe.observe.prometheus))
    named = with_hub_names(recipe)
    try:
        for name in recipe.observe.trackers:
            sinks.append(GuardedTracker(name, _start_tracker(name, named, run_dir), warn))
    except BaseException:
        for sink in sinks:
            sink.close("failed")
        raise
    return sinks


def _start_tracker(name: str, recipe: Recipe, run_dir: RunDirectory) -> Sink:
    _tracker_package(name)
    try:
        return TRACKERS[name](recipe, run_dir)
    except Exception as error:
        raise ValueError(
            f"observe.trackers: {name} did not start ({type(error).__name__}: {error}). {_REMEDIES[name]}, or remove it "
            "from observe.trackers."
        ) from error


def _tracker_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # installed, but broken: the original error is more precise
            raise
        raise ValueError(
            f"observe.trackers names {name}, which is not installed. "
            f"Install it (pip install {name}) or remove it from observe.trackers."
        ) from error


def _tracker_id(run_dir: RunDirectory, tracker: str) -> str | None:
    """Return the id of this run in `tracker`, from an earlier session, or None."""
    if not run_dir.tracker_ids.exists():
        return None
    return json.loads(run_dir.tracker_ids.read_text()).get(tracker)


def _keep_tracker_id(run_dir: RunDirectory, tracker: str, run_id: str) -> None:
    ids = json.loads(run_dir.tracker_ids.read_text()) if run_dir.tracker_ids.exists() else {}
    write_atomically(run_dir.tracker_ids, json.dumps({**ids, tracker: run_id}).encode())
