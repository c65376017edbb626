"""The page and report.html in headless Chromium: every tab, phone and desktop, light and dark, following, hostile texts, 100,000 samples."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.html import script_json
from megarl.observe.log import RunLog
from megarl.observe.page.bundle import bundled
from megarl.observe.page.metrics_table import smoothed
from megarl.observe.page.report import report_data, write_report
from tests.commands.view.conftest import Open, serving
from tests.support.agent_run import make_agent_run
from tests.support.chromium import Chromium, chromium_path
from tests.support.html_page import MARKUP
from tests.support.slow import slow_except
from tests.support.viewed_runs import add_step, make_large_run, make_run

pytest.importorskip("websockets", reason="websockets speaks Chromium's protocol")
pytestmark = pytest.mark.skipif(
    chromium_path() is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)

TABS = ("overview", "curves", "time", "samples", "sources", "system", "notices", "recipe")
READY = {
    "overview": "document.querySelectorAll('.figure').length > 3",
    "curves": "[...document.querySelectorAll('.chart .legend')].some((legend) => legend.textContent)",
    "time": "document.querySelectorAll('.waits tbody tr').length > 2",
    "samples": "document.querySelector('.sample')",
    "sources": "document.querySelector('.note')?.textContent",
    "system": "document.querySelector('.chart')",
    "notices": "document.querySelector('.notices li')",
    "recipe": "document.querySelectorAll('.settings tbody tr').length",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunLog]:
    log = make_run(tmp_path_factory.mktemp("live") / "live", 4, name="live", text=MARKUP, live=True)
    yield log
    log.close("finished")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, live: RunLog) -> Iterator[str]:
    """The address of a page about a live run with hostile texts, and a finished one of 100,000 samples."""
    folder = tmp_path_factory.mktemp("large")
    make_large_run(folder / "large", steps=3125, samples_per_step=32)
    with serving(live.run_dir.path, folder / "large") as address:
        yield address


def open_tab(browser: Chromium, address: str, tab: str) -> float:
    """Open a tab in a fresh page. Returns the seconds until it has its data."""
    browser.open("about:blank")
    began = time.monotonic()
    browser.open(f"{address}#{tab}")
    browser.wait_for(READY[tab.split("?")[0]])
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("width", "height", "dark"),
    slow_except(
        lambda screen: screen in {(390, 844, True), (1400, 900, False)},
        [(390, 844, False), (390, 844, True), (1400, 900, False), (1400, 900, True)],
    ),
    ids=["phone-light", "phone-dark", "desktop-light", "desktop-dark"],
)
def test_every_tab(browser: Chromium, address: str, width: int, height: int, dark: bool, tmp_path: Path) -> None:
    browser.set_screen(width, height, dark=dark)
    for tab in TABS:
        open_tab(browser, address, tab)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{tab} is wider than the screen"
        colours = browser.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        ground, ink = (sum(map(int, re.findall(r"\d+", colour))) for colour in colours)
        assert (ground < ink) == dark
        browser.screenshot(tmp_path / f"{tab}.png")
        assert (tmp_path / f"{tab}.png").stat().st_size > 5000
    assert browser.errors == []


def test_texts_of_samples_do_nothing(browser: Chromium, address: str) -> None:
    """Every text of the live run has markup with scripts: the page shows it, without an element for it."""
    browser.set_screen(1400, 900)
    for tab in TABS:
        open_tab(browser, address, tab)
        assert browser.evaluate("document.querySelectorAll('#page img, #page script').length") == 0, tab
    open_tab(browser, address, "samples")
    browser.evaluate("document.querySelector('.sample').click()")
    browser.wait_for("document.querySelector('.sample-detail pre')")
    assert MARKUP in browser.evaluate("document.querySelector('.sample-detail').textContent")
    assert browser.errors == []


def test_tokens_of_a_sample(browser: Chromium, address: str) -> None:
    browser.set_screen(1400, 900)
    open_tab(browser, address, "samples?run=0&step=4&offset=0")
    browser.wait_for("document.querySelectorAll('.token').length > 5")
    names = browser.evaluate("[...document.querySelectorAll('.sample-detail select option')].map((o) => o.value)")
    assert names == ["gap", "ratio", "advantage", "entropy", "probability", "version"]
    assert browser.evaluate("document.querySelectorAll('.token.masked').length") == 1
    browser.evaluate("document.querySelector('.token').click()")
    facts = browser.evaluate("document.querySelector('.token-facts').textContent")
    assert facts.startswith('token 0 "She" · gap ') and " · ratio " in facts and " · entropy " in facts
    place = """(() => {
      const canvas = document.querySelector('.sample-detail canvas'), box = canvas.getBoundingClientRect();
      const x = box.left + 54 + 2 / (document.querySelectorAll('.token').length - 1) * (box.width - 64);
      canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: x, clientY: box.top + 20 }));
      return document.querySelector('.sample-detail .tip').textContent;
    })()"""
    browser.wait_for(f"{place}.startsWith('token 2')")
    assert browser.evaluate(place) == "token 2gap not in the loss", "token 2 is masked; its value is finite"
    # A sample without recorded tokens says so.
    open_tab(browser, address, "samples?run=1")
    browser.wait_for("document.querySelector('.sample-detail .empty')")
    assert "were not recorded" in browser.evaluate("document.querySelector('.sample-detail').textContent")


def test_samples_follow_until_the_reader_opens_one(browser: Chromium, tmp_path: Path) -> None:
    """On a desktop the page shows the first sample at once, though the reader has not opened it."""
    browser.set_screen(1400, 900)
    log = make_run(tmp_path / "run", 3, live=True)
    head = "document.querySelector('.group')?.textContent.startsWith"
    try:
        with serving(tmp_path / "run") as address:
            open_tab(browser, address, "samples")
            browser.wait_for("document.querySelector('.sample-detail pre')")
            add_step(log, 4)
            browser.wait_for(f"{head}('step 4')", 20)
            browser.evaluate("document.querySelectorAll('.sample')[1].click()")
            browser.wait_for("location.hash.includes('offset=')")
            log.step(5)  # without samples
            add_step(log, 6)
            browser.wait_for("document.querySelector('.note').textContent.startsWith('Step 6 has samples')", 20)
            assert browser.evaluate(f"{head}('step 4')")
            # From step 5 the buttons go to the steps next to it.
            set_step = "(() => { document.querySelector('input[type=number]').value = 5; })()"
            for button, step in (("later step (])", 6), ("earlier step ([)", 4)):
                browser.evaluate(set_step)
                browser.evaluate(f"document.querySelector('button[title=\"{button}\"]').click()")
                browser.wait_for(f"{head}('step {step}')")
                assert browser.evaluate("document.querySelector('input[type=number]').value") == str(step)
            browser.open("about:blank")  # which asks no server that has ended
    finally:
        log.close("finished")
    assert browser.errors == []


def test_the_number_of_charts_that_are_left_out_stays(browser: Chromium, tmp_path: Path) -> None:
    browser.set_screen(1400, 900)
    log = make_run(tmp_path / "run", 1, live=True)
    log.add({f"many/metric_{i:03d}": float(i) for i in range(320)})
    add_step(log, 2)
    log.close("finished")
    with log.run_dir.notices.open("a") as file:
        file.writelines(json.dumps({"text": f"notice {number}"}) + "\n" for number in range(1001))
    report = write_report(tmp_path / "run").as_uri()
    browser.open(f"{report}#curves")
    browser.wait_for(READY["curves"])
    note = browser.evaluate("document.querySelector('.page > .note').textContent")
    assert re.fullmatch(r"The first 300 of 3\d\d charts; the filter finds the others\.", note), note
    with serving(tmp_path / "run") as address:
        open_tab(browser, address, "notices")
        assert "The newest 1,000 are listed" in browser.evaluate("document.querySelector('.note').textContent")
        browser.open("about:blank")
    assert browser.errors == []


def test_filters_find_the_failed_calls(browser: Chromium, address: str) -> None:
    browser.set_screen(1400, 900)
    open_tab(browser, address, "samples?run=0&tools=failed")
    assert set(browser.evaluate("[...document.querySelectorAll('.sample .marks')].map((m) => m.textContent)")) == {
        "1 call · 1 failed · lag 1"
    }
    browser.wait_for("document.querySelector('.call.failed')")
    assert "timed out" in browser.evaluate("document.querySelector('.call.failed summary').textContent")


def test_it_opens_and_follows_quickly(browser: Chromium, address: str, live: RunLog) -> None:
    """100,000 samples: under a second on a quiet machine; the bound here leaves room for a busy one."""
    browser.set_screen(1400, 900)
    open_tab(browser, address, "overview")  # the server reads the metrics once
    seconds = {
        tab: min(open_tab(browser, address, f"{tab}?run=1") for _ in range(2)) for tab in ("overview", "samples")
    }
    assert max(seconds.values()) < 10, seconds
    open_tab(browser, address, "overview")
    step = live.next_step
    add_step(live, step)
    waited = browser.wait_for(f"document.querySelector('.facts').textContent.includes('{step} of')", 20)
    print(json.dumps({"open": seconds, "follow": waited}))
    assert waited < 10
    open_tab(browser, address, "notices")
    live.notice("a new notice for the page")
    browser.wait_for("document.querySelector('.notices').textContent.includes('a new notice for the page')", 20)
    assert browser.errors == []


def test_a_step_between_the_first_two_answers_is_shown(browser: Chromium, tmp_path: Path) -> None:
    """The first answer about the run's state comes late: what the run wrote before it must not wait for the step after."""
    late = """const send = fetch; let first = true;
        fetch = (...request) => {
          if (!first || !String(request[0]).includes("/api/state")) return send(...request);
          first = false;
          return new Promise((resolve) => setTimeout(resolve, 4000)).then(() => send(...request));
        };"""
    log = make_run(tmp_path / "late", 2, name="late", live=True)
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=late)["identifier"]
    try:
        with serving(tmp_path / "late") as address:
            browser.open("about:blank")
            browser.open(f"{address}#overview")
            time.sleep(2.5)
            add_step(log, 3)
            browser.wait_for("document.querySelector('.facts')?.textContent.includes('3 of')", 20)
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        log.close("finished")
    assert browser.errors == []


# ---- report.html: the same page with its data inside


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the report of a run with several sources, tools and hostile texts."""
    folder = tmp_path_factory.mktemp("report")
    make_agent_run(folder, ["openai/gsm8k", MARKUP], MARKUP)
    return write_report(folder).as_uri()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)], ids=["phone", "desktop"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_tab_of_a_report(browser: Chromium, report: str, width: int, height: int, dark: bool) -> None:
    browser.set_screen(width, height, dark=dark)
    ready = READY | {
        "overview": "document.querySelector('.figure')",
        "notices": "document.querySelector('.note')?.textContent",
        "time": "document.querySelector('.waits')?.textContent",
        "sources": "document.querySelectorAll('table.sources').length == 3",
    }
    for tab in TABS:
        browser.open("about:blank")
        browser.open(f"{report}#{tab}")
        browser.wait_for(ready[tab])
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{tab} is wider than the screen"
        assert browser.evaluate("document.querySelectorAll('#page img, #page script').length") == 0, tab
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 300) == dark
    assert browser.evaluate("document.getElementById('follow').parentElement.hidden"), "a report follows nothing"
    assert browser.errors == []


def test_a_sample_of_a_report(browser: Chromium, report: str) -> None:
    browser.set_screen(1280, 900)
    browser.open("about:blank")
    browser.open(f"{report}#samples?tools=failed")
    browser.wait_for("document.querySelector('.call.failed')")
    assert "timed out" in browser.evaluate("document.querySelector('.call.failed summary').textContent")
    assert MARKUP in browser.evaluate("document.querySelector('.sample-detail').textContent")
    titles = browser.evaluate("[...document.querySelectorAll('.turn h4')].map((title) => title.textContent)")
    assert titles[-2:] == ["Turn 3 · 12 tokens", "User · ends the conversation · reward 0.5"]
    assert "samples/ has all." in browser.evaluate("document.querySelector('.note').textContent")
    assert browser.errors == []


QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("runs/0/curves", {"name": ["actor/entropy", "eval/pass@1", "missing"], "smoothing": 0.9}),
    ("runs/0/curves", {"name": ["actor/entropy"], "x": "hours"}),
    *(
        ("runs/0/samples", {"step": 12, **conditions})
        for conditions in (
            {},
            {"least": 0.5},
            {"most": 0.5, "spread": "some"},
            {"spread": "none"},
            {"source": "pears", "finish": "length"},
            {"tools": "called"},
            {"tools": "failed", "step": 7},
            {"staleness": 1, "text": "HAS 3 +"},
            {"text": "calculator"},
            {"text": "no sample has this"},
        )
    ),
    ("runs/0/sample", {"step": 3, "offset": 0}),
    *(
        (path, {})
        for path in ("charts", "recipes", "runs/0/overview", "runs/0/phases", "runs/0/sources", "runs/0/notices")
    ),
]


def test_a_report_answers_as_the_server_does(browser: Chromium, tmp_path: Path, open_page: Open) -> None:
    """frozen.js filters samples, smooths curves and so on by its own code: it must agree with the server's."""
    make_run(tmp_path / "view", 12)
    open_answers(browser, tmp_path / "view")
    server = open_page(tmp_path / "view")
    for path, parameters in QUESTIONS:
        expected = server.get(f"/api/{path}", params=parameters).json()
        answer = browser.evaluate(f"get({json.dumps(path)}, {json.dumps(parameters)})")
        assert plain(path, answer) == plain(path, expected), (path, parameters)


def test_a_long_curve_of_a_report_is_smoothed_over_all_steps(browser: Chromium, tmp_path: Path) -> None:
    """The report has 600 points of 5,000 steps, the extreme ones: a running mean of these alone is far too large."""
    draw = random.Random(0)
    values = [draw.lognormvariate(0, 1) if step % 50 else math.nan for step in range(1, 5001)]
    lines = [json.dumps({"step": step, "a": value if step % 50 else "NaN"}) for step, value in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    open_answers(browser, tmp_path)
    for weight in (0.9, 0.99):
        question = json.dumps({"name": ["a"], "smoothing": weight})
        curve = browser.evaluate(f"get('runs/0/curves', {question})")["curves"]["a"]
        exact = smoothed(values, weight)
        assert len(curve["x"]) < 1000
        errors = [abs(value / exact[x - 1] - 1) for x, value in zip(curve["x"], curve["smooth"], strict=True) if x > 50]
        assert sum(errors) / len(errors) < 0.05, weight
        assert max(errors) < (0.05 if weight > 0.9 else 0.25), (
            "with the shorter mean the order of the steps left out counts"
        )


def open_answers(browser: Chromium, run: Path) -> None:
    """Open a page with the data of a run's report, and the function of its script that answers from them: `get`."""
    script = bundled("frozen.js") + 'globalThis.get = modules["frozen.js"].get;'
    data = f'<script type="application/json" id="data">{script_json(report_data(run))}</script>'
    (run / "page.html").write_text(f'{data}<script type="module">{script}</script>')
    browser.open((run / "page.html").as_uri())
    browser.wait_for("globalThis.get")


def plain(path: str, answer: Any) -> list[str]:
    """Return an answer as a list of places and values of four digits, without what a report has more or less than the server."""
    if path == "runs/0/samples":
        answer = [
            [group["group"], group["rewards"], [{**sample, "record": 0} for sample in group["samples"]]]
            for group in answer["groups"]
        ]
    elif path == "runs/0/sample":
        answer = {name: answer[name] for name in ("prompt", "response", "reward")} | {
            "tokens": answer["token_values"]["tokens"]
        }
    elif path == "charts":
        answer = {name: answer[name] for name in ("charts", "names", "resumes")}
    return list(leaves(answer, ""))


def leaves(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            yield from leaves(value[name], f"{place}.{name}") if name != "record" else ()
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from leaves(item, f"{place}.{number}")
    else:
        yield f"{place}: {f'{value:.4g}' if isinstance(value, float) else value}"
