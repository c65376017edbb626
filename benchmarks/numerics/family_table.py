"""Compare a family's table from a file with transformers: ``python -m benchmarks.numerics.family_table MODEL --table FILE``

The tiny copy of MODEL that a rehearsal would make, with random weights from transformers' class, in one process and in layouts:
log-probs, the first step's gradient, the weights after two steps, and the exported tensors, as tests/megatron/test_layouts.py
does for megarl's own tables. Exit status 1 if one differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.numerics.parity import Difference, difference
from megarl.commands.model.check import read_config
from megarl.commands.rehearse.changes import Changes
from megarl.commands.rehearse.model import shrink_model
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.families.check import check_model
from megarl.hf.families.tables.family_table import FIELD, read_table, with_table
from tests.support.megatron_layouts import case
from tests.support.megatron_models import global_batch, reference_model
from tests.support.megatron_runs import SAME_CHANGE, check_gradient, check_weights, checkpoint_tensors, launch

LIMIT = 2e-5  # of a log-prob's difference, as in tests/megatron/test_layouts.py
_LAYERS, _SPREAD = 4, 0.05


def write_tiny(hf_config: dict[str, Any], directory: Path) -> Path:
    """Write a random float32 model, a tiny copy of the one with this config.json, with transformers' class for it.

    Norms and biases are spread, so that swapped ones are seen.
    """
    small = shrink_model(hf_config, _LAYERS, Changes())
    small = {name: value for name, value in small.items() if name not in (FIELD, "auto_map", "quantization_config")}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**small)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, _SPREAD)
        for name, buffer in model.named_buffers():
            if "e_score" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.01)
    model.save_pretrained(directory)
    return directory


def cases_of(config: dict[str, Any], table: Path) -> list[dict[str, Any]]:
    """Return one case per layout that cuts a model with this config.json: one process, TP2, PP2, and EP2 with experts."""
    names = ["TP1", "TP2", "PP2", *(["EP2"] if number_of_experts(text_fields(config)) else [])]
    return [{**case("tiny", name), "table": str(table)} for name in names]


def compare(hf_config: dict[str, Any], table: Path, directory: Path) -> dict[str, tuple[Difference, list[str]]]:
    """Return the differences and the faults by layout. No faults: the table describes transformers' model.

    hf_config: config.json. directory: an empty folder for the tiny model and the results.
    """
    config = with_table(hf_config, read_table(str(table)))
    check_model(config)
    path, results = write_tiny(config, directory / "models" / "tiny"), {}
    cases = cases_of(config, table.absolute())
    for processes in (1, 2):
        launch(processes, [each for each in cases if each["processes"] == processes], directory)
    first = torch.load(directory / "tiny-TP1.pt", weights_only=True)
    for each in cases:
        result, faults = difference(each, directory), []
        if result.log_prob > LIMIT:
            faults.append(f"log-probs differ by {result.log_prob:.1e}, more than {LIMIT}")
        if not result.exact:
            faults.append("the exported tensors are not the original ones")
        try:
            if each["processes"] == 1:
                inputs = [{"input_ids": tokens[None]} for tokens in global_batch()[0]]
                check_gradient(directory, each["name"], reference_model(path), inputs)
            else:
                after = torch.load(directory / f"{each['name']}.pt", weights_only=True)["after"]
                check_weights(after, first["after"], checkpoint_tensors(path), SAME_CHANGE)
        except AssertionError as error:
            faults.append(f"training: {error}")
        results[each["name"].removeprefix("tiny-")] = result, faults
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a family's table with transformers, at tiny size on the CPU.")
    parser.add_argument("model", metavar="MODEL", help="as for megarl model check")
    parser.add_argument("--table", required=True, type=Path, metavar="FILE", help="what megarl model table wrote")
    arguments = parser.parse_args()
    hf_config = read_config(arguments.model).config
    with tempfile.TemporaryDirectory() as folder:
        results = compare(hf_config, arguments.table, Path(folder))
    for layout, (result, faults) in results.items():
        print(
            f"{layout:<4} log-probs {result.log_prob:.1e}, entropy {result.entropy:.1e}: {'; '.join(faults) or 'equal'}"
        )
    wrong = any(faults for _, faults in results.values())
    print("The table does not describe transformers' model." if wrong else "The table describes transformers' model.")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
