"""A real vLLM: its samples are the model's, its log-probs exact, its weights the sender's."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megarl.engines.base import EngineDead, EngineRefused, GenerationAborted
from megarl.types import GenerationRequest, Prompt, Sampling
from megarl.weight_sync.session import WeightSyncError, compare_reports
from tests.support.engine_process import (
    MAX_LENGTH,
    VOCABULARY,
    EngineProcess,
    assert_exact,
    build_model,
    change,
    full_sender,
    gaps,
    load_model,
    make_requests,
    reference,
    same,
    spec,
    update,
)
from tests.support.slow import slow_except

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def process():
    process = EngineProcess()
    process.replace("megarl.engines.vllm.engine", "build_engine_args", "with_digests")
    yield process
    process.close()


@pytest.fixture(scope="module")
def info(process, path):
    info = process.start(spec(path, prompt_top_k=5))
    yield info
    process.shutdown()


@pytest.fixture
def engine(process, info):
    return process


def test_info(info):
    assert info["engine"] == "vllm"
    assert [name for name, _ in info["receivers"]] == ["e0/0"]
    assert info["device"] != "cpu" or info["can_sleep"] is False


def test_samples_follow_the_checkpoint_and_repeat(engine, path):
    requests = make_requests()
    _, completions = engine.generate(requests)
    assert_exact(load_model(path), requests, completions)
    assert all(len({tuple(s.tokens) for s in samples}) > 1 for samples in completions.values())
    assert same(completions, engine.generate(requests)[1])
    # sample i of a group draws from seed + i, so any engine may compute it
    alone = [GenerationRequest(r.group, r.prompt, Sampling(1, r.sampling.max_tokens), r.seed + 2) for r in requests]
    for group, (sample,) in engine.generate(alone)[1].items():
        assert np.array_equal(sample.tokens, completions[group][2].tokens)


def test_groups_stream_and_stop(engine):
    short, long = make_requests(1, max_tokens=2)[0], make_requests(2, max_tokens=60)[1]
    order, completions = engine.generate([long, short])
    assert order == [short.group, long.group]
    assert {(len(s.tokens), s.finish_reason) for s in completions[short.group]} == {(2, "length")}
    stop = int(completions[long.group][0].tokens[5])
    stopping = make_requests(2, max_tokens=60, stop_token_ids=(stop,))[1]
    (first, *_) = engine.generate([stopping])[1][stopping.group]
    assert first.tokens[-1] == stop and first.finish_reason == "stop" and len(first.tokens) <= 6


def test_greedy_for_evaluation(engine, path):
    requests = make_requests(3, n=1, temperature=0.0)
    model = load_model(path)
    _, completions = engine.generate(requests)
    for request in requests:
        (sample,) = completions[request.group]
        assert np.isnan(sample.log_probs).all()  # greedy has no sampling distribution
        expected = reference(model, request.prompt.tokens, sample.tokens.tolist())
        assert expected.argmax(-1).tolist() == sample.tokens.tolist()
    _, warmer = engine.generate(make_requests(1, temperature=0.7))
    assert all(np.isnan(s.log_probs).all() for s in warmer[0])  # vLLM's log-probs are for temperature 1


def test_prompt_log_probs_equal_the_models_softmax(engine, path):
    """Log-probs of the prompt's tokens and of the likeliest tokens, as for a teacher, equal the checkpoint's softmax."""
    tokens = tuple(np.random.default_rng(0).integers(1, VOCABULARY, 30).tolist())
    requests = [
        GenerationRequest(number, Prompt("p", tokens[: 30 - number], "", "x"), Sampling(1, 1, 0.0), 0, prompt_top_k=k)
        for number, k in enumerate((0, 5))
    ]
    _, scored = engine.generate(requests)
    logits = load_model(path)(torch.tensor([tokens])).logits[0].float()
    expected = logits.log_softmax(-1)[:-1].detach()
    for request in requests:
        length, k = len(request.prompt.tokens), request.prompt_top_k
        scores, places = scored[request.group][0].prompt, expected[: len(request.prompt.tokens) - 1]
        assert scores.log_probs[0] == 0 and not scores.top_log_probs[0].any()
        log_probs = places.gather(1, torch.tensor(tokens[1:length])[:, None])[:, 0]
        np.testing.assert_allclose(scores.log_probs[1:], log_probs, atol=1e-4)
        best = places.topk(k)
        np.testing.assert_allclose(scores.top_log_probs[1:], best.values, atol=1e-4)
        assert scores.top_tokens.shape == (length, k)
        named = places.gather(1, torch.from_numpy(scores.top_tokens[1:]).long())
        np.testing.assert_allclose(named, scores.top_log_probs[1:], atol=1e-4)
    with pytest.raises(ValueError, match="has prompt_top_k=6; the engine was started for 5"):
        engine.generate([dataclasses.replace(requests[0], prompt_top_k=6)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": MAX_LENGTH}, "4 prompt tokens . 128 response tokens = 132"),
        ({"n": 2, "temperature": 0.0}, "n is 2; ask for n=1"),
    ],
)
def test_invalid_requests_are_refused(engine, changes, message):
    good = make_requests(1)
    with pytest.raises(ValueError, match=message):
        engine.generate(good + make_requests(1, **changes))
    foreign = GenerationRequest(0, Prompt("p", (1, VOCABULARY + 9), "", "x"), Sampling(1, 4), 0)
    with pytest.raises(ValueError, match=r"token ids from 1 to 259; the model's vocabulary has 250"):
        engine.generate([foreign])
    engine.generate(good)


def test_an_abort_ends_only_running_requests(engine, path):
    requests = make_requests(2, max_tokens=100)
    short = dataclasses.replace(requests[0], sampling=Sampling(1, 2))
    running = engine.begin("generate", [short, requests[1]])
    while short.group not in engine.finished():
        time.sleep(0.001)
    engine.abort()
    with pytest.raises(GenerationAborted, match="'e0' aborted its requests"):
        running.result(20)
    assert_exact(load_model(path), requests, engine.generate(requests)[1])


def test_cpu_cannot_sleep(engine, info):
    if info["device"] != "cpu":
        pytest.skip("this device can sleep")
    for method in (engine.sleep, engine.wake):
        with pytest.raises(EngineRefused, match="cannot sleep"):
            method()


def test_updates_through_weight_sync(engine, info, path, tmp_path):
    model = load_model(path)
    sender = full_sender(engine, info)
    requests = make_requests()
    previous = engine.generate(requests)[1]
    with ThreadPoolExecutor(1) as pool:
        for version in (1, 2, 3):
            weights = change(model, version, tmp_path)
            sending = pool.submit(sender.send, version, weights.items)
            received = engine.update_weights(version)
            compare_reports(sending.result(30), received)
            completions = engine.generate(requests)[1]
            assert_exact(model, requests, completions)
            assert not same(previous, completions)
            previous = completions

        # running requests: tokens after the update follow the new weights
        short, *long = make_requests(4, max_tokens=100)
        short = dataclasses.replace(short, sampling=Sampling(1, 3))
        running = engine.begin("generate", [short, *long])
        while short.group not in engine.finished():
            time.sleep(0.001)
        engine.pause()
        before = load_model(tmp_path)
        weights = change(model, 4, tmp_path)
        sending = pool.submit(sender.send, 4, weights.items)
        engine.update_weights(4)
        sending.result(30)
        assert not running.done()
        engine.resume()
        mixed = running.result(60)[1]
        for request in long:
            for sample in mixed[request.group]:
                old, new = (gaps(m, request, sample) for m in (before, model))
                switch = int(np.argmax(old > 5e-5))
                assert 3 <= switch < 100
                assert new[switch:].max() < 5e-5

        # a version that lacks one expert's matrix: refused, and no half version ever generates
        del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
        sending = pool.submit(sender.send, 5, weights.items)
        with pytest.raises(ValueError, match=r"layers.1.mlp.experts.* lacks 2,048 of its 24,576 elements"):
            engine.update_weights(5)
        with pytest.raises(WeightSyncError, match=r"aborted: receiver 'e0/0': ValueError: .*lacks 2,048"):
            sending.result(10)
        with pytest.raises(EngineDead, match="lacks 2,048"):
            engine.generate(requests)
    sender.close()


def test_dummy_weights_and_unknown_names(process, info, path, tmp_path):
    info = process.start(spec(path, load_weights=False, seeded=False))
    with pytest.raises(EngineRefused, match="has dummy weights; update its weights first"):
        process.generate(make_requests(1))
    sender = full_sender(process, info)
    model = load_model(path)
    weights = change(model, 1, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 1, weights.items)
        process.update_weights(1)
        sending.result(30)
        requests = make_requests(2)
        assert_exact(model, requests, process.generate(requests)[1])

        # Without seeds in requests, the engine's generator draws for all requests, and restarts with each version.
        unseeded = [dataclasses.replace(request, seed=None) for request in make_requests(2)]
        drawn = {}
        for attempt, version in (("first", 1), ("again", 1), ("next", 2)):
            sending = pool.submit(sender.send, version, weights.items)
            process.update_weights(version)
            sending.result(30)
            drawn[attempt] = process.generate(unseeded)[1]
        assert_exact(model, unseeded, drawn["first"])
        assert same(drawn["first"], drawn["again"])
        assert not same(drawn["first"], drawn["next"])
        assert not same(drawn["next"], process.generate(unseeded)[1])
    sender.close()
    process.shutdown()

    info = process.start(spec(path, load_weights=False))
    sender = full_sender(process, info)
    with ThreadPoolExecutor(1) as pool:
        extra = [*weights.items(), ("model.layers.0.mlp.extra_bias", torch.ones(4))]
        sending = pool.submit(sender.send, 1, lambda: extra)
        with pytest.raises(ValueError, match=r"1 exported tensors are unknown .* model.layers.0.mlp.extra_bias"):
            process.update_weights(1)
        sending.result(30)
    sender.close()


def test_temperature_and_bad_arguments(process, info, path):
    with pytest.raises(ValueError, match=r"rollout.engine_args.max_num_seq: .*did you mean 'max_num_seqs'"):
        process.start(spec(path, engine_args={"max_num_seq": 4}))
    with pytest.raises(ValueError, match=r"engine_args.dtype cannot be set: set rollout.dtype instead"):
        process.start(spec(path, engine_args={"dtype": "float16"}))
    with pytest.raises(ValueError, match=r"temperature 0.7 together with a filter"):
        process.start(spec(path, temperature=0.7, top_p=0.9))
    process.start(spec(path, temperature=0.7))
    requests = make_requests(3, temperature=0.7)
    assert_exact(load_model(path), requests, process.generate(requests)[1])
    process.shutdown()


@pytest.mark.parametrize("kind", slow_except("deepseek_v3".__eq__, ["deepseek_v3", "qwen2_tied"]))
def test_deepseek_and_tied_models_sample_their_weights(process, info, tmp_path, kind):
    """DeepSeek-V3: without our settings, vLLM's CPU operators compute wrong attention, and its defaults wrong routing if
    transformers wrote config.json; the expert bias is a buffer, not a parameter. Tied embeddings: the export has no output
    layer, and the engine has a packed copy of it."""
    path = build_model(tmp_path, kind)
    model = load_model(path)
    sender = full_sender(process, process.start(spec(path)))
    requests = make_requests(3)
    assert_exact(model, requests, process.generate(requests)[1])
    update(process, sender, change(model, 1, tmp_path))
    assert_exact(model, requests, process.generate(requests)[1])
    sender.close()
    process.shutdown()
