"""Adapters that training starts from (`lora.path`): checked against the recipe before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.checkpoint.identity import check_identity, identity_of
from megarl.errors import RecipeError
from megarl.hf.adapters import adapter_faults
from megarl.hf.linears import linears_of_layer
from megarl.preflight.findings import Available
from megarl.preflight.hub_inputs import fetch_inputs, training_inputs
from megarl.preflight.load import load_recipe
from megarl.preflight.models import read_hf_config
from megarl.preflight.survey import survey
from megarl.recipe import Recipe, to_yaml
from megarl.recipe.paths import with_absolute_paths
from tests.support.fake_hub import folder_files, running_hub, use_hub

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, "rank_pattern": {}}


@pytest.fixture
def hf_config(quickstart_data: Path) -> dict[str, Any]:
    return read_hf_config(str(quickstart_data / "model"))


@pytest.fixture
def adapter(tmp_path: Path, hf_config: dict[str, Any]) -> Path:
    return write_adapter(tmp_path / "adapter", hf_config)


def write_adapter(folder: Path, hf_config: dict[str, Any], rank: int = 4, drop: str = "", **config: Any) -> Path:
    """Write a PEFT directory with matrices of zeros on all linears, except names that end in `drop`."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    tensors = {}
    for layer in range(hf_config["num_hidden_layers"]):
        for linear in linears_of_layer(hf_config, layer):
            if not drop or not linear.endswith(drop):
                name = f"base_model.model.model.layers.{layer}.{linear}"
                tensors[f"{name}.lora_A.weight"] = np.zeros((rank, 16), np.float32)
                tensors[f"{name}.lora_B.weight"] = np.zeros((16, rank), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def faults(
    folder: Path, config: dict[str, Any], rank: int = 4, alpha: float = 8, targets: str = "all-linear"
) -> Iterator[str]:
    for setting, problem, remedy in adapter_faults(folder, config, rank, alpha, targets.split()):
        yield f"{setting}: {problem}: {remedy}"


def test_an_adapter_that_fits(adapter: Path, hf_config: dict[str, Any]) -> None:
    assert not [*faults(adapter, hf_config)]


def test_all_differences_at_once(adapter: Path, hf_config: dict[str, Any]) -> None:
    rank, alpha, targets = faults(adapter, hf_config, 8, 16, "q_proj k_proj")
    assert rank == f"lora.rank: the adapter in {adapter} has r 4: set lora.rank=4, as it was trained"
    assert alpha.endswith("has lora_alpha 8: set lora.alpha=8, as it was trained")
    assert "lora.targets: the adapter also has model.layers.0.mlp.experts.down_proj" in targets
    assert targets.endswith(
        "set lora.targets to its linears: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )


def test_missing_linears(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    (fault,) = faults(write_adapter(tmp_path / "part", hf_config, drop="v_proj"), hf_config)
    assert (
        "has no model.layers.0.self_attn.v_proj" in fault
        and "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj" in fault
    )
    other = {**hf_config, "num_hidden_layers": hf_config["num_hidden_layers"] + 1}
    (fault,) = faults(write_adapter(tmp_path / "short", hf_config), other)
    assert f"has no model.layers.{hf_config['num_hidden_layers']}." in fault


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
    ],
)
def test_what_adapters_here_lack(tmp_path: Path, hf_config: dict[str, Any], field: str, value: Any) -> None:
    (fault,) = faults(write_adapter(tmp_path / "a", hf_config, **{field: value}), hf_config)
    assert fault.startswith("lora.path: ") and f"{field}: {value!r}" in fault


def test_matrices_of_another_rank(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    (fault,) = faults(write_adapter(tmp_path / "a", hf_config, rank=8), hf_config)
    assert "not a matrix of rank 4" in fault


class TestInARecipe:
    """The recipe's keys, and the survey that `train` makes."""

    @pytest.fixture(autouse=True)
    def _there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)

    def recipe(self, data: Path, path: str, *more: str) -> Recipe:
        names = [
            f"model.path={data}/model",
            *(f"data.{s}_files={data}/data/{s.replace('eval', 'test')}.parquet" for s in ("train", "eval")),
        ]
        return load_recipe(QUICKSTART, [*names, f"lora.path={path}", "lora.rank=4", "lora.alpha=8", *more])

    def test_it_is_checked(self, quickstart_data: Path, adapter: Path) -> None:
        assert not survey(self.recipe(quickstart_data, str(adapter))).errors
        (error,) = survey(self.recipe(quickstart_data, str(adapter), "lora.alpha=9")).errors
        assert isinstance(error, RecipeError) and error.key == "lora.alpha" and "set lora.alpha=8" in str(error)
        for path, words in (
            ("nowhere", "the directory does not exist"),
            (f"{quickstart_data}/model", "no adapter_config.json"),
        ):
            (error,) = survey(self.recipe(quickstart_data, path)).errors
            assert isinstance(error, RecipeError) and error.key == "lora.path" and words in str(error)

    def test_it_needs_a_rank(self, quickstart_data: Path) -> None:
        with pytest.raises(RecipeError, match="rank 0 makes no adapters"):
            self.recipe(quickstart_data, "adapter", "lora.rank=0")

    def test_eval_refuses_it(self, quickstart_data: Path, adapter: Path) -> None:
        (error,) = survey(self.recipe(quickstart_data, str(adapter)), Available(training=False)).errors
        assert "samples from model.path alone" in str(error) and "lora.path=null" in str(error)

    def test_a_name_on_the_hub(
        self, quickstart_data: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with running_hub() as server:
            use_hub(monkeypatch, server.url, tmp_path / "home")
            commit = server.model("org/adapter").commit({**folder_files(adapter), "training_args.bin": b"a pickle"})
            recipe = with_absolute_paths(self.recipe(quickstart_data, "org/adapter"))
            inputs = fetch_inputs(recipe, training_inputs(recipe))
            recipe, (notice, _) = inputs.recipe, inputs.notices
            assert notice == f"lora.path: org/adapter from the hub, at commit {commit[:12]}"
            assert not survey(recipe).errors
            assert f"path: hf://org/adapter@{commit}" in to_yaml(recipe)
            assert "training_args.bin" not in server.downloads()

    def test_a_resume_needs_the_same_adapter(
        self, quickstart_data: Path, adapter: Path, hf_config: dict[str, Any], tmp_path: Path
    ) -> None:
        def identity(recipe: Recipe) -> dict[str, Any]:
            return identity_of(recipe, hf_config, None, {"train": 1})

        first = identity(self.recipe(quickstart_data, str(adapter)))
        (tmp_path / "controller.json").write_text(json.dumps({"identity": first}))
        adapter.rename(tmp_path / "moved")
        check_identity(tmp_path, identity(self.recipe(quickstart_data, str(tmp_path / "moved"))))
        other = write_adapter(tmp_path / "other", hf_config, drop="v_proj")
        for path in (str(other), "null"):
            with pytest.raises(RecipeError, match=r"started from other adapters(.|\n)*set it back") as caught:
                check_identity(tmp_path, identity(self.recipe(quickstart_data, path)))
            assert caught.value.key == "lora.path"
        (tmp_path / "controller.json").write_text(
            json.dumps({"identity": identity(self.recipe(quickstart_data, "null"))})
        )
        with pytest.raises(RecipeError, match=r"started from new adapters(.|\n)*leave it out"):
            check_identity(tmp_path, identity(self.recipe(quickstart_data, str(other))))
