"""The NPU platform with stand-ins for the functions of torch_npu and MindSpeed, and environments of roles.

The stand-ins' functions are compared with the sources: torch_npu's wheel (`tests.support.upstream_sources`), and MindSpeed's where
MEGARL_MINDSPEED names a git directory of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl import load_recipe, platform
from megarl.engines import engine_env, rollout_env
from megarl.engines.specs import policy_spec
from megarl.errors import RecipeError
from megarl.megatron.model import build as models
from megarl.platform import environment
from megarl.platform.cpu import CPUPlatform
from megarl.platform.cuda import CUDAPlatform
from megarl.platform.device_kind import DeviceKind
from megarl.platform.environment import NEEDED, RoleSettings, users_first
from megarl.platform.npu import NPUPlatform
from megarl.platform.npu_kind import NPU
from megarl.preflight.environment import environment_notices
from megarl.recipe.schema import Recipe
from megarl.rollout.start_engines import engine_environment
from tests.support.upstream_sources import missing, torch_npu

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "stand_ins" / "ascend"
MINDSPEED, TORCH_NPU = os.environ.get("MEGARL_MINDSPEED", ""), torch_npu()


def test_activation_of_a_trainer() -> None:
    """Import order, command line hidden from MindSpeed, NPU preferred to CUDA, and the calls afterwards."""
    code = """
import sys
from pathlib import Path
sys.argv += ["train", "--debug"]
import torch
torch.cuda.is_available = lambda: True
from megarl import platform
import types
def imports_what_is_not_there(name):
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
alias = sys.modules["transformers.alias"] = types.ModuleType("transformers.alias")
alias.__getattr__ = imports_what_is_not_there
npu = platform.select("auto")
assert npu.name == "npu" == platform.kind(), npu.name
npu.prepare(); npu.prepare()
import torch_npu
from mindspeed.megatron_adaptor import repatched
assert torch_npu.called == ["import torch_npu", "import mindspeed.megatron_adaptor with 0 arguments"], torch_npu.called
assert sys.argv[1:] == ["train", "--debug"]
npu.adapt({"context_parallel_size": 2, "swap_optimizer": True})
npu.adapt({"use_flash_attn": False})
assert repatched == [{"use_flash_attn": True, "context_parallel_size": 2, "swap_optimizer": True}, {"use_flash_attn": False}]
try:
    npu.adapt({"needs": 1})
except ValueError as error:
    assert "needs the module megatron.training" in str(error), error
else:
    raise AssertionError("a missing module raised no error")
assert alias.__getattr__ is imports_what_is_not_there
npu.set_device(3); npu.empty_cache()
assert torch_npu.called[2:] == ["set_device(3)", "empty_cache()"]
assert (npu.peak_memory(), npu.device_name()) == (3.0, "Ascend910B1")
from megarl.platform.tracing import TraceOptions
trace = npu.profiler(Path("runs"), "rank0", TraceOptions())
trace.start(); trace.stop()
plain = "profile (['cpu', 'npu'], ['shapes'], ('Level0', 'AiCoreNone', 'Text', False), ('runs', 'rank0'))"
assert torch_npu.called[4:] == [plain, "profiled"], torch_npu.called
npu.profiler(Path("runs"), "rank0", TraceOptions(("device", "memory", "modules"), "level1", "L2Cache", "db", True, False)).start()
full = "profile (['npu'], ['memory', 'modules'], ('Level1', 'L2Cache', 'Db', True), ('runs', 'rank0', 'not analysed'))"
assert torch_npu.called[6:] == [full], torch_npu.called
npu.profiler(Path("runs"), "rank0", TraceOptions(level="level_none", marks=True)).start()
assert "('Level_none', 'AiCoreNone', 'Text', True)" in torch_npu.called[7], torch_npu.called
sys.modules["megatron.core"] = sys; del sys.modules["mindspeed.megatron_adaptor"]
try:
    npu.prepare()
except AssertionError as error:
    assert "before megatron" in str(error)
else:
    raise AssertionError("patched after Megatron was imported")
"""
    environ = os.environ | {"PYTHONPATH": f"{STAND_INS}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr


def test_the_adaptor_runs_before_model_parallel_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call would miss MindSpeed's part of initialize_model_parallel, and context parallel would have no
    groups."""
    recipe = load_recipe(ROOT / "recipes/grpo_qwen3_235b.yaml", ["megatron.extra.attention_backend=flash"])
    heads = {"num_attention_heads": 64, "num_experts": 128}
    order: list[Any] = []

    class Stop(Exception):
        pass

    def initialize(*_: Any) -> None:
        order.append("initialize")
        raise Stop

    monkeypatch.setattr(models, "read_model_config", lambda path, **_: SimpleNamespace(to_dict=lambda: heads))
    monkeypatch.setattr(models, "check_layout", lambda *_: None)
    monkeypatch.setattr(models.torch.distributed, "get_world_size", lambda: 128)
    monkeypatch.setattr(models, "initialize_parallel", initialize)
    with pytest.raises(Stop):
        models.build(recipe, SimpleNamespace(adapt=order.append))  # type: ignore[arg-type]
    settings, then = order
    from megatron.core.transformer.enums import AttnBackend

    assert then == "initialize" and settings["attention_backend"] is AttnBackend.flash
    megatron = recipe.megatron
    assert settings["tensor_model_parallel_size"] == megatron.tensor_parallel
    assert settings["use_distributed_optimizer"] and settings["moe_permute_fusion"] and settings["num_experts"] == 128
    recipe.megatron.extra["attention_backend"] = "flush"
    with pytest.raises(ValueError, match="attention_backend is 'flush'; Megatron has flash, "):
        models.build(recipe, SimpleNamespace(adapt=order.append))  # type: ignore[arg-type]


@pytest.mark.parametrize(("platform", "tensor", "overlaps"), [(NPUPlatform(), 2, False), (NPUPlatform(), 1, None), (CUDAPlatform(), 2, None)])  # fmt: skip
def test_shared_expert_overlap_is_off_under_tensor_parallel(platform: Any, tensor: int, overlaps: Any) -> None:
    """mbridge enables the overlap; with tensor parallel, MindSpeed's linears would gather twice and compute another
    model."""
    recipe, config = Recipe(), SimpleNamespace(model_type="deepseek_v3", to_dict=lambda: {"n_routed_experts": 8})
    recipe.megatron.tensor_parallel = tensor
    assert models._transformer_settings(recipe, config, platform).get("moe_shared_expert_overlap") is overlaps
    recipe.megatron.extra["moe_shared_expert_overlap"] = True
    assert models._transformer_settings(recipe, config, platform)["moe_shared_expert_overlap"]


def test_duplicated_weights_count_once_in_the_gradient_norm() -> None:
    """MindSpeed marks latent attention's down projections as divided over tensor-parallel ranks, which hold them whole."""
    chunk = torch.nn.ModuleDict({"down": torch.nn.Linear(2, 2), "up": torch.nn.Linear(2, 2)})
    chunk["down"].parallel_mode, chunk["up"].parallel_mode = "duplicated", "column"
    for parameter in chunk.parameters():
        parameter.tensor_model_parallel = True
    models._mark_duplicates(chunk)
    assert [p.tensor_model_parallel for p in chunk.parameters()] == [False, False, True, True]


def test_adapt_does_nothing_on_other_devices() -> None:
    for other_platform in (CPUPlatform(), CUDAPlatform()):
        other_platform.adapt({"context_parallel_size": 2})


# --- environments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout", "connect", "run"), [(60, "120", "60"), (1800.5, "1801", "1801"), (9000, "7200", "9000")])  # fmt: skip
def test_collective_timeouts_follow_the_recipe(timeout: float, connect: str, run: str) -> None:
    env = NPUPlatform().trainer_env(timeout)
    assert (env["HCCL_CONNECT_TIMEOUT"], env["HCCL_EXEC_TIMEOUT"]) == (connect, run)


def test_task_queue_differs_between_roles() -> None:
    trainer, engine = NPUPlatform().trainer_env(60), NPUPlatform().rollout_env()
    assert (trainer["TASK_QUEUE_ENABLE"], engine["TASK_QUEUE_ENABLE"]) == ("2", "1")
    for name in ("PYTORCH_NPU_ALLOC_CONF", "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        assert name in trainer and name in engine
    assert not [name for name in trainer | engine if name.endswith("IFNAME")], "which interface is each node's own"


def test_a_users_variable_is_kept_with_a_notice() -> None:
    defaults, users = (
        {"HCCL_CONNECT_TIMEOUT": "1800", "TASK_QUEUE_ENABLE": "2"},
        {"HCCL_CONNECT_TIMEOUT": "5400", "A": "1"},
    )
    assert users_first(defaults, users) == {"HCCL_CONNECT_TIMEOUT": "5400", "TASK_QUEUE_ENABLE": "2"}
    notice = "the environment has HCCL_CONNECT_TIMEOUT=5400, which is kept; otherwise trainers would get HCCL_CONNECT_TIMEOUT=1800"
    assert RoleSettings("trainers", defaults).notices(users) == [notice]
    assert RoleSettings("trainers", defaults).notices(defaults) == []
    memory, other = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, {"PYTORCH_ALLOC_CONF": ""}
    assert users_first(memory, other) == other, "torch_npu refuses both"
    assert "PYTORCH_ALLOC_CONF=," in RoleSettings("trainers", memory).notices(other)[0]


@pytest.mark.parametrize(
    "variable, value, engine_args, has",
    [
        ("VLLM_ASCEND_ENABLE_NZ", "1", {}, "0"),
        ("VLLM_ASCEND_ENABLE_NZ", "", {}, "0"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", {}, "expandable_segments:False"),
        ("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64", {}, "max_split_size_mb:64"),
        ("PYTORCH_ALLOC_CONF", "a:1,expandable_segments:true", {}, "expandable_segments:False"),
        ("TASK_QUEUE_ENABLE", "0", {}, "0"),
        ("TASK_QUEUE_ENABLE", "2", {}, "1"),
        ("TASK_QUEUE_ENABLE", "1", {"enforce_eager": True, "disable_cuda_graph": True}, "1"),
        ("HCCL_EXEC_TIMEOUT", "77", {}, "77"),
        ("ASCEND_LAUNCH_BLOCKING", "1", {}, "0"),
        ("RANK_TABLE_FILE", "/user/serverid/devindex/config/hccl.json", {}, ""),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engines_variables_agree_with_its_notice(engine, variable, value, engine_args, has, monkeypatch) -> None:
    """The engine has the user's value, except for values with which it would be wrong."""
    monkeypatch.setitem(environment._SHELL, variable, value)
    recipe, platform = Recipe(), NPUPlatform()
    recipe.rollout.engine, recipe.rollout.engine_args = engine, engine_args
    variables = engine_env(engine, platform.rollout_env(), 1, engine_args)
    assert variables[variable] == has
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"} <= variables.keys(), "torch_npu refuses both"
    matching = [
        notice
        for notice in environment_notices(recipe, platform, training=False)
        if f"has {variable}={value}, " in notice
    ]
    assert len(matching) == 1 and ("which is kept" in matching[0]) == (has == value)
    assert has == value or f"overridden: engines get {variable}={has or chr(34) * 2}, since " in matching[0]


@pytest.mark.parametrize(("engine", "eager"), [("vllm", "enforce_eager"), ("sglang", "disable_cuda_graph")])
def test_an_engine_with_graphs_refuses_blocking_launches(engine: str, eager: str) -> None:
    """vllm-ascend ends the start of an engine ("ACL graph is incompatible with ASCEND_LAUNCH_BLOCKING=1")."""
    blocking, platform = {"ASCEND_LAUNCH_BLOCKING": "1"}, NPUPlatform()
    engines = rollout_env(engine, platform.rollout_env(), {})
    with pytest.raises(RecipeError, match=rf"(?s)engines.ASCEND_LAUNCH_BLOCKING = '1'.*{eager}"):
        RoleSettings("engines", engines, blocking).check()
    without_graphs = RoleSettings("engines", rollout_env(engine, platform.rollout_env(), {eager: True}), blocking)
    assert without_graphs.environment({})["ASCEND_LAUNCH_BLOCKING"] == "1" and without_graphs.notices(blocking) == []
    trainers = RoleSettings("trainers", platform.trainer_env(60), blocking)
    assert trainers.environment({})["ASCEND_LAUNCH_BLOCKING"] == "1"


def test_no_role_forms_its_groups_from_a_sites_rank_table() -> None:
    shell, platform = {"RANK_TABLE_FILE": "/job/hccl.json"}, NPUPlatform()
    for role, defaults in (("trainers", platform.trainer_env(60)), ("engines", platform.rollout_env())):
        settings = RoleSettings(role, defaults)
        assert settings.environment(shell)["RANK_TABLE_FILE"] == ""
        (notice,) = settings.notices(shell)
        assert f'overridden: {role} get RANK_TABLE_FILE="", since a rank table describes one group' in notice


def test_a_users_variable_does_not_disable_determinism() -> None:
    hccl, nccl = NPUPlatform().deterministic_env(), CUDAPlatform().deterministic_env()
    assert users_first(hccl, {"HCCL_DETERMINISTIC": "false", "LCCL_DETERMINISTIC": "0"}) == hccl
    assert users_first(nccl, {"NCCL_ALGO": "Tree"}) == nccl
    assert "overridden: trainers get NCCL_ALGO=Ring" in RoleSettings("trainers", nccl).notices({"NCCL_ALGO": "Tree"})[0]
    stays = {"HCCL_DETERMINISTIC": "strict"}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert users_first(hccl, stays[0]) == hccl | stays[0] and users_first(nccl, stays[1]) == nccl | stays[1]


def test_needed_values_equal_those_that_platforms_set() -> None:
    """A value that changes only in a platform would no longer be compared with the user's."""
    engines = [rollout_env(engine_name, NPUPlatform().rollout_env(), {}) for engine_name in ("vllm", "sglang")]
    roles = [*engines, NPUPlatform().deterministic_env(), CUDAPlatform().deterministic_env()]
    roles.append(NPUPlatform().deterministic_rollout_env())
    assert NEEDED.keys() <= {setting for role in roles for setting in role.items()}
    deterministic = {setting for role in roles[2:] for setting in role.items()}
    assert deterministic <= NEEDED.keys()


def test_a_deterministic_run_configures_the_devices_libraries() -> None:
    recipe = Recipe()
    recipe.cluster.timeout, recipe.train.source = 60, "sft"
    assert environment_notices(recipe, NPUPlatform()) == []
    for device_platform, name in ((NPUPlatform(), "HCCL_DETERMINISTIC"), (CUDAPlatform(), "CUBLAS_WORKSPACE_CONFIG")):
        assert name in device_platform.deterministic_env() and name not in device_platform.trainer_env(60)


def test_engine_specs_name_their_device() -> None:
    from megarl.rollout.start_engines import start_engines

    specs: list[Any] = []
    cluster = SimpleNamespace(start_service=lambda server, args, **_: specs.append(args[1]))
    start_engines(Recipe(), [], CPUPlatform(), cluster, traces=None, updated=False)  # type: ignore[arg-type]
    assert [spec.device for spec in specs] == ["cpu"]


def test_processes_start_in_their_roles_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`connect` and `start_engines` pass the variables of the shell, the recipe and the platform, in this precedence."""
    from megarl import cluster

    received: dict[str, Any] = {}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setitem(environment._SHELL, "HCCL_EXEC_TIMEOUT", "77")
    monkeypatch.setattr("megarl.cluster.torchrun.cluster.TorchrunCluster", lambda *_, **roles: received.update(roles))
    recipe = Recipe()
    recipe.train.deterministic = True
    cluster.connect(recipe, NPUPlatform())
    trainer, spec = received["trainer_env"], policy_spec(recipe, "engine0", updated=False)
    engine = engine_environment(recipe, NPUPlatform(), "vllm", spec).environment()
    assert (trainer["HCCL_EXEC_TIMEOUT"], engine["HCCL_EXEC_TIMEOUT"]) == ("77", "77")
    assert trainer["HCCL_DETERMINISTIC"] == "true" and engine["HCCL_DETERMINISTIC"] == "strict"
    assert engine["VLLM_BATCH_INVARIANT"] == "1" and "VLLM_BATCH_INVARIANT" not in trainer
    assert trainer["OMP_NUM_THREADS"] == "1"
    assert (
        len([notice for notice in environment_notices(recipe, NPUPlatform()) if "HCCL_EXEC_TIMEOUT=77" in notice]) == 2
    )


# --- the stand-ins, and the sources ----------------------------------------------------------------


def parameters(source: str, name: str, owner: str = "") -> str:
    """Parameters of a function or method in `source`, without types."""
    tree: ast.AST = ast.parse(source)
    if owner:
        tree = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner)
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    for argument in [*function.args.args, *function.args.kwonlyargs]:
        argument.annotation = None
    return ast.unparse(function.args)


def argument_names(source: str, name: str, owner: str = "") -> set[str]:
    """The arguments that a function takes, without their defaults: torch_npu's versions write those differently."""
    arguments = ast.parse(f"def f({parameters(source, name, owner)}): ...").body[0].args  # type: ignore[attr-defined]
    return {item.arg for item in [*arguments.args, *arguments.kwonlyargs]}


@pytest.mark.skipif(not MINDSPEED, reason="MEGARL_MINDSPEED names no git directory of MindSpeed's")
@pytest.mark.parametrize("commit", ["core_r0.16.0", "f2b0977e"])
def test_mindspeeds_entry_equals_the_stand_in(commit: str) -> None:
    show = ["git", "-C", MINDSPEED, "show", f"{commit}:mindspeed/megatron_adaptor.py"]
    source = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    stand_in = (STAND_INS / "mindspeed" / "megatron_adaptor.py").read_text()
    assert parameters(source, "repatch") == parameters(stand_in, "repatch")
    last = ast.unparse(ast.parse(source).body[-1])
    assert last == "patch_features()", "importing it patches"
    assert "from torch_npu.contrib import transfer_to_npu" in source


@pytest.mark.skipif(TORCH_NPU is None, reason=missing("torch_npu"))
@pytest.mark.parametrize(
    "name", ["set_device", "current_device", "get_device_name", "empty_cache", "max_memory_allocated"]
)
def test_torch_npus_functions_equal_the_stand_in(name: str) -> None:
    assert TORCH_NPU is not None
    files = [*Path(TORCH_NPU, "torch_npu", "npu").glob("*.py")]
    defining = [text for text in (file.read_text() for file in files) if f"\ndef {name}(" in text]
    assert len(defining) == 1, f"{name} is defined in {len(defining)} files of torch_npu/npu"
    stand_in = (STAND_INS / "torch_npu" / "__init__.py").read_text()
    assert parameters(defining[0], name) == parameters(stand_in, name)


@pytest.mark.skipif(TORCH_NPU is None, reason=missing("torch_npu"))
def test_torch_npus_profiler_equals_the_stand_in() -> None:
    assert TORCH_NPU is not None
    source = Path(TORCH_NPU, "torch_npu", "profiler", "profiler.py").read_text()
    stand_in = (STAND_INS / "torch_npu" / "profiler.py").read_text()
    for name, owner in (("tensorboard_trace_handler", ""), ("start", "profile"), ("stop", "profile")):
        assert argument_names(source, name, owner) == argument_names(stand_in, name, owner), name
    assert argument_names(stand_in, "__init__", "profile") <= argument_names(source, "__init__", "profile")
    exported = Path(TORCH_NPU, "torch_npu", "profiler", "__init__.py").read_text()
    assert '"ProfilerActivity"' in exported
    settings = Path(TORCH_NPU, "torch_npu", "profiler", "experimental_config.py").read_text()
    theirs, ours = (argument_names(text, "__init__", "_ExperimentalConfig") for text in (settings, stand_in))
    assert theirs == ours
    for owner in ("ProfilerLevel", "AiCMetrics", "ExportType"):
        assert names_in(settings, owner) == names_in(stand_in, owner), owner


def names_in(source: str, owner: str) -> set[str]:
    """The names that a class of `source` assigns."""
    body = next(item.body for item in ast.parse(source).body if isinstance(item, ast.ClassDef) and item.name == owner)
    return {
        name.id
        for item in body
        for name in ast.walk(item)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def test_profiler_values_of_recipes_exist_in_torch_npu() -> None:
    stand_in, can = (STAND_INS / "torch_npu" / "profiler.py").read_text(), NPU.tracing
    assert {level.capitalize() for level in can.levels} == names_in(stand_in, "ProfilerLevel")
    assert {*can.metrics, "AiCoreNone"} == names_in(stand_in, "AiCMetrics")
    assert {export.capitalize() for export in can.exports} == names_in(stand_in, "ExportType")


def test_npu_has_precedence_over_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch_npu, `torch.cuda` answers for NPUs once MindSpeed is active."""
    monkeypatch.setattr(DeviceKind, "is_here", lambda kind: True)
    assert (platform.kind(), platform.kind("cuda")) == ("npu", "cuda")
