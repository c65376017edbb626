"""Record MindSpeed's settings, functions and attributes that megarl depends on: `python -m tests.support.mindspeed_calls SOURCE`.

SOURCE is a checkout of MindSpeed. Writes the settings to megarl/platform/mindspeed/tables/VERSION.json, and the functions
and attributes to tests/fixtures/mindspeed_calls/VERSION.json, so that tests can compare megarl's calls with MindSpeed
without an installation. `RELIED` lists the latter, each with the part of megarl that depends on it.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.platform.mindspeed.source_keys import TABLES, read_source
from megarl.platform.swapped_states import HOST_TENSORS, SWAPS, TO_HOST

Record = dict[str, list[str]]
CALLS = Path(__file__).parents[1] / "fixtures" / "mindspeed_calls"


@dataclass(frozen=True)
class Relied:
    """A function, method or class of MindSpeed that megarl depends on.

    attributes: of a class, to look for. reads: record the attributes of `config` that a function reads, instead of its
    arguments.
    """

    file: str  # relative to the package
    name: str  # a dot separates class and method
    reason: str
    attributes: tuple[str, ...] = ()
    reads: bool = False

    @property
    def key(self) -> str:
        return f"{self.file}:{self.name}" + " reads config" * self.reads


_SWAP = "core/optimizer/swap_optimizer/swap_optimizer.py"
_LATENT = "core/transformer/multi_head_latent_attention/adaptor.py"
_ATTENTION = "te/pytorch/attention/dot_product_attention/dot_product_attention.py"
RELIED = (
    Relied("megatron_adaptor.py", "repatch", "NPUPlatform.adapt calls it"),
    Relied("megatron_adaptor.py", "patch_features", "importing the module patches Megatron: NPUPlatform.prepare"),
    Relied("op_builder/builder.py", "MindSpeedOpBuilder.load", "platform/mindspeed/build_lock.py serializes builds"),
    Relied(
        _SWAP,
        "SwapDistributedOptimizer",
        "platform/swapped_states.py reads its host tensors",
        attributes=(HOST_TENSORS, TO_HOST, f"optimizer.{SWAPS}"),
    ),
    Relied(_SWAP, "swap_adamw_step", "platform/swapped_states.py: it counts steps in a tensor of the group"),
    Relied(
        _LATENT, "multi_latent_attention_init_impl", "upstream_fixes sets old names in the configuration", reads=True
    ),
    Relied(_ATTENTION, "TEDotProductAttention.forward", "qwen2_5_vl sets the tower's mask type", reads=True),
)


def recorded_calls(version: str) -> Record:
    record: Record = json.loads((CALLS / f"{version}.json").read_text())
    return record


def read_calls(source: Path) -> Record:
    """Read the present entries of `RELIED` from `source`, a checkout or site-packages folder.

    Values: the arguments of a function, in order; the attributes of `RELIED` that a class or its methods set; with `reads`,
    the attributes of `config` and `self.config` that a function reads. All except arguments are sorted.
    """
    record: Record = {}
    for relied in RELIED:
        file = source / "mindspeed" / relied.file
        node = _find(file, relied.name) if file.is_file() else None
        if node is None:
            continue
        if relied.reads:
            record[relied.key] = _config_reads(node)
        else:
            present = _attributes(node) & set(relied.attributes) if isinstance(node, ast.ClassDef) else None
            record[relied.key] = _arguments(node) if present is None else sorted(present)
    return record


def _find(file: Path, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Find the last definition of `name`, which counts when the module is executed."""
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    node: ast.ClassDef | ast.FunctionDef | None = None
    for part in name.split("."):
        matching = [n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part]
        if not matching:
            return None
        node = matching[-1]
        body = node.body
    return node


def _arguments(function: ast.FunctionDef | ast.ClassDef) -> list[str]:
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    return [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]


def _attributes(owner: ast.ClassDef) -> set[str]:
    """Class attributes, and attributes set on `self` or on an attribute of `self` (`self.optimizer.name`)."""
    names = set()
    for node in ast.walk(owner):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and node in owner.body:
                names.add(target.id)
            if isinstance(target, ast.Attribute) and ast.unparse(target).startswith("self."):
                names.add(ast.unparse(target).removeprefix("self."))
    return names


def _config_reads(function: ast.ClassDef | ast.FunctionDef) -> list[str]:
    return sorted(
        {
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node.value) in ("config", "self.config")
        }
    )


def write(source: Path) -> None:
    commit = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    table = replace(read_source(source), source=commit.stdout.strip())
    for folder, record in ((TABLES, asdict(table)), (CALLS, read_calls(source))):
        path = folder / f"{table.version}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write(Path(argument))
