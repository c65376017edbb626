"""Real engines with the experts of one model spread over them: samples, updates and deaths are a group's."""

import dataclasses
import os
import signal
import time

import numpy as np
import pytest

from megarl.engines.base import EngineDead
from megarl.types import Sampling
from megarl.weight_sync.full.sender import FullSender
from tests.support.engine_process import (
    PATIENCE,
    EngineProcess,
    assert_exact,
    build_model,
    change,
    load_model,
    make_requests,
    reference,
    spec,
    update_all,
)
from tests.support.span_gaps import EXACT, span_gaps, with_kept_cache

pytestmark = [pytest.mark.stack, pytest.mark.slow]


class EngineGroup:
    def __init__(self, path, size=2, **changes):
        self.engines = [EngineProcess() for _ in range(size)]
        for engine in self.engines:
            engine.replace("megarl.engines.vllm.engine", "build_engine_args", "with_digests")
        first = self.engines[0].open_rendezvous("127.0.0.1")
        changes = {"data_parallel": size, "expert_parallel": True, **changes}
        starting = [
            engine.begin(
                "start", spec(path, name=f"e{rank}", **changes), dataclasses.replace(first, rank=rank, size=size)
            )
            for rank, engine in enumerate(self.engines)
        ]
        try:
            self.infos = [start.result(PATIENCE) for start in starting]
        except BaseException:
            self.kill()  # else Python waits for them at its end
            raise

    def generate(self, *requests):
        """One list for each engine; completions by engine."""
        calls = [engine.begin("generate", load) for engine, load in zip(self.engines, requests, strict=True) if load]
        return [call.result(PATIENCE)[1] for call in calls]

    def full_sender(self):
        receivers = [tuple(receiver) for info in self.infos for receiver in info["receivers"]]
        sender = FullSender.open("127.0.0.1", receivers, bucket_bytes=1 << 18, timeout=120.0, heartbeat_timeout=8.0)
        for engine in self.engines:
            engine.connect_weight_sync(sender.session)
        return sender

    def kill(self):
        for engine in self.engines:
            engine.process.kill()

    def close(self):
        for ending in [engine.begin("shutdown") for engine in self.engines]:
            ending.result(30)
        for engine in self.engines:
            engine.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start():
    groups = []

    def make(*arguments, **changes):
        groups.append(EngineGroup(*arguments, **changes))
        return groups[-1]

    yield make
    for group in groups:
        group.kill()


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_samples_equal_the_models_under_unequal_loads_and_after_updates(start, tmp_path, kind):
    """Detects missing experts, experts of another version, and a step that only one engine takes."""
    path = build_model(tmp_path / "model", kind)
    group, model = start(path, load_weights=False), load_model(path)
    assert [name for info in group.infos for name, _ in info["receivers"]] == ["e0/0", "e1/0"]
    sender = group.full_sender()
    many, few = make_requests(6), make_requests(2, max_tokens=40, seed=1)
    for version in (1, 2, 3):
        update_all(group.engines, sender, change(model, version, tmp_path), version)
        for loads in ((many, few), (few, []), ([], many)):
            for requests, completions in zip([load for load in loads if load], group.generate(*loads), strict=True):
                assert_exact(model, requests, completions)
        (answers,) = group.generate([], make_requests(3, n=1, temperature=0.0))
        for number, (answer,) in answers.items():
            prompt = make_requests(3)[number].prompt.tokens
            assert reference(model, prompt, answer.tokens.tolist()).argmax(-1).tolist() == answer.tokens.tolist()
    sender.close()
    group.close()


def test_ranks_of_several_engines_share_the_experts_of_a_layer(start, path, tmp_path):
    """Two engines of two ranks: each rank of the four has one expert, and computes a part of its engine's tokens."""
    group, model = start(path, tensor_parallel=2, load_weights=False), load_model(path)
    assert [name for info in group.infos for name, _ in info["receivers"]] == ["e0/0", "e0/1", "e1/0", "e1/1"]
    sender = group.full_sender()
    many, few = make_requests(4), make_requests(1, n=1, max_tokens=30, seed=1)
    for version in (1, 2):
        update_all(group.engines, sender, change(model, version, tmp_path), version)
        for requests, completions in zip((many, few), group.generate(many, few), strict=True):
            assert_exact(model, requests, completions)
    sender.close()
    group.close()


@pytest.mark.parametrize("rule", ["refresh", "keep"])
def test_running_requests_of_a_group_take_new_weights(start, path, tmp_path, rule):
    """Each engine has half of the experts: a step with old experts on one of them would show in the log-probs."""
    group, models = start(path, at_update=rule), {0: load_model(path)}
    assert all(info["can_update_in_flight"] for info in group.infos)
    sender = group.full_sender()
    many, few = make_requests(4, max_tokens=100), make_requests(2, max_tokens=100, seed=1)
    short = dataclasses.replace(make_requests(5)[4], sampling=Sampling(1, 30))  # the update comes when it has finished
    running = [
        engine.begin("generate", load) for engine, load in zip(group.engines, ([*many, short], few), strict=True)
    ]
    while short.group not in group.engines[0].finished():
        time.sleep(0.001)
    for engine in group.engines:
        engine.pause()
    models[1] = load_model(path)
    update_all(group.engines, sender, change(models[1], 1, tmp_path), 1)
    assert not any(call.done() for call in running)
    for engine in group.engines:
        engine.resume()
    for requests, call in zip((many, few), running, strict=True):
        _, completions = call.result(PATIENCE)
        for request in requests:
            for sample in completions[request.group]:
                assert [span.version for span in sample.spans] == [0, 1]
                (_, first, _), (_, second, other) = span_gaps(models, request, sample)
                assert first.max() < EXACT and other[0] > EXACT
                if rule == "refresh":
                    assert second.max() < EXACT
                else:
                    assert np.abs(with_kept_cache(models, request, sample) - sample.log_probs).max() < EXACT
                    assert second.max() > EXACT, "the KV cache was recomputed"
    requests = make_requests(3, seed=9)
    for completions in group.generate(requests, requests):
        assert_exact(models[1], requests, completions)
    sender.close()
    group.close()


def test_an_update_begins_when_all_engines_have_joined(start, path, tmp_path):
    """An update of one member while another steps would hang both: it begins when all engines have joined."""
    group, model = start(path), load_model(path)
    sender = group.full_sender()
    first, second = group.engines
    running = first.begin("generate", make_requests(2, max_tokens=100))
    early = second.begin("update_weights", 1)
    weights = change(model, 1, tmp_path)
    assert_exact(load_model(path), make_requests(1), second.generate(make_requests(1))[1])  # steps continue
    assert not early.done()
    for engine in (first, second):
        engine.pause()
    for engine in (first, second):
        engine.resume()
    late = first.begin("update_weights", 1)
    sender.send(1, weights.items)
    reports = [update.result(PATIENCE) for update in (early, late)]
    assert list(reports[0].streams.values()) == list(reports[1].streams.values())
    running.result(PATIENCE)
    requests = make_requests(3)
    assert_exact(model, requests, second.generate(requests)[1])
    sender.close()
    group.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_ends_the_group(start, path, victim):
    """Otherwise the other engine would wait in a collective for half an hour. The engine with the store may die too."""
    group = start(path)
    survivor = group.engines[1 - victim]
    running = survivor.begin("generate", make_requests(2, max_tokens=100))
    watching = survivor.begin("watch")
    time.sleep(0.2)
    began = time.monotonic()
    os.kill(group.engines[victim].process.pid, signal.SIGKILL)
    for call in (running, watching):
        with pytest.raises(EngineDead, match=f"'e{1 - victim}'"):
            call.result(20)
    assert 4 < time.monotonic() - began < 12  # by then the death is detected, and the killed engine is reported first


def test_an_unknown_name_is_refused_with_experts_spread_over_engines(start, path, tmp_path):
    group, model = start(path), load_model(path)
    sender = group.full_sender()
    weights = change(model, 1, tmp_path)
    name = next(name for name in weights if ".experts.3." in name)
    weights["model.layers.0.mlp.experts.3.stray.weight"] = weights[name]
    with pytest.raises(Exception, match=r"1 exported tensors are unknown.*experts\.3\.stray"):
        update_all(group.engines, sender, weights, 1)
    sender.close()


def test_experts_of_one_engine_are_spread_over_its_ranks(start, path, tmp_path):
    engine, model = EngineProcess(), load_model(path)
    engine.start(spec(path, tensor_parallel=2, expert_parallel=True))
    requests = make_requests(3)
    assert_exact(model, requests, engine.generate(requests)[1])
    engine.shutdown()
    engine.close()
