"""report.html: a run on one page that needs no network and no server."""

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
    """Write ``report.html`` into the run directory; returns its path.

    Works on a run that is still going or that crashed: what is missing is said on the page. The page is
    self-contained (plotly.js included), and its content security policy forbids it to load anything or to run
    any script but its own, whatever a response contains.
    """
    run = RunDirectory(run_dir)
    page = render(collect(run))
    write_atomically(run.report, page.encode("utf-8", "backslashreplace"))
    return run.report


def render(data: ReportData) -> str:
    """The page, as text."""
    return page_with_charts(
        "report.html.j2",
        _payload(data),
        run=data,
        notices=[{**notice, "clock": _clock(notice.get("time"))} for notice in data.notices],
    )


def page_with_charts(template: str, payload: dict[str, Any], **values: Any) -> str:
    """A `page` with plotly.js in it, which is 5 MB; `payload` is what its script draws from."""
    from plotly.offline import get_plotlyjs

    plotly = get_plotlyjs()
    assert "</script" not in plotly, "plotly.js cannot be placed inside a script element"
    return page(template, **values, nonce=secrets.token_urlsafe(16), plotly=plotly, payload=script_json(payload))


def page(template: str, **values: Any) -> str:
    """A template of the package as a page."""
    import jinja2

    loader = jinja2.PackageLoader("megarl.observe")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values, written=time.strftime("%Y-%m-%d %H:%M"))


def script_json(value: Any) -> str:
    """`value` as JSON that no HTML parser can mistake for markup, wherever it is placed."""
    text = json.dumps(strict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _payload(data: ReportData) -> dict[str, Any]:
    """What the page's script draws from."""
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
