"""The same batch gives the same loss, metrics, gradient norm and gradient, however it is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.support.invariance import (
    AUX,
    OTHERS,
    WHOLE,
    Case,
    Layout,
    Split,
    batch,
    difference,
    full,
    quick,
    run,
    splits_of,
)
from tests.support.invariance import load as load_case

pytestmark = pytest.mark.stack

SAME = 1e-6
"""Relative tolerance in float32 (precision 6e-8)."""
SAME_TENSOR = 1e-5
"""Relative tolerance of each element of a gradient tensor. Gradients of norms over attention heads sum thousands of
terms that nearly cancel, so that the rounding of the terms remains."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("invariance")
    run(quick(), directory)
    return directory


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("invariance")
    run(full(), directory, timeout=3000)
    return directory


def check(case: Case, results: Path) -> None:
    gap = difference(case, results)
    assert max(gap.loss, gap.metric, gap.grad_norm, gap.gradient) < SAME, gap
    assert gap.tensor < SAME_TENSOR, gap


@pytest.mark.parametrize("case", splits_of(quick()), ids=lambda case: case.name)
def test_loss_and_gradient_do_not_depend_on_the_split(results: Path, case: Case) -> None:
    check(case, results)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the fixture runs every layout
@pytest.mark.parametrize("case", splits_of(full()), ids=lambda case: case.name)
def test_loss_and_gradient_do_not_depend_on_any_split(all_results: Path, case: Case) -> None:
    check(case, all_results)


def test_the_kl_in_the_reward_includes_samples_outside_the_loss(results: Path) -> None:
    """Other samples' advantages depend on its reward, so its KL counts. The worker's reference policy is log p + 0.6 step on
    every token, so a token's k3 is exp(0.6 step) - 0.6 step - 1."""
    got = load_case(Case(Layout("qwen3"), Split(WHOLE, algorithm="reinforce_plus_plus")), results)["penalties"]
    samples = [sample for group in batch() for sample in group.samples]
    assert sorted(got) == list(range(len(samples))) and any(sample.truncated for sample in samples)
    for number, sample in enumerate(samples):
        vectors = sample.data.get()[sample.index]
        change = 0.6 * ((vectors.tokens * 37 % 101) / 101 - 0.5)[vectors.loss_mask]
        assert got[number] == pytest.approx((np.exp(change) - change - 1).sum(), rel=1e-5)


def test_router_losses_equal_their_equations(results: Path) -> None:
    """Equations 17-20 of arXiv 2412.19437 on transformers' own router logits, sequence by sequence, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        results / "models" / "qwen3_moe", dtype=torch.float64, experts_implementation="eager"
    )
    experts, topk = model.config.num_experts, model.config.num_experts_per_tok
    samples = [sample for group in batch() for sample in group.samples if not sample.truncated]
    total = sum(sample.length for sample in samples)
    layers = model.config.num_hidden_layers
    balance, z, load = torch.zeros(()), torch.zeros(()), torch.zeros(layers, experts)
    for sample in samples:
        tokens = torch.from_numpy(sample.data.get()[sample.index].tokens).long()
        logits = torch.stack(model(tokens[None], output_router_logits=True).router_logits).double()
        scores = logits.view(layers, sample.length, experts).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(2, scores.topk(topk).indices, 1.0)
        share = experts / (topk * sample.length) * chosen.sum(1)
        balance = balance + (share * scores.mean(1)).sum() * sample.length / total
        z = z + logits.logsumexp(-1).square().sum() / total
        load += chosen.sum(1)
    got = load_case(Case(Layout("qwen3_moe", 1, AUX), Split(WHOLE)), results)
    metrics, busiest = got["metrics"], load.amax(1) / load.mean(1)
    assert metrics["actor/moe_aux_loss"] == pytest.approx(balance.item() / layers, rel=1e-6)
    assert metrics["actor/moe_z_loss"] == pytest.approx(z.item() / layers, rel=1e-6)
    assert metrics["actor/moe_load/max"] == pytest.approx(busiest.max().item(), rel=1e-6)
    assert metrics["actor/moe_load/mean"] == pytest.approx(busiest.mean().item(), rel=1e-6)

    (AUX["moe_aux_loss_coef"] * balance + AUX["moe_z_loss_coef"] * z).backward()
    without = load_case(Case(Layout("qwen3_moe"), Split(WHOLE)), results)["gradient"]
    for layer in range(layers):
        name = f"model.layers.{layer}.mlp.gate.weight"
        added = got["gradient"][name] - without[name]
        torch.testing.assert_close(added, model.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


def test_each_algorithm_has_a_different_gradient(results: Path) -> None:
    layout = Layout("qwen3")
    gradients = {name: load_case(Case(layout, Split(WHOLE, algorithm=name)), results) for name in OTHERS}
    metrics = {name: case["metrics"] for name, case in gradients.items()}
    assert 0.1 < metrics["gspo"]["actor/pg_clipfrac"] < 0.9
    for name in ("kl_cov", "clip_cov"):
        assert metrics[name]["actor/cov_selected"] == pytest.approx(0.05, abs=0.002)
    assert 0.02 < metrics["m2po"]["actor/second_moment_excluded"] < 0.95
    corrected = metrics["corrected"]
    assert 0.1 < corrected["rollout/correction_masked"] < 0.9 and 0 < corrected["rollout/correction_truncated"] < 1
    norms = {round(case["metrics"]["actor/grad_norm"], 6) for case in gradients.values()}
    assert len(norms) == len(OTHERS)


def test_every_loss_term_is_nonzero_on_the_batch(results: Path) -> None:
    """A metric of 0 or a missing loss term would not depend on the split either."""
    for layout in quick():
        if layout.processes == 1:
            for split in layout.splits:
                if split.algorithm != "ppo_clip":
                    continue
                metrics = load_case(Case(layout, split), results)["metrics"]
                assert 0.1 < metrics["actor/pg_clipfrac"] < 0.9
                assert abs(metrics["actor/pg_loss"]) > 0.05 and metrics["actor/kl_loss"] > 0.05
                if layout.megatron:
                    assert metrics["actor/moe_aux_loss"] > 1.001 and metrics["actor/moe_z_loss"] > 0.1
                assert metrics["actor/moe_load/max"] > metrics["actor/moe_load/mean"] > 1
