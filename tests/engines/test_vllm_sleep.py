"""Calls that the vLLM engine accepts while asleep, and without layerwise reload; vLLM is a stand-in."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megarl.engines.base import AdapterSpec, EngineDead, EngineRefused, EngineSpec
from megarl.engines.vllm.compat import Capabilities
from megarl.engines.vllm.engine import VllmEngine
from megarl.engines.vllm.route_support import support_of
from megarl.types import GenerationRequest, Prompt, Sampling
from megarl.weight_sync.session import Session

STEPS = 3  # of a request


class FakeProcessor:
    """The tokens of running requests: one a step. A request has one sample, of the same name."""

    def __init__(self, running: dict[str, int]) -> None:
        self.running = running
        self.external_req_ids = self.request_states = self

    def __getitem__(self, key: str) -> Any:
        left = self.running[key]
        state = SimpleNamespace(request_index=0, detokenizer=SimpleNamespace(num_output_tokens=lambda: STEPS - left))
        return _SampleNames(key, state)


class _SampleNames(list[str]):
    """The names of a request's samples, and the state of the only one."""

    def __init__(self, key: str, state: Any) -> None:
        super().__init__([key])
        self.request_index, self.detokenizer = state.request_index, state.detokenizer


class FakeVllm:
    """Record the calls of vLLM's engine."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100, hf_text_config=None, hf_config=None)
        self.engine_core = SimpleNamespace(shutdown=lambda: None, engine_core=SimpleNamespace())
        self.resets: list[dict[str, Any]] = []
        self.running: dict[str, int] = {}
        self.steps = 0
        self.output_processor = FakeProcessor(self.running)

    def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        self.calls.append(method)
        report = {"version": 1, "streams": {"0 to e0/0": "f"}, "bytes": 4, "buckets": 1, "checked": 0, "seconds": {}}
        return [[0, "host"] if method == "megarl_start" else [report, [], []]]

    def sleep(self, level: int, mode: str = "abort") -> None:
        self.calls.append(("sleep", level) if mode == "abort" else ("sleep", level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    def reset_prefix_cache(self, **options: Any) -> bool:
        self.resets.append(options)
        return True

    def add_request(self, key: str, *_: Any, **__: Any) -> None:
        self.running[key] = STEPS

    def step(self) -> list[Any]:
        self.steps += 1
        time.sleep(0.001)
        for key in self.running:
            self.running[key] -= 1
        done = [key for key, left in self.running.items() if left == 0]
        for key in done:
            del self.running[key]
        sample = SimpleNamespace(index=0, token_ids=[1], logprobs=None, finish_reason="stop", routed_experts=None)
        return [
            SimpleNamespace(finished=True, request_id=key, outputs=[sample], prompt_logprobs=None, prompt_token_ids=[1])
            for key in done
        ]


REQUEST = GenerationRequest(0, Prompt("p", (1,), "", "x"), Sampling(1, 1), seed=0)


def capabilities(**changes: Any) -> Capabilities:
    has = {
        "version": "0.15.1",
        "device": "cuda",
        "no_updates": None,
        "no_sharded": None,
        "preempting_reset": True,
        "keeps_requests_asleep": True,
        "flat_logprobs": True,
        "adapters": True,
        "routed_experts": False,
    }
    return Capabilities(**{**has, **changes})


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm()
    for name, content in {
        "vllm": {},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": lambda **_: None},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": {"LLMEngine": SimpleNamespace(from_engine_args=lambda _: fake)},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("megarl.engines.vllm.engine.build_engine_args", lambda spec, device: {})
    return fake


def engine(
    monkeypatch: pytest.MonkeyPatch, *, load_weights: bool = True, on: str | None = None, **changes: Any
) -> VllmEngine:
    monkeypatch.setattr("megarl.engines.vllm.compat.capabilities", lambda: capabilities(**changes))
    return VllmEngine(EngineSpec("e0", "model", "float32", 64, sleep_mode=True, load_weights=load_weights, device=on))


def test_weights_wake_before_the_cache(monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm) -> None:
    sleeper = engine(monkeypatch)
    assert sleeper.start()["can_sleep"]
    sleeper.sleep()
    with pytest.raises(EngineRefused, match="no memory for weights while they sleep"):
        sleeper.update_weights(1)
    with pytest.raises(EngineRefused, match=r"'e0' has \['weights', 'kv_cache'\] asleep"):
        sleeper.wake(("weight",))
    sleeper.wake(("weights",))
    sleeper.update_weights(1)
    with pytest.raises(EngineRefused, match=r"sleeps \(kv_cache\)"):
        sleeper.generate([REQUEST], print)
    with pytest.raises(EngineRefused, match=r"'e0' has \['kv_cache'\] asleep"):
        sleeper.wake(("weights",))
    sleeper.wake(("kv_cache",))
    # With asynchronous scheduling, a step may be in flight: the device ends it before its memory is released.
    asleep = ["megarl_synchronize", ("sleep", 2)]
    assert vllm.calls[1:] == [*asleep, ("wake_up", ["weights"]), "megarl_update", ("wake_up", ["kv_cache"])]

    sleeper.sleep()
    sleeper.wake()
    with pytest.raises(EngineRefused, match="dropped its weights when it went to sleep"):
        sleeper.generate([REQUEST], print)
    sleeper.shutdown()


def test_base_weights_stay_on_the_host_if_only_adapters_are_updated(
    monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm, tmp_path: Path
) -> None:
    """If only adapters are updated, sleep keeps the weights after the first update."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("megarl.engines.vllm.adapters.request", lambda: "adapter")
    monkeypatch.setattr("megarl.engines.vllm.compat.capabilities", capabilities)
    adapters = AdapterSpec(rank=8, targets=("q_proj",))
    spec = EngineSpec("e0", str(tmp_path), "float32", 64, sleep_mode=True, load_weights=False, adapters=adapters)
    sleeper = VllmEngine(spec)
    assert sleeper.start()["merged_because"] is None
    sleeper.sleep()
    vllm.collective_rpc = lambda method, args=(): [None]
    session = {
        "host": "", "port": 0, "prefix": "", "senders": (), "receivers": (), "sharded": False, "transport": "auto",
        "bucket_bytes": 1, "timeout": 1, "heartbeat_timeout": 8, "secret": "",
    }  # fmt: skip
    for alpha, level in ((16.0, 1), (None, 2)):
        sleeper.wake()
        assert sleeper.connect_weight_sync(Session(**session, adapter_alpha=alpha)) is None
        sleeper.sleep()
        assert vllm.calls[-1] == ("sleep", level)
    sleeper.shutdown()


def test_a_drafts_weights_stay_on_the_host(monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm) -> None:
    """No update brings them back."""
    monkeypatch.setattr("megarl.engines.vllm.compat.capabilities", capabilities)
    vllm.engine_core.engine_core = SimpleNamespace(scheduler=SimpleNamespace())
    for method, level in (("mtp", 1), ("ngram", 2)):
        arguments = {"speculative_config": {"method": method, "num_speculative_tokens": 1}}
        sleeper = VllmEngine(EngineSpec("e0", "model", "float32", 64, sleep_mode=True, engine_args=arguments))
        sleeper.start()
        sleeper.sleep()
        assert vllm.calls[-1] == ("sleep", level)
        sleeper.shutdown()


@pytest.mark.parametrize(
    ("no_sharded", "quantization", "words"),
    [
        ("materialize_layer is missing", None, "layer is missing"),
        (None, "fp8", "its checkpoint is quantized"),
        (None, None, None),
    ],
)
def test_an_engine_returns_why_it_refuses_sharded_updates(
    monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm, no_sharded: str | None, quantization: str | None, words: str | None
) -> None:
    """The engine stays alive, since the full route can replace the sharded one. A worker's reason is returned."""
    vllm.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=quantization), parallel_config=SimpleNamespace()
    )
    vllm.collective_rpc = lambda method, args=(): [
        ["e/0", "host"] if method == "megarl_start" else "lm_head is odd",
    ]
    session = Session(
        host="", port=0, prefix="", secret="", receivers=(), bucket_bytes=1, timeout=1, senders=(), transport="auto",
        check_every=0, heartbeat_timeout=8, sharded=True,
    )  # fmt: skip
    backend = engine(monkeypatch, no_sharded=no_sharded)
    backend.start()
    reason = backend.connect_weight_sync(session)
    assert reason is not None and (words or "lm_head is odd") in reason
    backend.shutdown()


def test_another_device_than_the_recipes_is_refused(monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm) -> None:
    """With `cluster.device: cpu` and vLLM for GPUs, engines ran on devices that no process had claimed."""
    backend = engine(monkeypatch, on="cpu")
    with pytest.raises(RuntimeError, match=r"runs on cuda here.* on cpu: set cluster\.device=cuda, or install"):
        backend.start()
    assert vllm.calls == []
    engine(monkeypatch, on="cuda").start()


def test_weight_updates_are_refused_without_layerwise_reload(monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm) -> None:
    reason = support_of("0.15.1").no_updates
    waiting = engine(monkeypatch, load_weights=False, no_updates=reason)
    with pytest.raises(RuntimeError, match=r"vLLM 0\.15\.1 has no layerwise reload: .*from vLLM 0\.16\.0 on"):
        waiting.start()
    with pytest.raises(EngineDead, match="has no layerwise reload"):
        waiting.update_weights(1)
    assert vllm.calls == [], "it was refused before anything was loaded"

    fixed = engine(monkeypatch, no_updates=reason)
    fixed.start()
    with pytest.raises(EngineRefused, match="has no layerwise reload"):
        fixed.connect_weight_sync(None)
    assert "megarl_connect" not in vllm.calls
    fixed.shutdown()


def test_groups_and_embeddings_of_an_earlier_engine_are_cleared(monkeypatch):
    from megarl.engines.vllm.compat import forget_earlier_engine

    done: list[str] = []
    groups = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        destroy_model_parallel=lambda: done.append("model parallel"),
        destroy_distributed_environment=lambda: done.append("distributed"),
    )
    embeddings = SimpleNamespace(_ROPE_DICT={"sizes": "an embedding without memory"})
    monkeypatch.delitem(sys.modules, "vllm.distributed.parallel_state", raising=False)
    forget_earlier_engine()  # the first engine of a process
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", groups)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.rotary_embedding", embeddings)
    forget_earlier_engine()
    assert done == ["model parallel", "distributed"] and embeddings._ROPE_DICT == {}


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def with_sampling_params(monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm) -> None:
    kinds = SimpleNamespace(FINAL_ONLY="final")
    for name, content in (
        ("vllm", {"SamplingParams": SimpleNamespace}),
        ("vllm.sampling_params", {"RequestOutputKind": kinds}),
    ):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def test_requests_wait_while_an_engine_sleeps_and_continue_with_new_weights(
    monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm, with_sampling_params: None
) -> None:
    """Colocated engines with `rollout.max_staleness`: running requests are preempted, new ones are queued."""
    monkeypatch.setattr("megarl.engines.vllm.compat.capabilities", lambda: capabilities())
    spec = EngineSpec("e0", "model", "float32", 64, sleep_mode=True, at_update="refresh")
    sleeper = VllmEngine(spec)
    description = sleeper.start()
    assert description["can_update_in_flight"] and not description["ends_requests_asleep"]
    sleeper.sleep()
    with pytest.raises(EngineRefused, match="sleeps"):  # before the first weights of the trainers
        sleeper.generate([REQUEST], print)
    sleeper.wake()
    sleeper.update_weights(0)
    finished: list[Any] = []
    first = threading.Thread(target=sleeper.generate, args=([REQUEST], lambda *result: finished.append(result)))
    gate = vllm.step

    def slow() -> list[Any]:
        time.sleep(0.2)
        return gate()

    monkeypatch.setattr(vllm, "step", slow)
    first.start()
    wait_for(lambda: vllm.running.get("0-0") == STEPS - 1)
    vllm.resets.clear()
    sleeper.sleep()
    assert vllm.calls[-1] == ("sleep", 2, "keep") and vllm.resets == [{"reset_running_requests": True}]
    steps = vllm.steps
    second = threading.Thread(target=sleeper.generate, args=([REQUEST], lambda *result: finished.append(result)))
    second.start()
    wait_for(lambda: len(vllm.running) == 2)
    time.sleep(0.05)
    assert vllm.steps == steps and not finished, "an engine that sleeps makes no step"
    sleeper.wake(("weights",))
    sleeper.update_weights(1)
    assert vllm.steps == steps
    sleeper.wake(("kv_cache",))
    first.join(10)
    second.join(10)
    versions = sorted([span.version for span in completions[0].spans] for _, completions in finished)
    assert versions == [[0, 1], [1]]
    sleeper.shutdown()


def test_a_vllm_that_ends_requests_asleep_is_described(monkeypatch: pytest.MonkeyPatch, vllm: FakeVllm) -> None:
    old = engine(monkeypatch, keeps_requests_asleep=False)
    description = old.start()
    assert description["can_update_in_flight"] and description["ends_requests_asleep"]
    old.shutdown()
