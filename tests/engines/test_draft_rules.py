"""Speculative decoding that megarl refuses before an engine starts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megarl.engines.base import AdapterSpec, EngineSpec
from megarl.engines.vllm import args, changing_weights
from megarl.engines.vllm.compat import repeat_by_request
from megarl.engines.vllm.outputs import DraftCounts
from megarl.errors import RecipeError
from megarl.types import Completion, DraftCount

PREDICTS = {"num_nextn_predict_layers": 1}
MTP = {"method": "mtp", "num_speculative_tokens": 3}


def spec(tmp_path, config=None, **changes):
    config = {"model_type": "glm4_moe", **PREDICTS} if config is None else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = EngineSpec("e0", str(tmp_path), "float32", 128, engine_args={"speculative_config": MTP}, load_weights=False)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("speculation", "key", "words"),
    [
        ("mtp", "", "it must be a mapping"),
        ({**MTP, "method": "draft_model"}, ".method", "(?s)random weights.*choose one of mtp, ngram"),
        ({**MTP, "method": None}, ".method", "random weights"),
        ({"method": "mtp"}, ".num_speculative_tokens", "set it to 1 or more"),
        ({**MTP, "num_speculative_tokens": True}, ".num_speculative_tokens", "set it to 1 or more"),
        ({**MTP, "rejection_sample_method": "synthetic"}, ".rejection_sample_method", "policy's distribution"),
        ({**MTP, "draft_load_config": {}}, ".draft_load_config", "megarl sets it"),
        ({**MTP, "model": "/other"}, ".model", "in model.path"),
        ({**MTP, "promt_lookup_max": 3}, ".promt_lookup_max", "did you mean prompt_lookup_max"),
    ],
)
def test_settings_are_checked(speculation, key, words):
    with pytest.raises(RecipeError, match=words) as refused:
        args.check_engine_args({"speculative_config": speculation})
    assert f"key    rollout.engine_args.speculative_config{key} = " in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"config": {"model_type": "qwen3"}}, "cpu", "has no layers for multi-token prediction"),
        ({"config": {"model_type": "qwen2_5_vl", "vision_config": {}, **PREDICTS}}, "cpu", "not tested with images"),
        ({"config": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}}, "cpu", "has no layers"),
        ({}, "npu", "vllm-ascend has its own checks"),
        ({"adapters": AdapterSpec(8, ("all",))}, "cuda", "adapters"),
        ({"quantization": "fp8"}, "cuda", "rollout.quantization"),
        ({"data_parallel": 2}, "cuda", "rollout.data_parallel"),
        ({"return_routed_experts": True}, "cuda", "routing_replay"),
        ({"engine_args": {"speculative_config": {**MTP, "method": "suffix"}}}, "cuda", "rollout.seeded: false"),
        (
            {"engine_args": {"speculative_config": MTP, "max_num_seqs": 600}},
            "cuda",
            "(?s)600 sequences.*2400.*set it to 512",
        ),
    ],
)
def test_an_engine_that_cannot_speculate_is_refused(tmp_path, changes, device, words):
    refused = spec(tmp_path, **changes)
    with pytest.raises(RecipeError, match=words):
        changing_weights.check_drafts(
            refused, device, args._model_config(str(tmp_path)), args.limits(replace(refused, device=device))
        )


def test_engines_load_their_draft_from_the_checkpoint(tmp_path):
    """Also the prediction layers of Qwen3.5's text_config; a fixed model's draft is loaded with the model."""
    config = {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}
    arguments = args.build_engine_args(spec(tmp_path, config), "cpu")
    assert arguments["load_format"] == "dummy"
    assert arguments["speculative_config"] == {**MTP, "draft_load_config": {"load_format": "auto"}}
    loaded = args.build_engine_args(spec(tmp_path, config, load_weights=True), "cpu")
    assert (loaded["load_format"], loaded["speculative_config"]) == ("auto", MTP)
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    assert args.build_engine_args(spec(tmp_path, config, engine_args=ngram), "cpu")["speculative_config"] == {
        **ngram["speculative_config"]
    }


def test_a_vllm_that_would_ignore_where_drafts_are_is_refused(tmp_path, monkeypatch):
    """vLLM 0.18 gives drafts the policy's load format."""
    monkeypatch.setattr(changing_weights, "package_folder", lambda _: tmp_path / "vllm")
    with pytest.raises(RecipeError, match="random weights, as it has no draft_load_config"):
        args.build_engine_args(spec(tmp_path), "cpu")


def test_values_are_repeated_for_the_tokens_of_their_request():
    temperatures, ends = torch.tensor([0.5, 0.0, 0.7]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert repeat_by_request(temperatures, ends, 5, 0, 1).tolist() == pytest.approx([0.5, 0.5, 0.7, 0.7, 0.7])
    assert repeat_by_request(temperatures, torch.tensor([1, 2, 2]), 2, 0, 1).tolist() == [0.5, 1.0]


def test_counts_go_to_the_samples_of_their_request():
    """Ended and cancelled requests leave nothing behind."""
    scheduler = SimpleNamespace(make_spec_decoding_stats=lambda *_, **__: "vLLM's")
    counts = DraftCounts(scheduler)
    for key, names in (("a", ["a0", "a1"]), ("b", ["b0"]), ("c", ["c0"])):
        counts.admit(key, [SimpleNamespace(request_id=name, request_index=int(name[1])) for name in reversed(names)])
    for name, accepted in (("a1", 2), ("b0", 1), ("a0", 0), ("a1", 1), ("c0", 2)):
        answer = scheduler.make_spec_decoding_stats(
            None, request_id=name, num_draft_tokens=2, num_accepted_tokens=accepted, num_invalid_spec_tokens=None
        )
        assert answer == "vLLM's"
    samples = [Completion(torch.zeros(1).numpy(), torch.zeros(1).numpy(), "stop")] * 2
    assert [sample.drafts for sample in counts.finish("a", samples)] == [DraftCount(2, 0), DraftCount(4, 3)]
    counts.cancel("b")
    assert counts.finish("c", samples[:1])[0].drafts == DraftCount(2, 2)
    assert counts._names == counts._counts == {}


def test_samples_have_no_counts_where_vllm_does_not_report_them():
    counts, sample = DraftCounts(SimpleNamespace()), Completion(torch.zeros(1).numpy(), torch.zeros(1).numpy(), "stop")
    counts.admit("a", [SimpleNamespace(request_id="a0", request_index=0)])
    assert counts.finish("a", [sample])[0].drafts is None
