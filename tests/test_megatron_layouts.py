"""Every layout computes what one process computes, and what transformers computes."""

from __future__ import annotations

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
from tests.megatron_models import LENGTHS, MODELS, write_model

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parent.parent


def layout(model: str, per_micro: int = 3, **megatron: Any) -> dict[str, Any]:
    name = "-".join([model, *(f"{key}={value}" for key, value in megatron.items())])
    return {"name": name, "model": model, "per_micro": per_micro, "megatron": megatron}


def balanced(**megatron: Any) -> dict[str, Any]:
    """With a load-balancing loss, which is the same for the same micro batches: pairs of sequences."""
    case = layout("qwen3_moe", per_micro=2, moe_aux_loss_coef=0.5, **megatron)
    return {**case, "reference": "qwen3_moe-moe_aux_loss_coef=0.5"}


ONE = [*(layout(model, per_micro=2) for model in MODELS), balanced()]
TWO = [
    layout("qwen3_moe", data_parallel_size_is=2),
    layout("qwen3_moe", expert_parallel=2),
    layout("qwen3_moe", tensor_parallel=2),
    layout("qwen3_moe", tensor_parallel=2, distributed_optimizer=False, recompute="full"),
    layout("qwen3_moe", tensor_parallel=2, expert_parallel=2, recompute="selective"),
    layout("qwen3_moe", tensor_parallel=2, expert_tensor_parallel=2),
    layout("qwen3_moe", per_micro=2, pipeline_parallel=2, virtual_pipeline=2),
    layout("qwen3_moe", context_parallel=2),
    balanced(expert_parallel=2),
    balanced(tensor_parallel=2),
    balanced(pipeline_parallel=2),
    layout("qwen2_tied", tensor_parallel=2),
    layout("qwen2_tied", pipeline_parallel=2, first_stage_layers=1),
    layout("qwen3", tensor_parallel=2, sequence_parallel=False),
    layout("deepseek_v3", tensor_parallel=2, expert_parallel=2),
    layout("deepseek_v3", context_parallel=2),
]
FOUR = [
    layout("qwen3_moe", per_micro=1, tensor_parallel=2, expert_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
    layout("qwen3_moe", tensor_parallel=2, context_parallel=2, expert_parallel=4),
    layout("deepseek_v3", pipeline_parallel=2, expert_parallel=2),
]
RESUME = [
    {"name": "resume", "kind": "resume", "model": "qwen3_moe", "megatron": {"expert_parallel": 2}},
    {"name": "resume-bf16", "kind": "resume", "model": "qwen2_tied", "dtype": "bfloat16"},
]


def reshard(name: str, source: str, **megatron: Any) -> dict[str, Any]:
    """Read the checkpoint that the case `source` wrote, in another layout, and write it again; see
    `tests.megatron_checkpoints`. `resume` wrote the first one."""
    bf16 = source.endswith("bf16")
    model = {"model": "qwen2_tied", "dtype": "bfloat16"} if bf16 else {"model": "qwen3_moe"}
    case = {**model, "name": name + "-bf16" * bf16, "kind": "reshard", "from": source, "root": "resume"}
    return {**case, "per_micro": 2, "megatron": megatron}


# A chain: each reads what the one before has written, so every layout is both written and read.
RESHARD_TWO = [
    reshard("tp-ep", "resume", tensor_parallel=2, expert_parallel=2, distributed_optimizer=False),
    reshard("pp-vpp", "tp-ep", pipeline_parallel=2, virtual_pipeline=2),
    reshard("tp-etp", "pp-vpp", tensor_parallel=2, expert_tensor_parallel=2),
    reshard("tp", "resume-bf16", tensor_parallel=2, distributed_optimizer=False),
    {"name": "other", "kind": "other_model", "from": "resume", "model": "qwen3"},
]
RESHARD_ONE = [reshard("one", "tp-etp"), reshard("one", "tp-bf16")]
RESHARD_FOUR = [
    {
        **reshard("four", "one", tensor_parallel=2, expert_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
        "per_micro": 1,
    },
]
SLOW_TWO = [
    RESUME[0],
    RESUME[1],
    reshard("cp", "resume", context_parallel=2),
    reshard("dp", "cp"),
    reshard("tp", "dp", tensor_parallel=2),
    reshard("pp-plain", "tp", pipeline_parallel=2, distributed_optimizer=False),
    reshard("pp", "resume-bf16", pipeline_parallel=2, first_stage_layers=1),
]
SLOW_ONE = [
    reshard("one-plain", "pp-plain", distributed_optimizer=False),
    {**reshard("one", "one-plain"), "same_ranks": True},
    reshard("one", "pp-bf16"),
]
SLOW_FOUR = [
    reshard("tp-cp-ep", "one", tensor_parallel=2, context_parallel=2, expert_parallel=4),
    reshard("tp-dp-ep", "tp-cp-ep", tensor_parallel=2, expert_parallel=2),
    reshard("pp-ep-plain", "tp-dp-ep", pipeline_parallel=2, expert_parallel=2, distributed_optimizer=False),
    reshard("tp-pp", "one-bf16", tensor_parallel=2, pipeline_parallel=2),
    reshard("dp-plain", "tp-pp-bf16", distributed_optimizer=False),
]


@pytest.mark.slow
def test_checkpoints_move_between_more_layouts(tmp_path: Path) -> None:
    for model in ("qwen3_moe", "qwen2_tied"):
        write_model(model, tmp_path / "models")
    for processes, cases in ((2, SLOW_TWO), (1, SLOW_ONE), (4, SLOW_FOUR)):
        launch(processes, cases, tmp_path)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of models/ and of what the workers of all cases wrote."""
    directory = tmp_path_factory.mktemp("megatron")
    for model in MODELS:
        write_model(model, directory / "models")
    launch(2, [*TWO, *RESUME, *RESHARD_TWO, *megatron_critic.TWO], directory)  # first: others read its checkpoints
    launch(1, [*ONE, *RESHARD_ONE, *megatron_critic.ONE], directory)
    launch(4, [*FOUR, *RESHARD_FOUR], directory)
    return directory


def launch(processes: int, cases: list[dict[str, Any]], directory: Path) -> None:
    """Run `cases` in `processes` worker processes."""
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
        codes = [worker.wait(timeout=400) for worker in workers]
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


def test_trainers_on_a_cpu_warn_of_nothing(results: Path) -> None:
    """What is to be expected there is left out: a user could act on none of it."""
    for log in results.glob("worker-*.log"):
        assert "Warning" not in log.read_text(), log.read_text()


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_match_transformers(results: Path, model: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        results / "models" / model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 250, (length,), generator=generator) for length in LENGTHS]
    rows = log_probs_of(results, model)
    assert sorted(rows) == list(range(len(LENGTHS)))
    for number, sequence in enumerate(tokens):
        with torch.no_grad():
            logits = reference(sequence[None]).logits[0].log_softmax(-1)
        expected = logits[:-1].gather(1, sequence[1:, None]).squeeze(1)
        entropy = -(logits.exp() * logits).sum(-1)[:-1]
        log_probs, entropies = rows[number]
        assert log_probs[0] == 0 and entropies[0] == 0, "the first token is predicted by nothing"
        torch.testing.assert_close(log_probs[1:], expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(entropies[1:], entropy, atol=2e-5, rtol=0)


@pytest.mark.parametrize("case", [*ONE, *TWO, *FOUR], ids=lambda case: case["name"])
def test_layout_changes_nothing(results: Path, case: dict[str, Any]) -> None:
    reference = case.get("reference", case["model"])
    one, got = (torch.load(results / f"{name}.pt", weights_only=True) for name in (reference, case["name"]))

    original = checkpoint_tensors(results / "models" / case["model"])
    exported = got["before"]
    assert {k: v for k, v in original.items() if k not in exported} == {}
    assert all(torch.equal(exported[name], weight) for name, weight in original.items()), "round trip is not exact"

    for number, (log_probs, entropy) in log_probs_of(results, case["name"]).items():
        for value, expected in zip((log_probs, entropy), log_probs_of(results, reference)[number], strict=True):
            torch.testing.assert_close(value, expected, atol=5e-6, rtol=0)

    for metrics, expected in zip(got["metrics"], one["metrics"], strict=True):
        assert metrics["tokens"] == sum(LENGTHS)
        assert metrics == pytest.approx(expected, rel=2e-6), "a loss or gradient norm depends on the layout"
    for name, weight in one["after"].items():
        torch.testing.assert_close(got["after"][name], weight, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert name.endswith("e_score_correction_bias") or not torch.equal(weight, one["before"][name]), name


def test_balancing_loss_changes_the_gradient(results: Path) -> None:
    """Without this, the cases that compare it over layouts could pass by leaving it out."""
    norms = [
        torch.load(results / f"{name}.pt", weights_only=True)["metrics"][0]["actor/grad_norm"]
        for name in ("qwen3_moe", "qwen3_moe-moe_aux_loss_coef=0.5")
    ]
    assert abs(norms[0] - norms[1]) > 1e-4 * norms[0], norms


@pytest.mark.parametrize("case", RESUME, ids=lambda case: case["name"])
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
