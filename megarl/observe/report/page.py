"""report.html: a self-contained page about a run. It needs no network and no server."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

from megarl.atomic_files import write_atomically
from megarl.observe.json_lines import strict
from megarl.observe.report.charts import present
from megarl.observe.report.data import ReportData, collect
from megarl.observe.run_dir import RunDirectory


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run directory. Returns its path.

    Works for live and crashed runs: the page lists missing data. The page includes plotly.js. Its content security policy
    blocks requests and foreign scripts, whatever text a response contains.
    """
    run = RunDirectory(run_dir)
    write_html(run.report, render(collect(run)))
    return run.report


def render(data: ReportData) -> str:
    """Render the page as HTML."""
    return page_with_charts(
        "report.html.j2",
        _payload(data),
        run=data,
        notices=[{**notice, "clock": _clock(notice.get("time"))} for notice in data.notices],
        faults=[{**fault, "clock": _clock(fault["time"])} for fault in data.faults],
    )


def page_with_charts(template: str, payload: dict[str, Any], **values: Any) -> str:
    """Render a `page` that includes plotly.js (5 MB); `payload`: the data of its charts."""
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs()
    assert "</script" not in plotly, "plotly.js cannot be placed inside a script element"
    return page(template, **values, nonce=secrets.token_urlsafe(16), plotly=plotly, payload=script_json(payload))


def page(template: str, **values: Any) -> str:
    """Render a template of this package as HTML."""
    import jinja2

    loader = jinja2.PackageLoader("megarl.observe")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values, written=time.strftime("%Y-%m-%d %H:%M"))


def write_html(path: Path, html: str) -> None:
    """Write a page atomically. Lone surrogates, which UTF-8 lacks, become escapes."""
    write_atomically(path, html.encode("utf-8", "backslashreplace"))


def script_json(value: Any) -> str:
    """Return `value` as JSON with <, > and & escaped, so that HTML parsers never read it as markup."""
    text = json.dumps(strict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _payload(data: ReportData) -> dict[str, Any]:
    """Return the data of the page's charts, tables and samples."""
    return {
        "series": data.series,
        "charts": present(data.series),
        "resumes": data.resumes,
        "phases": data.phases,
        "timeline": data.timeline,
        "sources": data.sources,
        "samples": data.samples,
    }


def _clock(seconds: Any) -> str:
    if not isinstance(seconds, (int, float)):
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
