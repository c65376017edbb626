"""report.html: the page of `megarl view` about one run, with the run's data inside."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.errors import command_name, cut_middle
from megarl.observe.html import write_html
from megarl.observe.page.bundle import one_file
from megarl.observe.page.curves import MAX_POINTS
from megarl.observe.page.report_samples import MAX_TEXT, embedded_samples
from megarl.observe.page.viewed_run import ViewedRun, chart_list, recipe_table
from megarl.observe.run_dir import RunDirectory

MAX_NOTICES = 1000  # the newest


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run directory. Returns its path.

    Works for live and crashed runs: the page lists missing data. Its size has a bound: curves are thinned, and some samples,
    their tokens and their long texts are left out, as the page says.
    """
    data = report_data(run_dir)
    path = RunDirectory(run_dir).report
    write_html(path, one_file(html.escape(f"{data['answers']['runs']['runs'][0]['label']} · megarl"), data))
    return path


def write_report_or_warn(run_dir: Path, warn: Callable[[str], None]) -> None:
    """Write the report of a run that ends. A failure is a warning: the run's results are complete without the report."""
    try:
        write_report(run_dir)
    except Exception as error:  # noqa: BLE001 - see above; the warning names the command that tries again
        warn(
            f"report.html could not be written ({type(error).__name__}: {error}). "
            f"Try again with: {command_name()} report {run_dir}"
        )


def report_data(run_dir: Path) -> dict[str, Any]:
    """Return the data of the page.

    ``answers``: answers of the server of `megarl view`, by path (docs/view.md). The script static/frozen.js computes the others from
    ``curves`` (see `MetricsTable.report_curves`) and ``samples`` (see `embedded_samples`).
    """
    run = ViewedRun(0, run_dir, "")
    run.label = run.name()
    samples = embedded_samples(run.run_dir)
    curves, note = run.report_curves()
    if run.state()["metrics"][1] > MAX_POINTS:
        note = f"Curves with more than {MAX_POINTS} points are thinned: of each interval the smallest and the largest value are drawn. {note}"
    count = run.notices(0)["count"]
    notices = run.notices(max(0, count - MAX_NOTICES))
    notices["notices"] = [{**notice, "text": cut_middle(notice["text"], MAX_TEXT)} for notice in notices["notices"]]
    return {
        "answers": {
            "runs": {
                "runs": [{"id": 0, "label": run.label, "path": str(run_dir)}],
                "follow": False,
                "written": time.time(),
            },
            "state": {"runs": [run.state()]},
            "charts": {**chart_list([run], list(curves["metrics"])), "note": note.strip()},
            "recipes": recipe_table([run]),
            "runs/0/overview": run.overview(),
            "runs/0/sources": run.sources(),
            "runs/0/phases": run.phases(),
            "runs/0/notices": notices,
            "runs/0/sample_steps": {"steps": samples.steps, "note": samples.note},
        },
        "curves": curves,
        "samples": samples.groups,
    }
