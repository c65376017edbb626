"""Adapters on the real stack, as a user runs them: SFT, RL from the merged model, resume and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.commands.data.tiny_model import make_tiny_model
from megarl.hf.linears import adapter_sizes
from megarl.observe.metrics import without_times
from tests.support.stack import metrics, run
from tests.support.training_runs import train

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
RL = [
    "lora.rank=4",
    "actor.mini_batches=1",
    "actor.optimizer.lr=1e-2",
    "algorithm.kl_coef=0.01",
    "megatron.tensor_parallel=2",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "train.steps=3",
]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def adapters(directory: Path) -> dict[str, torch.Tensor]:
    """Adapter matrices by Hugging Face module and matrix: "model.layers.0.self_attn.q_proj.lora_A"."""
    named = load_file(directory / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model.").removesuffix(".weight"): matrix for name, matrix in named.items()}


def learned(start: Path, adapter: Path, merged: Path) -> set[str]:
    """Assert that `merged` is the starting model plus the adapters' product, and nothing else.

    Returns the names of the changed linears ("q_proj"). An adapter of an expert that received no token changes nothing.
    """
    matrices, got, changed = adapters(adapter), weights(merged), set()
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(start)
    for name, weight in weights(start).items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" not in matrices:
            assert torch.equal(got[name], weight), f"{name} has no adapter, and changed"
            continue
        delta = matrices.pop(f"{module}.lora_B") @ matrices.pop(f"{module}.lora_A") * config["lora_alpha"] / config["r"]
        assert delta.any() or ".experts." in name, f"{name}: its adapter has learned nothing"
        torch.testing.assert_close(got[name], weight + delta, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        changed |= {module.rsplit(".", 1)[-1]} if delta.any() else set()
    assert not matrices, "adapters of linears that the model does not have"
    return changed


@pytest.fixture(scope="module")
def sft(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of SFT with adapters on attention only."""
    runs = tmp_path_factory.mktemp("sft")
    done = run(
        "train",
        "recipes/quickstart_sft.yaml",
        f"model.path={quickstart_data}/model",
        f"data.train_files=[{quickstart_data}/data/sft.parquet]",
        f"runs_dir={runs}",
        "name=sft",
        "lora.rank=8",
        "lora.alpha=16",
        f"lora.targets=[{','.join(sorted(ATTENTION))}]",
        "actor.optimizer.lr=1e-2",
        "actor.optimizer.warmup_steps=0",
        "train.steps=8",
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return runs / "sft"


@pytest.fixture(scope="module")
def rl(sft: Path, quickstart_data: Path) -> Path:
    """Three steps of RL with adapters on all linears, from the merged SFT model."""
    done = train(quickstart_data, sft.parent, "rl", f"model.path={sft / 'hf'}", *RL, "train.export_at_end=true")
    assert done.returncode == 0, done.stderr + done.stdout
    return sft.parent / "rl"


def test_sft_trains_only_the_adapters(sft: Path, quickstart_data: Path) -> None:
    lines = metrics(sft)
    assert lines[-1]["actor/pg_loss"] < lines[0]["actor/pg_loss"] - 0.5
    assert learned(quickstart_data / "model", sft / "hf_adapter", sft / "hf") == ATTENTION
    assert {module.split(".")[-2] for module in adapters(sft / "hf_adapter")} == ATTENTION


def test_engines_sample_merged_weights(rl: Path) -> None:
    lines = metrics(rl)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout/logprob_gap_max"] < 1e-3 for line in lines), "engines do not sample merged weights"


@pytest.fixture(scope="module")
def dense(quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a dense model, once with adapter-only weight sync and once with merged weights."""
    runs = tmp_path_factory.mktemp("dense")
    make_tiny_model("qwen3", runs / "model", seed=3)
    for way in ("auto", "merged"):
        options = [
            *RL,
            f"model.path={runs / 'model'}",
            "megatron.expert_parallel=1",
            "algorithm.entropy_coef=0.1",
            "actor.optimizer.lr=5e-2",
            f"weight_sync.adapters={way}",
        ]
        done = train(quickstart_data, runs, way, *options)
        assert done.returncode == 0, done.stderr + done.stdout
        (runs / f"{way}.txt").write_text(" ".join(done.stdout.split()))
    return runs


def test_engines_receive_only_adapters(dense: Path) -> None:
    """One notice reports it; later updates send only adapter bytes; the engines' log-probs are the trainers'."""
    assert (dense / "auto.txt").read_text().count("weight_sync.adapters=auto: only adapters are sent; ") == 1
    config = json.loads((dense / "model" / "config.json").read_text())
    of_adapters = 4 * sum(adapter_sizes(config, 4, ["all-linear"]).values())
    apart, merged = metrics(dense / "auto"), metrics(dense / "merged")
    for line, other in zip(apart[:-1], merged, strict=False):  # the last step's weights are not sent
        assert line["weight_sync/version"] == line["step"]
        assert of_adapters <= line["weight_sync/bytes"] < 1.1 * of_adapters < other["weight_sync/bytes"] / 4
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in [*apart, *merged]), "engines sample other weights"
    moved = [abs(line["actor/entropy"] - apart[0]["actor/entropy"]) for line in apart[1:]]
    assert min(moved) > 1e-3, "adapters have changed nothing: whatever engines hold would do"


def test_the_reference_is_the_starting_model(rl: Path) -> None:
    first, second, third = metrics(rl)
    assert abs(first["actor/kl_loss"]) < 1e-9
    assert min(second["actor/kl_loss"], third["actor/kl_loss"]) > 1e-4


def test_rl_trains_only_adapters_of_all_linears(rl: Path, sft: Path) -> None:
    assert learned(sft / "hf", rl / "hf_adapter", rl / "hf") == {*ATTENTION, "gate_proj", "up_proj", "down_proj"}


def test_export_of_a_checkpoint_equals_the_runs_export(rl: Path, tmp_path: Path) -> None:
    """The export reads a checkpoint, which has only the adapters, and the starting model."""
    tensors = {
        key.split("@")[0]
        for file in (rl / "checkpoints" / "step_000003" / "trainer").glob("*.safetensors")
        for key in load_file(file)
    }
    assert tensors and all(".lora." in name for name in tensors)
    done = run("export", str(rl), "--out", str(tmp_path / "out"), torchrun=2)
    assert done.returncode == 0 and "bit for bit" in done.stdout, done.stderr + done.stdout
    assert f"{tmp_path / 'out_adapter'}: the adapters alone, for PEFT" in done.stdout
    for directory, file in (("", "model"), ("_adapter", "adapter_model")):
        mine, other = (
            load_file(Path(f"{path}{directory}") / f"{file}.safetensors") for path in (tmp_path / "out", rl / "hf")
        )
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in other.items())


def test_a_resumed_run_is_bit_identical(rl: Path, sft: Path, quickstart_data: Path, tmp_path: Path) -> None:
    resume = f"train.resume={rl / 'checkpoints' / 'step_000002'}"
    done = train(quickstart_data, tmp_path, "rest", f"model.path={sft / 'hf'}", *RL, resume)
    assert done.returncode == 0, done.stderr + done.stdout
    # The resumed run's first line has the weight sync that it began with.
    (line,), (expected,) = without_times(metrics(tmp_path / "rest")), without_times(metrics(rl)[2:])
    assert {name: line[name] for name in line if not name.startswith("weight_sync/")} == expected


@pytest.mark.parametrize("change", ["lora.alpha=8", "lora.rank=0"])
def test_a_resume_with_other_adapters_is_refused(rl: Path, sft: Path, quickstart_data: Path, change: str) -> None:
    more = [f"model.path={sft / 'hf'}", *RL, "train.steps=4", "train.resume=auto", change]
    done = train(quickstart_data, rl.parent, "rl", *more)
    assert done.returncode == 2 and "was trained with lora.rank=" in done.stderr, done.stderr
