"""Last lines of a plan, its progress on standard error, and the source of its host memory."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.plan.command import arguments_of, plan
from megarl.commands.plan.count.stages import counted
from megarl.commands.plan.count.types import Activations, HostUse, RankMemory, RecipePlan
from megarl.commands.plan.options import PlanOptions, host_memory_notes
from megarl.commands.plan.search.search import SearchResult
from megarl.commands.plan.show.verdict import of_plan, of_search
from megarl.hf import published
from megarl.platform.device_table import device_named
from megarl.preflight.load import load_recipe
from tests.support import plans
from tests.support.layout_search import subject

ROOT = Path(__file__).parents[3]
PATH = Path("my recipe.yaml")


def words(plan: RecipePlan, *settings: str, options: tuple[str, ...] = ()) -> str:
    verdict, following, *commands = of_plan(plan, PATH, settings, options)
    assert verdict.startswith("Verdict: ") and following.startswith("Next: ") and following.endswith(":")
    return "\n".join([verdict, following, *commands])


def test_a_fitting_plan_names_the_room_and_the_next_commands() -> None:
    fits = words(plans.LARGE, "train.steps=3")
    assert "fits 910B: " in fits and " of 64 GiB are left (actor 0 + engine, gen); 1 check could not run here" in fits
    assert " doctor 'my recipe.yaml' train.steps=3\n" in fits and fits.endswith(" train 'my recipe.yaml' train.steps=3")
    assert "--host-memory" not in words(plans.LARGE, options=("--host-memory", "2048"))


def test_on_several_nodes_the_next_commands_are_the_launchers() -> None:
    fits = words(replace(plans.LARGE, hosts=[HostUse("node 0", 1, {}), HostUse("nodes 1-3", 3, {})]), "train.steps=3")
    assert "Next: on all 4 nodes" in fits
    assert fits.endswith("bash launch/ssh.sh hosts 'my recipe.yaml' train.steps=3")


def test_a_plan_that_does_not_fit_names_the_first_layout_that_does() -> None:
    assert "does not fit, for 1 reason" in words(plans.TOO_LARGE)
    assert "plan 'my recipe.yaml' train.steps=3 megatron.recompute=full" in words(plans.TOO_LARGE, "train.steps=3")
    options = tuple(arguments_of(PlanOptions(device="910B", host_memory=2048.0, memory=61.5, strict=True), "Qwen3-8B"))
    assert options == (
        "--device",
        "910B",
        "--memory",
        "61.5",
        "--host-memory",
        "2048",
        "--strict",
        "--model",
        "Qwen3-8B",
    )
    assert words(plans.TOO_LARGE, options=options).endswith(" megatron.recompute=full " + " ".join(options))
    searched = words(replace(plans.TOO_LARGE, suggestions=[]), options=options)
    assert searched.endswith(f"plan 'my recipe.yaml' {' '.join(options)} --search")


def test_unknown_memory_is_no_fit() -> None:
    assert "not compared with a device" in words(plans.SMALL) and "--device H100" in words(plans.SMALL)
    unknown = replace(plans.LARGE, not_counted=["rollout"])
    assert (
        "not known: " in words(unknown) and "engines of rollout" in words(unknown) and "fits 910B" not in words(unknown)
    )
    stages = [replace(stage, activations=None, not_counted="flex") for stage in plans.LARGE.stages]
    assert "the memory of activations is not counted" in words(replace(plans.LARGE, stages=stages))


def test_a_search_without_a_layout_says_how_many_devices_are_needed() -> None:
    small = subject()
    small = replace(small, device=replace(small.device, memory=1e-6))
    verdict, following = of_search(small, SearchResult(not_reached=1), PATH, [], [])
    assert "no layout was found" in verdict and "the trainers need" in verdict
    assert "--seconds" in following


@pytest.mark.parametrize(
    ("option", "file", "words"),
    [
        (None, None, "2048 GiB a machine, assumed: --host-memory or"),
        (2048.0, None, "2048 GiB a machine, as --host-memory says."),
        (None, "910B: {like: 910B, host_memory: 2048}", "2048 GiB a machine, as own.yaml says."),
        (None, "910B: {like: 910B, per_node: 4}", "2048 GiB a machine, assumed"),
    ],
)
def test_given_host_memory_is_not_assumed(
    option: float | None, file: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if file is not None:
        Path("own.yaml").write_text(file)
    device = replace(device_named("910B"), host_memory=2048.0)
    (note,) = host_memory_notes(device, PlanOptions(host_memory=option, devices=Path("own.yaml") if file else None))
    assert words in note
    assert host_memory_notes(device_named("CPU"), PlanOptions()) == []


def test_each_counted_stage_is_reported() -> None:
    held = RankMemory(
        parameters=10, trained=10, weights=20, buffers=1, gradients=40, masters=30, moments=60, reference=21
    )
    answer = {"held": asdict(held), "largest": None, "activations": asdict(Activations(3, 9, 5, 50))}

    class Client:
        def submit(self, question: Any) -> Future[dict[str, Any]]:
            future: Future[dict[str, Any]] = Future()
            future.set_result({**answer, "largest": question.rank})
            return future

    lines: list[str] = []
    recipe, model = load_recipe(ROOT / "recipes" / "grpo_deepseek_v3.yaml"), published.read("DeepSeek-V3")
    counted(recipe, model, model, Client(), report=lines.append)  # type: ignore[arg-type]
    assert lines == [f"actor: counted {number} of 8 pipeline stages" for number in range(1, 9)]


@pytest.mark.parametrize("as_json", [False, True])
def test_progress_is_on_standard_error_unless_json_is_printed(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def counts(*_: Any, report: Any, **__: Any) -> RecipePlan:
        report("counted something")
        return plans.SMALL

    monkeypatch.setattr("megarl.commands.plan.command.make_plan", counts)
    monkeypatch.setattr("megarl.commands.plan.command.with_estimate", lambda result, *_: result)
    assert plan(ROOT / "recipes" / "grpo_qwen2.5_7b.yaml", [], PlanOptions(as_json=as_json)) == 0
    printed = capsys.readouterr()
    assert "counted something" not in printed.out
    if as_json:
        json.loads(printed.out)
        assert printed.err == ""
    else:
        assert printed.err.splitlines()[-1] == "plan: counted something" and printed.err.startswith("plan: checking ")
