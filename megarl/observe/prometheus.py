"""The newest metrics of a run for Prometheus, over HTTP on the controller's machine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megarl.rollout.metrics import source_of

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_OF_MACHINE = re.compile(r"host/(?P<figure>\w+)/(?P<machine>.+)")


def series_of(metric: str) -> tuple[str, dict[str, str]]:
    """Return the name of `metric` in Prometheus, and its labels beyond ``run``.

    ``metric`` is our name, so that two metrics never share a series. Metrics of a data source or of a machine have the name of their
    figure, with the label ``source`` or ``machine``. Examples: critic/rewards/mean is megarl_critic_rewards_mean;
    eval/pass@1 is megarl_eval_pass_at_1; source/gsm8k/rewards/mean is megarl_source_rewards_mean{source="gsm8k"}.
    """
    labels, name = {"metric": metric}, metric
    if (source := source_of(metric)) is not None:
        name = metric.replace(f"/{source}/", "/" if metric.startswith("source/") else "/source/", 1)
        labels["source"] = source
    elif (match := _OF_MACHINE.fullmatch(metric)) and match["machine"] not in ("mean", "max"):
        name, labels["machine"] = f"host/{match['figure']}", match["machine"]
    return "megarl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name.replace("@", "_at_")), labels


class PrometheusSink:
    """Serves the last value of each metric, the step, and when it was finished, at http://HOST:PORT/metrics.

    Raises ValueError if it cannot listen, or if the package prometheus_client is missing.
    """

    def __init__(self, run: str, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError as error:
            raise ValueError(
                "observe.prometheus needs the package prometheus_client, which is not installed. Install it (pip install "
                "prometheus_client) or remove the key."
            ) from error
        self._run, self._guard = run, threading.Lock()
        self._values: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"observe.prometheus: cannot listen on {host}, port {port} ({error}). Choose another port, or an address of "
                "this machine for observe.prometheus_host."
            ) from error

    @property
    def port(self) -> int:
        port: int = self._server.server_port
        return port

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._guard:
            self._values |= {**metrics, "step": step, "step_finished_seconds": time.time()}

    def close(self, status: str) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> list[Any]:
        """Return no metrics: `CollectorRegistry` would otherwise call `collect` at registration."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics, for a request."""
        from prometheus_client.core import GaugeMetricFamily

        with self._guard:
            values = dict(self._values)
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in values.items():
            name, labels = series_of(metric)
            labels = {"run": self._run, **labels}
            if name not in families:
                families[name] = GaugeMetricFamily(
                    name, "docs/metrics.md of megarl describes the metrics", labels=list(labels)
                )
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()
