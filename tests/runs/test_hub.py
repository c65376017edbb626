"""A run with model and rows on the hub, on the real stack: commits, epochs, chat template, and a run from its adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megarl.data.chat_template import CHATML
from tests.support.fake_hub import FakeHub, environment, folder_files, running_hub
from tests.support.stack import metrics, run

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SETTINGS = [
    "data.prompts_per_step=8",
    "data.max_prompt_length=256",
    "cluster.trainers=1",
    "megatron.expert_parallel=1",
    "lora.rank=4",
    "actor.optimizer.lr=1e-2",
    "actor.optimizer.warmup_steps=0",
    "data.chat_template=chatml",
]


@pytest.fixture(scope="module")
def hub(quickstart_data: Path) -> Iterator[FakeHub]:
    with running_hub() as server:
        server.model("org/tiny").commit(folder_files(quickstart_data / "model"))
        server.dataset("org/words").commit({"sft.parquet": (quickstart_data / "data" / "sft.parquet").read_bytes()})
        yield server


@pytest.fixture(scope="module")
def runs(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the run `first`, and the cache `home`."""
    folder = tmp_path_factory.mktemp("hub")
    train(hub, folder, "first", "train.epochs=0.004", "train.save_at_end=true")
    return folder


def train(hub: FakeHub, runs: Path, name: str, *more: str, offline: bool = False) -> None:
    done = run(
        "train",
        "recipes/quickstart_sft.yaml",
        "model.path=org/tiny",
        "data.train_files=hf://org/words/sft",
        f"runs_dir={runs}",
        f"name={name}",
        *SETTINGS,
        *more,
        env=environment(hub.url, runs / "home", offline=offline),
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_the_run_records_commits_and_steps(runs: Path, hub: FakeHub) -> None:
    resolved = yaml.safe_load((runs / "first" / "recipe.resolved.yaml").read_text())
    model, words = (hub.repositories[name].refs["main"] for name in ("models/org/tiny", "datasets/org/words"))
    assert resolved["model"]["path"] == f"hf://org/tiny@{model}"
    assert resolved["data"]["train_files"] == [f"hf://org/words@{words}/sft.parquet"]
    assert json.loads((runs / "first" / "summary.json").read_text())["model"] == f"hf://org/tiny@{model}"
    assert resolved["train"]["epochs"] is None
    assert len(metrics(runs / "first")) == resolved["train"]["steps"] > 1


def test_the_exported_model_has_the_template_and_the_adapter_names_its_base(runs: Path, hub: FakeHub) -> None:
    exported = runs / "first" / "hf"
    assert (exported / "chat_template.jinja").read_text() == CHATML
    assert "chat_template" not in json.loads((exported / "tokenizer_config.json").read_text())
    adapter = json.loads((runs / "first" / "hf_adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "org/tiny"
    assert adapter["revision"] == hub.repositories["models/org/tiny"].refs["main"]


def test_a_run_from_the_adapter_starts_where_it_ended(runs: Path, hub: FakeHub) -> None:
    """Without a network, and with a learning rate of 0: the adapter comes back bit for bit."""
    start = runs / "first" / "hf_adapter"
    train(hub, runs, "second", f"lora.path={start}", "actor.optimizer.lr=0", "train.steps=1", offline=True)
    before, after = (load_file(each / "adapter_model.safetensors") for each in (start, runs / "second" / "hf_adapter"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], matrix) for name, matrix in before.items())
    assert any(matrix.any() for name, matrix in before.items() if "lora_B" in name)


def test_a_resumed_run_keeps_its_commits(runs: Path, hub: FakeHub) -> None:
    first = hub.repositories["models/org/tiny"]
    commit, steps = first.refs["main"], len(metrics(runs / "first"))
    first.commit({**first.commits[commit], "model.safetensors": b"other weights"})
    train(hub, runs, "first", f"train.steps={steps + 1}", "train.resume=auto")
    assert yaml.safe_load((runs / "first" / "recipe.resolved.yaml").read_text())["model"]["path"].endswith(commit)
    assert len(metrics(runs / "first")) == steps + 1
