"""MindSpeed's settings: checks without an installation, compared with its sources if they are available.

MEGARL_MINDSPEED: a git directory of MindSpeed's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from docs.generate.supported_recipes import rows
from megarl import load_recipe
from megarl.errors import RecipeError
from megarl.hf import published
from megarl.megatron.extra_settings import adaptor_settings, check_extra
from megarl.platform.mindspeed import settings as mindspeed
from megarl.platform.mindspeed.contradictions import RULES, contradiction
from megarl.platform.mindspeed.source_keys import TABLES, Table, read_source
from megarl.recipe.schema import Recipe
from tests.support.mindspeed_calls import CALLS, RELIED, read_calls, recorded_calls
from tests.support.mindspeed_checkout import WITH_SOURCES, checkout, source_of
from tests.support.mindspeed_record import NEWEST

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(TABLES.glob("*.json"))
DENSE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8, "vocab_size": 1000}
SPARSE = {**DENSE, "num_experts": 8, "moe_intermediate_size": 96}


@pytest.fixture(autouse=True)
def table_of_0_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest table, whatever this machine has installed."""
    newest = Table(**json.loads((TABLES / "0.16.0.json").read_text()))
    monkeypatch.setattr(mindspeed, "table", lambda: newest)


def recipe(extra: dict[str, Any], device: str = "npu", **megatron: Any) -> Recipe:
    base = Recipe()
    base.cluster.device, base.megatron.extra = device, extra  # type: ignore[assignment]
    for name, value in megatron.items():
        setattr(base.megatron, name, value)
    return base


# --- names and values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"swap_optimiser": True}, r"swap_optimiser is not a field .* nor a setting of MindSpeed 0\.16\.0\. Nearest: swap_optimizer\."),
        ({"moe_router_dtypee": "fp32"}, r"Nearest: moe_router_dtype\."),
        ({"fused_permute_unpermute": True}, r"MindSpeed 0\.16\.0 has no setting of that name[\s\S]*write moe_permute_fusion"),
        ({"context_parallel_algo": "hybrid_cp"}, r"supports megatron_cp_algo, [\s\S]*write hybrid_cp_algo"),
        ({"swap_optimizer": "true"}, r"expects true or false"),
        ({"swap_optimizer_times": True}, r"of type int"),
        ({"use_fused_swiglu": True}, r"MindSpeed does not read it"),
        ({"moe_tp_extend_ep": True}, r"only with moe_token_dispatcher_type alltoall_seq"),
        ({"moe_permutation_async_comm": True}, r"only with moe_token_dispatcher_type alltoall_seq"),
        ({"moe_token_dispatcher_type": "alltoall_seq"}, r"moe_token_dispatcher_type = "),
        ({"npu_deterministic": True}, r"training loop[\s\S]*train\.deterministic"),
    ],
)  # fmt: skip
def test_settings_that_mindspeed_would_ignore_are_refused(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_extra(recipe(extra), DENSE, "megatron")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_mindspeed_settings_are_refused_on_other_devices(device: str) -> None:
    with pytest.raises(RecipeError, match=rf"critic\.megatron\.extra\.swap_optimizer[\s\S]*Ascend[\s\S]*on {device}"):
        check_extra(recipe({"swap_optimizer": True}, device), DENSE, "critic.megatron")
    check_extra(recipe({"moe_router_dtype": "fp32", "moe_grouped_gemm": True}, device), SPARSE, "megatron")


def test_recipes_for_ascend_are_checked_without_mindspeed() -> None:
    """MindSpeed settings in megarl's recipe for DeepSeek-V3 are valid."""
    path = ROOT / "recipes" / "grpo_deepseek_v3.yaml"
    check_extra(load_recipe(path), published.read("DeepSeek-V3"), "megatron")
    with pytest.raises(RecipeError, match="use_fused_rotary_pos_emb"):
        check_extra(load_recipe(path, ["cluster.device=cuda"]), published.read("DeepSeek-V3"), "megatron")


# --- what excludes each other --------------------------------------------------------------------

OVERLAP = {"moe_alltoall_overlap_comm": True}
HYBRID = {"context_parallel_algo": "hybrid_cp_algo"}
CP2, TP2 = {"context_parallel": 2}, {"tensor_parallel": 2}
# extra, megatron's keys, the same mended or None (nothing mends it), whether MindSpeed itself refuses: in order of RULES.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None, bool]] = [
    ("swap_optimizer", {"swap_optimizer": True}, {"distributed_optimizer": False}, None, True),
    ("reuse_fp32_param", {"reuse_fp32_param": True}, {}, {"swap_optimizer": True}, False),
    ("virtual_optimizer", {"virtual_optimizer": "all"}, {}, {"swap_optimizer": True}, False),
    ("quant_states", {"quant_states": "fp8"}, {}, {"swap_optimizer": True}, False),
    ("quant_grads", {"quant_grads": True}, {}, {"swap_optimizer": True}, False),
    ("gemm_gradient_accumulation_fusion", {"gemm_gradient_accumulation_fusion": True, "moe_grouped_gemm": False}, {}, {"gemm_gradient_accumulation_fusion": True}, True),
    ("moe_permute_fusion", {"moe_permute_fusion": True, "moe_token_dispatcher_type": "allgather"}, {}, {"moe_permute_fusion": True}, True),
    ("use_fused_moe_token_permute_and_unpermute", {"use_fused_moe_token_permute_and_unpermute": True, "moe_token_dispatcher_type": "allgather"}, {}, {"use_fused_moe_token_permute_and_unpermute": True}, True),
    ("use_ascend_mc2", {"use_ascend_mc2": True, "fp8": "hybrid"}, TP2, {"use_ascend_mc2": True}, True),
    ("use_ascend_mc2", {"use_ascend_mc2": True, "use_ascend_coc": True}, TP2, None, True),
    ("use_ascend_mc2", {"use_ascend_mc2": True, **OVERLAP}, TP2, None, True),
    ("use_ascend_mc2", {"use_ascend_mc2": True}, {}, None, False),
    ("use_ascend_coc", {"use_ascend_coc": True}, TP2, None, True),
    ("context_parallel_algo", {"context_parallel_algo": "ulysses_cp_algo"}, CP2, {}, True),
    ("context_parallel_algo", {"context_parallel_algo": "adaptive_cp_algo"}, CP2, {"context_parallel_algo": "kvallgather_cp_algo"}, True),
    ("context_parallel_algo", {"context_parallel_algo": "hybrid_adaptive_cp_algo", "ulysses_degree_in_cp": 2}, {"context_parallel": 4}, None, True),
    ("context_parallel_algo", HYBRID, {"context_parallel": 4}, {**HYBRID, "ulysses_degree_in_cp": 2}, True),
    ("context_parallel_algo", {**HYBRID, "ulysses_degree_in_cp": 2}, {"context_parallel": 4, "tensor_parallel": 8}, None, True),
    # MindSpeed's check is there, and is not reached.
    ("context_parallel_algo", {"context_parallel_algo": "kvallgather_cp_algo", "attention_mask_type": "general"}, CP2, None, False),
    ("cp_window_size", {"cp_window_size": 2}, CP2, {"cp_window_size": 1}, True),
    ("context_parallel_kv_cache_policy", {"context_parallel_kv_cache_policy": "full"}, {}, None, True),
    ("use_fused_rotary_pos_emb", {"use_fused_rotary_pos_emb": True, "position_embedding_type": "mrope"}, {}, {"use_fused_rotary_pos_emb": True}, True),
    ("use_flash_attn", {"sparse_mode": 4}, {}, {"sparse_mode": 2}, True),
    ("moe_zero_memory", {"moe_zero_memory": "level0"}, {}, {"moe_zero_memory": "level0", **OVERLAP}, True),
    ("moe_zero_memory_num_layers", {"moe_zero_memory_num_layers": 2}, {}, None, True),
    ("moe_alltoall_overlap_comm", {**OVERLAP, "moe_token_dispatcher_type": "allgather"}, {}, OVERLAP, True),
    ("moe_alltoall_overlap_comm", {**OVERLAP, "moe_grouped_gemm": False}, {}, None, True),
    ("moe_allgather_overlap_comm", {"moe_allgather_overlap_comm": True, "moe_permutation_async_comm": True}, {}, None, True),
    ("moe_shared_expert_overlap", {"moe_shared_expert_overlap": True}, TP2, {"moe_shared_expert_overlap": False}, False),
    ("moe_fb_overlap", {"moe_fb_overlap": True, "moe_grouped_gemm": False}, {"expert_parallel": 2}, None, True),
    ("moe_fb_overlap", {"moe_fb_overlap": True, **OVERLAP}, {"expert_parallel": 2}, None, True),
    ("moe_fb_overlap", {"moe_fb_overlap": True}, {}, None, True),
    ("moe_fb_overlap", {"moe_fb_overlap": True}, {"expert_parallel": 2, "ddp": {"overlap_grad_reduce": True}}, None, True),
    ("moe_unperm2_mem_optim_swap", {"moe_unperm2_mem_optim_swap": True}, {}, None, True),
    ("multi_head_latent_attention", {"multi_head_latent_attention": True}, {}, None, True),
    ("context_parallel_size", {"position_embedding_type": "mrope"}, CP2, {}, False),
]  # fmt: skip


def all_settings(extra: dict[str, Any], megatron: dict[str, Any]) -> dict[str, Any]:
    return adaptor_settings(recipe(extra, **megatron), SPARSE)


def test_each_rule_has_a_case() -> None:
    assert [rule.name for rule in RULES] == [name for name, *_ in CASES]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_contradictions_that_mindspeed_refuses_late_are_refused_early(number: int) -> None:
    """Each case is refused by its rule and not by an earlier one; the corrected case is accepted."""
    _, extra, megatron, mended, _ = CASES[number]
    assert contradiction(mindspeed.arguments(all_settings(extra, megatron))) is RULES[number]
    if mended is not None:
        assert contradiction(mindspeed.arguments(all_settings(mended, megatron))) is None


def test_a_contradiction_names_the_key_and_mindspeeds_file() -> None:
    swapped = recipe({"swap_optimizer": True}, distributed_optimizer=False)
    with pytest.raises(RecipeError, match=r"megatron\.extra\.swap_optimizer = true[\s\S]*swap_optimizer_feature\.py[\s\S]*megatron\.distributed_optimizer=true"):  # fmt: skip
        check_extra(swapped, SPARSE, "megatron")


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, True),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, True),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, False),
        ({"mscale_all_dim": 1.0}, True),
        ({}, False),
    ],
)
def test_latent_attention_that_mindspeed_scales_differently_is_refused(fields: dict[str, float], fits: bool) -> None:
    """The model is refused before a run starts, and only on Ascend; `test_mindspeed_scales_by_mscale` shows the
    difference."""
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, **fields}
    latent = {**DENSE, "kv_lora_rank": 512, "rope_scaling": scaling}
    check_extra(recipe({}, "cuda"), latent, "megatron")
    check_extra(recipe({}), {**latent, "rope_scaling": None}, "megatron")
    if fits:
        return check_extra(recipe({}), latent, "megatron")
    for section, key in (("megatron", r"model\.path"), ("critic.megatron", r"critic\.model_path")):
        with pytest.raises(RecipeError, match=rf"{key} = [\s\S]*mscale [\d.]+ and mscale_all_dim [\d.]+[\s\S]*cluster\.device: cuda"):  # fmt: skip
            check_extra(recipe({}), latent, section)


def test_norms_that_mindspeed_computes_differently_are_refused() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = {**DENSE, **experts, "model_type": "qwen3_next", "shared_expert_intermediate_size": 64}
    check_extra(recipe({}, "cuda"), model, "megatron")
    with pytest.raises(
        RecipeError, match=r"model\.path = [\s\S]*norms add 1 to their weights[\s\S]*cluster\.device: cuda"
    ):
        check_extra(recipe({}), model, "megatron")


@pytest.mark.parametrize(
    "name, what", [("DeepSeek-V3.2", "sparse attention"), ("ERNIE-4.5-21B-A3B-PT", "softmax and a bias")]
)
def test_layers_without_mindspeeds_kernels_are_refused(name: str, what: str) -> None:
    check_extra(recipe({}, "cuda"), model := published.read(name), "megatron")
    with pytest.raises(RecipeError, match=rf"model\.path = [\s\S]*{what}[\s\S]*cluster\.device: cuda"):
        check_extra(recipe({}), model, "megatron")


def test_context_parallel_with_images_is_refused() -> None:
    images = {"text_config": DENSE, "vision_config": {}}
    with pytest.raises(RecipeError, match=r"megatron\.context_parallel = 2[\s\S]*vision[\s\S]*context_parallel=1"):
        check_extra(recipe({}, context_parallel=2), images, "megatron")
    check_extra(recipe({}, "cuda", context_parallel=2), images, "megatron")
    check_extra(recipe({}, tensor_parallel=2), images, "megatron")


# --- the tables, and MindSpeed itself -------------------------------------------------------------

TREE = {
    "setup.py": "__version__ = '0.99.0'\n",
    "mindspeed/__init__.py": "",
    "mindspeed/features_manager/__init__.py": (
        "from mindspeed.features_manager.feature import MindSpeedFeature\n"
        "from mindspeed.features_manager.cut import Cut\n"
        "from mindspeed.features_manager.folder import Other\n"
    ),
    "mindspeed/features_manager/feature.py": "class MindSpeedFeature:\n    def __init__(self, name, level=2): pass\n",
    "mindspeed/features_manager/unused.py": "group.add_argument('--nobody-reads-it')\n",
    "mindspeed/features_manager/cut.py": (
        "_WAYS = ('ring', 'window')\n"
        "class Cut(MindSpeedFeature):\n"
        "    def __init__(self):\n"
        "        super().__init__('use-flash-attn')\n"
        "    def register_args(self, parser):\n"
        "        group.add_argument('--cut-way', type=str, choices=_WAYS)\n"
        "        group.add_argument('--no-gmm', action='store_false', dest='use_gmm')\n"
        "        group.add_argument('--cut-size', type=int, default=1)\n"
        "        self.add_parser_argument_choices_value(parser, '--cut-way', 'both')\n"
        "        self.add_parser_argument_choices_value(parser, '--tokenizer-type', 'ours')\n"
    ),
    "mindspeed/features_manager/folder/__init__.py": "from .other import Other\n",
    "mindspeed/features_manager/folder/other.py": (
        "class Other(MindSpeedFeature):\n"
        "    def __init__(self, feature_name: str = 'swap-all', optimization_level: int = 2):\n"
        "        super().__init__(feature_name, optimization_level)\n"
        "class Always(MindSpeedFeature):\n"
        "    def __init__(self):\n"
        "        super().__init__('basic', optimization_level=0)\n"
        "class Asks(MindSpeedFeature):\n"
        "    def __init__(self):\n"
        "        super().__init__('affinity')\n"
        "    def is_need_apply(self, args):\n"
        "        return True\n"
    ),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_table_is_read_from_sources(tree: Path) -> None:
    table = read_source(tree)
    assert table.version == "0.99.0"
    assert table.options == {"cut_way": ["ring", "window", "both"], "use_gmm": "flag", "cut_size": "int"}
    assert table.switches == ["swap_all", "use_flash_attn"]
    with pytest.raises(ValueError, match="has no mindspeed/features_manager"):
        read_source(tree / "mindspeed")


def test_unreadable_sources_are_named_with_their_line(tree: Path) -> None:
    cut = tree / "mindspeed/features_manager/cut.py"
    cut.write_text("from elsewhere import FLAG\n" + cut.read_text().replace("'--cut-way', type", "FLAG, type"))
    with pytest.raises(
        ValueError, match=r"cut\.py, line \d+: FLAG is not a literal value: megarl does not support this MindSpeed"
    ):
        read_source(tree)


def test_the_table_follows_the_installed_versions(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the fixture's table
    of = mindspeed.table.__wrapped__
    for megatron, version in (("0.12.1", "0.12.1"), ("0.16.1", "0.16.0"), ("0.99.9", "0.16.0"), ("", "0.16.0")):
        monkeypatch.setattr(mindspeed, "version_of", lambda _, version=megatron: version)
        assert of().version == version
    monkeypatch.syspath_prepend(str(tree))
    assert of().version == "0.99.0" and "use_gmm" in of().options


def test_calls_are_read_from_sources(tmp_path: Path) -> None:
    """Arguments in order, attributes of a class, reads of a configuration; absent entries are left out."""
    place = tmp_path / "mindspeed" / "core/optimizer/swap_optimizer/swap_optimizer.py"
    for file in ("megatron_adaptor.py", "core/transformer/multi_head_latent_attention/adaptor.py"):
        (tmp_path / "mindspeed" / file).parent.mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True)
    (tmp_path / "mindspeed" / "megatron_adaptor.py").write_text("def repatch(b, a, *, c=1): pass\n")
    (tmp_path / "mindspeed" / "core/transformer/multi_head_latent_attention/adaptor.py").write_text(
        "def multi_latent_attention_init_impl(self, config):\n    self.config.written = config.b + self.config.a\n"
    )
    place.write_text(
        "class SwapDistributedOptimizer:\n"
        "    param_to_cpu_states_map = {}\n"
        "    def __init__(self):\n"
        "        self.optimizer.is_swap_optimizer = True\n"
        "        swap_to_host_stream = None\n"
    )
    swap = "core/optimizer/swap_optimizer/swap_optimizer.py:SwapDistributedOptimizer"
    latent = "core/transformer/multi_head_latent_attention/adaptor.py:multi_latent_attention_init_impl reads config"
    assert read_calls(tmp_path) == {
        "megatron_adaptor.py:repatch": ["b", "a", "c"],
        swap: ["optimizer.is_swap_optimizer", "param_to_cpu_states_map"],
        latent: ["a", "b"],
    }


def test_every_relied_on_call_is_recorded() -> None:
    """Every place that RELIED lists is in the newest record, and the stand-in for MindSpeed's entry has its arguments."""
    calls = recorded_calls(NEWEST)
    assert sorted(path.name for path in CALLS.iterdir()) == [path.name for path in SHIPPED]
    assert calls.keys() == {relied.key for relied in RELIED}
    for relied in RELIED:
        assert set(relied.attributes) <= set(calls[relied.key]), relied
    stand_in = ROOT / "tests" / "stand_ins" / "ascend"
    assert read_calls(stand_in)["megatron_adaptor.py:repatch"] == calls["megatron_adaptor.py:repatch"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@WITH_SOURCES
def test_recorded_tables_equal_the_sources(path: Path, tmp_path: Path) -> None:
    """A new table equals the recorded one and the options of MindSpeed's argument parser."""
    shipped = Table(**json.loads(path.read_text()))
    source = checkout(shipped.source, tmp_path)
    table = read_source(source)
    text = "".join(file.read_text() for file in (source / "mindspeed").rglob("*.py") if file.name != "arguments.py")
    assert text.count("use_fused_swiglu") == 0 and text.count("use-fused-swiglu") == 1, (
        "more than the option has its name"
    )
    assert asdict(table) | {"source": shipped.source} == asdict(shipped)
    assert read_calls(source) == recorded_calls(shipped.version)
    real = run_mindspeed(source, [])["options"]
    assert {name: sorted(kind, key=str) if isinstance(kind, list) else None for name, kind in table.options.items()} == real  # fmt: skip


@pytest.mark.slow
@WITH_SOURCES
def test_mindspeed_refuses_the_same_contradictions(tmp_path: Path) -> None:
    """Each case, and its mended one, in MindSpeed's own code. Of core_r0.16.0, which the installed Megatron is for."""
    tries = [
        (name, attempt, attempt is extra, refuses, {"settings": all_settings(attempt, megatron), "latent": False})
        for name, extra, megatron, mended, refuses in CASES
        for attempt in ([extra] if mended is None else [extra, mended])
    ]
    errors = run_mindspeed(source_of("0.16.0", tmp_path), [case for *_, case in tries])["errors"]
    wrong, unknown = [], []
    for (name, extra, broken, refuses, _), error in zip(tries, errors, strict=True):
        if "needs the module megatron.training" in str(error):  # a feature for Megatron's own training loop as well
            unknown.append(name)
        elif bool(error) != (broken and refuses):
            wrong.append((name, extra, error))
    assert not wrong
    whole = {"reuse_fp32_param", "virtual_optimizer", "swap_optimizer", "moe_fb_overlap", "moe_unperm2_mem_optim_swap"}
    assert set(unknown) <= whole | {"use_ascend_mc2", "use_ascend_coc"}, (
        "these may need it, depending on other settings"
    )


@pytest.mark.slow
@WITH_SOURCES
def test_mindspeed_accepts_the_published_recipes(tmp_path: Path) -> None:
    """MindSpeed's features and configuration checks accept the settings of each published recipe."""
    cases = []
    for row in rows():
        model = published.read(row.shape)
        settings = adaptor_settings(load_recipe(row.path), model)
        cases.append({"settings": settings, "latent": settings["multi_latent_attention"]})
    errors = run_mindspeed(source_of("0.16.0", tmp_path), cases)["errors"]
    assert len(errors) == len(rows()) and not any(errors), list(zip((row.path.name for row in rows()), errors, strict=True))  # fmt: skip


@pytest.mark.slow
@WITH_SOURCES
def test_a_model_is_built_from_mindspeeds_modules(quickstart_data: Path, tmp_path: Path) -> None:
    """Megatron's model, mbridge's names and MindSpeed's modules fit each other: all weights find their place."""
    cases = {"build": [f"model.path={quickstart_data}/model", "model.dtype=bfloat16", "cluster.trainers=1"]}
    output = run_mindspeed(source_of("0.16.0", tmp_path), cases)
    assert {"TEColumnParallelGroupedLinear", "TELayerNormColumnParallelLinear"} <= set(output["mindspeeds"])
    assert output["differ"] == [] and output["compared"] > 20


def run_mindspeed(source: Path, cases: Any) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "support" / "mindspeed_worker.py"), str(source)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=900, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
