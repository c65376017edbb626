"""The tiny models and their reference results."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from megarl.commands.accept import goldens
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.parity_rank import Case
from megarl.commands.accept.settings import Settings
from megarl.commands.accept.stages import model_parity
from megarl.commands.accept.tiny_families import FAMILIES, LENGTHS, batch, exact_values, weights, write_family
from megarl.platform.adaptor import adaptor
from megarl.platform.kinds import KINDS

DIGESTS = {"dense": "20262b6ab4439ecb", "moe": "ca07d6d314d256a1", "mla": "ffa64ffa1ff10058", "vl": "281ea7ae40a21134"}


def digest(family: str) -> str:
    """SHA-256 of weights, tokens, advantages and pixels."""
    total = hashlib.sha256()
    for name, tensor in sorted(weights(family).items()):
        total.update(name.encode() + str(tensor.shape).encode() + tensor.tobytes())
    for sequence in batch(family):
        total.update(sequence.tokens.tobytes() + sequence.advantages.tobytes())
        for image in sequence.images:
            total.update(image.pixels.tobytes())
    return total.hexdigest()[:16]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_and_inputs_are_bit_identical_everywhere(family):
    assert digest(family) == DIGESTS[family], (
        "the references are of another model: python -m tests.support.make_goldens"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_represents_the_weights_exactly(family):
    import torch

    for name, tensor in weights(family).items():
        exact = torch.from_numpy(tensor)
        assert torch.equal(exact.bfloat16().float(), exact), name
        assert len(np.unique(tensor)) > min(tensor.size, 64) // 2, f"{name} hardly varies"


def test_a_family_is_written_once(tmp_path):
    path = write_family("mla", tmp_path)
    assert json.loads((path / "config.json").read_text())["rope_scaling"]["factor"] == 40
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert write_family("mla", tmp_path) == path and (path / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "dense" else [pytest.mark.slow]) for name in FAMILIES]
)
def test_golden_references_equal_transformers(family, tmp_path):
    from tests.support.make_goldens import golden_of

    computed, kept = golden_of(family, tmp_path), goldens.read_golden(family)
    for name in ("log_probs", "log_probs_after", "sketches", "squares"):
        np.testing.assert_allclose(getattr(computed, name), getattr(kept, name), rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(computed.grad_norms, kept.grad_norms, rtol=1e-5)
    assert computed.tensor_norms.keys() == kept.tensor_norms.keys() and len(kept.tensor_norms) > 20


def test_golden_files_are_small_and_complete():
    sizes = [path.stat().st_size for path in goldens.FOLDER.iterdir()]
    assert len(sizes) == len(FAMILIES) and sum(sizes) < 100_000
    for family in FAMILIES:
        golden = goldens.read_golden(family)
        assert golden.log_probs.shape == golden.log_probs_after.shape == (sum(LENGTHS),)
        assert np.abs(golden.log_probs - golden.log_probs_after).max() > 0.1, "the steps change nothing"
        assert golden.sketches.shape[0] == FAMILIES[family]["num_hidden_layers"]


class TestComparison:
    golden = goldens.read_golden("dense")

    def table(self) -> np.ndarray:
        return np.concatenate([self.golden.sketches, self.golden.squares[:, None]], 1)

    def test_first_layer_that_differs(self):
        assert model_parity.first_layer_apart(self.golden, self.table(), 1e-4)[0] == 0
        table = self.table()
        table[2:] *= 1.01
        layer, size = model_parity.first_layer_apart(self.golden, table, 1e-4)
        assert layer == 3 and size > 1e-4
        table[1, 0] = np.nan
        assert model_parity.first_layer_apart(self.golden, table, 1e-4)[0] == 2

    def test_tensor_whose_gradient_differs_most(self):
        norms = dict(self.golden.tensor_norms)
        assert model_parity.worst_tensor(self.golden, norms)[1] == 0
        name = "model.layers.2.self_attn.k_proj.weight"
        norms[name] *= 1.5
        worst, share = model_parity.worst_tensor(self.golden, norms)
        assert worst == name and share == pytest.approx(0.5)
        norms["model.layers.1.self_attn.k_proj.weight"] = float("nan")
        assert np.isnan(model_parity.worst_tensor(self.golden, norms)[1]), "a NaN is the worst"

    def test_cases_name_their_layout(self):
        case = Case("moe", "m", "float32", {"tensor_parallel": 2, "expert_tensor_parallel": 2, "recompute": "full"})
        assert case.name == "moe TP2ETP2 float32 recompute"

    def test_every_cut_is_tried_on_two_devices(self):
        for tiny in (False, True):
            cuts = {key for family in FAMILIES for layout in model_parity.layouts(2, family, tiny) for key in layout}
            assert {"tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel"} <= cuts

    def test_a_host_optimizer_case_runs_on_devices_that_support_it(self, tmp_path):
        def names(device: str) -> list[str]:
            context = StageContext(Settings(device, 2), tmp_path, tmp_path, 1e9)
            return [case.name for case in model_parity.cases(context, 1, ["dense"])]

        with_adaptor = [kind.name for kind in KINDS if model_parity.SWAPPED in adaptor(kind.name).settings]
        assert with_adaptor and all(
            "dense 1 bfloat16 distributed_optimizer extra" in names(listed) for listed in with_adaptor
        )
        assert not any("extra" in name for name in names("cpu"))

    def test_spread_is_exact(self):
        assert exact_values("x", 4).tolist() == exact_values("x", 8)[:4].tolist()
        assert np.abs(exact_values("y", 10000)).max() == 1.0 and abs(exact_values("y", 10000).mean()) < 0.05
