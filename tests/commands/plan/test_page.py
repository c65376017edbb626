"""The page of a plan: self-contained, equal to the plan, and valid for plans with missing parts."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.commands.plan.count.types import (
    DeviceUses,
    HostUse,
    PhaseTime,
    RecipePlan,
    Refusal,
    Suggestion,
    Use,
    Variable,
)
from megarl.commands.plan.show import drawing
from megarl.commands.plan.show.console import host_columns
from megarl.commands.plan.show.estimate_table import remarks, seconds_columns
from megarl.commands.plan.show.page import render, verdict
from megarl.commands.plan.show.units import GIB, Unit
from megarl.commands.plan.time.spread import Ratios, spreads
from megarl.engines.routes import WeightRoute
from megarl.observe.html import write_html
from tests.support import plans
from tests.support.html_page import MARKUP, Page, assert_self_contained

ALL = ("LARGE", "TOO_LARGE", "SMALL", "INTERLEAVED", "AHEAD", "BARE")


def read(plan: RecipePlan, folder: Path) -> Page:
    """The page as a browser would read it."""
    write_html(folder / "plan.html", render(plan))
    return Page(folder / "plan.html")


def pieces(page: Page) -> list[tuple[str, str]]:
    """(title, style) of each drawn element."""
    return [
        (str(attributes["title"]), str(attributes["style"]))
        for tag, attributes in page.elements
        if tag == "i" and "title" in attributes
    ]


def words(page: Page) -> str:
    return re.sub(r"\s+", " ", page.text)


@pytest.mark.parametrize("name", ALL)
def test_the_page_fetches_nothing(name: str, tmp_path: Path) -> None:
    page = read(getattr(plans, name), tmp_path)
    assert len((tmp_path / "plan.html").read_bytes()) < 200_000
    assert_self_contained(page)
    assert not page.scripts
    assert "default-src 'none'" in (tmp_path / "plan.html").read_text()


def test_texts_of_a_plan_are_escaped(tmp_path: Path) -> None:
    evil = replace(
        plans.LARGE,
        recipe=MARKUP,
        stages=[replace(plans.stage(0), role=MARKUP)] * 2,
        places=[DeviceUses(MARKUP, 1, [Use(MARKUP, {MARKUP: GIB})])],
        estimate=replace(plans.ESTIMATE, phases=[PhaseTime(MARKUP, 1.0, MARKUP, MARKUP)]),
        refusals=[Refusal(MARKUP, MARKUP, MARKUP)],
        suggestions=[Suggestion(MARKUP, 1.0)],
        unchecked=[MARKUP],
        notes=[MARKUP],
    )
    page = read(evil, tmp_path)
    assert not [tag for tag, _ in page.elements if tag in ("img", "script")]
    assert page.text.count(MARKUP) >= 16, "in legends and bars, too"
    assert [title for title, _ in pieces(page) if MARKUP in title] == [
        f"{MARKUP}: {MARKUP} 1.0 GiB",
        f"{MARKUP}: 1.00 s of {MARKUP}",
    ]


def test_errors_come_first(tmp_path: Path) -> None:
    text = words(read(plans.TOO_LARGE, tmp_path))
    order = [
        text.index(part)
        for part in (
            "cannot work",
            "megatron.pipeline_parallel",
            "910B has 40",
            "more stages",
            "megatron.recompute=full, with 1.21 × the seconds of a step",
            "Fullest device",
        )
    ]
    assert order == sorted(order)


def test_verdicts() -> None:
    large = plans.LARGE
    assert verdict(large) == ("fits", "good")
    assert verdict(plans.TOO_LARGE) == ("cannot work", "bad")
    assert verdict(replace(plans.TOO_LARGE, refusals=[])) == ("does not fit", "bad")
    assert verdict(replace(large, device=None, memory=None))[1] == "warn"
    engines = replace(large, not_counted=["rollout", "teacher"])
    assert verdict(engines) == ("not known: memory of engines (rollout, teacher)", "warn")
    unknown = replace(large, stages=[replace(large.stages[0], activations=None, not_counted="images")])
    assert verdict(unknown) == ("not known: activations are not counted", "warn")


def test_bars_have_the_sizes_of_the_plan(tmp_path: Path) -> None:
    """Bars show every part of every phase of every place in sequence, at the scale of the device's memory line."""
    charts, parts = drawing.memory(plans.LARGE, Unit("GiB", GIB)), drawing.parts_of(plans.LARGE.places)
    assert len(charts) == 8
    for place, chart in zip(plans.LARGE.places, charts, strict=True):
        assert chart.line is not None and [row.name for row in chart.rows] == [use.phase for use in place.uses]
        for use, row in zip(place.uses, chart.rows, strict=True):
            sizes = {parts[piece.number]: piece.width / chart.line * 64 for piece in row.pieces}
            assert sizes == pytest.approx({part: size / GIB for part, size in use.parts.items()}, abs=0.01)
            ends = [0.0, *(piece.left + piece.width for piece in row.pieces)]
            assert [piece.left for piece in row.pieces] == pytest.approx(ends[:-1]) and row.end == pytest.approx(
                ends[-1]
            )
        for at, text in chart.ticks:
            assert at / chart.line * 64 == pytest.approx(float(text), abs=0.01)
    titles = [title for title, style in pieces(read(plans.LARGE, tmp_path)) if style.startswith("left:0.0%")]
    assert titles.count("gen: engine weights 22.0 GiB") == 8


def test_a_much_larger_device_is_not_drawn_as_a_line(tmp_path: Path) -> None:
    """The bars would be too small to be seen."""
    tiny = replace(plans.SMALL, memory=64.0)
    (chart,) = drawing.memory(tiny, Unit.of(tiny.most))
    assert chart.line is None and chart.rows[0].end == pytest.approx(100 / 1.14, abs=0.01)
    assert "The device has 64 GiB, far more than is drawn" in words(read(tiny, tmp_path))
    assert "The dashed line is the device's memory" in words(read(plans.LARGE, tmp_path))


def test_more_parts_than_colours_are_hatched(tmp_path: Path) -> None:
    use = Use("gen", {f"part {number}": GIB for number in range(14)})
    (chart,) = drawing.memory(replace(plans.LARGE, places=[DeviceUses("actor", 1, [use])]), Unit.of(GIB))
    assert [(piece.colour, piece.hatched) for piece in chart.rows[0].pieces[-3:]] == [(11, False), (0, True), (1, True)]
    page = read(replace(plans.LARGE, places=[DeviceUses("actor", 1, [use])]), tmp_path)
    assert [attributes["title"] for tag, attributes in page.elements if tag == "i" and attributes.get("class") == "hatched" and "title" in attributes] == [
        "gen: part 12 1.0 GiB", "gen: part 13 1.0 GiB",
    ]  # fmt: skip


def test_phases_that_do_not_fit_are_marked(tmp_path: Path) -> None:
    plan = replace(plans.LARGE, memory=50.7, places=plans.LARGE.places[:1])
    write_html(tmp_path / "plan.html", render(plan))
    html = (tmp_path / "plan.html").read_text()
    assert re.findall(r'<td class="fault">([^<]*)<', html) == ["51.0"]  # gen; the update's 50.5 fits
    assert re.findall(r'<b class="bad"[^>]*>([^<]*)<', html) == ["51.0"]


def test_a_tiny_model_is_shown_in_mib(tmp_path: Path) -> None:
    page = read(plans.SMALL, tmp_path)
    assert "1.6 MiB" in page.text and "0.00" not in page.text
    assert [title for title, _ in pieces(page)] == [
        "update_actor: weights 0.76 MiB",
        "update_actor: activations 0.86 MiB",
    ]
    (chart,) = drawing.memory(plans.SMALL, Unit.of(plans.SMALL.most))
    assert chart.line is None and chart.rows[0].text == "1.6"
    assert [Unit("GiB", GIB).show(size * GIB) for size in (0, 0.041, 1.26, 53, 1234)] == [
        "0",
        "0.04",
        "1.3",
        "53.0",
        "1,234",
    ]


def test_missing_parts_of_the_plan_are_noted(tmp_path: Path) -> None:
    text = words(read(plans.SMALL, tmp_path))
    for message in (
        "no device given",
        "One pipeline stage",
        "No time is estimated: that needs a device",
        "No notes",
    ):
        assert message in text
    text = words(read(plans.BARE, tmp_path))
    assert "No device's memory was counted" in text and "No stage was counted" in text


def test_the_pipeline_has_the_estimates_times(tmp_path: Path) -> None:
    drawn = drawing.schedule(plans.INTERLEAVED, "actor")
    assert (len(drawn.stages), drawn.chunks, drawn.micro_batches, drawn.estimated) == (4, 2, 64, True)
    slots = [slot for stage in drawn.stages for slot in stage]
    assert drawn.fold is not None and len(slots) < 400
    assert max(int(slot.text) for slot in slots) == 64
    assert max(slot.left + slot.width for slot in slots) == pytest.approx(100)
    for stage in drawn.stages:
        for earlier, other in itertools.pairwise(stage):
            assert earlier.left + earlier.width <= other.left + 0.01
    assert [kind[:2] for kind in drawn.kinds] == [
        ("forward, chunk 1", False), ("forward, chunk 2", False), ("backward, chunk 1", True), ("backward, chunk 2", True)
    ]  # fmt: skip
    page = read(plans.INTERLEAVED, tmp_path)
    titles = [title for title, _ in pieces(page) if "micro batch" in title]
    assert len(titles) == len(slots) and "backward, chunk 2 of micro batch 64" in titles


def test_a_plain_schedule_has_megatrons_times() -> None:
    """Stage 0 of 8: eight forward passes, then it waits for the last stage's first backward pass to come back."""
    drawn = drawing.schedule(replace(plans.LARGE, estimate=None), "actor")
    first, last = drawn.stages[0], drawn.stages[7]
    assert [slot.kind for slot in first[:9]] == [0] * 8 + [1]
    forward = first[0].width
    assert first[8].left / forward == pytest.approx(8 + 2 * 7, rel=0.01), "seven stages' backward passes, twice as long"
    assert last[0].left / forward == pytest.approx(7, rel=0.01) and last[1].width / forward == pytest.approx(
        2, rel=0.01
    )


def test_without_an_estimate_a_pipeline_is_an_example(tmp_path: Path) -> None:
    plan = replace(plans.LARGE, estimate=None)
    assert drawing.schedule(plan, "actor").micro_batches == 16
    assert "The number of micro batches is not estimated here; drawn with 16" in words(read(plan, tmp_path))


def test_phases_are_drawn_at_their_begin(tmp_path: Path) -> None:
    """Phases are drawn in sequence or in parallel, each divided into the parts of its seconds."""
    page = read(plans.LARGE, tmp_path)
    assert "nothing is measured" in words(page) and "assumed for update_actor: the bubble of 8 stages" in words(page)
    chart = drawing.time(plans.ESTIMATE)
    assert chart.line is not None
    a_second = chart.line / plans.ESTIMATE.seconds
    assert [row.pieces[0].left / a_second for row in chart.rows[:3]] == pytest.approx([0, 482.2, 502.6], abs=0.1)
    gen = replace(plans.PHASES[0], seconds=3.0, parts={"memory": 2.0, "compute": 1.0})
    ahead = replace(plans.AHEAD.estimate, phases=[gen, *plans.AHEAD.estimate.phases[1:]])
    chart, parts = drawing.time(ahead), drawing.spent_on(ahead)
    assert chart.line is not None
    a_second = chart.line / ahead.seconds
    assert [row.pieces[0].left / a_second for row in chart.rows[:3]] == pytest.approx([0, 0, 20.4], abs=0.1)
    assert {parts[piece.number]: round(piece.width / a_second, 1) for piece in chart.rows[0].pieces} == {
        "memory bandwidth": 2.0,
        "compute": 1.0,
    }


def test_engines_are_listed_in_a_table(tmp_path: Path) -> None:
    teacher = replace(plans.LARGE.engine, parameters=7_615_616_512, devices=2, cache=None, sequences=None)
    text = words(read(replace(plans.LARGE, readers={"teacher": teacher}), tmp_path))
    assert "rollout1" + "11,000,000,000" in text.replace(" ", "") and "teacher27,615,616,512" in text.replace(" ", "")


def test_the_page_has_the_consoles_hosts_routes_and_ranges(tmp_path: Path) -> None:
    """The page has every figure of the console, and marks a machine with too little memory."""
    hosts = [
        HostUse("node 0", 1, {"offloaded": 160 * GIB, "asleep": 459 * GIB}),
        HostUse("nodes 1-15", 15, {"offloaded": 700 * GIB, "asleep": 459 * GIB}),
    ]
    routes = [
        WeightRoute("sharded", "weight_sync.route=auto", "CANN 9", "slow at first"),
        WeightRoute("none", "too old", "CANN 8"),
        WeightRoute("sharded", "x", "CANN 10"),
    ]
    ratios = [Ratios("run of A", True, {"gen": 2.0, "step": 1.0}), Ratios("run of B", True, {"gen": 8.0})]
    plan = replace(
        plans.LARGE,
        device=replace(plans.DEVICE, host_memory=1024.0),
        hosts=hosts,
        routes=routes,
        estimate=replace(plans.ESTIMATE, weights={"sharded": 13.1, "full": 223.0}),
        spread=spreads(plans.ESTIMATE, experts=True, ratios=ratios),
        compared=["run of A", "run of B"],
        model_kind="with experts",
        environment=[Variable("engines", "HCCL_BUFFSIZE", "240", "needs it")],
    )
    page = read(plan, tmp_path)
    text = words(page)
    for column in [*host_columns(hosts, 1024.0), *seconds_columns(plan)]:
        assert all(cell in text for cell in column), column
    html = (tmp_path / "plan.html").read_text()
    assert re.findall(r'<td class="fault">([^<]*)<', html) == ["135.0 short"]
    for expected in (
        "Weight route: sharded on CANN 9",
        "weight_sync.route=auto; slow at first. No route was measured on a device yet",
        "elsewhere: none on CANN 8: too old",
        "engines: HCCL_BUFFSIZE=240 (needs it)",
        *remarks(plan),
    ):
        assert expected in text, expected
    assert re.search(r"full\s*223 s\s*sharded\s*13.1 s", text) and "CANN 10" not in text


def test_one_published_run_gives_no_range(tmp_path: Path) -> None:
    """Like the console's table: limits of one run would be equal."""
    ratios = [
        Ratios(run, True, {"gen": factor, "step": factor}) for run, factor in (("run of A", 2.0), ("run of B", 8.0))
    ]
    for count, shown in ((1, "one published run, so no range"), (2, "published runs: ")):
        spread = spreads(plans.ESTIMATE, experts=True, ratios=ratios[:count])
        text = words(read(replace(plans.LARGE, estimate=plans.ESTIMATE, spread=spread), tmp_path))
        assert shown in text and ("published runs: " in text) == (count == 2)


def test_the_page_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.html"
    path.write_text("the one of before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_html(path, render(plans.SMALL))
    assert path.read_text() == "the one of before" and list(tmp_path.iterdir()) == [path]


def test_a_thousand_micro_batches_stay_small() -> None:
    many = replace(plans.LARGE, estimate=replace(plans.ESTIMATE, micro_batches=1024))
    assert len(render(many)) - len(render(plans.SMALL)) < 150_000
