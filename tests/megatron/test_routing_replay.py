"""Routing replay: tokens go to the recorded experts at every layout, which reduces the train/rollout mismatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megarl.errors import RecipeError
from megarl.preflight.engines_and_devices import check_device
from megarl.preflight.recipe.general import validate
from megarl.recipe.schema import Recipe
from tests.support.megatron_models import LENGTHS, write_model
from tests.support.trainer_processes import run_cases

LAYERS, EXPERTS, TOPK = 4, 4, 2


def case(kind: str, name: str, **megatron: Any) -> dict[str, Any]:
    replay = "old_log_probs" if kind == "recorded" else "rollout"
    return {"name": name, "kind": kind, "megatron": {"routing_replay": replay, **megatron}}


ONE = [
    case("given", "given"),
    {**case("mismatch", "bf16"), "dtype": "bfloat16"},
    {**case("recorded", "recorded"), "lr": 5e-5},
]
TWO = [
    case("given", "given-tp2-ep2", tensor_parallel=2, expert_parallel=2),
    case("given", "given-tp2-ep2-padded", tensor_parallel=2, expert_parallel=2, packing=False),
    case("given", "given-cp2", context_parallel=2),
    case("given", "given-pp2-vpp2", pipeline_parallel=2, virtual_pipeline=2, recompute="full"),
    {**case("recorded", "recorded-tp2-ep2", tensor_parallel=2, expert_parallel=2), "lr": 5e-5},
]


def hf_log_probs(path: Path, tokens: torch.Tensor, choose: Callable[..., torch.Tensor] | None) -> list[torch.Tensor]:
    """Log-probs of each sequence from transformers; `choose(layer, sequence, probabilities)` picks the experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    now = {"sequence": 0}
    for number, layer in enumerate(model.model.layers):

        def forward(hidden: torch.Tensor, gate: Any = layer.mlp.gate, number: int = number) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            probabilities = logits.softmax(-1)
            chosen = choose(number, now["sequence"], probabilities)
            weights = probabilities.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        layer.mlp.gate.forward = forward
    result = []
    for sequence, ids in enumerate(tokens.split(LENGTHS)):
        now["sequence"] = sequence
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        picked = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        result.append(torch.cat([torch.zeros(1), picked]))
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, a routing that no router would choose (`inputs.pt`), and the workers' results."""
    directory = tmp_path_factory.mktemp("routing")
    model = write_model("qwen3_moe", directory)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 250, (sum(LENGTHS),), generator=generator)
    experts = torch.rand(sum(LENGTHS), LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOPK].to(torch.int16)
    torch.save({"tokens": tokens, "experts": experts}, directory / "inputs.pt")
    chosen: list[dict[int, torch.Tensor]] = [{} for _ in LENGTHS]

    def note(layer: int, sequence: int, probabilities: torch.Tensor) -> torch.Tensor:
        chosen[sequence][layer] = probabilities.topk(TOPK).indices
        return chosen[sequence][layer]

    log_probs = torch.cat(hf_log_probs(model, tokens, note))
    engine = torch.cat([torch.stack([layers[n] for n in range(LAYERS)], 1) for layers in chosen]).to(torch.int16)
    torch.save({"log_probs": log_probs, "experts": engine}, directory / "engine.pt")
    for processes, cases in ((1, ONE), (2, TWO)):
        run_cases("tests.support.routing_worker", processes, [{**c, "model": str(model)} for c in cases], directory)
    return directory


def read(results: Path, name: str) -> dict[str, Any]:
    return torch.load(results / f"{name}.pt", weights_only=True)


@pytest.mark.stack
@pytest.mark.slow
def test_replayed_routing_is_followed_at_every_layout(results: Path) -> None:
    results_of_case, inputs = read(results, "given"), read(results, "inputs")
    experts, tokens = inputs["experts"].long().split(LENGTHS), inputs["tokens"]
    forced = hf_log_probs(results / "qwen3_moe", tokens, lambda layer, sequence, _: experts[sequence][:, layer])
    torch.testing.assert_close(results_of_case["before"], torch.cat(forced), atol=2e-5, rtol=0)
    freely = hf_log_probs(results / "qwen3_moe", tokens, lambda _, __, p: p.topk(TOPK).indices)
    assert (results_of_case["before"] - torch.cat(freely)).abs().max() > 1e-3, (
        "the replayed routing equals the router's choice"
    )
    for name in ("given", "given-tp2-ep2", "given-tp2-ep2-padded", "given-cp2", "given-pp2-vpp2"):
        result = read(results, name)
        torch.testing.assert_close(result["before"], results_of_case["before"], atol=5e-6, rtol=0)
        torch.testing.assert_close(
            result["seen"], results_of_case["before"], atol=5e-6, rtol=0
        )  # the update's pass, and recompute
        assert result["norm"] == pytest.approx(results_of_case["norm"], rel=2e-6), name


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.parametrize("name", ["recorded", "recorded-tp2-ep2"])
def test_recorded_routing_narrows_the_importance_ratio(results: Path, name: str) -> None:
    """After an update, importance ratios are nearer to 1 with the recorded routing than without it."""
    result = read(results, name)
    torch.testing.assert_close(result["reference"], result["before"], atol=1e-6, rtol=0)
    with_replay = (result["replayed"] - result["before"]).abs()
    without = (result["freely"] - result["before"]).abs()
    print(
        f"{name}: |log ratio| mean {with_replay.mean():.5f} max {with_replay.max():.4f} replayed, "
        f"mean {without.mean():.5f} max {without.max():.4f} free"
    )
    assert not torch.equal(with_replay, without), "no token changed its experts: the test shows nothing"
    assert with_replay.mean() < without.mean()


@pytest.mark.stack
@pytest.mark.slow
def test_replaying_the_engines_routing_narrows_the_gap_of_bfloat16(results: Path) -> None:
    """A float32 model stands for the engine, the trainer computes in bfloat16: nearly tied experts flip."""
    result, engine = read(results, "bf16"), read(results, "engine")["log_probs"]
    replayed, freely = ((result[name] - engine).abs() for name in ("replayed", "freely"))
    print(
        f"bf16 against float32: mean |gap| {replayed.mean():.5f} (max {replayed.max():.4f}) replayed, "
        f"{freely.mean():.5f} (max {freely.max():.4f}) free"
    )
    assert replayed.mean() < freely.mean() and replayed.max() < 0.7 * freely.max()


def recipe(**changes: Any) -> Recipe:
    recipe = Recipe()
    recipe.model.path = "model"
    recipe.megatron.routing_replay = changes.pop("replay")
    for name, value in changes.items():
        section, key = name.split("__")
        setattr(getattr(recipe, section), key, value)
    return recipe


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replay": "rollout", "train__source": "sft", "algorithm__loss": "sft"}, "routes each token only once"),
        ({"replay": "old_log_probs", "megatron__extra": {"moe_router_fusion": True}}, "cannot replay"),
    ],
)
def test_unsupported_replay_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        validate(recipe(**changes))


def test_routed_experts_of_the_engine_are_aligned_with_tokens(tmp_path: Path) -> None:
    import json
    from types import SimpleNamespace

    from megarl.engines.base import EngineSpec
    from megarl.engines.vllm.args import build_engine_args
    from megarl.engines.vllm.outputs import completions

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    spec = EngineSpec("e0", str(tmp_path), "bfloat16", 64, return_routed_experts=True)
    assert build_engine_args(spec, "cuda")["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in build_engine_args(replace(spec, return_routed_experts=False), "cuda")

    read = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # of 2 + 3 tokens the last is never read
    sample = SimpleNamespace(index=0, token_ids=[7, 8, 9], logprobs=None, finish_reason="stop", routed_experts=read)
    (completion,) = completions(SimpleNamespace(prompt_token_ids=[5, 6], outputs=[sample]), None)
    experts = completion.routed_experts
    assert experts is not None and experts.dtype == np.int16 and experts.shape == (5, 3, 2)
    assert (experts[:4] == read).all() and (experts[4] == -1).all()
    with pytest.raises(RuntimeError, match="4 of a sample's 6 tokens"):
        completions(SimpleNamespace(prompt_token_ids=[4, 5, 6], outputs=[sample]), None)


def test_replay_of_the_engines_routing_is_refused_on_a_cpu() -> None:
    """Engines on a CPU cannot return expert ids, and would fail only minutes later, after their start."""
    recipe = Recipe()
    recipe.megatron.routing_replay = "rollout"
    with pytest.raises(RecipeError, match="routing_replay=old_log_probs"):
        check_device(recipe, "cpu")
    check_device(recipe, "cuda")
