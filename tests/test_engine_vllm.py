"""A real vLLM: its samples are the model's, its log-probs exact, its weights the sender's.

The engine lives in a process of its own and this one plays the trainer: it holds the Hugging Face
model, changes its weights and sends them through the exchange.
"""

import dataclasses
import multiprocessing
import os
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megarl.engines import create, engine_env
from megarl.engines.base import EngineDead, EngineRefused, EngineSpec
from megarl.exchange.sender import WeightSender
from megarl.exchange.session import ExchangeError, compare_reports
from megarl.types import GenerationRequest, Prompt, Sampling

pytestmark = pytest.mark.stack

VOCABULARY = 250  # not a multiple of vLLM's padding
MAX_LENGTH = 128


def serve(connection):
    """The engine's process: runs (number, method, arguments) in threads, answers (number, error, value)."""
    state = {}

    def start(spec):
        state["engine"] = create("vllm", spec)
        return state["engine"].start()

    def generate(requests):
        order, completions = [], {}
        state["finished"] = order
        state["engine"].generate(requests, lambda group, c: (order.append(group), completions.update({group: c})))
        return order, completions

    def finished():
        return state["finished"]

    def run(number, method, arguments):
        try:
            target = {"start": start, "generate": generate, "finished": finished}.get(method) or getattr(
                state["engine"], method
            )
            answer = (number, None, target(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again in the other process
            traceback.clear_frames(error.__traceback__)
            answer = (number, type(error)(str(error)), None)
        with lock:
            connection.send(answer)

    lock = threading.Lock()
    while (message := connection.recv()) is not None:
        threading.Thread(target=run, args=message).start()


class EngineProcess:
    def __init__(self):
        before = dict(os.environ)
        os.environ.update(engine_env("vllm", {}, threads=1))
        try:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs,), daemon=False)
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.futures: dict[int, Future] = {}
        threading.Thread(target=self._answers, daemon=True).start()

    def _answers(self):
        while True:
            try:
                number, error, value = self.connection.recv()
            except (EOFError, OSError):
                return
            future = self.futures.pop(number)
            future.set_exception(error) if error is not None else future.set_result(value)

    def begin(self, method, *arguments):
        number, future = time.monotonic_ns(), Future()
        self.futures[number] = future
        self.connection.send((number, method, arguments))
        return future

    def __getattr__(self, method):
        return lambda *arguments: self.begin(method, *arguments).result(120)

    def close(self):
        self.connection.send(None)
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()


def build_model(path, kind="qwen3_moe"):
    import transformers

    torch.manual_seed(0)
    common = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **common, num_key_value_heads=2, head_dim=32, num_experts=4, moe_intermediate_size=32
        )
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
        return str(path)
    latent = dict(kv_lora_rank=512, q_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)
    experts = dict(moe_intermediate_size=64, n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1)
    config = transformers.DeepseekV3Config(
        **common, **latent, **experts, num_key_value_heads=4, first_k_dense_replace=1, routed_scaling_factor=1.0
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(path)
    return str(path)


def load_model(path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def change(model, seed, directory):
    """New weights for `model`; returns them under their checkpoint names."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in [*model.parameters(), *biases]:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def make_requests(count=6, n=3, max_tokens=20, temperature=1.0, seed=0, **sampling):
    random = np.random.default_rng(seed)
    prompts = [tuple(random.integers(3, VOCABULARY, 4 + i).tolist()) for i in range(count)]
    return [
        GenerationRequest(
            i, Prompt(f"p{i}", tokens, "", "x"), Sampling(n, max_tokens, temperature, **sampling), 100 * i
        )
        for i, tokens in enumerate(prompts)
    ]


@torch.no_grad()
def reference(model, prompt, tokens, temperature=1.0):
    """log-probs [response, vocabulary] of the Hugging Face model before each response token."""
    sequence = torch.tensor([[*prompt, *tokens]])
    logits = model(sequence).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)


def gaps(model, request, sample):
    """How far the engine's log-probs are from the Hugging Face model's, a token."""
    expected = reference(model, request.prompt.tokens, sample.tokens.tolist(), request.sampling.temperature)
    expected = expected.gather(1, torch.from_numpy(sample.tokens).long()[:, None])[:, 0]
    return np.abs(expected.numpy() - sample.log_probs)


def assert_exact(model, requests, completions, bound=5e-5):
    for request in requests:
        assert len(completions[request.group]) == request.sampling.n
        for sample in completions[request.group]:
            assert sample.tokens.dtype == np.int32 and sample.log_probs.dtype == np.float32
            assert gaps(model, request, sample).max() < bound


def same(one, other):
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.log_probs, b.log_probs)
        for group in one
        for a, b in zip(one[group], other[group], strict=True)
    )


def exchange(engine, info):
    sender = WeightSender.open("127.0.0.1", [tuple(r) for r in info["receivers"]], bucket_bytes=1 << 18, timeout=30.0)
    engine.connect_exchange(sender.session)
    return sender


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def process():
    process = EngineProcess()
    yield process
    process.close()


def spec(path, **changes):
    return EngineSpec(**{"name": "e0", "model_path": path, "dtype": "float32", "max_model_len": MAX_LENGTH, **changes})


@pytest.fixture(scope="module")
def info(process, path):
    info = process.start(spec(path))
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
    assert all(np.isnan(s.log_probs).all() for s in warmer[0])  # vLLM's are those of temperature 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": MAX_LENGTH}, "4 prompt tokens . 128 response tokens = 132"),
        ({"n": 2, "temperature": 0.0}, "n is 2; ask for n=1"),
    ],
)
def test_requests_that_cannot_be_served(engine, changes, message):
    good = make_requests(1)
    with pytest.raises(ValueError, match=message):
        engine.generate(good + make_requests(1, **changes))
    foreign = GenerationRequest(0, Prompt("p", (1, VOCABULARY + 9), "", "x"), Sampling(1, 4), 0)
    with pytest.raises(ValueError, match=r"token ids from 1 to 259; the model's vocabulary has 250"):
        engine.generate([foreign])
    engine.generate(good)


def test_cpu_cannot_sleep(engine, info):
    if info["device"] != "cpu":
        pytest.skip("this device can sleep")
    for method in (engine.sleep, engine.wake):
        with pytest.raises(EngineRefused, match="cannot sleep"):
            method()


def test_updates_through_the_exchange(engine, info, path, tmp_path):
    model = load_model(path)
    sender = exchange(engine, info)
    requests = make_requests()
    previous = engine.generate(requests)[1]
    with ThreadPoolExecutor(1) as pool:
        for version in (1, 2, 3):
            weights = change(model, version, tmp_path)
            sending = pool.submit(sender.send, version, weights.items())
            received = engine.update_weights(version)
            compare_reports(sending.result(30), {"e0": received})
            completions = engine.generate(requests)[1]
            assert_exact(model, requests, completions)
            assert not same(previous, completions)
            previous = completions

        # in flight: what is sampled after the update follows the new weights
        short, *long = make_requests(4, max_tokens=100)
        short = dataclasses.replace(short, sampling=Sampling(1, 3))
        running = engine.begin("generate", [short, *long])
        while short.group not in engine.finished():
            time.sleep(0.001)
        engine.pause()
        before = load_model(tmp_path)
        weights = change(model, 4, tmp_path)
        sending = pool.submit(sender.send, 4, weights.items())
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
        sending = pool.submit(sender.send, 5, weights.items())
        with pytest.raises(ValueError, match=r"layers.1.mlp.experts.* lacks 2,048 of its 24,576 elements"):
            engine.update_weights(5)
        with pytest.raises(ExchangeError, match=r"aborted: receiver 'e0/0': ValueError: .*lacks 2,048"):
            sending.result(10)
        with pytest.raises(EngineDead, match="lacks 2,048"):
            engine.generate(requests)
    sender.close()


def test_dummy_weights_and_unknown_names(process, info, path, tmp_path):
    info = process.start(spec(path, load_weights=False))
    with pytest.raises(EngineRefused, match="has dummy weights; update its weights first"):
        process.generate(make_requests(1))
    sender = exchange(process, info)
    model = load_model(path)
    weights = change(model, 1, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 1, weights.items())
        process.update_weights(1)
        sending.result(30)
        requests = make_requests(2)
        assert_exact(model, requests, process.generate(requests)[1])
    sender.close()
    process.shutdown()

    info = process.start(spec(path, load_weights=False))
    sender = exchange(process, info)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 1, [*weights.items(), ("model.layers.0.mlp.extra_bias", torch.ones(4))])
        with pytest.raises(ValueError, match=r"1 exported tensors are unknown .* model.layers.0.mlp.extra_bias"):
            process.update_weights(1)
        sending.result(30)
    sender.close()


def test_temperature_and_bad_arguments(process, info, path):
    with pytest.raises(ValueError, match=r"rollout.engine_args.max_num_seq: .*did you mean 'max_num_seqs'"):
        process.start(spec(path, engine_args={"max_num_seq": 4}))
    with pytest.raises(ValueError, match=r"engine_args.dtype cannot be given: set rollout.dtype instead"):
        process.start(spec(path, engine_args={"dtype": "float16"}))
    with pytest.raises(ValueError, match=r"temperature 0.7 together with a filter"):
        process.start(spec(path, temperature=0.7, top_p=0.9))
    process.start(spec(path, temperature=0.7))
    requests = make_requests(3, temperature=0.7)
    assert_exact(load_model(path), requests, process.generate(requests)[1])
    process.shutdown()


def test_deepseek(process, info, tmp_path):
    """Attention that vLLM's CPU operators get wrong without our setting, and routing that its
    defaults get wrong with a config.json as transformers writes it; its expert bias is no parameter."""
    path = build_model(tmp_path, "deepseek_v3")
    model = load_model(path)
    sender = exchange(process, process.start(spec(path)))
    requests = make_requests(3)
    assert_exact(model, requests, process.generate(requests)[1])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 1, change(model, 1, tmp_path).items())
        process.update_weights(1)
        sending.result(30)
    assert_exact(model, requests, process.generate(requests)[1])
    sender.close()
    process.shutdown()
