"""Tiny models: transformers finds every tensor it expects, and the seed determines the bytes."""

import hashlib
import json

import pytest

from megarl.commands.data.tiny_model import KINDS, make_tiny_model
from megarl.data import check_vocabulary, load_tokenizer
from megarl.hf.families import FAMILIES
from megarl.hf.families.read import config_of_unknown_type


@pytest.mark.parametrize("kind", list(KINDS))
def test_transformers_loads_every_tensor(tmp_path, kind):
    import torch
    from transformers import AutoModelForCausalLM

    sizes = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "vocab_size": 640}
    if FAMILIES[kind].latent:
        sizes["num_key_value_heads"] = 6
    if FAMILIES[kind].delta_nets:
        sizes["layer_types"] = ["linear_attention", "linear_attention", "full_attention"]
    if FAMILIES[kind].windows:
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    out = make_tiny_model(kind, tmp_path, seed=0, **sizes)
    config = config_of_unknown_type(out)
    model, report = AutoModelForCausalLM.from_pretrained(out, config=config, output_loading_info=True, dtype="auto")
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert model.dtype == torch.float32 and model.config.model_type == (FAMILIES[kind].reads_as or kind)
    check_vocabulary(load_tokenizer(out), json.loads((out / "config.json").read_text()))
    assert model.config.eos_token_id == load_tokenizer(out).eos_id
    logits = model(torch.arange(24)[None]).logits
    assert torch.isfinite(logits).all() and logits.std() > 0.05


def test_tied_embeddings_have_no_head(tmp_path):
    from safetensors.numpy import load_file

    make_tiny_model("qwen2", tmp_path, seed=0, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_norm_spread_sets_the_spread_of_norms_and_biases(tmp_path):
    from safetensors.numpy import load_file

    for spread in (0.1, 0.0):
        make_tiny_model("qwen2", tmp_path, seed=0, norm_spread=spread)
        tensors = load_file(tmp_path / "model.safetensors")
        norm, bias = tensors["model.norm.weight"], tensors["model.layers.0.self_attn.q_proj.bias"]
        assert norm.mean() == pytest.approx(1, abs=0.05) and bias.mean() == pytest.approx(0, abs=0.05)
        assert norm.std() == pytest.approx(spread, rel=0.3) and bias.std() == pytest.approx(spread, rel=0.3)
        assert tensors["lm_head.weight"].std() == pytest.approx(0.05, rel=0.05)


def test_equal_seeds_give_equal_bytes(tmp_path):
    from safetensors.numpy import load_file

    def model_files(seed):
        make_tiny_model("qwen3_moe", tmp_path, seed)
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    first, other = model_files(1), model_files(0)
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}
    assert first == model_files(1)
    # Weights as they were first published; a change of these needs a new quickstart format.
    make_tiny_model("qwen3_moe", tmp_path, seed=0)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert hashlib.sha256(head.tobytes()).hexdigest()[:16] == "098369a468d72603"


def test_unsupported_tiny_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no tiny 'gemma3' model, only qwen3_moe"):
        make_tiny_model("gemma3", tmp_path, seed=0)
    with pytest.raises(ValueError, match="qwen3 has no size num_experts"):
        make_tiny_model("qwen3", tmp_path, seed=0, num_experts=8)
    with pytest.raises(ValueError, match="vocab_size 256 is below the tiny tokenizer's 4"):
        make_tiny_model("qwen3", tmp_path, seed=0, vocab_size=256)
