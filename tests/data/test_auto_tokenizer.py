"""Tokenizers load without torch, and transformers is complete afterwards."""

import json
import os
import subprocess
import sys

import pytest

from megarl.commands.data.tiny_tokenizer import make_tiny_tokenizer
from megarl.data import auto_tokenizer

# Prints which of torch's and transformers' modules are loaded, and their names, after a tokenizer was loaded and models were imported.
REPORT = """
import json, sys
{first}
from megarl.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer({directory!r})
ids = tokenizer.encode("hello 12")
loaded = "torch" in sys.modules
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import WatermarkingConfig
from transformers.models.auto import auto_factory
from transformers import modeling_gguf_pytorch_utils, modeling_rope_utils
modules = {{
    name: sorted({{*vars(module), *vars(module).get("_class_to_module", ())}})  # the latter: names that are imported when read
    for name, module in list(sys.modules.items())
    if name.partition(".")[0] == "transformers"
}}
print(json.dumps({{
    "loaded": loaded,
    "ids": ids,
    "modules": modules,
    "torch": [module.torch.Tensor is torch.Tensor for module in (modeling_gguf_pytorch_utils, modeling_rope_utils)],
    "available": modeling_rope_utils.is_torch_available(),
    "processor": type(WatermarkingConfig().construct_processor(64, "cpu")).__name__,
    "class": issubclass(AutoModelForCausalLM, auto_factory._BaseAutoModelClass),
}}))
"""


@pytest.fixture(scope="module", params=["qwen3_moe", "llama"])
def model_type(request: pytest.FixtureRequest) -> str:
    """Llama's configuration imports torch."""
    return request.param


@pytest.fixture(scope="module")
def reports(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """Reports of a process without torch, and of one that has imported it first."""
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "dtype": "bfloat16"}))

    def report(first: str) -> dict:
        script = REPORT.format(first=first, directory=str(directory))
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return report(""), report("import torch")


@pytest.mark.slow
def test_a_tokenizer_is_loaded_without_torch(reports, model_type):
    without, after = reports
    assert (without["loaded"], after["loaded"]) == (model_type == "llama", True)
    assert without["ids"] == after["ids"]


@pytest.mark.slow
def test_nothing_of_transformers_is_missing_afterwards(reports):
    """If another version of transformers fails here, add the names to `NEED_TORCH`, and change `VERSION`."""
    without, after = reports
    missing = {
        name: names
        for name in without["modules"].keys() & after["modules"].keys()
        if (names := set(after["modules"][name]) - set(without["modules"][name]))
    }
    assert missing == {}
    assert without["torch"] == [True, True] and without["available"] and without["class"]
    assert without["processor"] == "WatermarkLogitsProcessor"


def test_the_version_of_transformers_is_the_tested_one():
    import transformers

    assert transformers.__version__.startswith(f"{auto_tokenizer.VERSION}.")
