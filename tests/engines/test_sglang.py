"""SGLang behind the engine protocol, with a stand-in for its offline engine. With MEGARL_SGLANG (an unpacked wheel of 0.5.23),
the stand-in's names and parameters and other assumptions are compared with SGLang's source.

With MEGARL_SGLANG_PYTHON (an interpreter with SGLang), the real engine runs on the CPU. SGLang's kernels for CPUs must be built
from source and need AMX, so the kernels have a stand-in. SGLang was not run on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl import load_recipe
from megarl.engines import arguments_of, create, engine_env
from megarl.engines.base import EngineDead, EngineRefused, EngineSpec, GenerationAborted
from megarl.engines.sglang import args, worker
from megarl.engines.sglang.args import LOADER, build_engine_args
from megarl.errors import RecipeError
from megarl.preflight.engines_and_devices import check_device
from megarl.types import GenerationRequest, Prompt, Sampling, Span
from megarl.weight_sync.full.sender import FullSender
from megarl.weight_sync.session import WeightSyncError, compare_reports
from tests.support import fake_sglang
from tests.support.fake_sglang import END, VOCABULARY

ROOT = Path(__file__).parents[2]


@pytest.fixture
def spec(tmp_path) -> EngineSpec:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": END}))
    return EngineSpec("e0", str(tmp_path), "bfloat16", 40, load_weights=False, sleep_mode=True)


@pytest.fixture
def fake(monkeypatch):
    return fake_sglang.install(monkeypatch)


@pytest.fixture
def engine(fake, spec):
    engine = create("sglang", spec)
    engine.info = engine.start()
    engine.real = fake.instances[0]
    yield engine
    engine.shutdown()


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"table": torch.randn(VOCABULARY, VOCABULARY), "scale": torch.tensor(1.5)}


@pytest.fixture
def send_weights(engine, tmp_path_factory):
    """Sends weights to the engine, as a trainer does."""
    folder = str(tmp_path_factory.mktemp("shm"))
    sender = FullSender.open(
        "127.0.0.1", engine.info["receivers"], bucket_bytes=512, timeout=10.0, heartbeat_timeout=8.0, shm_dir=folder
    )
    engine.connect_weight_sync(sender.session)
    with ThreadPoolExecutor(1) as pool:

        def send(version: int, values: dict[str, torch.Tensor]):
            sending = pool.submit(sender.send, version, values.items)
            return engine.update_weights(version), sending

        yield send
    sender.close()


def request(group: int, n: int = 3, **sampling: object) -> GenerationRequest:
    options = {"max_tokens": 8, **sampling}
    return GenerationRequest(
        group, Prompt(f"p{group}", (group % 7, 3), "", "x"), Sampling(n, **options), seed=100 * group
    )


def generate(engine, *requests: GenerationRequest) -> dict[int, list]:
    done: dict[int, list] = {}
    engine.generate(requests, lambda group, completions: done.update({group: completions}))
    return done


# --- the adapter --------------------------------------------------------------------------------


def test_samples_follow_the_updated_weights(engine, send_weights) -> None:
    """Detects samples of old or no weights, a fingerprint that differs from the sender's, and prefixes cached with old
    weights."""
    with pytest.raises(EngineRefused, match="has dummy weights; update its weights first"):
        generate(engine, request(0))
    for version in (1, 2):
        report, sending = send_weights(version, weights(version))
        compare_reports(sending.result(10), report)
        assert torch.equal(engine.real.model.table, weights(version)["table"])
    assert engine.real.calls == ["begin", "update, flush True", "end"] * 2
    first = generate(engine, request(1), request(2, temperature=0.7))
    assert sorted(first) == [1, 2] and [len(samples) for samples in first.values()] == [3, 3]
    table = weights(2)["table"] * 1.5
    for group, temperature in ((1, 1.0), (2, 0.7)):
        for sample in first[group]:
            reads = [3, *sample.tokens[:-1].tolist()]
            expected = (
                (table[reads] / temperature).log_softmax(-1).gather(1, torch.tensor(sample.tokens[:, None]).long())
            )
            np.testing.assert_allclose(sample.log_probs, expected[:, 0].numpy(), atol=1e-5)


def test_sample_i_draws_from_seed_plus_i(engine, send_weights) -> None:
    """Siblings that are equal, or that another engine could not repeat."""
    send_weights(1, weights(1))[1].result(10)
    samples = generate(engine, request(1, n=4))[1]
    assert len({tuple(sample.tokens) for sample in samples}) > 1
    alone = GenerationRequest(9, request(1).prompt, Sampling(1, 8), seed=102)
    assert np.array_equal(generate(engine, alone)[9][0].tokens, samples[2].tokens)


def test_greedy_and_stopping(engine, send_weights) -> None:
    send_weights(1, weights(1))[1].result(10)
    (greedy,) = generate(engine, request(1, n=1, temperature=0.0))[1]
    assert np.isnan(greedy.log_probs).all() and greedy.finish_reason == "length" and len(greedy.tokens) == 8
    with pytest.raises(ValueError, match="n is 2; ask for n=1"):
        generate(engine, request(1, n=2, temperature=0.0))
    stop = int(greedy.tokens[2])
    (stopped,) = generate(engine, request(1, n=1, temperature=0.0, stop_token_ids=(stop, END)))[1]
    assert stopped.finish_reason == "stop" and stopped.tokens.tolist() == greedy.tokens[:3].tolist()
    with pytest.raises(ValueError, match=rf"SGLang would also stop at the model's eos tokens \[{END}\]"):
        generate(engine, request(1, stop_token_ids=(stop,)))
    with pytest.raises(ValueError, match="= 47; the engine was started for 1 to 40 in all"):
        generate(engine, request(1, max_tokens=45))


def test_a_truncated_response_ends_the_engine(engine, send_weights) -> None:
    """SGLang makes max_new_tokens smaller without a word where its cache is small: samples would be cut ones."""
    send_weights(1, weights(1))[1].result(10)
    engine.real.longest = 5
    with pytest.raises(EngineDead, match="cut a response at 5 of 8 tokens"):
        generate(engine, request(1))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"table": torch.ones(VOCABULARY, VOCABULARY)}, "1 parameters of the engine's model lack values: scale"),
        ({"table": torch.ones(VOCABULARY - 1, VOCABULARY), "scale": torch.ones(())}, "lack values: table"),
    ],
)
def test_incomplete_weights_end_the_engine(engine, send_weights, values, message) -> None:
    with pytest.raises(WeightSyncError, match=message):
        send_weights(1, values)
    assert engine.real.calls == ["begin", "update, flush True", "shutdown"]
    with pytest.raises(EngineDead, match="lack values"):
        engine.update_weights(2)


def test_running_requests_keep_their_weights(engine, send_weights) -> None:
    send_weights(1, weights(1))[1].result(10)
    engine.real.seconds = 0.05
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, request(1))
        while not engine.call(lambda: engine.running):
            time.sleep(0.005)
        for refused in (lambda: engine.update_weights(2), engine.sleep):
            with pytest.raises(EngineRefused, match="while 1 requests run"):
                refused()
        engine.abort()
        with pytest.raises(GenerationAborted):
            running.result(5)
    assert len(engine.real.tokenizer_manager.aborted) == 3
    engine.real.seconds = 0.0
    assert list(generate(engine, request(2))) == [2]


def test_aborted_samples_continue_after_their_tokens(engine, send_weights) -> None:
    """SGLang returns the tokens of an aborted sample. They stay the first tokens of the sample, with their log-probs."""
    send_weights(1, weights(1))[1].result(10)
    engine.real.seconds = 0.05
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, request(1, n=2, max_tokens=30))
        while not engine.call(lambda: engine.running) and not running.done():
            time.sleep(0.005)
        time.sleep(0.2)
        with pytest.raises(EngineRefused, match="only when it ends"):
            engine.copy_running(1)
        (moved,) = engine.hand_over([1])
        assert running.result(5) == {}
    engine.real.seconds = 0.0
    send_weights(2, weights(2))[1].result(10)
    for sample, partial in zip(generate(engine, moved)[1], moved.partials, strict=True):
        length = len(partial.tokens)
        assert 0 < length < 30 and partial.finish_reason is None
        assert np.array_equal(sample.tokens[:length], partial.tokens) and len(sample.tokens) == 30
        assert np.array_equal(sample.log_probs[:length], partial.log_probs)
        assert sample.spans == (Span(0, 1), Span(length, 2))
    engine.pause()
    with pytest.raises(EngineRefused, match="is paused"):
        engine.hand_over()


def test_pause_holds_the_schedulers(engine, send_weights) -> None:
    send_weights(1, weights(1))[1].result(10)
    engine.pause()
    assert engine.real.calls[-1] == "info", "nothing waited for the schedulers"
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (generate(engine, request(1)), done.set()))
        assert not done.wait(0.2)
        engine.resume()
        assert done.wait(5)


def test_sleep_and_wake(engine, send_weights) -> None:
    """Sleep drops the weights, an update brings them before the first sample, and graphs are restored last."""
    send_weights(1, weights(1))[1].result(10)
    assert engine.info["can_sleep"] is True and engine.info["can_update_in_flight"] is False
    engine.sleep()
    with pytest.raises(EngineRefused, match=r"sleeps \(weights, kv_cache\)"):
        generate(engine, request(1))
    with pytest.raises(EngineRefused, match="no memory for weights while they sleep"):
        engine.update_weights(2)
    with pytest.raises(EngineRefused, match=r"wake\(\['graphs'\]\)"):
        engine.wake(["graphs"])
    engine.wake(["weights"])
    send_weights(2, weights(2))[1].result(10)
    engine.wake(["kv_cache"])
    assert [call for call in engine.real.calls if call.startswith("re")] == [
        "release",
        "resume ['weights']",
        "resume ['kv_cache', 'cuda_graph']",
    ]
    assert not engine.real.asleep and list(generate(engine, request(1))) == [1]
    engine.sleep()
    engine.wake()
    with pytest.raises(EngineRefused, match="dropped its weights when it went to sleep"):
        generate(engine, request(1))


def test_an_sglang_without_begin_weight_update_is_refused(fake, spec, monkeypatch) -> None:
    monkeypatch.delattr(fake, "begin_weight_update")
    with pytest.raises(RuntimeError, match=r"no begin_weight_update.*0\.5\.23"):
        create("sglang", spec).start()


# --- settings rejected before the start ---------------------------------------------------------


def test_arguments(spec, monkeypatch) -> None:
    monkeypatch.setattr(args, "fields", lambda: ["mem_fraction_static", "attention_backend"])
    with pytest.raises(ValueError, match="did you mean 'mem_fraction_static'"):
        arguments_of("sglang").check_engine_args({"mem_fraction": 0.3}, "rollout")
    with pytest.raises(ValueError, match=r"rollout\.engine_args\.tp_size cannot be set: set rollout\.tensor_parallel"):
        arguments_of("sglang").check_engine_args({"tp_size": 2}, "rollout")
    with pytest.raises(ValueError, match=r"model_path cannot be set: set model\.path instead"):
        arguments_of("sglang").check_engine_args({"model_path": "x"}, "rollout")
    with pytest.raises(ValueError, match=r"ep_size cannot be set: set rollout\.expert_parallel"):
        arguments_of("sglang").check_engine_args({"ep_size": 2}, "rollout")
    spread = build_engine_args(replace(spec, tensor_parallel=4, expert_parallel=True), "npu")
    assert (spread["tp_size"], spread["ep_size"]) == (4, 4), "rollout.expert_parallel was read and ignored"
    monkeypatch.setattr(args, "fields", lambda: ["ep_size"])
    fixed = replace(spec, tensor_parallel=4, engine_args={"ep_size": 2}, recipe_section="judge")
    assert build_engine_args(fixed, "npu")["ep_size"] == 2, "a judge has no expert_parallel"
    arguments = build_engine_args(spec, "npu")
    assert "ep_size" not in arguments
    assert arguments["load_format"] == "dummy" and arguments["custom_weight_loader"] == [LOADER]
    assert arguments["context_length"] == 42 and arguments["enable_memory_saver"] is True
    assert arguments["enable_deterministic_inference"] is True, "requests' seeds would be ignored"
    unseeded = build_engine_args(replace(spec, seeded=False), "cuda")
    assert unseeded["enable_deterministic_inference"] is False
    assert arguments["attention_backend"] == arguments["sampling_backend"] == "ascend"
    assert "attention_backend" not in build_engine_args(spec, "cuda")


@pytest.mark.parametrize(
    ("argument", "value", "cause"),
    [
        ("speculative_algorithm", "EAGLE3", "once for the policy and once for the draft"),
        ("speculative_algorithm", "standalone", "weights that trainers send only once"),
        ("hicache_storage_backend", "file", "survive updates of the weights"),
        ("enable_lmcache", True, "survive updates of the weights"),
        ("enable_flexkv", True, "survive updates of the weights"),
        ("enable_unified_cache_external_linker", True, "survive updates of the weights"),
    ],
)
def test_arguments_that_break_updates_are_refused(argument: str, value: object, cause: str, monkeypatch) -> None:
    """An update waited for weights that were sent once, and samples used KV caches of earlier weights."""
    monkeypatch.setattr(args, "fields", lambda: [argument])
    check = arguments_of("sglang").check_engine_args
    with pytest.raises(RecipeError, match=cause) as error:
        check({argument: value}, "rollout")
    assert error.value.key == f"rollout.engine_args.{argument}"
    check({argument: value}, "judge")
    check({argument: "ngram" if argument == "speculative_algorithm" else None}, "rollout")


def test_a_truncated_response_names_its_engines_recipe_section() -> None:
    from megarl.engines.sglang.engine import _completion

    output = {"output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}}
    with pytest.raises(RuntimeError, match=r"raise judge\.engine_args\.mem_fraction_static"):
        _completion(output, Sampling(1, 2), "judge")


def test_environment() -> None:
    platform = pytest.importorskip("megarl.platform.npu").NPUPlatform().rollout_env()
    environment = engine_env("sglang", platform, 2, {})
    assert environment["SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT"] == "1" and environment["TASK_QUEUE_ENABLE"] == "1"
    assert engine_env("sglang", platform, 2, {"disable_cuda_graph": True})["TASK_QUEUE_ENABLE"] == "2"
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


@pytest.mark.parametrize(
    "change, device, message",
    [
        ({}, "cpu", r"rollout\.engine(.|\n)*AMX(.|\n)*rollout\.engine=vllm"),
        ({"return_routed_experts": True}, "npu", r"routing_replay(.|\n)*old_log_probs"),
        ({"prompt_top_k": 5, "recipe_section": "teacher"}, "npu", r"prompt tokens(.|\n)*teacher\.engine=vllm"),
    ],
)
def test_plans_that_sglang_cannot_serve(spec, change, device, message) -> None:
    with pytest.raises(RecipeError, match=message):
        arguments_of("sglang").check_plan(EngineSpec(spec.name, spec.model_path, spec.dtype, 40, **change), device)
    arguments_of("sglang").check_plan(spec, "npu")


def test_seeds_on_an_npu_need_a_package(spec, fake) -> None:
    with pytest.raises(RecipeError, match="batch_invariant_ops"):
        arguments_of("sglang").check_plan(spec, "npu")
    arguments_of("sglang").check_plan(spec, "cuda")


def test_sleep_needs_a_package(spec, fake, monkeypatch) -> None:
    """SGLang imports it when the engine starts, and the wheel of PyPI is of no use on an NPU."""
    monkeypatch.delitem(sys.modules, "torch_memory_saver")
    with pytest.raises(RecipeError, match="pip install torch-memory-saver"):
        arguments_of("sglang").check_plan(spec, "cuda")
    with pytest.raises(RecipeError, match="sgl-project/sgl-kernel-npu"):
        arguments_of("sglang").check_plan(replace(spec, seeded=False), "npu")


def test_images_are_refused(spec) -> None:
    Path(spec.model_path, "config.json").write_text(json.dumps({"vision_config": {}}))
    with pytest.raises(RecipeError, match="images"):
        arguments_of("sglang").check_plan(spec, "npu")


def test_the_sglang_recipe_is_refused_on_a_cpu() -> None:
    recipe = load_recipe(ROOT / "recipes" / "grpo_qwen3_8b_sglang.yaml")
    check_device(recipe, "npu")
    with pytest.raises(RecipeError, match="sglang"):
        check_device(recipe, "cpu")


def test_results_of_all_ranks_are_read(tmp_path) -> None:
    for rank in (0, 1):
        (tmp_path / f"{rank}.json").write_text(json.dumps({"error": f"of {rank}"}))
    assert [result["error"] for result in worker.read_results(str(tmp_path), 2)] == ["of 0", "of 1"]


# --- a real SGLang, on the CPU ------------------------------------------------------------------


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_real_sglang_on_the_cpu(kind: str, tmp_path) -> None:
    """Its log-probs are transformers' at the sampling temperature, seeds are a sample's own, its weights the sender's."""
    interpreter = os.environ.get("MEGARL_SGLANG_PYTHON")
    if not interpreter:
        pytest.skip("MEGARL_SGLANG_PYTHON names no interpreter that has SGLang 0.5.23, megarl's packages and triton")
    environment = engine_env("sglang", {}, 1, {}) | {
        "PYTHONPATH": f"{ROOT}/tests/stand_ins:{ROOT}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # there may be no compiler
    }
    command = [interpreter, "-m", "tests.support.sglang_cpu", kind, str(tmp_path / "model")]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=400)
    outputs: dict[str, list] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            for name, value in json.loads(line).items():
                outputs.setdefault(name, []).append(value)
    assert "told_to_the_sender" in outputs, done.stdout + done.stderr
    assert np.max(outputs["gap"]) < 5e-5 and len(outputs["gap"]) == 2
    assert outputs["repeats"] == outputs["seed_plus_1"] == outputs["differ"] == outputs["stops"] == [True]
    assert outputs["ends"] == [["length", "stop"]]
    assert outputs["paused"] == [[]] and outputs["resumed"] == [[[0]]]
    assert outputs["aborted"][0][0].startswith("GenerationAborted") and outputs["after_abort"] == [[1]]
    assert "1 parameters of the engine's model lack values: lm_head.weight" in outputs["weight_left_out"][0]
    assert "lack values: lm_head.weight" in outputs["told_to_the_sender"][0][0]
