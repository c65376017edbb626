"""Plans of models with only a config.json, and of user-defined losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.commands.plan.preflight import checked
from megarl.hf.published import read
from megarl.preflight.load import load_recipe
from megarl.preflight.models import config_of
from tests.support.count_ranks import count_stages

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
LOSS = """
from megarl.algorithms.losses import log_ratio, policy_loss


@policy_loss("of_a_plan", needs_old_log_probs=False)
def of_a_plan(inputs, settings):
    return -log_ratio(inputs), {}
"""


def folder(tmp_path: Path) -> Path:
    """A model without a published counterpart: only a config.json."""
    config = read("Qwen2.5-0.5B-Instruct") | {"num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_with_only_a_config_is_planned(tmp_path: Path) -> None:
    recipe = load_recipe(QUICKSTART, [f"model.path={folder(tmp_path)}", "megatron.expert_parallel=1"])
    report = checked(recipe, QUICKSTART)
    assert report.errors == [] and report.configs["model.path"]["num_hidden_layers"] == 2
    assert f"model.path: {tmp_path} has only a config.json: its weights and tokenizer" in report.texts("unavailable")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert checked(recipe, QUICKSTART).errors, "weights that are there are read"


def test_a_folder_can_replace_a_published_model(tmp_path: Path) -> None:
    config = config_of("models/of-nowhere", QUICKSTART, name=str(folder(tmp_path)))
    assert config["vocab_size"] == 512


@pytest.mark.slow  # a rank is built in a separate process
def test_a_user_loss_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_loss.py").write_text(LOSS)
    settings = [
        "algorithm.modules=[own_loss]",
        "algorithm.loss=of_a_plan",
        "algorithm.clip_high=0.2",
        "megatron.expert_parallel=1",
        f"model.path={folder(tmp_path)}",
    ]
    recipe = load_recipe(QUICKSTART, settings)
    model = json.loads((tmp_path / "config.json").read_text())
    (stage,) = count_stages(recipe, model, model)
    assert stage.activations is not None and stage.activations.update > 0
