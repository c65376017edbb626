"""The page in headless Chromium: every tab, phone and desktop, light and dark, following, hostile texts, 100,000 samples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.observe.log import RunLog
from tests.support.chromium import Chromium, chromium_path
from tests.support.html_page import MARKUP
from tests.support.viewed_runs import add_step, make_large_run, make_run

pytest.importorskip("websockets", reason="websockets speaks Chromium's protocol")
pytestmark = pytest.mark.skipif(
    chromium_path() is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)

ROOT = Path(__file__).parents[3]
TABS = ("overview", "curves", "time", "samples", "system", "notices", "recipe")
READY = {
    "overview": "document.querySelectorAll('.figure').length > 3",
    "curves": "[...document.querySelectorAll('.chart .legend')].some((legend) => legend.textContent)",
    "time": "document.querySelectorAll('.waits tbody tr').length > 2",
    "samples": "document.querySelector('.sample')",
    "system": "document.querySelector('.chart')",
    "notices": "document.querySelector('.notices li')",
    "recipe": "document.querySelectorAll('.settings tbody tr').length",
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    started = Chromium(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


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
    paths = [str(live.run_dir.path), str(folder / "large")]
    command = [sys.executable, "-m", "megarl", "view", *paths, "--port", "0", "--follow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        printed = re.search(r"http://\S+", process.stdout.readline())
        assert printed
        yield printed[0]
        process.kill()


def open_tab(browser: Chromium, address: str, tab: str) -> float:
    """Open a tab in a fresh page. Returns the seconds until it has its data."""
    browser.open("about:blank")
    began = time.monotonic()
    browser.open(f"{address}#{tab}")
    browser.wait_for(READY[tab.split("?")[0]])
    return time.monotonic() - began


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1400, 900)], ids=["phone", "desktop"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
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
    # A sample without recorded tokens says so.
    open_tab(browser, address, "samples?run=1")
    browser.wait_for("document.querySelector('.sample-detail .empty')")
    assert "were not recorded" in browser.evaluate("document.querySelector('.sample-detail').textContent")


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
