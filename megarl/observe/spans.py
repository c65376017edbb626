"""Spans of a session, its steps and phases for an OpenTelemetry collector (`observe.otlp`).

The tree of a session: `run`, in it `start`, a `step` per step and, after the last one, `export`; in a step its phases (gen,
old_log_prob, update_actor, ...), which nest as in trace.json. Notices and warnings are events of the running step.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from megarl.errors import pluralize
from megarl.recipe.observe import OtlpConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

_SECONDS = 5.0  # limit of a request, with its repeats
_QUEUE = 8192  # spans; a step has about 15
_METRICS = (
    "rollout/rewards/mean",
    "critic/rewards/mean",
    "actor/loss",
    "actor/grad_norm",
    "response_length/mean",
    "perf/throughput",
)
"""Metrics that a step's span has as attributes; metrics.jsonl has all."""


class Spans:
    """Records no spans: `observe.otlp.url` is not set."""

    def begin_step(self, step: int) -> None:
        """Begin the span of `step`."""

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End the span that `begin_step` has begun, as the span of `step`, with some of its metrics."""

    def phase(self, name: str, *, nested: bool) -> contextlib.AbstractContextManager[None]:
        """Record the block as a span. nested: inside the span of an outer phase of this thread or task, else of the step."""
        return contextlib.nullcontext()

    def notice(self, text: str, level: str) -> None:
        """Add an event to the span of the running step."""

    def close(self, status: str, error: str | None) -> str | None:
        """End all spans and send them. Returns a warning if spans were lost, or None."""
        return None


class OtlpSpans(Spans):
    """Sends spans to a collector with the OpenTelemetry SDK, from a thread of the SDK, over HTTP.

    Raises ValueError if the SDK or its exporter is not installed, or a header's variable is not set. A collector that does not
    answer does not end the run: `warn` is called once, and later spans are tried again.
    """

    def __init__(
        self, config: OtlpConfig, run: str, attributes: Mapping[str, str | int], warn: Callable[[str], None]
    ) -> None:
        """attributes: of the span of the session."""
        assert config.url is not None
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ValueError(
                f"observe.otlp needs two packages, and {error.name} is not installed: pip install opentelemetry-sdk "
                "opentelemetry-exporter-otlp-proto-http, or remove observe.otlp.url."
            ) from error
        self._trace = trace
        url = f"{config.url.rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(endpoint=url, headers=_headers(config.headers), timeout=_SECONDS)
        self._exporter = _CountingExporter(exporter, config.url, warn)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "megarl", "service.instance.id": run, "megarl.run": run}),
            shutdown_on_exit=False,  # `close` does it
        )
        self._provider.add_span_processor(BatchSpanProcessor(cast(Any, self._exporter), max_queue_size=_QUEUE))
        self._tracer = self._provider.get_tracer("megarl")
        self._run = self._tracer.start_span("run", attributes=dict(attributes))
        self._step: Span | None = None

    def begin_step(self, step: int) -> None:
        inside = self._trace.set_span_in_context(self._run)
        self._step = self._tracer.start_span("step", context=inside, attributes={"megarl.step": step})

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._step is not None:
            self._step.set_attribute("megarl.step", step)  # 0: the evaluation before the first step has a line
            self._step.set_attributes({f"megarl.{name}": float(metrics[name]) for name in _METRICS if name in metrics})
            self._step.end()
            self._step = None

    @contextlib.contextmanager
    def phase(self, name: str, *, nested: bool) -> Iterator[None]:
        outer = None if nested else self._trace.set_span_in_context(self._step or self._run)
        with self._tracer.start_as_current_span(name, context=outer):
            yield

    def notice(self, text: str, level: str) -> None:
        span = self._step or self._run
        if span.is_recording():  # after `close`, the console and notices.jsonl still have messages
            span.add_event(level, {"text": text})

    def close(self, status: str, error: str | None) -> str | None:
        failed = self._trace.Status(self._trace.StatusCode.ERROR, error) if status == "failed" else None
        for span in filter(None, (self._step, self._run)):
            span.set_attribute("megarl.status", status)
            if failed is not None:
                span.set_status(failed)
            span.end()
        self._step = None
        self._exporter.closing = True
        self._provider.shutdown()
        lost = self._exporter.lost
        return f"observe.otlp: {pluralize(lost, 'span')} did not reach {self._exporter.url}" if lost else None


def _headers(variables: Mapping[str, str]) -> dict[str, str]:
    """Read the headers' values from the environment. Messages never contain a value."""
    for header, variable in variables.items():
        if not os.environ.get(variable):
            raise ValueError(f"observe.otlp.headers: {header} reads {variable}, which is not set in this environment")
    return {header: os.environ[variable] for header, variable in variables.items()}


def make_spans(config: OtlpConfig, run: str, attributes: Mapping[str, str | int], warn: Callable[[str], None]) -> Spans:
    """Return the spans that `observe.otlp` selects."""
    return Spans() if config.url is None else OtlpSpans(config, run, attributes, warn)


class _CountingExporter:
    """An exporter with the methods of `SpanExporter`, around the official one: counts lost spans, and warns of the first failure in place of a log line each.

    closing: the run ends, so after one more failure nothing is tried again.
    """

    def __init__(self, exporter: SpanExporter, url: str, warn: Callable[[str], None]) -> None:
        self._exporter, self.url, self._warn = exporter, url, warn
        self.lost, self.closing, self._failed_at_end = 0, False, False
        self._logger = logging.getLogger(type(exporter).__module__)
        self._logger.addFilter(_nothing)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE if self._failed_at_end else self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self.lost and not self.closing:
                self._warn(
                    f"observe.otlp: {self.url} does not accept spans. Later ones are tried again; trace.json has all phases."
                )
            self.lost += len(spans)
            self._failed_at_end = self.closing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        self._logger.removeFilter(_nothing)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _nothing(record: Any) -> bool:
    return False
