"""report.html: self-contained, safe with untrusted text, and valid for a run in any state."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.report import report
from megarl.observe.html import script_json
from megarl.observe.log import RunLog
from megarl.observe.page import facts
from megarl.observe.page.charts import present
from megarl.observe.page.curves import thin
from megarl.observe.page.facts import phase_times
from megarl.observe.page.report import report_data, write_report
from megarl.recipe.schema import Recipe
from tests.support.html_page import MARKUP, Page, assert_self_contained


def make_run(path: Path, text: str = "#### 72") -> None:
    recipe = Recipe(name=f"run {text}")
    recipe.model.path = f"models/{text}"
    recipe.observe.console = "plain"
    recipe.observe.tensorboard = recipe.observe.report = False
    with RunLog(recipe, path, 1, 4) as log:
        log.evaluation(0, {"pass@1": 0.25})
        for step in range(1, 5):
            with log.phase("gen"), log.phase("reward"):
                pass
            log.call(text, text, text, 0.0, 1.0)
            log.add({"critic/rewards/mean": step / 4, "critic/rewards/min": 0.0, "critic/rewards/max": 1.0})
            log.add({f"critic/score/{text}/mean": 0.5, "actor/kl_loss": math.nan if step == 2 else 0.1})
            log.samples(step, [{"prompt": text, "response": text, "reward": 0.5, "data_source": text, "extra": text}])
            log.step(step)
        log.evaluation(4, {"pass@1": 0.75})
        log.warn(text)


def curve(data: dict[str, Any], metric: str) -> tuple[list[int], list[float | None]]:
    """Return steps and values of a curve of the page's data."""
    number, values = data["curves"]["metrics"][metric]
    return [data["curves"]["steps"][place] for place in data["curves"]["places"][number]], values


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    page = Page(report(tmp_path))
    assert_self_contained(page)
    (policy,) = [str(attributes["content"]) for tag, attributes in page.elements if "http-equiv" in attributes]
    nonce = re.search(r"default-src 'none'; script-src 'nonce-([\w-]+)'; style-src 'nonce-([\w-]+)';", policy)
    assert nonce and nonce[1] == nonce[2] and "unsafe" not in policy, "scripts and styles run by nonce alone"
    assert {attributes["nonce"] for tag, attributes in page.elements if tag in ("script", "style")} == {nonce[1]}
    assert "fetch(" not in page.scripts[1] and "import " not in page.scripts[1], "the script asks no server"


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "plain")
    make_run(tmp_path / "evil", MARKUP)
    plain, evil = Page(report(tmp_path / "plain")), Page(report(tmp_path / "evil"))
    assert [tag for tag, _ in evil.elements] == [tag for tag, _ in plain.elements]
    data = json.loads(evil.scripts[0])
    assert data["samples"][0]["samples"][0]["record"]["response"] == MARKUP
    assert not set("<>&") & set(evil.scripts[0]) and MARKUP in evil.title
    assert data["answers"]["runs/0/notices"]["notices"][-1]["text"] == MARKUP, "a notice is shown as it was written"


def test_script_json_has_no_markup_and_no_nonfinite_numbers() -> None:
    text = script_json({"a": "</script>&\u2028\ud800", "b": math.nan})
    assert not set("<>&") & set(text)
    written = text.encode("utf-8", "backslashreplace")  # as the page is
    assert json.loads(written) == {"a": "</script>&\u2028\ud800", "b": "NaN"}


def test_the_page_has_the_runs_facts_and_figures(tmp_path: Path) -> None:
    make_run(tmp_path)
    data = report_data(tmp_path)
    answers, overview = data["answers"], data["answers"]["runs/0/overview"]
    assert (overview["status"]["name"], overview["error"], overview["gaps"]) == ("finished", None, [])
    assert ("Steps", "4 of 4") in overview["facts"] and ("Model", "models/#### 72") in overview["facts"]
    assert overview["figures"][0] == {"label": "pass@1", "value": "75.0%", "detail": "from 25.0% (steps 0 to 4)"}
    assert curve(data, "actor/kl_loss") == ([1, 2, 3, 4], [0.1, None, 0.1, 0.1])
    assert curve(data, "eval/pass@1") == ([0, 4], [0.25, 0.75])
    titles = [chart["title"] for chart in answers["charts"]["charts"]]
    assert titles[:3] == ["Reward", "Evaluation", "Reward parts"] and "KL to the reference" in titles
    assert answers["runs/0/phases"]["timeline"]["rows"][:2] == ["gen", "reward"]
    assert answers["runs/0/phases"]["phases"]["names"] == ["gen", "other"], (
        "reward runs inside gen: stacking both would count it twice"
    )
    assert answers["recipes"]["texts"] == [(tmp_path / "recipe.resolved.yaml").read_text()]
    assert answers["runs"]["runs"][0]["label"] == "run #### 72"


def test_an_evaluation_loss_is_not_drawn_as_an_accuracy(tmp_path: Path) -> None:
    """A loss between 0 and 1 is not drawn as a share."""
    recipe = Recipe(name="dpo")
    recipe.observe.console, recipe.observe.tensorboard, recipe.observe.report = "plain", False, False
    with RunLog(recipe, tmp_path, 1, 1) as log:
        log.evaluation(0, {"loss": 0.75, "dpo_accuracy": 0.5})
        log.evaluation(1, {"loss": 0.25, "dpo_accuracy": 0.875})
        log.step(1)
    data = report_data(tmp_path)
    figures = data["answers"]["runs/0/overview"]["figures"]
    assert [(figure["label"], figure["value"], figure["detail"]) for figure in figures[:2]] == [
        ("Evaluation loss", "0.25", "from 0.75 (steps 0 to 1)"),
        ("Evaluation: chosen ahead", "87.5%", "from 50.0% (steps 0 to 1)"),
    ]
    charts = {chart["title"]: chart for chart in data["answers"]["charts"]["charts"]}
    assert (
        charts["Evaluation: loss"]["series"] == [("eval/loss", "held out")] and not charts["Evaluation: loss"]["tick"]
    )
    assert "Evaluation" not in charts
    assert "Evaluation: loss" not in [chart["title"] for chart in present(["actor/pg_loss"])], "RL has no such loss"


def test_figures_count_omitted_nonfinite_steps(tmp_path: Path) -> None:
    recipe = Recipe()
    recipe.observe.console = "plain"
    recipe.observe.tensorboard = recipe.observe.report = False
    with RunLog(recipe, tmp_path, 1, 3) as log:
        for step, gap in enumerate((0.1, math.nan, math.inf), start=1):
            log.add({"rollout/logprob_gap_mean": gap, "perf/throughput": 50.0, "critic/rewards/mean": math.nan})
            log.step(step)
    figures = {figure["label"]: figure for figure in report_data(tmp_path)["answers"]["runs/0/overview"]["figures"]}
    assert figures["Train/rollout gap"]["value"] == "1.0e-01"
    assert figures["Train/rollout gap"]["detail"] == "worst step 1.0e-01; not finite in 2 of 3 steps"
    assert (figures["Reward"]["value"], figures["Reward"]["detail"]) == ("not finite", "in all of 3 steps")
    assert figures["Tokens/s/device"]["detail"] == "median step"


@pytest.mark.parametrize("kept", ["metrics.jsonl", "recipe.resolved.yaml", "summary.json"])
def test_a_partial_run_has_a_report(tmp_path: Path, kept: str) -> None:
    make_run(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    for path in tmp_path.iterdir():
        if path.is_file() and path.name != kept:
            path.unlink()
    for path in (tmp_path / "samples").iterdir():
        path.unlink()
    data = json.loads(Page(report(tmp_path)).scripts[0])
    gaps = " ".join(data["answers"]["runs/0/overview"]["gaps"])
    assert "is missing" in gaps or "no finished step" in gaps
    assert data["answers"]["runs/0/sample_steps"] == {"steps": [], "note": ""} and data["samples"] == []


def test_damaged_files_are_reported_on_the_page(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": ')
    (tmp_path / "recipe.resolved.yaml").write_text("a: [")
    for name in ("metrics.jsonl", "trace.json", "notices.jsonl", "samples/step_000004.jsonl"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"\x00garbage\n" + data[: len(data) * 2 // 3])
    answers = json.loads(Page(report(tmp_path)).scripts[0])["answers"]
    gaps = answers["runs/0/overview"]["gaps"]
    assert "metrics.jsonl, line 1: not a line of metrics." in gaps and "summary.json could not be read." in gaps
    assert "notices.jsonl, line 1: not a notice." in gaps
    assert "step_000004.jsonl, byte 0: not a sample." in answers["runs/0/sample_steps"]["note"]
    assert answers["recipes"]["texts"] == ["a: ["] and answers["recipes"]["rows"] == []


def test_status_is_running_or_killed_by_the_lock(tmp_path: Path) -> None:
    recipe = Recipe()
    recipe.observe.console = "plain"
    recipe.observe.tensorboard = False
    log = RunLog(recipe, tmp_path, 1, 5)
    log.step(1)
    assert report_data(tmp_path)["answers"]["runs/0/overview"]["status"]["name"] == "running"
    assert "in progress" in Page(write_report(tmp_path)).scripts[0]
    log.run_dir.unlock()
    assert report_data(tmp_path)["answers"]["runs/0/overview"]["status"]["name"] == "killed"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make_run(tmp_path / "runs" / "mine")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "empty", "not a run directory"),
        (tmp_path / "runs", "Runs inside it: mine"),
    ):
        with pytest.raises(ValueError, match=message):
            report(path)
    assert not (tmp_path / "empty" / "report.html").exists()


# ---- long runs


def test_thinning_keeps_spikes_gaps_and_ends() -> None:
    draw = random.Random(0)
    ys = [draw.random() for _ in range(10_000)]
    ys[1234], ys[5678], ys[8000] = 50.0, -50.0, math.nan
    kept = thin(ys, 600)
    assert {0, 1234, 5678, 8000, 9999} <= set(kept)
    assert kept == sorted(set(kept)) and len(kept) <= 610
    assert thin(ys[:600], 600) == list(range(600))


def test_stacked_phases_keep_their_mean() -> None:
    lines = [{"step": n, "timing_s/step": 4.0, "timing_s/gen": n % 3, "timing_s/save": 1.0} for n in range(1, 1001)]
    phases = phase_times(lines, nested={"save"})
    assert phases["per_bar"] == math.ceil(1000 / facts.MAX_BARS)
    assert phases["names"] == ["gen", "other"]
    mean = sum(phases["seconds"]["gen"]) / len(phases["x"])
    assert mean == pytest.approx(1.0, abs=0.01)
    assert phases["seconds"]["other"][0] == pytest.approx(4.0 - phases["seconds"]["gen"][0], abs=1e-4)


def test_ten_thousand_steps_stay_small(tmp_path: Path) -> None:
    draw = random.Random(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            metrics = {f"group/metric_{i}": draw.random() for i in range(40)}
            file.write(json.dumps({"step": step, **metrics, "timing_s/step": 9.0, "timing_s/gen": 5.0}) + "\n")
    (tmp_path / "samples").mkdir()
    sample = json.dumps({"prompt": "p" * 2000, "response": "数" * 20_000, "reward": 1.0, "group": 1}) + "\n"
    for step in range(10, 2000, 10):
        (tmp_path / "samples" / f"step_{step:06d}.jsonl").write_text(sample * 8)
    page = report(tmp_path)
    assert page.stat().st_size < 7e6
    data = json.loads(Page(page).scripts[0])
    assert [data["samples"][0]["step"], data["samples"][-1]["step"]] == [1990, 10]
    assert "of 199 files" in data["answers"]["runs/0/sample_steps"]["note"]
    assert "characters left out here" in data["samples"][0]["samples"][0]["record"]["response"]
    assert "points are thinned" in data["answers"]["charts"]["note"]
    steps, values = curve(data, "group/metric_0")
    assert len(steps) == len(values) <= 610 and (steps[0], steps[-1]) == (1, 10_000)
    assert data["curves"]["hours"][-1] == pytest.approx(25.0)
