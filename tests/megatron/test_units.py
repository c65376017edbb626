"""The trainer's pure parts, against hand-worked numbers and against autograd."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megarl.errors import RecipeError
from megarl.hf.published import read as published
from megarl.megatron.batch import MicroBatch, pack
from megarl.megatron.extra_settings import check_extra, check_extra_names, fields_of_megatron
from megarl.megatron.layout import check_layout, uses_sequence_parallel, vocab_divisor
from megarl.megatron.model import post_norms
from megarl.megatron.native_layers.norm_rotary import rms_norm, rotate_packed
from megarl.megatron.native_layers.spec_provider import Norm
from megarl.megatron.optimizer import learning_rate
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import MegatronConfig, OptimizerConfig

DENSE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 12, "vocab_size": 1000}
VISION = {"model_type": "qwen2_5_vl", "text_config": DENSE, "vision_config": {"num_heads": 6, "intermediate_size": 96}}
SPARSE = {**DENSE, "num_experts": 8, "moe_intermediate_size": 96}
LATENT = {
    **DENSE,
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "n_routed_experts": 8,
    "moe_intermediate_size": 33,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}


@pytest.mark.parametrize(
    ("model", "processes", "settings", "words"),
    [
        (DENSE, 6, {"tensor_parallel": 4}, "6 is not a multiple of 4"),
        (DENSE, 16, {"tensor_parallel": 16}, "8 attention heads"),
        (DENSE, 8, {"tensor_parallel": 8}, "4 key/value heads"),
        ({**DENSE, "intermediate_size": 99}, 2, {"tensor_parallel": 2}, "intermediate_size of 99 .99 / 2 = 49.5"),
        ({**LATENT, "n_shared_experts": 3}, 2, {"tensor_parallel": 2}, "n_shared_experts of 99"),
        (DENSE, 6, {"context_parallel": 4}, "6 is not a multiple of 4"),
        (DENSE, 5, {"pipeline_parallel": 5}, "12 layers .12 / 5 = 2.4"),
        (DENSE, 24, {"pipeline_parallel": 24}, "12 layers .12 / 24 = 0.5"),
        (DENSE, 4, {"pipeline_parallel": 4, "first_stage_layers": 2}, "leaves 12 - 2 = 10; 10 layers .* other 3"),
        (
            DENSE,
            2,
            {"pipeline_parallel": 2, "first_stage_layers": 4, "last_stage_layers": 6},
            "leave 12 - 10 = 2 layers to no stage",
        ),
        (
            DENSE,
            2,
            {"pipeline_parallel": 2, "first_stage_layers": 12},
            "leaves 12 - 12 = 0: no layers for the other 1 stage",
        ),
        (
            DENSE,
            3,
            {"pipeline_parallel": 3, "virtual_pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 5},
            "does not divide the 3 layers of the first",
        ),
        (DENSE, 2, {"pipeline_parallel": 2, "virtual_pipeline": 4}, "virtual_pipeline=4 does not divide the 6"),
        (DENSE, 1, {"virtual_pipeline": 2}, "needs megatron.pipeline_parallel > 1"),
        (DENSE, 1, {"first_stage_layers": 2}, "needs megatron.pipeline_parallel > 1"),
        (DENSE, 2, {"expert_parallel": 2}, "dense"),
        (DENSE, 2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}, "dense"),
        (DENSE, 1, {"moe_aux_loss_coef": 0.1}, "dense"),
        (DENSE, 1, {"moe_z_loss_coef": 0.1}, "dense"),
        (VISION, 4, {"tensor_parallel": 4}, "vision tower's num_heads of 6"),
        (
            VISION,
            2,
            {"pipeline_parallel": 2, "virtual_pipeline": 2},
            "virtual pipeline stages of a model with a vision tower",
        ),
        (SPARSE, 3, {"expert_parallel": 3}, "8 experts"),
        (SPARSE, 4, {"expert_parallel": 8}, "1 x 1 = 4|4 x 1 x 1 = 4"),
        (SPARSE, 4, {"expert_parallel": 4, "expert_tensor_parallel": 2}, "4 x 2 = 8"),
        (SPARSE, 64, {"expert_tensor_parallel": 64}, "width of 96"),
        (SPARSE, 2, {"tensor_parallel": 2, "sequence_parallel": False}, "Leave megatron.sequence_parallel unset"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(
    model: dict[str, Any], processes: int, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        check_layout(model, MegatronConfig(**settings), processes)
    assert any(f"megatron.{key}" in str(error.value) for key in settings), "the message names no key to change"


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"])
def test_expert_tensor_parallel_of_stacked_experts_is_refused(kind: str) -> None:
    model = {**SPARSE, "model_type": kind}
    with pytest.raises(ValueError, match=rf"expert_tensor_parallel=2: {kind} checkpoints store all experts of a layer"):
        check_layout(model, MegatronConfig(tensor_parallel=2, expert_tensor_parallel=2), 2)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_padded_batches_of_delta_nets_are_refused(kind: str) -> None:
    """The layers read the bounds of the sequences, which a padded batch does not have."""
    fields = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 8}
    mixed = {**DENSE, **fields, "model_type": kind, "full_attention_interval": 4}
    with pytest.raises(ValueError, match=r"megatron\.packing=false .* gated delta nets .* set megatron\.packing=true"):
        check_layout(mixed, MegatronConfig(packing=False), 1)
    check_layout(mixed, MegatronConfig(), 1)
    check_layout({**mixed, "layer_types": ["full_attention"] * 8}, MegatronConfig(packing=False), 1)
    check_layout(DENSE, MegatronConfig(packing=False), 1)
    with pytest.raises(ValueError, match=r"megatron\.packing=false .* sparse attention takes packed sequences only"):
        check_layout(published("DeepSeek-V3.2"), MegatronConfig(packing=False), 1)


def test_uneven_stages_are_refused_with_values_that_work() -> None:
    def message(layers: int, trainers: int, **settings: int) -> str:
        with pytest.raises(ValueError) as error:
            check_layout({**DENSE, "num_hidden_layers": layers}, MegatronConfig(**settings), trainers)
        return str(error.value)

    ends = "Set megatron.first_stage_layers=3 and megatron.last_stage_layers=3, or"
    assert f"{ends} choose megatron.pipeline_parallel=1, 2 or 4 (equal stages)" in message(12, 20, pipeline_parallel=5)
    assert f"{ends} leave both out" in message(12, 20, pipeline_parallel=5, first_stage_layers=5)
    check_layout(DENSE, MegatronConfig(pipeline_parallel=5, first_stage_layers=3, last_stage_layers=3), 20)
    assert ". Choose megatron.pipeline_parallel=1, 2 or 4 (equal stages)" in message(12, 16, pipeline_parallel=16)
    interleaved = message(45, 4, pipeline_parallel=4, virtual_pipeline=3)
    assert "Set megatron.first_stage_layers=9 and megatron.last_stage_layers=12." in interleaved
    check_layout(
        {**DENSE, "num_hidden_layers": 45},
        MegatronConfig(pipeline_parallel=4, virtual_pipeline=3, first_stage_layers=9, last_stage_layers=12),
        4,
    )
    assert message(9, 2, pipeline_parallel=2, virtual_pipeline=3).endswith(
        "). Change megatron.pipeline_parallel or megatron.virtual_pipeline."
    )


def test_layouts_that_divide_are_accepted() -> None:
    check_layout(DENSE, MegatronConfig(tensor_parallel=4, pipeline_parallel=2, context_parallel=2), 32)
    check_layout(DENSE, MegatronConfig(pipeline_parallel=4, first_stage_layers=2, last_stage_layers=4), 4)
    check_layout(SPARSE, MegatronConfig(tensor_parallel=2, expert_parallel=8, expert_tensor_parallel=1), 8)
    check_layout({**DENSE, "kv_lora_rank": 512}, MegatronConfig(tensor_parallel=8), 8)
    assert vocab_divisor(DENSE, MegatronConfig(tensor_parallel=3)) == 3
    assert vocab_divisor(DENSE, MegatronConfig(tensor_parallel=4)) is None
    assert uses_sequence_parallel(MegatronConfig(tensor_parallel=2))
    assert not uses_sequence_parallel(MegatronConfig(tensor_parallel=2, sequence_parallel=False))


def rates(total: int, **settings: Any) -> list[float]:
    return [learning_rate(step, OptimizerConfig(lr=1.0, **settings), total) for step in range(1, total + 1)]


def test_learning_rates_worked_by_hand() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(5, warmup_steps=4, init_lr_ratio=0.2) == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates(7, warmup_steps=2, decay="linear", decay_steps=6) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rates(4, decay="linear", min_lr_ratio=0.2) == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(4, decay="cosine", min_lr_ratio=0.1) == pytest.approx([0.868198, 0.55, 0.231802, 0.1], abs=1e-6)
    assert rates(3, warmup_steps=3, decay="cosine") == pytest.approx([1 / 3, 2 / 3, 1.0])


class Pass(torch.nn.Module):
    """A row-parallel linear that returns its input."""

    def __init__(self, *_: int, config: Any) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


@pytest.mark.parametrize("after", [False, True])
def test_norms_that_add_1_to_their_weights_do_not_round_the_sum(after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between 1 and 2, bfloat16 has steps of 1/128: a rounded sum scales channels by up to 0.4% too much or too little."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    config: Any = SimpleNamespace(
        normalization="RMSNorm",
        params_dtype=torch.bfloat16,
        sequence_parallel=False,
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=1e-6,
    )
    norm = post_norms._with_norm(Pass)(64, 64, config=config) if after else Norm(config, 64, 1e-6)
    (weight,) = norm.parameters()
    torch.manual_seed(0)
    weight.data.copy_(torch.linspace(-0.6, 0.9, 64))
    x = torch.randn(4096, 64).bfloat16()
    out = norm(x)[0] if after else norm(x)
    exact = x.double() * x.double().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    assert out.dtype == torch.bfloat16
    factors = (out.double() * exact).sum(0) / exact.square().sum(0)
    assert (factors / (1 + weight.detach().double()) - 1).abs().max() < 3e-4

    out.sum().backward()
    torch.testing.assert_close(weight.grad, exact.sum(0).bfloat16(), rtol=0.01, atol=0.5)


def test_norm_and_rotation_have_correct_values_and_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (5,), weight, 1e-5))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight))

    def zero_centered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return rms_norm(a, b, 1e-5, zero_centered=True)

    torch.testing.assert_close(zero_centered(x, weight), rms_norm(x, weight + 1, 1e-5))
    assert torch.autograd.gradcheck(zero_centered, (x, weight))

    angles = torch.randn(4, 1, 1, 2, dtype=torch.float64)
    freqs = torch.cat([angles, angles], -1)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    t = torch.randn(7, 2, 6, dtype=torch.float64, requires_grad=True)  # the last 2 of 6 are not rotated
    rotated = rotate_packed(t, offsets, freqs)
    for start, end in pairwise(offsets.tolist()):
        for token in range(start, end):
            z = torch.complex(t[token, :, :2], t[token, :, 2:4])
            z = z * torch.polar(torch.ones(2, dtype=torch.float64), angles[token - start, 0, 0])
            torch.testing.assert_close(rotated[token, :, :4], torch.cat([z.real, z.imag], -1))
    torch.testing.assert_close(rotated[..., 4:], t[..., 4:])
    assert torch.autograd.gradcheck(lambda a: rotate_packed(a, offsets, freqs), (t,))

    freqs = angles.repeat_interleave(2, -1)  # pairs are neighbours
    rotated = rotate_packed(t, offsets, freqs, rotary_interleaved=True)
    for start, end in pairwise(offsets.tolist()):
        turned = _apply_rotary_pos_emb_bshd(t[start:end, None], freqs[: end - start], rotary_interleaved=True)
        torch.testing.assert_close(rotated[start:end], turned[:, 0])
    assert torch.autograd.gradcheck(lambda a: rotate_packed(a, offsets, freqs, rotary_interleaved=True), (t,))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 2)])
def test_packing_pairs_each_logit_with_its_target_token(ranks: int, sequence_parallel: int, packing: bool) -> None:
    batch = MicroBatch(torch.arange(100, 113), [5, 1, 7], counted=[True, False, True])
    streams = [
        pack(
            batch,
            context_parallel=ranks,
            context_rank=rank,
            sequence_parallel=sequence_parallel,
            device=torch.device("cpu"),
            packing=packing,
        )
        for rank in range(ranks)
    ]
    assert all(stream.as_read(stream.tokens).shape[1] % sequence_parallel == 0 for stream in streams)
    assert len({stream.share for stream in streams}) == 1
    # The model reads [b, s] and its rows come out with s first.
    inputs, positions = (
        torch.cat([stream.as_read(getattr(stream, name)).T.flatten() for stream in streams])
        for name in ("tokens", "positions")
    )
    labels, sequences, row_tokens = (
        torch.cat([getattr(stream, name) for stream in streams]) for name in ("labels", "sequences", "row_tokens")
    )
    first = streams[0]
    assert first.targets.tolist() == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12], "the first token of a sequence has none"
    assert labels[first.sources].tolist() == batch.tokens[first.targets].tolist()
    assert inputs[first.sources].tolist() == batch.tokens[first.targets - 1].tolist()
    assert positions[first.sources].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    real = row_tokens >= 0
    assert sorted(row_tokens[real].tolist()) == list(range(13))
    assert torch.equal(inputs[real], batch.tokens[row_tokens[real]])
    expected = torch.tensor([0] * 5 + [-1] + [2] * 7)
    assert torch.equal(sequences[real], expected[row_tokens[real]]) and (sequences[~real] == -1).all()
    assert first.lengths.tolist() == [5, 1, 7] and batch.counted_tokens == 12
    if ranks == sequence_parallel == 1:
        assert first.share == (13 if packing else 21), "nothing is padded that need not be"
        assert first.as_read(first.tokens).shape == ((1, 13) if packing else (3, 7))


def test_context_parallel_ranks_hold_chunks_from_both_ends() -> None:
    """Attention masks over ranks rely on this order; it balances the causal work."""
    for rank, positions in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        stream = pack(
            MicroBatch(torch.arange(8), [8]),
            context_parallel=2,
            context_rank=rank,
            sequence_parallel=1,
            device=torch.device("cpu"),
        )
        assert stream.positions.tolist() == positions


def test_names_in_extra_are_checked_against_megatrons_source() -> None:
    """The check parses Megatron's source; the fields must equal the imported classes' fields."""
    from megatron.core.transformer import MLATransformerConfig

    assert fields_of_megatron() == {field.name for field in dataclasses.fields(MLATransformerConfig)}
    recipe = Recipe()
    recipe.cluster.device, recipe.megatron.extra = "cpu", {"moe_router_dtype": "fp32", "recompute_modules": ["mlp"]}
    check_extra(recipe, DENSE, "megatron")
    recipe.megatron.extra = {"moe_router_dtypee": "fp32"}
    with pytest.raises(ValueError, match=r"critic\.megatron\.extra\.moe_router_dtypee .* Nearest: moe_router_dtype\."):
        check_extra(recipe, DENSE, "critic.megatron")


def test_a_megatron_that_was_not_found_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remembered "not installed" would end the checks of names in this process without a word."""
    with monkeypatch.context() as patch:
        patch.setattr("megarl.megatron.extra_settings.importlib.util.find_spec", lambda _: None)
        assert fields_of_megatron() is None
    assert fields_of_megatron()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"moe_token_dispatcher_type": "alltol"}, r"Megatron accepts allgather, alltoall, flex[\s\S]*write alltoall"),
        ({"recompute_granularity": "some"}, "Megatron accepts full, selective"),
        ({"moe_grouped_gemm": "no"}, "expects true or false"),
    ],
)
def test_values_in_extra_follow_megatrons_types(extra: dict[str, Any], words: str) -> None:
    """Without the check, a trainer would report the value half a minute later."""
    recipe = Recipe()
    recipe.cluster.device, recipe.megatron.extra = "cpu", extra
    with pytest.raises(RecipeError, match=words):
        check_extra_names(recipe, "megatron")
    recipe.megatron.extra = {
        "moe_token_dispatcher_type": "alltoall",
        "recompute_granularity": None,
        "num_moe_experts": 4,
    }
    check_extra_names(recipe, "megatron")
