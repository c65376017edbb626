"""``megarl engines``: a live run lists its engines, changes their number, or refuses with the reason."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.cluster.stacks import channel
from megarl.cluster.stacks.channel import socket_path
from megarl.cluster.stacks.live_run import answering_requests, ask_live_run
from megarl.commands.engines.command import show_engines
from megarl.errors import InputError
from megarl.observe.run_dir import RunDirectory
from megarl.recipe.schema import Recipe
from megarl.rollout.fleet.live_requests import EngineRequests, why_fixed
from tests.support.elastic_engines import ElasticEngines


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    run = RunDirectory(tmp_path / "mine")
    run.lock()
    yield run.path
    run.unlock()


def elastic_recipe(**rollout: Any) -> Recipe:
    recipe = Recipe()
    recipe.cluster.placement, recipe.rollout.min_engines = "disaggregated", 1
    for name, value in rollout.items():
        setattr(recipe.rollout, name, value)
    return recipe


class Run:
    """The controller of a run with three engines, in this process; `free`: engines that free devices hold."""

    def __init__(self, free: int | None = 1, recipe: Recipe | None = None) -> None:
        self.engines = ElasticEngines(3)
        self.free, self.asked = free, list[int]()
        self.services: list[Any] = []
        self.problem: str | None = None
        recipe = recipe or elastic_recipe(tensor_parallel=2)
        moves = self.engines.source.moves
        self.cluster: Any = SimpleNamespace(free_services=self.count_free, leave_machine=self.leave, stacks=list)
        self.requests = EngineRequests(
            recipe,
            self.cluster,
            self.engines.fleet.engines,
            self.engines.fleet if recipe.rollout.min_engines else None,
            why_fixed(recipe, "ray"),
            moves.versions_by_engine,
            moves.groups_by_engine,
        )
        self.cluster.requests = {"engines": self.requests.answer_engines, "leave": self.requests.answer_leave}

    def count_free(self, devices: int) -> int | None:
        self.asked.append(devices)
        return self.free

    def leave(self, rank: int, agree: Any) -> tuple[list[Any], str | None]:
        assert rank == 3
        problem = self.problem or agree(self.services)
        return ([], problem) if problem else (self.services, None)


def test_engines_are_listed_and_their_number_changes(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.engines.source.admit(0)
    run.engines.services[1].die()
    run.engines.fleet.poll()
    with answering_requests(run.cluster):
        show_engines(directory, "list", as_json=False)
        table = capsys.readouterr().out.splitlines()
        show_engines(directory, "+1", as_json=False)
        changed = capsys.readouterr().out.splitlines()
        run.engines.check()
        show_engines(directory, "list", as_json=True)
        listed = json.loads(capsys.readouterr().out)
        show_engines(directory, "2", as_json=False)
        fewer = capsys.readouterr().out.splitlines()
        show_engines(directory, "2", as_json=False)
        assert "->" not in capsys.readouterr().out, "nothing changes"
    assert table == [
        "engine   state     host   devices  version  groups  deaths",
        "engine0  serving   node7  4        0        4       0",
        "engine1  starting  -      4        -        0       1",
        "engine2  serving   node7  4        0        4       0",
        "3 engines wanted; at least 1 (rollout.min_engines), 1 more on free devices",
    ]
    assert changed[-2:] == [
        "3 -> 4 engines wanted; at least 1 (rollout.min_engines), 1 more on free devices",
        "Further engines load now, and sample from the next update of the weights on.",
    ]
    assert run.engines.restarts == [1, 3] and listed["engines"][3]["name"] == "engine3" and listed["wanted"] == 4
    assert fewer[-1].startswith("Leaving engines get no further groups") and "4 -> 2 engines" in fewer[-2]
    run.engines.check()
    assert sorted(run.engines.ended) == [1, 3] and run.engines.fleet.serving == [0, 2], "engines that do not sample end"
    assert set(run.asked) == {2}, "devices per engine"


@pytest.mark.parametrize(
    ("request_text", "reason"),
    [
        (
            "+2",
            r"2 more engines would need free devices \(2 on one machine for each: rollout\.tensor_parallel\), and the Ray cluster "
            r"has enough for 1\. Add a machine, or ask for 1 more at most",
        ),
        ("-3", r"0 engines would be fewer than rollout\.min_engines = 1\. To go lower, stop the run"),
    ],
)
def test_numbers_that_a_run_refuses(directory: Path, request_text: str, reason: str) -> None:
    run = Run()
    with answering_requests(run.cluster), pytest.raises(InputError, match=rf"does not change its engines: {reason}"):
        show_engines(directory, request_text, as_json=False)
    assert run.engines.fleet.wanted == 3


def test_a_machine_with_an_engine_of_the_judge_does_not_leave() -> None:
    """With `judge.restarts` the run does not need this process, but another machine may have no devices for the next one."""
    run = Run()
    run.services = [run.engines.handles[2].service, SimpleNamespace(name="judge0")]
    assert run.requests.answer_leave(["3", "60"]) == {
        "refused": "judge0 is on it, and would wait for devices of another machine"
    }
    assert run.engines.fleet.serving == [0, 1, 2]


def test_an_engine_that_leaves_stays_if_it_is_wanted_again(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its devices are not free yet. Once it hands its groups over it leaves, and the refusal names it."""
    run = Run(free=0)
    run.engines.source.admit(0)
    engines = run.engines
    engines.services[2].silent = True
    with answering_requests(run.cluster):
        show_engines(directory, "-1", as_json=False)
        engines.fleet.poll()
        assert engines.fleet.serving == [0, 1]
        show_engines(directory, "+1", as_json=False)
        engines.check()
        assert engines.fleet.serving == [0, 1, 2] and engines.ended == [] and engines.notices[-1] == "engine2 stays"
        show_engines(directory, "-1", as_json=False)
        engines.check()
        with pytest.raises(InputError, match=r"Add a machine, or ask again when engine2, which leaves now, has left\."):
            show_engines(directory, "+1", as_json=False)
        engines.services[2].reply()
        engines.check()
    assert engines.ended == [2] and capsys.readouterr().out


def test_simultaneous_requests_count_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first waits for Ray's count of free devices, while the second arrives."""
    run = Run(free=8)
    second = threading.Thread(target=lambda: answers.append(run.requests.answer_engines(["+1"])))
    answers: list[dict[str, Any]] = []

    def count_free(devices: int) -> int:
        if second.ident is None:
            second.start()
            second.join(0.5)
        return 8

    monkeypatch.setattr(run.cluster, "free_services", count_free)
    answers.append(run.requests.answer_engines(["+1"]))
    second.join(10)
    assert {answer["before"] for answer in answers} == {3, 4} and run.engines.fleet.wanted == 5


def test_engines_without_devices_have_no_limit(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(free=None, recipe=elastic_recipe())
    with answering_requests(run.cluster):
        show_engines(directory, "7", as_json=False)
    assert "3 -> 7 engines wanted" in (text := capsys.readouterr().out) and "since they need no devices" in text


@pytest.mark.parametrize(
    ("placement", "rollout", "transport", "reason"),
    [
        ("colocated", {"min_engines": None}, "ray", "share the trainers' devices (cluster.placement=colocated)"),
        ("disaggregated", {"min_engines": None, "data_parallel": 2}, "ray", "groups of 2 (rollout.data_parallel)"),
        ("disaggregated", {"min_engines": None}, "ray", "it has no rollout.min_engines. Resume it with this setting"),
        ("disaggregated", {}, "torchrun", "torchrun starts its processes"),
    ],
)
def test_a_fixed_number_of_engines_has_its_reason(
    placement: Any, rollout: dict[str, Any], transport: str, reason: str
) -> None:
    recipe = elastic_recipe(**rollout)
    recipe.cluster.placement = placement
    assert reason in str(why_fixed(recipe, transport)) and why_fixed(elastic_recipe(), "ray") is None


def test_a_run_with_a_fixed_number_lists_its_engines(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(recipe=elastic_recipe(min_engines=None))
    with answering_requests(run.cluster):
        show_engines(directory, "list", as_json=False)
        assert capsys.readouterr().out.splitlines()[-1].startswith("The number of engines is fixed: it has no rollout.")
        with pytest.raises(InputError, match=r"the number of its engines is fixed: it has no rollout\.min_engines"):
            show_engines(directory, "+1", as_json=False)
    assert "refused" in run.requests.answer_leave(["3", "60"])


def test_a_machine_leaves_if_the_run_can_go_on() -> None:
    run = Run()
    run.problem = "trainers are on it"
    assert run.requests.answer_leave(["3", "60"]) == {"refused": "trainers are on it"}
    run.problem, run.services = None, [run.engines.services[2]]
    assert run.requests.answer_leave(["3", "60"]) == {"engines": ["engine2"]}
    run.engines.check()
    assert run.engines.ended == [2]
    run.services = []  # its process has ended
    assert run.requests.answer_leave(["3", "60"]) == {"engines": []}
    run.services = [run.engines.services[each] for each in (0, 1)]
    assert "only 0 engines would keep sampling" in run.requests.answer_leave(["3", "60"])["refused"]


def test_runs_that_cannot_answer(directory: Path, tmp_path: Path) -> None:
    for text in ("two", "1.5", "--all", "+"):
        with pytest.raises(InputError, match=r"is not a number of engines: write list, a number such as 4"):
            show_engines(directory, text, as_json=False)
    with pytest.raises(InputError, match="no run is alive"):
        show_engines(tmp_path, "list", as_json=False)
    with pytest.raises(InputError, match=r"cannot be reached: .*No such file"):
        show_engines(directory, "list", as_json=False)
    starting: Any = SimpleNamespace(requests={}, stacks=list)
    with answering_requests(starting):
        with pytest.raises(InputError, match="has not started its engines yet, or has none"):
            show_engines(directory, "list", as_json=False)
        broken: Any = {"engines": lambda words: 1 / 0}
        starting.requests = broken
        with pytest.raises(RuntimeError, match=r"cannot answer 'engines': .*ZeroDivisionError"):
            ask_live_run(os.getpid(), os.getuid(), ["engines"])
    assert not socket_path(os.getpid(), os.getuid()).exists()


def test_a_controller_that_ends_before_its_answer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: Any = SimpleNamespace(stacks=list, requests={"engines": lambda words: {}})
    monkeypatch.setattr(channel.json, "dumps", lambda reply: "")
    with answering_requests(ends), pytest.raises(InputError, match=r"was cut off .*its controller ends"):
        show_engines(directory, "list", as_json=False)


def test_a_change_by_a_negative_number_is_no_option(directory: Path) -> None:
    run = Run()
    with answering_requests(run.cluster):
        result = CliRunner().invoke(app, ["engines", str(directory), "-1"])
    assert result.exit_code == 0, result.output
    assert "3 -> 2 engines wanted" in result.output
