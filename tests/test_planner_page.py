"""The page of a plan: self-contained, true to the plan, and there for any plan, whatever it lacks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.planner.page import Unit, render, verdict, write_page
from megarl.planner.plan import PhaseTime, Place, Plan, Refusal, Use
from tests import plans
from tests.test_observe_report import EVIL, Page

GIB = 2**30
ALL = ("LARGE", "TOO_LARGE", "SMALL", "INTERLEAVED", "AHEAD", "BARE")


def read(plan: Plan, folder: Path) -> tuple[Page, dict[str, Any]]:
    """The page as a browser would read it, and what its script draws from."""
    write_page(plan, folder / "plan.html")
    page = Page(folder / "plan.html")
    return page, json.loads(page.scripts[0])


def words(page: Page) -> str:
    return re.sub(r"\s+", " ", page.text)


@pytest.mark.parametrize("name", ALL)
def test_the_page_fetches_nothing(name: str, tmp_path: Path) -> None:
    page, _ = read(getattr(plans, name), tmp_path)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), (tag, attributes)
        assert "src" not in attributes, (tag, attributes)
        assert not (attributes.get("href") or "#").startswith(("http", "//")), (tag, attributes)
    assert "default-src 'none'" in (tmp_path / "plan.html").read_text()


def test_words_of_a_plan_are_text(tmp_path: Path) -> None:
    evil = replace(
        plans.LARGE,
        recipe=EVIL,
        stages=[replace(plans.stage(0), role=EVIL)] * 2,
        places=[Place(EVIL, 1, [Use(EVIL, {EVIL: GIB})])],
        estimate=replace(plans.ESTIMATE, phases=[PhaseTime(EVIL, 1.0, EVIL, EVIL)]),
        refusals=[Refusal(EVIL, EVIL, EVIL)],
        proposals=[EVIL],
        unchecked=[EVIL],
        notes=[EVIL],
    )
    page, payload = read(evil, tmp_path)
    assert [tag for tag, _ in page.elements if tag in ("img", "script")] == ["script"] * 3
    assert page.text.count(EVIL) >= 12 and payload["memory"]["parts"] == [EVIL]


def test_what_is_wrong_comes_first(tmp_path: Path) -> None:
    text = words(read(plans.TOO_LARGE, tmp_path)[0])
    order = [
        text.index(part)
        for part in (
            "cannot work",
            "megatron.pipeline_parallel",
            "910B has 40",
            "more stages",
            "megatron.recompute=full (step",
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
    assert verdict(engines) == ("not known: what engines hold (rollout, teacher)", "warn")
    unknown = replace(large, stages=[replace(large.stages[0], activations=None, not_counted="images")])
    assert verdict(unknown) == ("not known: activations are not counted", "warn")


def test_bars_are_the_plans(tmp_path: Path) -> None:
    """Every part of every phase of every place, in GiB, and the device's line."""
    _, payload = read(plans.LARGE, tmp_path)
    memory = payload["memory"]
    assert (memory["unit"], memory["limit"]) == ("GiB", 64.0)
    assert len(memory["places"]) == 8
    for place, drawn in zip(plans.LARGE.places, memory["places"], strict=True):
        assert drawn["phases"] == [use.phase for use in place.uses]
        for use, amounts in zip(place.uses, drawn["parts"], strict=True):
            assert {part: size for part, size in zip(memory["parts"], amounts, strict=True) if size} == {
                part: size / GIB for part, size in use.parts.items()
            }


def test_what_does_not_fit_is_marked(tmp_path: Path) -> None:
    plan = replace(plans.LARGE, memory=50.7, places=plans.LARGE.places[:1])
    write_page(plan, tmp_path / "plan.html")
    html = (tmp_path / "plan.html").read_text()
    assert re.findall(r'<td class="fault">([^<]*)<', html) == ["51.0"]  # gen; the update's 50.5 fits


def test_a_tiny_model_is_shown_in_mib(tmp_path: Path) -> None:
    page, payload = read(plans.SMALL, tmp_path)
    assert payload["memory"]["unit"] == "MiB" and payload["memory"]["limit"] is None
    assert "1.6 MiB" in page.text and "0.00" not in page.text
    assert [Unit("GiB", GIB).show(size * GIB) for size in (0, 0.041, 1.26, 53, 1234)] == [
        "0",
        "0.04",
        "1.3",
        "53.0",
        "1,234",
    ]


def test_what_is_lacking_is_said(tmp_path: Path) -> None:
    text = words(read(plans.SMALL, tmp_path)[0])
    for said in (
        "no device given",
        "One pipeline stage",
        "No time is estimated: that needs a device",
        "Nothing to tell",
    ):
        assert said in text
    text = words(read(plans.BARE, tmp_path)[0])
    assert "No device's memory was counted" in text and "No stage was counted" in text


def test_the_pipeline_is_the_estimates(tmp_path: Path) -> None:
    _, payload = read(plans.INTERLEAVED, tmp_path)
    (drawn,) = payload["pipelines"]
    assert (drawn["stages"], drawn["chunks"], drawn["micro_batches"], drawn["known"]) == (4, 2, 64, True)
    assert drawn["fold"] is not None and len(drawn["slots"]) < 400
    assert max(slot[2] for slot in drawn["slots"]) == 63 and max(slot[5] for slot in drawn["slots"]) == drawn["length"]


def test_without_an_estimate_a_pipeline_is_an_example(tmp_path: Path) -> None:
    page, payload = read(replace(plans.LARGE, estimate=None), tmp_path)
    assert payload["pipelines"][0]["micro_batches"] == 16
    assert "How many micro batches there are is not estimated here; drawn with 16" in words(page)


def test_phases_stand_where_they_begin(tmp_path: Path) -> None:
    """One behind the other, or beside it; each cut into what its seconds are spent on."""
    page, payload = read(plans.LARGE, tmp_path)
    assert [phase[1] for phase in payload["time"]["phases"]][:3] == [0, 482.2, pytest.approx(502.6)]
    assert "none of it is measured" in words(page) and "35 % of 376 TFLOP/s; the bubble of 8 stages" in words(page)
    gen = replace(plans.PHASES[0], seconds=3.0, parts={"memory": 2.0, "compute": 1.0})
    payload = read(
        replace(plans.AHEAD, estimate=replace(plans.AHEAD.estimate, phases=[gen, *plans.AHEAD.estimate.phases[1:]])),
        tmp_path,
    )[1]
    drawn = payload["time"]
    assert [phase[1] for phase in drawn["phases"]][:3] == [0, 0, 20.4]
    assert drawn["parts"][:2] == ["memory bandwidth", "compute"] and drawn["phases"][0][3][:2] == [2.0, 1.0]


def test_engines_stand_in_a_table(tmp_path: Path) -> None:
    teacher = replace(plans.LARGE.engine, parameters=7_615_616_512, devices=2, cache=None, sequences=None)
    text = words(read(replace(plans.LARGE, readers={"teacher": teacher}), tmp_path)[0])
    assert "rollout1" + "11,000,000,000" in text.replace(" ", "") and "teacher27,615,616,512" in text.replace(" ", "")


def test_the_page_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.html"
    path.write_text("the one of before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_page(plans.SMALL, path)
    assert path.read_text() == "the one of before" and list(tmp_path.iterdir()) == [path]


def test_a_thousand_micro_batches_stay_small() -> None:
    many = replace(plans.LARGE, estimate=replace(plans.ESTIMATE, micro_batches=1024))
    assert len(render(many)) - len(render(plans.SMALL)) < 150_000
