"""Every layout computes what one process computes, and what transformers computes."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from tests import megatron_critic
from tests.megatron_layouts import (
    OPTIONS,
    PARITY,
    RESHARD_FOUR,
    RESHARD_MORE_FOUR,
    RESHARD_MORE_ONE,
    RESHARD_MORE_TWO,
    RESHARD_ONE,
    RESHARD_TWO,
    RESUME,
)
from tests.megatron_models import LENGTHS, MODELS, write_model

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]  # the first test waits for all launches

ROOT = Path(__file__).parent.parent


def cases(*lists: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """Run a test for each case; the slow ones with --all alone."""
    marked = [
        pytest.param(one, id=one["name"], marks=[pytest.mark.slow] if one.get("slow") else [])
        for some in lists
        for one in some
    ]
    return pytest.mark.parametrize("case", marked)


@pytest.mark.slow
def test_checkpoints_move_between_more_layouts(tmp_path: Path) -> None:
    for model in ("qwen3_moe", "qwen2_tied"):
        write_model(model, tmp_path / "models")
    for processes, cases in ((2, RESHARD_MORE_TWO), (1, RESHARD_MORE_ONE), (4, RESHARD_MORE_FOUR)):
        launch(processes, cases, tmp_path)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of models/ and of what the workers wrote. One launch a number of processes."""
    directory = tmp_path_factory.mktemp("megatron")
    for model in MODELS:
        write_model(model, directory / "models")
    wanted = selected(request, [*PARITY, *OPTIONS])
    others = {  # two processes first: others read their checkpoints
        2: [*RESUME, *RESHARD_TWO, *megatron_critic.TWO],
        1: [*RESHARD_ONE, *megatron_critic.ONE],
        4: RESHARD_FOUR,
    }
    for processes, more in others.items():
        launch(processes, [*(one for one in wanted if one["processes"] == processes), *more], directory)
    return directory


def selected(request: pytest.FixtureRequest, some: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `some` that the selected tests are about, and those that they are compared with: `-k moonlight-TP2`
    runs two."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = [value for item in items for value in item.callspec.params.values() if isinstance(value, dict)]
    names = {one[key] for one in asked for key in ("name", "reference") if one.get(key)}
    return [one for one in some if one["name"] in names]


def launch(processes: int, cases: list[dict[str, Any]], directory: Path) -> None:
    """Run `cases`, one after the other, in `processes` worker processes."""
    file = directory / f"cases-{processes}.json"
    resolved = [{**case, "model": str(directory / "models" / case["model"])} for case in cases]
    for case in resolved:  # what is left over for data parallel is no setting; the name says it
        case["megatron"] = {k: v for k, v in case.get("megatron", {}).items() if k != "data_parallel_size_is"}
    file.write_text(json.dumps(resolved))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs = [directory / f"worker-{processes}-{rank}.log" for rank in range(processes)]
    workers = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.megatron_worker", str(file), str(directory)],
                    cwd=ROOT,
                    env={**environment, "RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [worker.wait(timeout=900) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert not any(codes), "\n".join(log.read_text()[-4000:] for log in logs)


def log_probs_of(results: Path, name: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(log-probs, entropy) of each sequence, from all data-parallel ranks."""
    merged: dict[int, Any] = {}
    for file in results.glob(f"{name}.log_probs.*.pt"):
        merged.update(torch.load(file, weights_only=True))
    return merged


def checkpoint_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            tensors.update({key: reader.get_tensor(key) for key in reader.keys()})  # noqa: SIM118
    return tensors


@cases(PARITY[:1])
def test_trainers_on_a_cpu_warn_of_nothing(results: Path, case: dict[str, Any]) -> None:
    """What is to be expected there is left out: a user could act on none of it."""
    for log in results.glob("worker-*.log"):
        assert "Warning" not in log.read_text(), log.read_text()


@functools.lru_cache
def of_transformers(model: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(log-probs, entropy) of each sequence, [length] each, computed alone and without Megatron."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in LENGTHS:
        tokens = torch.randint(0, 250, (length,), generator=generator)
        with torch.no_grad():
            logits = reference(tokens[None]).logits[0].log_softmax(-1)[:-1]
        log_probs = logits.gather(1, tokens[1:, None]).squeeze(1)
        entropy = -(logits.exp() * logits).sum(-1)
        # The first token is predicted by nothing.
        rows.append((torch.cat([torch.zeros(1), log_probs]), torch.cat([torch.zeros(1), entropy])))
    return rows


@cases(PARITY, OPTIONS)
def test_log_probs_are_those_of_transformers(results: Path, case: dict[str, Any]) -> None:
    rows = log_probs_of(results, case["name"])
    assert sorted(rows) == list(range(len(LENGTHS)))
    for number, expected in enumerate(of_transformers(results / "models" / case["model"])):
        for value, wanted in zip(rows[number], expected, strict=True):
            torch.testing.assert_close(value, wanted, atol=2e-5, rtol=0)


@cases(PARITY, OPTIONS)
def test_export_is_the_original_bit_for_bit(results: Path, case: dict[str, Any]) -> None:
    """Loaded, exported and written: every tensor that the original has, untrained ones too, and no other."""
    original = checkpoint_tensors(results / "models" / case["model"])
    exported = checkpoint_tensors(results / f"{case['name']}.hf")
    assert exported.keys() == original.keys()
    for name, weight in original.items():
        assert exported[name].dtype == weight.dtype and torch.equal(exported[name], weight), name
    if case["model"] == "deepseek_v3":
        assert "model.layers.4.eh_proj.weight" in original, "this test is to prove that MTP layers survive"


@cases(PARITY, OPTIONS)
def test_training_does_not_depend_on_the_layout(results: Path, case: dict[str, Any]) -> None:
    one, got = (torch.load(results / f"{name}.pt", weights_only=True) for name in (case["reference"], case["name"]))
    for metrics, expected in zip(got["metrics"], one["metrics"], strict=True):
        assert metrics["tokens"] == sum(LENGTHS)
        assert metrics == pytest.approx(expected, rel=2e-6), "a loss or gradient norm depends on the layout"
    before = checkpoint_tensors(results / "models" / case["model"])
    assert got["after"].keys() == one["after"].keys()
    for name, weight in one["after"].items():
        torch.testing.assert_close(got["after"][name], weight, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert name.endswith("e_score_correction_bias") or not torch.equal(weight, before[name]), name


@cases(RESUME)
def test_saved_hf_directory_is_what_was_exported(results: Path, case: dict[str, Any]) -> None:
    """The resumed run's equality to the last bit is asserted in the worker; here, the directory it wrote."""
    saved = checkpoint_tensors(results / f"{case['name']}.hf")
    weights = torch.load(results / f"{case['name']}.weights.pt", weights_only=True)
    original = checkpoint_tensors(results / "models" / case["model"])
    assert saved.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    assert (results / f"{case['name']}.hf" / "config.json").read_text() == (
        results / "models" / case["model"] / "config.json"
    ).read_text()


@pytest.mark.parametrize("case", megatron_critic.ONE, ids=lambda case: case["name"])
def test_values_match_transformers(results: Path, case: dict[str, Any]) -> None:
    megatron_critic.check_against_transformers(results, case["name"])


@pytest.mark.parametrize("case", [*megatron_critic.ONE, *megatron_critic.TWO], ids=lambda case: case["name"])
def test_layout_changes_nothing_of_the_critic(results: Path, case: dict[str, Any]) -> None:
    megatron_critic.check_against_one_process(results, case)
