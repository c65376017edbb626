"""Write docs/grafana_dashboard.json from the charts of a run's page: ``python -m docs.generate.grafana``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megarl.observe.page.charts import CHARTS, Chart
from megarl.observe.prometheus import series_of

FILE = Path(__file__).resolve().parents[2] / "docs" / "grafana_dashboard.json"
_ANY = "ANY"  # stands for the star of a pattern
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def expression(pattern: str) -> tuple[str, str]:
    """Return the PromQL expression of the metrics that match `pattern`, and the legend of its curves."""
    name, labels = series_of(pattern.replace("*", _ANY))
    variable = next((label for label in ("source", "machine") if label in labels), None)
    if variable is not None:
        return f'{name}{{run=~"$run"}}', f"{{{{run}}}} {{{{{variable}}}}}"
    if _ANY in name:
        return f'{{__name__=~"{name.replace(_ANY, ".+")}", run=~"$run"}}', "{{run}} {{metric}}"
    return f'{name}{{run=~"$run"}}', "{{run}}"


def document() -> str:
    """Return the dashboard: a panel per chart, three in a row, and variables for the data source and the runs."""
    panels = [_panel(number, chart) for number, chart in enumerate(CHARTS)]
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            **{
                "name": "run",
                "label": "Run",
                "type": "query",
                "datasource": _SOURCE,
                "multi": True,
                "includeAll": True,
            },
            **{"query": {"query": "label_values(megarl_step, run)", "refId": "run"}, "refresh": 2},
        },
    ]
    dashboard = {
        **{"title": "megarl", "uid": "megarl", "schemaVersion": 39, "version": 1, "editable": True, "refresh": "30s"},
        **{"time": {"from": "now-6h", "to": "now"}, "templating": {"list": variables}, "panels": panels},
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _panel(number: int, chart: Chart) -> dict[str, Any]:
    targets = []
    for place, (pattern, label) in enumerate(chart.series):
        query, legend = expression(pattern)
        text = re.sub(r"\s+", " ", label.replace("*", "")).strip()
        targets.append({"refId": chr(ord("A") + place), "expr": query, "legendFormat": f"{legend} {text}".strip()})
    unit = "percentunit" if chart.tick.endswith("%") else "Bps" if chart.title.startswith("Network") else "short"
    custom = {"scaleDistribution": {"type": "log", "log": 10}} if chart.log else {}
    column, row = number % (_COLUMNS // _WIDTH), number // (_COLUMNS // _WIDTH)
    return {
        **{"id": number + 1, "type": "timeseries", "title": chart.title, "description": chart.note},
        **{"datasource": _SOURCE, "targets": targets},
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
    }


if __name__ == "__main__":
    FILE.write_text(document())
