"""Sharded weight sync from every trainer layout of the matrix to every engine layout, bit-identical to full weight sync.

All engines of a model, with different layouts and types, are in one session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megarl.weight_sync.session import compare_reports, merge_reports
from tests.support.engine_process import (
    VOCABULARY,
    EngineProcess,
    assert_same_digests,
    build_model,
    make_requests,
    spec,
)
from tests.support.live_trainers import Trainers
from tests.support.megatron_layouts import PARITY

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(3600)]

PATIENCE = 600  # seconds, for engines or trainers to start
F32, BF16 = "float32", "bfloat16"
ONE: dict[str, Any] = {}
TP2 = {"tensor_parallel": 2}
EP2 = {"tensor_parallel": 2, "expert_parallel": True}
DENSE = [(ONE, F32), (TP2, F32), (ONE, BF16), (TP2, BF16)]
SPARSE = [(ONE, BF16), (TP2, F32), (EP2, F32), (EP2, BF16)]
ENGINES = {"qwen2": DENSE, "qwen2_tied": DENSE, "qwen3": DENSE, "qwen3_moe": SPARSE, "deepseek_v3": SPARSE}
PROCESSES = (1, 2, 4)
AT_A_TIME = 4  # layouts of the same processes: each leaves threads behind that gloo keeps busy


class Engines:
    """Engines of one model in different layouts and types."""

    def __init__(self, stack: contextlib.ExitStack, path: str, kinds: list[tuple[dict[str, Any], str]]) -> None:
        """`stack` ends the processes, also if a later one fails to start."""
        self.path, self.infos = path, list[dict[str, Any]]()
        self.processes: list[EngineProcess] = []
        for number, (layout, dtype) in enumerate(kinds):
            process = EngineProcess()
            stack.callback(process.close)
            self.processes.append(process)
            process.replace("megarl.engines.vllm.engine", "build_engine_args", "with_digests")
            engine_spec = spec(path, name=f"e{number}", load_weights=False, dtype=dtype, **layout)
            self.infos.append(process.begin("start", engine_spec).result(PATIENCE))  # in turn: two cores
        self.all("rpc", "watch_layers")

    def all(self, method: str, *arguments: Any) -> list[Any]:
        begun = [process.begin(method, *arguments) for process in self.processes]
        return [future.result(PATIENCE) for future in begun]

    @property
    def receivers(self) -> list[Any]:
        return [receiver for info in self.infos for receiver in info["receivers"]]


@pytest.fixture(scope="module", params=list(ENGINES))
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    path = build_model(tmp_path_factory.mktemp(request.param) / request.param, request.param, layers=4)
    with contextlib.ExitStack() as stack:
        yield Engines(stack, path, ENGINES[request.param])


@pytest.mark.parametrize("processes", PROCESSES)
def test_bit_equality_over_the_matrix(engines: Engines, processes: int, tmp_path: Path) -> None:
    """Three updates of each layout in one session, with generation between, each checked against the export; then the
    same weights through full weight sync."""
    model = Path(engines.path).name
    layouts = [case["megatron"] for case in PARITY if case["model"] == model and case["processes"] == processes]
    if model == "deepseek_v3":  # mbridge cannot pad its vocabulary
        layouts = [layout for layout in layouts if VOCABULARY % layout.get("tensor_parallel", 1) == 0]
    assert layouts
    for first in range(0, len(layouts), AT_A_TIME):
        some = layouts[first : first + AT_A_TIME]
        trainers = Trainers(tmp_path, engines.path, some[0], processes)
        try:
            for number, layout in enumerate(some, first):
                trainers.call("rebuild", layout, BF16 if number % 3 == 2 else F32)
                check(engines, trainers, layout)
        finally:
            trainers.close()


def check(engines: Engines, trainers: Trainers, layout: dict[str, Any]) -> None:
    options = {"bucket_mb": 1, "timeout": 120.0, "check_every": 1}
    session = trainers.call("open_planned", engines.receivers, options)[0]
    engines.all("connect_weight_sync", session)
    former: list[Any] = []
    # Version 4 repeats version 3's weights. The digests below include layers before vLLM repacks them, when a router's
    # bias, which arrives after the experts on either route, still has the previous update's values.
    for version in (1, 2, 3, 4):
        if version < 4:
            trainers.call("change", version)
        sending: Future[list[Any]] = trainers.begin("send_planned", version)
        received = merge_reports(engines.all("update_weights", version))
        sent = merge_reports(sending.result(PATIENCE))
        compare_reports(sent, received)
        assert received.checked == sent.checked > 0, layout
        digests = engines.all("rpc", "digests")
        if version in (2, 3):
            changed = [left != right for left, right in zip(digests, former, strict=True)]
            assert all(changed), f"{layout}: version {version} changed the weights of these engines only: {changed}"
        former = digests
        engines.all("generate", make_requests(2))
    engines.all("rpc", "forget_names")
    engines.all("connect_weight_sync", trainers.call("open_export", engines.receivers)[0])
    exporting = trainers.begin("send_export", 5)
    reports = engines.all("update_weights", 5)
    compare_reports(exporting.result(PATIENCE)[0], merge_reports(reports))
    for number, (planned, exported) in enumerate(zip(former, engines.all("rpc", "digests"), strict=True)):
        assert_same_digests(planned, exported, f"{layout}: engine {number}")
