"""`megarl convert-weights`: FP8 models in bfloat16, bit by bit as an independent slow reference; refusals."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megarl.commands.convert_weights import command as convert_weights
from megarl.commands.convert_weights.command import convert
from megarl.errors import InputError
from tests.support.fp8_model import ATTENTION, BLOCK, INDEX


def value_of_e4m3(code: int) -> float:
    """The number of a float8_e4m3fn byte, from its definition: 1 sign bit, 4 of the exponent (bias 7), 3 of the mantissa."""
    sign, exponent, mantissa = (-1.0) ** (code >> 7), (code >> 3) & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def bfloat16_bits(value: float) -> int:
    """`value`, which a float32 holds, rounded to the nearest bfloat16, ties to even, with integers alone."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def reference(codes: torch.Tensor, scales: torch.Tensor, block: int) -> list[list[int]]:
    raw, factors = codes.view(torch.uint8).tolist(), scales.tolist()
    single: Callable[[float], float] = lambda value: struct.unpack("<f", struct.pack("<f", value))[0]  # noqa: E731
    return [
        [bfloat16_bits(single(value_of_e4m3(code) * factors[i // block][j // block])) for j, code in enumerate(row)]
        for i, row in enumerate(raw)
    ]


def everything(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_converted_values_names_files_and_config_are_correct(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bf16"
    convert(model, out, workers=1)
    before, after = everything(model), everything(out)
    assert after.keys() == {name for name in before if not name.endswith("_scale_inv")}
    for name in ATTENTION:
        scales = before[f"{name}.weight_scale_inv"]
        expected = reference(before[f"{name}.weight"], scales, BLOCK)
        converted = after[f"{name}.weight"]
        assert converted.dtype == torch.bfloat16
        assert (converted.view(torch.int16).to(torch.int32) & 0xFFFF).tolist() == expected, name
    for name in ("model.embed_tokens.weight", "model.layers.1.gate.bias"):
        assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name])
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    for name, file in index["weight_map"].items():
        with safe_open(out / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - no mapping
    assert index["weight_map"].keys() == after.keys()
    config = json.loads((out / "config.json").read_text())
    assert config == {"model_type": "deepseek_v3", "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1}
    assert (out / "tokenizer.json").read_text() == "tokenizer.json as published"
    printed = capsys.readouterr().out
    assert "not copied" in printed and "configuration_deepseek.py" in printed and "consolidated.bin" in printed
    assert not (out / "configuration_deepseek.py").exists() and "left 0:00" in printed
    assert {path.name for path in out.iterdir() if path.name.startswith(".")} == set()
    assert (out / "model-00001-of-00003.safetensors").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_all_codes_of_e4m3_and_scales_in_bfloat16(model: Path, tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # the two NaN
    scales = torch.tensor([[3e-4, 1.7]]).to(torch.bfloat16)
    weight = codes.view(1, 256).view(torch.float8_e4m3fn)
    for file in model.glob("*.safetensors"):
        file.unlink()
    (model / INDEX).unlink()
    save_file({"a.weight": weight, "a.weight_scale_inv": scales}, model / "model.safetensors")
    change(model, weight_block_size=[128, 128])
    convert(model, tmp_path / "out", workers=1)
    converted = load_file(tmp_path / "out" / "model.safetensors")["a.weight"]
    expected = reference(weight, scales.float(), 128)
    assert (converted.view(torch.int16).to(torch.int32) & 0xFFFF).tolist() == expected
    assert not (tmp_path / "out" / INDEX).exists()


def change(model: Path, **settings: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] |= settings
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"quant_method": "awq"}, "quantized by 'awq'"),
        ({"quant_method": "gptq"}, "quantized by 'gptq'"),
        ({"quant_method": "compressed-tensors"}, "quantized by 'compressed-tensors'"),
        ({"weight_block_size": None}, "one scale per tensor is not supported"),
        ({"fmt": "e5m2"}, "'e5m2' is not supported, only e4m3"),
        ({"weight_block_size": [8, 4]}, r"blocks of 8 x 4 need scales \[1, 3\]"),
    ],
)
def test_other_formats_are_refused(model: Path, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    change(model, **settings)
    with pytest.raises(InputError, match=words):
        convert(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def rewrite(model: Path, number: int, **tensors: torch.Tensor | None) -> None:
    """Change tensors of a file, by names a_b__c for a.b_c; None removes a tensor. The index is updated."""
    file = model / f"model-0000{number}-of-00003.safetensors"
    named = {name.replace("__", "\0").replace("_", ".").replace("\0", "_"): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in {**load_file(file), **named}.items() if tensor is not None}
    save_file(kept, file)
    index = json.loads((model / INDEX).read_text())
    remaining = {name: place for name, place in index["weight_map"].items() if place != file.name}
    (model / INDEX).write_text(json.dumps({"weight_map": remaining | dict.fromkeys(kept, file.name)}))


def test_unpaired_and_unsupported_tensors_are_refused(model: Path, tmp_path: Path) -> None:
    scales = load_file(model / "model-00003-of-00003.safetensors")["model.layers.0.kv.weight_scale_inv"]
    rewrite(model, 3, model_layers_0_kv_weight__scale__inv=None)
    with pytest.raises(InputError, match=r"model\.layers\.0\.kv\.weight is in FP8 e4m3, and no file has its scales"):
        convert(model, tmp_path / "out")
    rewrite(model, 3, model_layers_0_kv_weight__scale__inv=scales, packed_weight=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(InputError, match=r"packed\.weight is in I32; supported: FP8 e4m3, F64, F32, BF16, F16"):
        convert(model, tmp_path / "out")
    rewrite(model, 3, packed_weight=None)
    (model / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"names model-00001-of-00003\.safetensors, which is not there"):
        convert(model, tmp_path / "out")


def test_scales_without_a_quantized_tensor_are_refused(model: Path, tmp_path: Path) -> None:
    """In whichever file the tensor is: its scales would be dropped."""
    weight = load_file(model / "model-00002-of-00003.safetensors")["model.layers.0.kv.weight"]
    rewrite(model, 2, model_layers_0_kv_weight=weight.to(torch.bfloat16))
    with pytest.raises(InputError, match=r"model-00003.*0\.kv\.weight_scale_inv has scales for a tensor in BF16"):
        convert(model, tmp_path / "out")
    rewrite(model, 2, model_layers_0_kv_weight=None)
    with pytest.raises(InputError, match=r"has scales, and no file has their tensor, model\.layers\.0\.kv\.weight"):
        convert(model, tmp_path / "out")
    rewrite(model, 2, model_layers_0_kv_weight=weight)
    convert(model, tmp_path / "out", workers=1)


def test_a_nonfinite_value_is_named(model: Path, tmp_path: Path) -> None:
    rewrite(model, 1, model_embed__tokens_weight=torch.tensor([[1.0, float("nan")]]).to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"model-00001.*model\.embed_tokens\.weight has a value that is not finite"):
        convert(model, tmp_path / "out", workers=1)
    assert not (tmp_path / "out" / "model-00001-of-00003.safetensors").exists()


def test_folders_in_use_and_full_disks_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="is the source itself"):
        convert(model, model)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(InputError, match="is not empty"):
        convert(model, tmp_path / "mine")
    usage = convert_weights.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_weights.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(InputError, match=r"too small: the model in bfloat16 is .* MB are needed, and 0\.0 MB are free"):
        convert(model, tmp_path / "out")


@pytest.mark.slow
def test_memory_use_is_independent_of_the_file_size(tmp_path: Path) -> None:
    """A file of 384 MiB, 512 MiB when converted, with 200 MiB of address space beyond what the imports take."""
    folder = tmp_path / "large"
    folder.mkdir()
    rows, columns, count = 8192, 8192, 2
    weight = torch.zeros(rows, columns, dtype=torch.uint8).fill_(0x38).view(torch.float8_e4m3fn)  # 1.0
    tensors = {f"{number}.weight": weight.clone() for number in range(count)}
    tensors |= {f"{number}.weight_scale_inv": torch.full((64, 64), 0.5) for number in range(count)}
    tensors["embed.weight"] = torch.ones(16384, 8192, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    del tensors, weight
    code = (
        "import resource, sys, torch; from pathlib import Path; import numpy\n"
        "from megarl.commands.convert_weights.fp8 import Fp8Blocks\n"
        "from megarl.commands.convert_weights.shards import ShardJob, convert_shard\n"
        "torch.set_num_threads(1); torch.zeros(8).view(torch.uint8).view(torch.float8_e4m3fn).float()\n"
        "pages = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages + (200 << 20),) * 2)\n"
        "source = Path(sys.argv[1]); scales = {f'{n}.weight': source for n in range(2)}\n"
        "print(convert_shard(ShardJob(source, source.with_name('out.safetensors'), Fp8Blocks(128, 128), scales)).size)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder / "model.safetensors"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        int(done.stdout) == (folder / "out.safetensors").stat().st_size > 2 * rows * columns * count + 2 * 16384 * 8192
    )
    with safe_open(folder / "out.safetensors", framework="pt") as opened:
        assert torch.equal(opened.get_slice("1.weight")[8191:, :4], torch.full((1, 4), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": 3}', "{"])
def test_a_damaged_index_is_an_error_of_the_folder(model: Path, tmp_path: Path, index: str) -> None:
    (model / INDEX).write_text(index)
    with pytest.raises(InputError, match=rf"{INDEX} cannot be read"):
        convert(model, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
