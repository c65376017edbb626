"""The page's data over HTTP: finished, growing, damaged and large runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from megarl.observe.json_lines import json_line
from megarl.observe.page.sample_pages import PAGE_BYTES
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import sample_path
from tests.commands.view.conftest import Open
from tests.support.bytes_read import BytesRead
from tests.support.html_page import MARKUP
from tests.support.viewed_runs import add_step, make_large_run, make_run


def get(page: TestClient, path: str, **parameters: Any) -> dict[str, Any]:
    answer = page.get(f"/api/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path, 1)
    page = open_page(tmp_path)
    html = page.get("/").text
    assert 'src="/static/app.js"' in html and "//" not in html.replace("<!doctype", ""), "no address of another server"
    for name in ("app.js", "curves.js", "samples.js", "tokens.js", "style.css"):
        answer = page.get(f"/static/{name}")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(("text/javascript", "text/css"))


def test_overview(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path / "a", 4)
    page = open_page(tmp_path / "a", follow=True)
    assert get(page, "runs") == {"follow": True, "runs": [{"id": 0, "label": "a", "path": str(tmp_path / "a")}]}
    data = get(page, "runs/0/overview")
    assert data["status"] == {"name": "finished", "kind": "good", "text": "finished"} and data["gaps"] == []
    assert ["Steps", "4 of 4"] in data["facts"] and data["sample_steps"] == [1, 4, 4]
    assert "pass@1" in [figure["label"] for figure in data["figures"]] and "actor/entropy" in data["metrics"]
    assert get(page, "charts")["charts"][0]["title"] == "Reward"


def test_runs_with_the_same_name_have_different_labels(tmp_path: Path, open_page: Open) -> None:
    for name in ("x/run", "y/run", "y/other"):
        make_run(tmp_path / name, 1)
    page = open_page(tmp_path / "x/run", tmp_path / "y/run", tmp_path / "y/other")
    assert [run["label"] for run in get(page, "runs")["runs"]] == ["x/run", "y/run", "y/other"]


def test_following(tmp_path: Path, open_page: Open) -> None:
    """The page sees each step, once, as soon as it is written; a half-written line waits for its end."""
    log = make_run(tmp_path, 3, live=True)
    page = open_page(tmp_path)
    first = get(page, "state")["runs"][0]
    assert first["status"] == "running" and first["metrics"] == [0, 4] and first["samples"] == [3, 3]
    curves = get(page, "runs/0/curves", name=["actor/entropy", "fleet/serving"])
    assert curves["whole"] and curves["curves"]["actor/entropy"]["x"] == [1, 2, 3] and curves["since"] == [0, 4]
    add_step(log, 4)
    state = get(page, "state")["runs"][0]
    assert state["metrics"] == [0, 5] and state["samples"] == [4, 4] and state["trace"] > first["trace"]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "actor/entropy": 0.')
    assert get(page, "state")["runs"][0]["metrics"] == [0, 5]
    more = get(page, "runs/0/curves", name="actor/entropy", epoch=0, lines=4)
    assert not more["whole"] and more["curves"]["actor/entropy"]["x"] == [4] and more["since"] == [0, 5]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"5}\n")
    last = get(page, "runs/0/curves", name="actor/entropy", epoch=0, lines=5)
    assert last["curves"]["actor/entropy"] == {"x": [5], "y": [0.5], "thinned": False}
    assert get(page, "runs/0/curves", name="actor/entropy", epoch=0, lines=6)["curves"] == {}
    assert get(page, "runs/0/notices")["count"] == 1
    log.notice("the disk is nearly full")
    assert [notice["text"] for notice in get(page, "runs/0/notices", first=1)["notices"]] == ["the disk is nearly full"]
    log.close("stopped", "by the test")
    overview = get(page, "runs/0/overview")
    assert overview["status"]["name"] == "stopped" and overview["error"] == "by the test"


def test_an_evaluation_that_joins_a_step_sends_the_curves_again(tmp_path: Path, open_page: Open) -> None:
    log = make_run(tmp_path, 3, live=True)
    page = open_page(tmp_path)
    epoch, lines = get(page, "runs/0/curves", name="actor/entropy")["since"]
    log.evaluation(3, {"pass@1": 0.75})
    answer = get(page, "runs/0/curves", name=["actor/entropy", "eval/pass@1"], epoch=epoch, lines=lines)
    assert answer["whole"] and answer["since"] == [epoch + 1, lines]
    assert answer["curves"]["eval/pass@1"]["x"] == [0, 3] and answer["curves"]["actor/entropy"]["x"] == [1, 2, 3]
    log.close("finished")


def test_a_killed_run_is_not_called_running(tmp_path: Path, open_page: Open) -> None:
    log = make_run(tmp_path, 1, live=True)
    page = open_page(tmp_path)
    assert get(page, "state")["runs"][0]["status"] == "running"
    log.run_dir.unlock()  # as the kernel does when the process dies
    assert get(open_page(tmp_path), "state")["runs"][0]["status"] == "killed"
    log.close("finished")


def test_reading_leaves_the_run_as_it_is(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path, 2)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    page = open_page(tmp_path)
    paths = [
        "overview",
        "phases",
        "notices",
        "sample_steps",
        "samples",
        "sample?step=1&offset=0",
        "curves?name=actor/entropy",
    ]
    for path in paths:
        assert page.get(f"/api/runs/0/{path}").status_code == 200
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")} == before


def test_damaged_files_are_named_and_do_not_stop_the_page(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path, 2)
    run_dir = RunDirectory(tmp_path)
    for path in (run_dir.metrics, run_dir.notices, sample_path(run_dir, 2), run_dir.trace):
        path.write_bytes(b"\x00\xff{{\n" + path.read_bytes() + b'{"torn": ')
    run_dir.summary.write_text("[1")
    run_dir.recipe.write_text("a: [")
    page = open_page(tmp_path)
    data = get(page, "runs/0/overview")
    assert data["status"]["name"] == "unknown"
    assert {"summary.json could not be read.", "metrics.jsonl, line 1: not a line of metrics."} <= set(data["gaps"])
    assert "notices.jsonl, line 1: not a notice." in data["gaps"]
    listed = get(page, "runs/0/samples")
    assert listed["damaged"][0] == "step_000002.jsonl, byte 0: not a sample." and len(listed["damaged"]) == 2
    assert listed["looked_at"] == 32
    assert get(page, "runs/0/phases")["timeline"]["steps"] == [1, 2]
    assert page.get("/api/runs/0/sample", params={"step": 2, "offset": 0}).status_code == 400


def test_an_empty_run_has_a_page(tmp_path: Path, open_page: Open) -> None:
    (tmp_path / "recipe.resolved.yaml").write_text("name: empty\n")
    page = open_page(tmp_path)
    assert get(page, "state")["runs"][0]["metrics"] == [0, 0]
    assert "metrics.jsonl has no finished step yet." in get(page, "runs/0/overview")["gaps"]
    assert get(page, "charts") == {"charts": [], "names": [], "resumes": {"0": []}}
    assert get(page, "runs/0/samples")["groups"] == [] and get(page, "runs/0/notices")["notices"] == []
    assert get(page, "runs/0/phases")["timeline"]["steps"] == []
    assert get(page, "runs/0/curves", name="a")["curves"] == {}


def test_the_first_look_at_100_000_samples_reads_one_page_of_them(tmp_path: Path, open_page: Open) -> None:
    """Opening costs the metrics, the names of the files, and the samples that are shown: not the samples of the run."""
    make_large_run(tmp_path / "many", steps=1000, samples_per_step=100)
    make_large_run(tmp_path / "one", steps=1, samples_per_step=100_000)
    for name, steps in (("many", 1000), ("one", 1)):
        metrics = (tmp_path / name / "metrics.jsonl").stat().st_size
        samples = sum(path.stat().st_size for path in (tmp_path / name / "samples").iterdir())
        page = open_page(tmp_path / name)
        get(page, "runs")  # imports
        with BytesRead() as opening:
            for path in ("state", "charts", "runs/0/overview", "runs/0/sample_steps"):
                get(page, path)
        assert opening.count < 2 * metrics + 1_000_000, "no sample is read"
        with BytesRead() as listing:
            listed = get(page, "runs/0/samples")
        assert listing.count < 3_000_000 < samples / 10 and 64 <= listed["looked_at"] <= 200
        with BytesRead() as again:
            get(page, "state")
        assert again.count < 100_000, "a look at a run without news reads no file"
        assert len(get(page, "runs/0/sample_steps")["steps"]) == steps


def test_a_search_reads_a_bounded_part_and_says_where_it_stopped(tmp_path: Path, open_page: Open) -> None:
    make_large_run(tmp_path, steps=2, samples_per_step=40_000)
    page = open_page(tmp_path)
    with BytesRead() as search:
        answer = get(page, "runs/0/samples", text="no sample has this")
    assert answer["groups"] == [] and answer["next"][0] == 2 and answer["next"][1] > 0
    assert PAGE_BYTES <= answer["bytes_read"] < 1.1 * PAGE_BYTES and search.count < 1.5 * PAGE_BYTES
    looked, start, pages = answer["looked_at"], answer["next"], 1
    while start:
        answer = get(page, "runs/0/samples", text="no sample has this", step=start[0], offset=start[1])
        looked, start, pages = looked + answer["looked_at"], answer["next"], pages + 1
    assert looked == 80_000 and pages > 3


def test_texts_stay_data(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path, 1, text=MARKUP + "\ud800")
    page = open_page(tmp_path)
    answer = page.get("/api/runs/0/samples")
    assert answer.headers["content-type"] == "application/json"
    listed = answer.json()["groups"]
    assert any(MARKUP in (group["data_source"] or "") for group in listed)
    sample = get(page, "runs/0/sample", step=1, offset=listed[1]["samples"][0]["offset"])
    assert MARKUP in sample["turns"][1]["text"] and MARKUP in sample["prompt"]


def test_token_values_come_with_the_samples_that_have_them(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path, 2)
    page = open_page(tmp_path)
    first, second, *_ = get(page, "runs/0/samples")["groups"]
    with_values = get(page, "runs/0/sample", step=2, offset=first["samples"][1]["offset"])["token_values"]
    assert with_values["index"] == 1 and len(with_values["tokens"]) == len(with_values["values"]["entropy"]) > 5
    assert get(page, "runs/0/sample", step=2, offset=second["samples"][0]["offset"])["token_values"] is None
    (tmp_path / "tokens" / "step_000002.jsonl").write_text("{cut off\n")
    damaged = get(page, "runs/0/sample", step=2, offset=first["samples"][1]["offset"])
    assert damaged["token_values"] is None and "tokens/step_000002.jsonl, line 1 is damaged" in damaged["token_damage"]
    (tmp_path / "tokens" / "step_000002.jsonl").write_text('{"torn\n')
    assert get(page, "runs/0/sample", step=2, offset=0)["token_values"] is None


def test_recipes_side_by_side(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path / "a", 1, name="a")
    make_run(tmp_path / "b", 1, name="b", seed=3)
    (tmp_path / "b" / "recipe.resolved.1.yaml").write_text("train: {seed: 2}\nold: 1\n")
    page = open_page(tmp_path / "a", tmp_path / "b")
    table = get(page, "recipes")
    rows = {row["key"]: row["values"] for row in table["rows"]}
    assert table["names"] == ["a", "b", "b (earlier session 1)"]
    assert rows["train.seed"] == ["0", "3", "2"] and rows["old"] == [None, None, "1"]
    assert rows["name"] == ['"a"', '"b"', None] and rows["observe.tensorboard"] == ["false", "false", None]


@pytest.mark.parametrize(
    "query",
    [
        "curves?smoothing=2",
        "curves?smoothing=x",
        "curves?x=days",
        "curves?epoch=1",
        "samples?least=a",
        "samples?tools=all",
        "samples?step=x",
        "sample?step=1",
    ],
)
def test_wrong_questions_are_refused_with_a_reason(tmp_path: Path, open_page: Open, query: str) -> None:
    make_run(tmp_path, 1)
    answer = open_page(tmp_path).get(f"/api/runs/0/{query}")
    assert answer.status_code == 400 and "must be" in answer.json()["error"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, 1)
    page = open_page(tmp_path)
    os.remove(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").mkdir()
    answer = page.get("/api/runs/0/overview")
    assert answer.status_code == 503 and "metrics.jsonl could not be read" in answer.json()["error"]


def test_a_group_that_spans_the_end_of_a_page_is_kept_whole(tmp_path: Path, open_page: Open) -> None:
    make_run(tmp_path, 1)
    path = sample_path(RunDirectory(tmp_path), 1)
    records = [{"group": 1, "reward": i, "prompt": "p", "response": "r"} for i in range(100)]
    path.write_bytes(b"".join(map(json_line, records)) + json.dumps({"reward": "NaN"}).encode() + b"\n")
    page = get(open_page(tmp_path), "runs/0/samples")
    assert (
        len(page["groups"]) == 1
        and len(page["groups"][0]["samples"]) == 100
        and page["next"] == [1, page["bytes_read"]]
    )
