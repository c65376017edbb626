"""The router of ERNIE 4.5: transformers' weights, choice and gradients; recorded choices; counts for moving biases."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from megatron.core.transformer.moe.router import TopKRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

from megarl.megatron import current_batch
from megarl.megatron.moe import routing_replay
from megarl.megatron.moe.biased_softmax import BiasedSoftmaxRouter
from megarl.megatron.moe.recorded_routing import UNKNOWN, Routing

TOKENS, EXPERTS, CHOSEN, HIDDEN = 40, 8, 2, 16


def make_router(bias: torch.Tensor) -> BiasedSoftmaxRouter:
    """Return a router with the attributes that `routing` reads; Megatron's constructor needs process groups."""
    router = BiasedSoftmaxRouter.__new__(BiasedSoftmaxRouter)
    torch.nn.Module.__init__(router)
    router.topk, router.router_replay, router.enable_expert_bias = CHOSEN, None, True
    router.expert_bias, router.local_tokens_per_expert = bias, torch.zeros(EXPERTS)
    return router


@pytest.fixture
def gate() -> Ernie4_5_MoeTopKRouter:
    """transformers' router, with biases that change the choice of many tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "moe_num_experts": EXPERTS, "moe_k": CHOSEN, "num_attention_heads": 2}
    gate = Ernie4_5_MoeTopKRouter(transformers.Ernie4_5_MoeConfig(**sizes, num_key_value_heads=2))
    with torch.no_grad():
        gate.weight.normal_(0, 0.5)
        gate.moe_statics.e_score_correction_bias.normal_(0, 0.1)
    return gate


def test_weights_choice_and_gradients_are_transformers(gate: Ernie4_5_MoeTopKRouter) -> None:
    hidden, slopes = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
    _, weights, chosen = gate(hidden)
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights)
    router = make_router(gate.moe_statics.e_score_correction_bias.detach()[0])
    matrix = gate.weight.detach().clone().requires_grad_()
    probs, choice = router.routing((hidden @ matrix.T)[:, None])
    torch.testing.assert_close(probs, expected)
    assert torch.equal(choice, expected > 0)
    (expected * slopes).sum().backward()
    (probs * slopes).sum().backward()
    torch.testing.assert_close(matrix.grad, gate.weight.grad)
    assert not torch.equal(chosen.sort().values, (hidden @ matrix.T).topk(CHOSEN).indices.sort().values), "bias unused"
    assert torch.equal(router.local_tokens_per_expert, choice.float().sum(0))


def test_the_fused_router_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopKRouter, "__init__", lambda self, config: None)
    with pytest.raises(ValueError, match=r"megatron\.extra\.moe_router_fusion=true.*Leave it out"):
        BiasedSoftmaxRouter(SimpleNamespace(moe_router_fusion=True))


def test_recorded_choices_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are recomputed for the recorded experts; a token without a record is routed as usual."""
    torch.manual_seed(0)
    router, logits = make_router(torch.zeros(EXPERTS)), torch.randn(3, 1, EXPERTS)
    router.router_replay = routing_replay.RouterReplay(1)
    recorded = torch.tensor([[6, 7], [0, 5], [UNKNOWN, UNKNOWN]])
    stream = SimpleNamespace(routing=Routing(rows={1: recorded}), row_tokens=torch.arange(3))
    monkeypatch.setattr(current_batch, "current", lambda: stream)
    monkeypatch.setattr(routing_replay, "_local_rows", lambda rows: rows)  # one tensor-parallel rank
    probs, choice = router.routing(logits)
    best = logits[2, 0].topk(CHOSEN).indices.sort().values.tolist()
    assert [row.nonzero().flatten().tolist() for row in choice] == [[6, 7], [0, 5], best]
    torch.testing.assert_close(probs[0, 6:], logits[0, 0, 6:].softmax(0))
