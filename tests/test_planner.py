"""What a plan is made of: the largest work of a stage, live memory, phases, balanced experts, and the command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megarl import model_configs
from megarl.cli import app, guarded
from megarl.config.load import load_recipe
from megarl.config.schema import Recipe
from megarl.planner.command import plan
from megarl.planner.counts import Activations, Held, Phase, phases
from megarl.planner.live import Live
from megarl.planner.stages import Stage, stages
from megarl.planner.workload import Workload, first_ranks, largest

ROOT = Path(__file__).parent.parent
HELD = Held(parameters=10, trained=10, weights=20, buffers=1, gradients=40, masters=30, moments=60, reference=21)
BEYOND = Activations(forward=3, update=9, kept=5, optimizer=50)


def recipe(tokens: int, prompt: int, response: int, **megatron: object) -> Recipe:
    made = Recipe()
    made.actor.max_tokens_per_micro_batch = tokens
    made.data.max_prompt_length, made.rollout.max_response_length = prompt, response
    for name, value in megatron.items():
        setattr(made.megatron, name, value)
    return made


def test_the_largest_micro_batch_is_full() -> None:
    assert largest(recipe(1000, 100, 300), 0).lengths == [333, 333, 334]
    assert largest(recipe(1000, 100, 300, context_parallel=2), 0).lengths == [400] * 5


def test_a_sequence_longer_than_a_micro_batch_goes_alone() -> None:
    assert largest(recipe(1000, 500, 1500), 0).lengths == [2000]
    assert largest(recipe(1000, 500, 1500, packing=False), 0).lengths == [2000]


def test_padding_counts_as_tokens() -> None:
    assert largest(recipe(1000, 100, 300, packing=False), 0).lengths == [400, 400]


def test_earlier_stages_have_more_under_way() -> None:
    piped = recipe(10, 5, 5, pipeline_parallel=4)
    assert [largest(piped, stage).micro_batches for stage in range(4)] == [4, 3, 2, 2]
    interleaved = recipe(10, 5, 5, pipeline_parallel=4, virtual_pipeline=2)
    assert largest(interleaved, 3) == Workload([10], 8, None)
    assert first_ranks(piped.megatron, 32) == [0, 8, 16, 24]


def test_phases_without_offload() -> None:
    found = phases(HELD, BEYOND, reference=True, leaves=False)
    assert found["update"] == Phase(151 + 9, 21)
    assert found["optimizer"] == Phase(151 + 50, 21)
    assert found["rollout"] == found["exchange"] == found["resident"] == Phase(151, 21)


def test_phases_with_offload() -> None:
    found = phases(HELD, None, reference=False, leaves=True)
    assert found == {"resident": Phase(151, 110), "exchange": Phase(21, 110), "rollout": Phase(1, 110)}


def test_swapped_states_are_on_the_host() -> None:
    found = phases(HELD, BEYOND, reference=False, leaves=False, swaps=3)
    assert found["update"] == Phase(61 + 9, 90)
    assert found["optimizer"] == Phase(61 + 30, 90), "a third of the states at a time"


def test_live_memory_counts_each_memory_once_while_it_is_there() -> None:
    meta = torch.device("meta")
    weight = torch.empty(100, 100, device=meta, requires_grad=True)
    with Live(meta) as live:
        weight.detach().zero_()
        assert live.now == 0, "what was there before does not count"
        made = torch.empty(10, 100, device=meta)
        view = made.view(100, 10)
        del made
        assert live.now == 4000
        product = view.view(10, 100) @ weight
        del view
        loss = product.relu().sum()
        assert live.kept == 0
        loss.backward()
        assert live.kept == 4000 + 4000 + 4000 + 4 + 4, "input, product, its relu, the sum, its gradient"
    assert weight.grad is not None and live.peak >= live.kept + weight.grad.nbytes


def test_a_device_is_too_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    held, beyond = (type(one)(**{k: v << 30 for k, v in asdict(one).items()}) for one in (HELD, BEYOND))
    stage = Stage("actor", 0, 0, held, beyond, None, phases(held, beyond, reference=True, leaves=False))
    monkeypatch.setattr("megarl.planner.command.stages", lambda *_: [stage])
    path = ROOT / "recipes" / "grpo_qwen2.5_7b.yaml"
    common = {"model": None, "device": None, "as_json": False}
    assert plan(path, [], memory=151 + 50, **common) == 0
    assert plan(path, [], memory=151 + 48, **common) == 1
    printed = capsys.readouterr().out
    assert "-2.0 optimizer" in printed and max(map(len, printed.splitlines())) <= 100


def test_what_was_not_counted_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage("actor", 0, 0, HELD, None, "images", phases(HELD, None, reference=True, leaves=False))
    monkeypatch.setattr("megarl.planner.command.stages", lambda *_: [stage])
    path = ROOT / "recipes" / "grpo_qwen2.5_7b.yaml"
    assert plan(path, [], memory=1, model=None, device=None, as_json=False) == 0
    printed = capsys.readouterr().out
    assert "not known" in printed and "fits" not in printed and "Activations are not known: images." in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipes/dapo_qwen3_30b.yaml", "--device", "H10O"], "Nearest: H100"),
        (["recipes/tiny/TINY", "--device", "H100"], "there is no file"),
        (["recipes/dapo_qwen3_30b.yaml", "--model", "Qwen3-30B"], "config.json of 'Qwen3-30B' is not kept"),
        (["recipes/dapo_qwen3_30b.yaml", "cluster.trainers=12"], "12 processes do not divide by"),
    ],
)
def test_bad_input_is_said(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert guarded(lambda: app(args=["plan", *arguments], standalone_mode=False), debug=False) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.stack
def test_all_of_deepseek_v3_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Summed over pipeline stages and expert-parallel ranks, the ranks hold the published 671 billion parameters."""
    made, model = load_recipe(ROOT / "recipes" / "grpo_deepseek_v3.yaml"), model_configs.read("DeepSeek-V3")
    found = stages(made, model, model)
    experts = 3 * model["hidden_size"] * model["moe_intermediate_size"] * model["n_routed_experts"]
    layers = model["num_hidden_layers"] - model["first_k_dense_replace"]
    local = layers * experts // made.megatron.expert_parallel
    total = sum(stage.held.parameters for stage in found) - local + layers * experts
    assert total == pytest.approx(671e9, rel=0.001)
    assert all(stage.activations is not None for stage in found)
    assert json.dumps([stage.rank for stage in found]) == json.dumps([32 * number for number in range(8)])
