"""`megarl model check`: all reasons against a model at once, from its config.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import app
from megarl.commands.model import new_family
from megarl.commands.model.check import check_config
from megarl.exit_status import guarded
from megarl.hf import published
from megarl.hf.families import FAMILIES
from megarl.hf.families.check import check_model
from tests.support.fake_hub import running_hub, use_hub

UNKNOWN = {
    "model_type": "gpt_oss_2",
    "architectures": ["GptOss2ForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sink_tokens": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = guarded(lambda: app(args=["model", "check", *arguments], standalone_mode=False), debug=False)
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_published_model(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "Qwen3-8B")
    assert status == 0 and text.endswith("\nmegarl trains this model.\n")
    assert "8,190,427,136 parameters, 36 layers" in text and "yes: q_proj, k_proj" in text


@pytest.mark.parametrize("name", published.names())
def test_every_published_model_is_trained(name: str) -> None:
    assert check_config(name, published.read(name)).reasons == []


def test_an_unknown_family_with_all_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, folder(tmp_path / "m", {**UNKNOWN, "vocab_size": None}))
    assert status == 1 and "does not train this model, for 3 reasons:" in text
    for words in ("this is a 'gpt_oss_2' model", "(quantization_config in config.json: mxfp4)", "has no vocab_size"):
        assert words in text
    assert "docs/add_a_model.md has the steps" in text and "sink_tokens" in text


def test_the_code_of_an_unknown_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hints name the files to compare, and separate fields that the code reads. Here: ERNIE 4.5, as if it were unknown."""
    monkeypatch.delitem(FAMILIES, "ernie4_5_moe")
    monkeypatch.setattr(published, "names", lambda: ["Qwen3-8B"])
    fields = {
        "model_type": "ernie4_5_moe",
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_k": 6,
        "moe_gate": "topk",
    }
    text = "\n".join(new_family.hints(fields))
    assert re.search(r"transformers: \S+/models/ernie4_5_moe$", text, re.MULTILINE)
    assert re.search(r"vLLM: \S+/ernie45_moe\.py$", text, re.MULTILINE)
    assert "some of the same layers: llama, mixtral, qwen3_moe" in text
    assert "no supported family has: moe_k\n" in text and text.endswith("of no effect in transformers: moe_gate")
    text = "\n".join(new_family.hints(UNKNOWN))
    assert "does not know this model_type" in text and "vLLM: the installed version has no GptOss2ForCausalLM" in text


def test_several_settings_of_a_known_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**published.read("Qwen3-8B"), "attention_bias": True, "hidden_act": "gelu", "use_sliding_window": True}
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0}
    status, text = run(capsys, f"{folder(tmp_path / 'm', config)}/config.json", "--json")
    result = json.loads(text)
    assert status == 1 and len(result["reasons"]) == 4 and result["family"] == "qwen3" and not result["hints"]
    with pytest.raises(ValueError, match="rotary scaling 'dynamic'"):  # the first of them stops a run
        check_model(config)


def test_damaged_weights(quickstart_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, str(quickstart_data / "model"))[0] == 0
    model = folder(tmp_path / "m", json.loads((quickstart_data / "model" / "config.json").read_text()))
    (tmp_path / "m" / "model.safetensors").write_bytes(b"cut")
    status, text = run(capsys, model)
    assert status == 1 and "Its weights: model.safetensors is not a safetensors file" in text


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.dumps(published.read("Qwen3-8B")).encode()
    with running_hub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        server.model("org/new").commit({"config.json": config, "model.safetensors": b"large", "tokenizer.json": b"{}"})
        server.model("org/old").commit({"config.json": config, "pytorch_model.bin": b"large"})
        assert run(capsys, "org/new")[0] == run(capsys, "hf://org/new@main")[0] == 0
        assert server.downloads() == ["config.json"]
        status, text = run(capsys, "org/old")
        assert status == 1 and "org/old has no *.safetensors, but weights in pytorch_model.bin" in text
        status, text = run(capsys, "org/none")
        assert status == 2 and "has no such model" in text
        use_hub(monkeypatch, server.url, tmp_path / "home", offline=True)
        status, text = run(capsys, "Qwen/Qwen3-8B")
        assert status == 2 and "HF_HUB_OFFLINE is set" in text and "config.json`) into this cache" in text
        assert "megarl contains the config.json of Qwen3-8B: python -m megarl model check Qwen3-8B" in text
        assert run(capsys, "org/new")[0] == 0 and run(capsys, "org/old")[0] == 1  # the cache has the lists of files
        for tree in (tmp_path / "home").rglob("trees/*.json"):
            tree.unlink()
        for name in ("org/new", "org/old"):
            status, text = run(capsys, name)
            assert status == 0 and "HF_HUB_OFFLINE is set" in text and "its weights are not checked" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is neither a folder with a config.json"), ("{", "is not valid JSON"), ("[]", "is not a JSON object")],
)
def test_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text(content)
    status, text = run(capsys, "m")
    assert status == 2 and words in text


def test_a_name_that_is_nearly_right(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "qwen3-30b-a3")
    assert status == 2 and "such as Qwen3-30B-A3B, " in text and "published has a folder for each" in text
    assert len(text) < 400, "not the names of all models"


def test_it_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; from megarl.commands.model.check import check_model_of; check_model_of('Qwen3-8B', as_json=True);"
        "heavy = {'torch', 'megatron', 'mbridge', 'vllm', 'transformers'} & {*sys.modules}; assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
