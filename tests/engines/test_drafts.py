"""Speculative decoding in a real vLLM: samples have the policy's distribution, and the draft keeps its checkpoint's weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.types import GenerationRequest, Prompt, Sampling
from tests.support.digests import digest
from tests.support.engine_process import (
    EngineProcess,
    assert_exact,
    build_model,
    change,
    full_sender,
    load_model,
    make_requests,
    reference,
    same,
    spec,
    update,
)
from tests.support.megatron_prediction import add_mtp_layer

pytestmark = pytest.mark.stack

LAYERS = 2


SPECULATION = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A policy of GLM-4.5's architecture with a layer for multi-token prediction."""
    folder = Path(build_model(tmp_path_factory.mktemp("policy"), "glm4_moe", LAYERS))
    torch.manual_seed(1)
    add_mtp_layer(folder / "model.safetensors", LAYERS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return str(folder)


def make_predictable(folder):
    """Make the policy predict each token from the one before alone, and its draft compute the same prediction."""
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
    projection = tensors[f"model.layers.{LAYERS}.eh_proj.weight"].zero_()  # of the embedding, and of the hidden state
    projection[:, : len(projection)] = torch.eye(len(projection))
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture
def process():
    process = EngineProcess()
    process.replace("megarl.engines.vllm.engine", "build_engine_args", "with_digests")
    yield process
    process.shutdown()
    process.close()


def places_in_distribution(model, request, samples):
    """Each token's place in the policy's distribution, uniform between 0 and 1 for a sample of it: the probability of all
    tokens with lower ids, and a random share of the token's probability."""
    random, places = np.random.default_rng(0), []
    for sample in samples:
        probabilities = reference(model, request.prompt.tokens, sample.tokens.tolist()).exp().double()
        up_to = probabilities.cumsum(1).gather(1, torch.from_numpy(sample.tokens).long()[:, None])[:, 0].numpy()
        likelihoods = probabilities.gather(1, torch.from_numpy(sample.tokens).long()[:, None])[:, 0].numpy()
        places.append(up_to - likelihoods * random.random(len(likelihoods)))
    return np.sort(np.concatenate(places))


@pytest.mark.slow
def test_samples_are_the_policys_and_the_draft_is_the_checkpoints(process, path, tmp_path):
    info = process.start(spec(path, load_weights=False, engine_args=SPECULATION))
    model, sender = load_model(path), full_sender(process, info)
    update(process, sender, change(model, 5, tmp_path), 1)
    requests = make_requests(4, n=3, max_tokens=24)
    completions = process.generate(requests)[1]
    assert_exact(model, requests, completions)
    assert same(completions, process.generate(requests[::-1])[1])  # whatever a step's other requests are
    name = f"model.layers.{LAYERS}.eh_proj.weight"
    assert process.rpc("draft_digests")[0][name] == digest(load_file(Path(path) / "model.safetensors")[name])
    request = GenerationRequest(0, Prompt("p", (5, 6, 7, 8), "", "x"), Sampling(64, 48), 7)
    places = places_in_distribution(model, request, process.generate([request])[1][0])
    gap = np.abs(places - (np.arange(len(places)) + 0.5) / len(places)).max() * np.sqrt(len(places))
    assert gap < 1.95  # Kolmogorov-Smirnov: one of 1,000 correct samplers is above
    sender.close()


@pytest.mark.slow
def test_a_draft_follows_updates_and_its_accepted_tokens_are_counted(process, path, tmp_path):
    """The draft shares the policy's embedding and output layer, so that it still predicts the policy's likeliest token."""
    path = shutil.copytree(path, tmp_path / "predictable")
    make_predictable(path)
    info = process.start(spec(str(path), load_weights=False, temperature=0.05, engine_args=SPECULATION))
    model, sender = load_model(path), full_sender(process, info)
    (request,) = make_requests(1, n=4, max_tokens=31, temperature=0.05)
    for version in (1, 2):
        torch.manual_seed(version)
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_()
            model.lm_head.weight.normal_(std=0.3)
        model.save_pretrained(tmp_path)
        update(process, sender, load_file(tmp_path / "model.safetensors"), version)
        completions = process.generate([request])[1]
        assert_exact(model, [request], completions, bound=1e-3)  # the temperature multiplies differences by 20
        for sample in completions[0]:
            count = sample.drafts
            assert count.accepted > 0.9 * count.proposed > 0
            assert len(sample.tokens) - 1 <= count.accepted + (count.proposed + 1) // 2 <= len(sample.tokens) + 1
    sender.close()
