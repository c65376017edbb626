"""Charts with awkward axes, and the recipe tab of runs without a recipe, in headless Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.page.bundle import bundled, static_text
from megarl.observe.page.report import write_report
from tests.commands.view.conftest import serving
from tests.support.chromium import Chromium, chromium_path
from tests.support.viewed_runs import make_run

pytest.importorskip("websockets", reason="websockets speaks Chromium's protocol")
pytestmark = pytest.mark.skipif(
    chromium_path() is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)

# Draws one chart and returns the labels of the y axis, each with the place of its left end, and where the first point is.
DRAW = """((spec, y) => {
  const chart = new Chart(spec);
  document.body.replaceChildren(chart.element);
  const pen = chart.canvas.getContext("2d");
  const labels = [];
  const write = pen.fillText.bind(pen);
  pen.fillText = (text, x, at) => {
    if (pen.textAlign === "right") labels.push([text, x - pen.measureText(text).width, x]);
    write(text, x, at);
  };
  chart.set([{ label: "a", color: "--c0", dash: [], x: y.map((_, i) => i), y }]);
  return { labels, first: chart.x(0), step: chart.inverse(chart.x(1)) };
})"""
AXES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "short": ({}, [0, 0.5, 1]),
    "millions": ({}, [1_000_000, 9_000_000]),
    "large percentages": ({"tick": ".0%"}, [0, 9e6]),
    "many digits": ({}, [10_234.52, 10_234.57]),
    "near one": ({"tick": ".2~%"}, [0.999991, 0.999999]),
    "small, near each other": ({"tick": ".1e"}, [1.0001e-6, 1.0004e-6]),
    "logarithmic": ({"log": True}, [1e-6, 1e6]),
    "logarithmic within a decade": ({"log": True, "tick": ".1e"}, [2e-4, 7e-4]),
    "constant": ({}, [12_345.678, 12_345.678]),
}


@pytest.fixture
def chart_page(browser: Chromium, tmp_path: Path) -> Chromium:
    script = bundled("charts.js") + 'globalThis.Chart = modules["charts.js"].Chart;'
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    page = f"{head}<style>{static_text('style.css')}</style><body></body><script type='module'>{script}</script>"
    (tmp_path / "page.html").write_text(page)
    browser.open((tmp_path / "page.html").as_uri())
    browser.wait_for("globalThis.Chart")
    return browser


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)], ids=["phone", "desktop"])
@pytest.mark.parametrize("axis", AXES)
def test_labels_of_the_axis_are_whole_and_different(
    chart_page: Chromium, axis: str, width: int, height: int, tmp_path: Path
) -> None:
    chart_page.set_screen(width, height)
    spec, values = AXES[axis]
    spec = {"title": axis, **spec}
    drawn = chart_page.evaluate(f"{DRAW}({json.dumps(spec)}, {json.dumps(values)})")
    texts = [text for text, _, _ in drawn["labels"]]
    assert len(texts) >= 2 and len(set(texts)) == len(texts), texts
    for text, left, right in drawn["labels"]:
        assert left >= 0, f"{text} begins {-left:.0f} pixels left of the chart"
        assert right < drawn["first"], f"{text} covers the curve"
    assert drawn["step"] == pytest.approx(1), "the crosshair and zooming use the same margin"
    chart_page.screenshot(tmp_path / "chart.png")
    assert chart_page.errors == []


# Draws curves and bands; returns the points of the filled area, the number of single points, and the texts at x = `at`.
POINT = """((spec, curves, bands, at) => {
  const chart = new Chart(spec);
  document.body.replaceChildren(chart.element);
  const pen = chart.canvas.getContext("2d");
  let [path, area, alone] = [[], [], 0];
  const [begin, fill, rectangle] = [pen.beginPath.bind(pen), pen.fill.bind(pen), pen.fillRect.bind(pen)];
  pen.lineTo = (x, y) => { path.push(y); };
  pen.beginPath = () => { path = []; begin(); };
  pen.fill = () => { area = path; fill(); };
  pen.fillRect = (...place) => { alone += 1; rectangle(...place); };
  chart.set(curves.map((curve) => ({ label: "a", color: "--c0", dash: [], ...curve })), bands);
  chart.point(chart.x(at));
  return { area, alone, height: chart.canvas.clientHeight, texts: [...chart.tip.children].map((row) => row.textContent) };
})"""


def draw(page: Chromium, spec: dict[str, Any], curves: list[Any], bands: list[Any], at: float) -> dict[str, Any]:
    page.set_screen(1280, 900)
    arguments = ", ".join(json.dumps(value) for value in ({"title": "t", **spec}, curves, bands, at))
    answer: dict[str, Any] = page.evaluate(f"{POINT}({arguments})")
    assert page.errors == []
    return answer


def test_a_value_of_another_step_has_its_step(chart_page: Chromium) -> None:
    """An evaluation has a value every 10 steps."""
    curves = [{"x": [1, 2, 3, 4], "y": [1, 2, None, 4]}, {"x": [0, 10], "y": [5, 6], "label": "b"}]
    assert draw(chart_page, {}, curves, [], 3)["texts"] == ["step 3", "a not finite", "b 5 (step 0)"]


def test_a_logarithmic_chart_of_zeros(chart_page: Chromium) -> None:
    """A positive value between zeros is a point; a band that begins at zero ends at the axis."""
    curve = {"x": [0, 1, 2, 3, 4], "y": [0, 1e-3, 0, 1e-2, 1e-1]}
    band = {"color": "--c0", "x": curve["x"], "low": [0, 0, 0, 1e-3, 1e-2], "high": [0, 1e-2, 1e-2, 1, 1]}
    drawn = draw(chart_page, {"log": True}, [curve], [band], 1)
    assert drawn["alone"] == 1
    assert len(drawn["area"]) == 8 and all(0 <= y <= drawn["height"] for y in drawn["area"]), drawn["area"]


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)], ids=["phone", "desktop"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_report_without_a_recipe_says_so(
    browser: Chromium, tmp_path: Path, width: int, height: int, dark: bool
) -> None:
    make_run(tmp_path / "old", 2, name="old")
    (tmp_path / "old" / "recipe.resolved.yaml").unlink()
    report = write_report(tmp_path / "old").as_uri()
    browser.set_screen(width, height, dark=dark)
    browser.open(f"{report}#recipe")
    browser.wait_for("document.querySelector('.recipe')?.textContent.includes('recipe.resolved.yaml')")
    shown = browser.evaluate("document.querySelector('.recipe').innerText").strip()
    assert shown == "There is no recipe.resolved.yaml in the directory of old, so its settings are not known."
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser.screenshot(tmp_path / "recipe.png")
    assert browser.errors == []


def test_of_two_runs_the_one_without_a_recipe_is_named(browser: Chromium, tmp_path: Path) -> None:
    """The answer is slow: text typed before it arrives must not hide the settings."""
    for name in ("new", "old"):
        make_run(tmp_path / name, 1)
    (tmp_path / "old" / "recipe.resolved.yaml").unlink()
    browser.set_screen(1280, 900)
    slow = {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    with serving(tmp_path / "new", tmp_path / "old") as address:
        browser.open(f"{address}#overview")
        browser.wait_for("document.querySelectorAll('.figure').length")
        browser.call("Network.emulateNetworkConditions", latency=1500, **slow)
        browser.evaluate("location.hash = '#recipe'")
        browser.wait_for("document.querySelector('.recipe input')")
        type_ = "const box = document.querySelector('.recipe input'); box.value = 'train.'; box.dispatchEvent(new Event('input'))"
        browser.evaluate(f"(() => {{ {type_} }})()")
        browser.wait_for("document.querySelectorAll('.settings tbody tr').length")
        browser.call("Network.emulateNetworkConditions", latency=0, **slow)
        shown = browser.evaluate("document.querySelector('.recipe').innerText")
        assert "in the directory of old" in shown and "in the directory of new" not in shown
        keys = browser.evaluate("[...document.querySelectorAll('.settings tbody th')].map((cell) => cell.textContent)")
        assert keys and all("train." in key for key in keys)
    assert browser.errors == []
