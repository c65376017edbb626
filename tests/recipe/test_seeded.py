"""`rollout.seeded`: the value of `auto`, the notice, and the requests and engines that follow it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch

from megarl import load_recipe
from megarl.agents.trajectory import turn_seed
from megarl.engines.specs import policy_spec
from megarl.errors import RecipeError
from megarl.platform.cpu import CPUPlatform
from megarl.preflight.environment import environment_notices
from megarl.recipe.derived.seeded import samples_are_seeded, seeds_notice
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import EngineHandle
from megarl.rollout.judge import server as judge_server
from megarl.rollout.server import _single_requests
from megarl.rollout.source_engines import EnginesSource
from megarl.types import GenerationRequest, Prompt, Sampling


def recipe_of(device: str, seeded: Any = "auto", *, deterministic: bool = False) -> Recipe:
    recipe = Recipe()
    recipe.cluster.device, recipe.rollout.seeded = device, seeded
    recipe.train.deterministic = deterministic
    return recipe


@pytest.mark.parametrize(
    "device, seeded, deterministic, expected, note",
    [
        ("cpu", "auto", False, True, None),
        ("cpu", False, False, False, "rollout.seeded is false (set by the recipe)"),
        ("npu", "auto", False, False, "rollout.seeded is false (auto on npu)"),
        ("cuda", "auto", False, False, "rollout.seeded is false (auto on cuda)"),
        ("npu", "auto", True, True, "rollout.seeded is true (auto with train.deterministic)"),
        ("npu", False, True, False, "rollout.seeded is false (set by the recipe)"),
        ("cuda", True, False, True, "rollout.seeded is true (set by the recipe)"),
    ],
)
def test_auto_follows_the_device_and_determinism(device, seeded, deterministic, expected, note) -> None:
    recipe = recipe_of(device, seeded, deterministic=deterministic)
    assert samples_are_seeded(recipe) is expected
    notice = seeds_notice(recipe)
    assert (notice is None) == (note is None) and (notice or "").startswith(note or "")
    recipe.train.source = "sft"
    assert seeds_notice(recipe) is None, "nothing is sampled"


@pytest.mark.parametrize(
    "device, seeded, cost",
    [
        ("npu", False, "at the cost of a Python loop over requests in every decode step"),
        ("cuda", True, "where vLLM uses its Model Runner V1 (V2, its default, has none)"),
        ("cpu", False, "gives each sample a separate generator"),
    ],
)
def test_the_notice_names_the_cost_of_seeds_on_the_device(device: str, seeded: bool, cost: str) -> None:
    notice = seeds_notice(recipe_of(device, seeded))
    assert notice is not None and cost in notice and ("at the cost" in notice) == (device != "cpu")


@pytest.mark.parametrize("seeded", [True, False])
def test_the_notice_names_the_cost_of_seeds_in_sglang(seeded: bool) -> None:
    """It named vLLM's model runner, and a generator for each weight version, which SGLang does not have."""
    recipe = recipe_of("cuda", seeded)
    recipe.rollout.engine = "sglang"
    notice = seeds_notice(recipe)
    assert notice is not None and "at the cost of SGLang's deterministic mode for the whole engine" in notice
    assert "vLLM" not in notice and "weight version" not in notice


def test_a_run_has_one_notice() -> None:
    notices = environment_notices(recipe_of("cpu", False), CPUPlatform())
    assert len([notice for notice in notices if "rollout.seeded" in notice]) == 1


def test_the_key_accepts_auto_or_a_boolean(tmp_path) -> None:
    base = ["model.path=/m", "data.train_files=[a.parquet]"]
    file = tmp_path / "r.yaml"
    file.write_text("rollout: {seeded: false}\n")
    assert load_recipe(file, base).rollout.seeded is False
    assert load_recipe(file, [*base, "rollout.seeded=auto"]).rollout.seeded == "auto"
    with pytest.raises(RecipeError, match=r"rollout\.seeded"):
        load_recipe(file, [*base, "rollout.seeded=never"])


@pytest.mark.parametrize("seeded", [True, False])
def test_requests_have_seeds_if_the_recipe_sets_them(seeded: bool) -> None:
    recipe = recipe_of("cpu", seeded)
    recipe.data.prompts_per_step = recipe.train.steps = 2
    recipe.rollout.samples_per_prompt = 2
    submitted: list[GenerationRequest] = []

    class Service:
        name = "engine0"

        def call(self, _: str, requests: list[GenerationRequest]) -> Any:
            submitted.extend(requests)
            return SimpleNamespace(add_done_callback=lambda _: None)

        def call_with_parts(self, *_: Any) -> Any:
            return SimpleNamespace(add_done_callback=lambda _: None)

    class Prompts(list[Prompt]):
        sets: ClassVar = {"train": 2}
        difficulty = None

    prompts = Prompts([Prompt(str(row), (1,), "", "x") for row in range(2)])
    source = EnginesSource(recipe, prompts, [EngineHandle(Service())], [0], lambda: None)  # type: ignore[arg-type]
    source.admit(0)
    assert [request.seed is not None for request in submitted] == [seeded] * 2


def test_seeds_derived_from_none_are_none() -> None:
    request = GenerationRequest(3, Prompt("p", (1,), "", "x"), Sampling(2, 4), seed=None, with_greedy=True)
    assert [part.seed for part in _single_requests(request)] == [None] * 3
    assert turn_seed(None, 2) is None


def test_a_judge_without_a_run_seed_sends_no_seeds(monkeypatch) -> None:
    calls: list[GenerationRequest] = []

    def generate(requests: list[GenerationRequest], finished: Any) -> None:
        calls.extend(requests)
        for request in requests:
            finished(request.group, [SimpleNamespace(tokens=SimpleNamespace(tolist=list))])

    monkeypatch.setattr(judge_server.engines, "create", lambda *_: SimpleNamespace(generate=generate))
    tokenizer = SimpleNamespace(stop_ids=(0,), decode=lambda _: "Score: 1")
    monkeypatch.setattr(judge_server, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(judge_server, "JudgeCodec", lambda *_: SimpleNamespace(tokenizer=tokenizer))
    settings = SimpleNamespace(path="m", max_tokens=4, temperature=1.0)
    server = judge_server.JudgeServer("fake", None, settings, run_seed=None)  # type: ignore[arg-type]
    server._sample_verdicts(1, 0, {0: (1,), 1: (2,)})
    assert [request.seed for request in calls] == [None, None]


def test_engines_without_seeds_draw_different_numbers() -> None:
    """Equal generators in all engines would give siblings of a prompt, and a rerun of it elsewhere, the same noise."""
    recipe = recipe_of("cpu", False)
    seeds = {policy_spec(recipe, f"engine{number}", updated=True).seed for number in range(8)}
    assert len(seeds) == 8 and all(0 <= seed < 2**32 for seed in seeds)
    recipe.rollout.seeded = True
    assert {policy_spec(recipe, f"engine{number}", updated=True).seed for number in range(8)} == {recipe.train.seed}


def test_a_reseed_reaches_both_model_runners_of_vllm() -> None:
    """V1 draws unseeded samples with torch; V2 draws their seeds with numpy."""
    worker = pytest.importorskip("megarl.engines.vllm.worker", reason="vLLM is not installed")
    draws = []
    for seed in (1, 2, 1):
        worker.WorkerExtension.megarl_seed(None, seed)
        draws.append((torch.rand(1).item(), int(numpy.random.randint(2**62))))
    assert draws[0] == draws[2] and draws[0][0] != draws[1][0] and draws[0][1] != draws[1][1]
