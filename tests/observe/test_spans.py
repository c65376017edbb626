"""Spans of a run at a collector: a real OTLP receiver over HTTP, on loopback, that parses the official messages."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import RecipeError
from megarl.observe.log import RunLog
from megarl.observe.spans import _CountingExporter
from megarl.preflight.recipe.observe import otlp_errors
from megarl.recipe.observe import OtlpConfig
from tests.support.log_recipe import make_recipe

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter over HTTP is not installed")


class Collector(http.server.ThreadingHTTPServer):
    """Accepts ExportTraceServiceRequest at /v1/traces. status: of its answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.spans, self.resources, self.headers = 200, [], [], []  # type: ignore[var-annotated]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def by_name(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.status if self.path == "/v1/traces" else 404
        if status == 200:
            request = ExportTraceServiceRequest.FromString(body)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
            for part in request.resource_spans:
                self.server.resources.append(values(part.resource.attributes))
                self.server.spans += [span for scope in part.scope_spans for span in scope.spans]
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.shutdown()
    server.server_close()


def two_steps(folder: Path, config: OtlpConfig) -> None:
    with RunLog(make_recipe(otlp=config), folder, 1, 2) as log:
        with log.phase("start"):
            pass
        log.begin()
        log.evaluation(0, {"greedy": 0.5})
        for step in (1, 2):
            with log.phase("update_actor"), log.phase("weight_sync"):
                time.sleep(0.01)
            log.warn(f"a warning in step {step}")
            log.add({"critic/rewards/mean": step / 4, "actor/entropy": 1.0})
            log.step(step)
        with log.phase("export"):
            pass


def test_spans_of_run_steps_and_phases(collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "Bearer 123")
    two_steps(tmp_path, OtlpConfig(collector.url, {"Authorization": "MY_TOKEN"}))
    (run,) = collector.by_name("run")
    assert values(run.attributes) == {"megarl.first_step": 1, "megarl.total_steps": 2, "megarl.status": "finished"}
    assert {span.trace_id for span in collector.spans} == {run.trace_id} and not run.parent_span_id
    steps = collector.by_name("step")
    assert [span.parent_span_id for span in steps] == [run.span_id] * 3
    assert [values(span.attributes)["megarl.step"] for span in steps] == [0, 1, 2]
    assert values(steps[2].attributes)["megarl.critic/rewards/mean"] == 0.5
    assert "megarl.actor/entropy" not in values(steps[2].attributes)
    updates, syncs = collector.by_name("update_actor"), collector.by_name("weight_sync")
    assert [span.parent_span_id for span in updates] == [span.span_id for span in steps[1:]]
    assert [span.parent_span_id for span in syncs] == [span.span_id for span in updates]
    for span in syncs:
        assert 0.01e9 <= span.end_time_unix_nano - span.start_time_unix_nano < 5e9
    assert [span.parent_span_id for span in collector.by_name("start") + collector.by_name("export")] == [
        run.span_id
    ] * 2
    (event,) = steps[1].events
    assert event.name == "warning" and values(event.attributes) == {"text": "a warning in step 1"}
    assert collector.resources[0]["service.name"] == "megarl"
    assert collector.resources[0]["megarl.run"] == make_recipe().name
    assert collector.headers[0]["authorization"] == "Bearer 123"


def test_a_failed_run_has_the_error(collector: Collector, tmp_path: Path) -> None:
    recipe = make_recipe(otlp=OtlpConfig(collector.url))
    with pytest.raises(RuntimeError), RunLog(recipe, tmp_path, 1, 2) as log:
        log.begin()
        with log.phase("gen"):
            raise RuntimeError("an engine died")
    (gen,), (step,), (run,) = map(collector.by_name, ("gen", "step", "run"))
    assert gen.parent_span_id == step.span_id and gen.status.code == 2
    assert run.status.code == 2 and run.status.message == "RuntimeError: an engine died"


def test_a_collector_that_refuses_is_reported_once(
    collector: Collector, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends as it would, soon, and says how many spans are missing. The SDK logs nothing besides."""
    collector.status = 400
    began = time.monotonic()
    two_steps(tmp_path, OtlpConfig(collector.url))
    shown = capfd.readouterr()
    assert time.monotonic() - began < 10
    assert shown.out.count("WARNING: observe.otlp") == 1 and "10 spans did not reach" in shown.out
    assert not [record.name for record in caplog.records if record.name.startswith("opentelemetry")]
    assert "spans did not reach" in (tmp_path / "notices.jsonl").read_text()


def test_an_absent_collector_delays_the_end_by_seconds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Collector()
    server.shutdown()
    server.server_close()
    began = time.monotonic()
    two_steps(tmp_path, OtlpConfig(server.url))
    assert time.monotonic() - began < 20 and "10 spans did not reach" in capfd.readouterr().out


def test_after_a_failure_at_the_end_nothing_is_tried_again() -> None:
    """Thousands of spans may wait, and each request may take seconds."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Refusing:
        requests = 0

        def export(self, spans: Any) -> SpanExportResult:
            self.requests += 1
            return SpanExportResult.FAILURE

    refusing = Refusing()
    exporter = _CountingExporter(refusing, "http://host", pytest.fail)  # type: ignore[arg-type]
    exporter.closing = True
    for _ in range(3):
        exporter.export([None, None])  # type: ignore[list-item]
    assert (refusing.requests, exporter.lost) == (1, 6)


def test_later_spans_are_tried_again(collector: Collector, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    collector.status = 400
    with RunLog(make_recipe(otlp=OtlpConfig(collector.url)), tmp_path, 1, 1) as log:
        log.begin()
        with log.phase("gen"):
            pass
        log._spans._provider.force_flush()  # type: ignore[attr-defined]
        assert "does not accept spans. Later ones are tried again" in capfd.readouterr().out
        collector.status = 200
        log.step(1)
    assert {span.name for span in collector.spans} == {"step", "run"}
    assert "1 span did not reach" in capfd.readouterr().out


def test_without_a_url_no_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    two_steps(tmp_path, OtlpConfig())
    with pytest.raises(ValueError, match="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or"):
        two_steps(tmp_path / "second", OtlpConfig("http://127.0.0.1:1"))


def test_a_missing_variable_is_refused(tmp_path: Path) -> None:
    config = OtlpConfig("http://127.0.0.1:1", {"Authorization": "NO_SUCH_TOKEN"})
    with pytest.raises(ValueError, match="Authorization reads NO_SUCH_TOKEN, which is not set"):
        two_steps(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OtlpConfig("127.0.0.1:4318"), "http or https URL"),
        (OtlpConfig("http://me:secret@host:4318"), "contains a name or a password"),
        (OtlpConfig("http://host:4318/v1/traces"), "leave /v1/traces out"),
        (OtlpConfig(None, {"Authorization": "MY_TOKEN"}), "set observe.otlp.url"),
        (OtlpConfig("http://host:4318", {"Authorization": "Bearer 1"}), "must name an environment variable"),
    ],
)
def test_wrong_settings_are_refused(config: OtlpConfig, words: str) -> None:
    errors = [str(error) for error in otlp_errors(config) if isinstance(error, RecipeError)]
    assert len(errors) == 1 and words in errors[0] and "secret" not in errors[0].replace("no secret", "")
