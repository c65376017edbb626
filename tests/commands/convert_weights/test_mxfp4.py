"""`megarl convert-weights`: MXFP4 models in bfloat16, bit by bit as transformers and the format's definition have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.commands.convert_weights import mxfp4
from megarl.commands.convert_weights.command import convert
from megarl.errors import InputError
from megarl.hf.families.check import check_model

EXPERTS, ROWS, GROUPS = 2, 5, 3
DOWN = "model.layers.0.mlp.experts.down_proj"
CONFIG = {
    "model_type": "gpt_oss",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_size": ROWS,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with values and scales in two files. All bytes of values and most of scales occur."""
    folder = tmp_path / "mxfp4"
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randperm(EXPERTS * ROWS * GROUPS * 16, generator=generator).to(torch.uint8)
    scales = torch.randint(0, 253, (EXPERTS, ROWS, GROUPS), generator=generator).to(torch.uint8)
    scales[0, 0] = torch.tensor([0, 1, 127])
    first = {f"{DOWN}_blocks": blocks.view(EXPERTS, ROWS, GROUPS, 16), "model.norm.weight": torch.ones(ROWS)}
    second = {f"{DOWN}_scales": scales, f"{DOWN}_bias": torch.randn(EXPERTS, ROWS).to(torch.bfloat16)}
    placed = {}
    for number, tensors in ((1, first), (2, second)):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(tensors, folder / name)
        placed |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_text("as published")
    return folder


def everything(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def by_definition(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[experts, out, in] in float64: value of 4 bits (sign, 2 bits of the exponent with bias 1, 1 of the mantissa) * 2^(scale - 127)."""
    out = torch.empty(*blocks.shape[:2], GROUPS * 32, dtype=torch.float64)
    for expert, row, group, place in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
        byte = int(blocks[expert, row, group, place])
        for second, code in enumerate((byte & 15, byte >> 4)):
            exponent, mantissa = (code >> 1) & 3, code & 1
            value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            scaled = (-1.0) ** (code >> 3) * value * 2.0 ** (int(scales[expert, row, group]) - 127)
            out[expert, row, group * 32 + 2 * place + second] = scaled
    return out


@pytest.mark.parametrize("rows", [2, 512])
def test_converted_values_equal_transformers_and_the_definition(
    model: Path, tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4, "_ROWS", rows)
    convert(model, tmp_path / "bf16", workers=1)
    before, after = everything(model), everything(tmp_path / "bf16")
    assert after.keys() == {DOWN, f"{DOWN}_bias", "model.norm.weight"}
    blocks, scales = before[f"{DOWN}_blocks"], before[f"{DOWN}_scales"]
    assert after[DOWN].dtype == torch.bfloat16 and after[DOWN].shape == (EXPERTS, GROUPS * 32, ROWS)
    assert torch.equal(after[DOWN].double(), by_definition(blocks, scales).transpose(1, 2))
    of_transformers = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(after[DOWN].view(torch.int16), of_transformers.contiguous().view(torch.int16))
    assert all(torch.equal(after[name], before[name]) for name in after if name != DOWN)


def test_the_converted_model_is_accepted(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"mxfp4.*megarl convert-weights"):
        check_model(json.loads((model / "config.json").read_text()))
    convert(model, tmp_path / "bf16", workers=1)
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    check_model(config)
    assert (tmp_path / "bf16" / "chat_template.jinja").read_text() == "as published"
    assert "MXFP4 in groups of 32" in capsys.readouterr().out
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == everything(tmp_path / "bf16").keys()


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (2, {f"{DOWN}_scales": None}, "down_proj_blocks is in MXFP4, and no file has its scales"),
        (1, {f"{DOWN}_blocks": None}, "has scales, and no file has their tensor, .*down_proj_blocks"),
        (
            2,
            {f"{DOWN}_scales": torch.zeros(EXPERTS, ROWS, 2, dtype=torch.uint8)},
            r"needs scales in U8 of shape \[2, 5, 3\]",
        ),
        (1, {f"{DOWN}_blocks": torch.zeros(2, 5, 3, 8, dtype=torch.uint8)}, r"is \[2, 5, 3, 8\], not \[experts, out"),
        (1, {"other": torch.zeros(2, dtype=torch.uint8)}, r"other is in U8; supported: MXFP4, F64"),
    ],
)
def test_incomplete_models_are_refused(
    model: Path, tmp_path: Path, number: int, change: dict[str, Any], words: str
) -> None:
    file = model / f"model-0000{number}-of-00002.safetensors"
    tensors = {name: tensor for name, tensor in {**load_file(file), **change}.items() if tensor is not None}
    save_file(tensors, file)
    index = model / "model.safetensors.index.json"
    placed = {name: place for name, place in json.loads(index.read_text())["weight_map"].items() if place != file.name}
    index.write_text(json.dumps({"weight_map": placed | dict.fromkeys(tensors, file.name)}))
    with pytest.raises(InputError, match=words):
        convert(model, tmp_path / "bf16")
    assert not (tmp_path / "bf16").exists()


def test_an_infinite_scale_is_named(model: Path, tmp_path: Path) -> None:
    file = model / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    tensors[f"{DOWN}_scales"][1, 2, 0] = 255
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"down_proj has a value that is not finite"):
        convert(model, tmp_path / "bf16", workers=1)
