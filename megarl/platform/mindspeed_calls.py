"""Functions and attributes of MindSpeed that megarl calls, or whose behaviour it depends on, read off its sources.

They are part of a `mindspeed_keys.Table`: the tables are recorded, so that tests compare megarl's calls with MindSpeed
where it is not installed. `RELIED` lists the places, each with the part of megarl that depends on it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from megarl.platform.swapped import HOST_TENSORS, SWAPS, TO_HOST

Record = dict[str, list[str]]


@dataclass(frozen=True)
class Relied:
    """A function, method or class of MindSpeed. `attributes` are those of a class; `reads`: whether to record which
    attributes of a `config` a function reads, instead of its arguments."""

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
    Relied("op_builder/builder.py", "MindSpeedOpBuilder.load", "platform/mindspeed_ops.py lets processes take turns"),
    Relied(
        _SWAP,
        "SwapDistributedOptimizer",
        "platform/swapped.py reads its host tensors",
        attributes=(HOST_TENSORS, TO_HOST, f"optimizer.{SWAPS}"),
    ),
    Relied(_SWAP, "swap_adamw_step", "platform/swapped.py: it counts steps in a tensor of the group"),
    Relied(_LATENT, "multi_latent_attention_init_impl", "upstream_fixes gives the configuration old names", reads=True),
    Relied(_ATTENTION, "TEDotProductAttention.forward", "qwen2_5_vl sets the tower's mask type", reads=True),
)


def read_calls(source: Path) -> dict[str, list[str]]:
    """Return what each of `RELIED` has in the checkout or site-packages folder `source`; those that are absent are left out.

    Functions: their arguments in order. Classes: which of the attributes their bodies set, or their methods on `self` or
    below it. With `reads`: attributes of `config` and `self.config`. Names are sorted except for arguments.
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
    """The last definition wins, as it does when the module is executed."""
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
    """Class attributes, and attributes set on `self` or on an attribute of it (`self.optimizer.name`)."""
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
