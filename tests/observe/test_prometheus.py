"""Metrics for Prometheus, read over HTTP, and the dashboard for Grafana."""

from __future__ import annotations

import json
import re
import urllib.request
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from docs.generate.grafana import FILE, document
from megarl.observe.log import RunLog
from megarl.observe.page.charts import CHARTS
from megarl.observe.prometheus import PrometheusSink, series_of
from tests.support.log_recipe import make_recipe

pytest.importorskip("prometheus_client", reason="observe.prometheus needs it")
Sample = tuple[str, dict[str, str], float]


def read(sink: PrometheusSink) -> list[Sample]:
    """Read the page as Prometheus does."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


@pytest.mark.parametrize(
    ("metric", "name", "labels"),
    [
        ("critic/rewards/mean", "megarl_critic_rewards_mean", {}),
        ("eval/pass@1", "megarl_eval_pass_at_1", {}),
        ("source/openai/gsm8k/rewards/mean", "megarl_source_rewards_mean", {"source": "openai/gsm8k"}),
        ("eval/a b/pass@4", "megarl_eval_source_pass_at_4", {"source": "a b"}),
        ("host/cpu/node-7.x", "megarl_host_cpu", {"machine": "node-7.x"}),
        ("host/cpu/max", "megarl_host_cpu_max", {}),
        ("host/run_disk", "megarl_host_run_disk", {}),
    ],
)
def test_names(metric: str, name: str, labels: dict[str, str]) -> None:
    assert series_of(metric) == (name, {"metric": metric, **labels})


def test_the_newest_values_are_served() -> None:
    sink = PrometheusSink("mine", "127.0.0.1", 0)
    try:
        assert read(sink) == []
        sink.write(1, {"critic/score/a-b/mean": 0.5, "critic/score/a b/mean": 1.0, "eval/pass@1": 0.25})
        sink.write(2, {"critic/score/a-b/mean": 0.75, "actor/grad_norm": float("nan")})
        samples = {labels["metric"]: (name, labels["run"], value) for name, labels, value in read(sink)}
    finally:
        sink.close("finished")
    assert samples["critic/score/a-b/mean"] == ("megarl_critic_score_a_b_mean", "mine", 0.75)
    assert samples["critic/score/a b/mean"][2] == 1.0, "metrics that have the same name in Prometheus stay apart"
    assert samples["eval/pass@1"][2] == 0.25 and samples["step"][2] == 2.0 and samples["actor/grad_norm"][2] != 0
    assert samples["step_finished_seconds"][2] > 1.7e9
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=1)


def test_a_run_serves_them_and_an_occupied_port_is_refused(tmp_path: Path) -> None:
    first = PrometheusSink("first", "127.0.0.1", 0)
    recipe = make_recipe()
    recipe.observe.prometheus = first.port
    try:
        with pytest.raises(ValueError, match=f"observe.prometheus: cannot listen on 127.0.0.1, port {first.port}"):
            RunLog(recipe, tmp_path / "second", 1, 2)
    finally:
        first.close("finished")
    with RunLog(recipe, tmp_path / "second", 1, 2) as log:
        log.add({"actor/lr": 0.5})
        log.step(1)
        assert ("megarl_actor_lr", {"run": recipe.name, "metric": "actor/lr"}, 0.5) in read(first)


def test_the_dashboard_is_generated() -> None:
    assert FILE.read_text() == document(), "run python -m docs.generate.grafana"


def test_the_dashboard_finds_each_metric_of_the_charts() -> None:
    """Each query selects the series that a run with this metric serves, and only metrics of its chart."""
    dashboard = json.loads(FILE.read_text())
    for chart, panel in zip(CHARTS, dashboard["panels"], strict=True):
        assert panel["title"] == chart.title and panel["type"] == "timeseries"
        for (pattern, _), target in zip(chart.series, panel["targets"], strict=True):
            metric = pattern.replace("*", "1")
            name, labels = series_of(metric)
            assert selects(target["expr"], name, {"run": "mine", **labels}), (pattern, target["expr"])
            assert not selects(target["expr"], name + "_more", {"run": "mine"}) or ".+" in target["expr"]
            assert not selects(target["expr"], "megarl_step", {"run": "mine"})
            shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert set(shown) <= {"run", *labels}
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(CHARTS)
    for one, other in combinations([panel["gridPos"] for panel in dashboard["panels"]], 2):
        assert not overlap(one, other)


def selects(expression: str, name: str, labels: dict[str, str]) -> bool:
    """Evaluate a PromQL selector for one series. ``$run`` is all runs."""
    selector = re.fullmatch(r"(\w*)\{(.*)\}", expression)
    assert selector, expression
    conditions = re.findall(r'(\w+)=~"([^"]*)"(?:, |$)', selector[2])
    assert ", ".join(f'{label}=~"{pattern}"' for label, pattern in conditions) == selector[2], expression
    values = {**labels, "__name__": name}
    matches = all(re.fullmatch(pattern.replace("$run", ".*"), values.get(label, "")) for label, pattern in conditions)
    return matches and selector[1] in ("", name)


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        one[axis] < other[axis] + other[size] and other[axis] < one[axis] + one[size] for axis, size in ("xw", "yh")
    )
