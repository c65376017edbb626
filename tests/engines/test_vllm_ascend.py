"""Versions of vllm-ascend: settings that are rejected before an engine starts. tests/engines/test_vllm_ascend_wake.py: waking up.

No test runs on a device. megarl's table of versions is compared with each version's source: the versions in
launch/sources-dev.txt from their wheels, all where MEGARL_VLLM_ASCEND names a git directory of vllm-ascend."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

from megarl import load_recipe
from megarl.engines import arguments_of, engine_env
from megarl.engines.base import EngineSpec
from megarl.engines.vllm import ascend
from megarl.engines.vllm.args import build_engine_args, check_plan
from megarl.errors import RecipeError
from megarl.preflight.engines_and_devices import check_device
from tests.support.upstream_sources import missing, torch_npu, unpacked

ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("MEGARL_VLLM_ASCEND")
# Git references of the versions in megarl's table.
_VERSIONS = (
    "0.11.0rc1 0.11.0 0.12.0rc1 0.13.0 0.14.0rc1 0.15.0rc1 0.16.0rc1 0.17.0rc1 0.18.0rc1 0.18.0 0.19.1rc1 0.20.2rc1 "
    "0.21.0rc1 0.22.1rc1 0.23.0rc1 0.23.0 0.24.0rc1 0.25.1rc1"
)
REFERENCES = {version: f"v{version}" for version in _VERSIONS.split()} | {"0.26.0rc1": "releases/v0.26.0rc"}
EACH = pytest.mark.parametrize(
    "version",
    [
        pytest.param(
            version,
            marks=pytest.mark.skipif(
                not SOURCES and unpacked("vllm-ascend", version) is None,
                reason=missing(f"vllm-ascend {version}")
                if version in ("0.18.0", "0.23.0")
                else "MEGARL_VLLM_ASCEND names no git directory of vllm-ascend, and CI has the wheels of two versions",
            ),
        )
        for version in REFERENCES
    ],
)


# --- the table against the sources --------------------------------------------------------------


def git(*arguments: str) -> str:
    assert SOURCES
    done = subprocess.run(["git", "-C", SOURCES, *arguments], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: grep found nothing
    return done.stdout


@functools.cache
def files_of(version: str) -> dict[str, str]:
    """Texts of the version's Python files, by their paths below vllm_ascend/."""
    if not SOURCES:
        wheel = unpacked("vllm-ascend", version)
        assert wheel is not None
        package = wheel / "vllm_ascend"
        return {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    ref = REFERENCES[version]
    paths = [
        path for path in git("ls-tree", "-r", "--name-only", ref, "--", "vllm_ascend").split() if path[-3:] == ".py"
    ]
    return {path.removeprefix("vllm_ascend/"): git("show", f"{ref}:{path}") for path in paths}


def source(version: str, *files: str) -> str:
    """Return the text of the first of `files` that the version has, or ""."""
    return next((files_of(version)[file] for file in files if file in files_of(version)), "")


def method(text: str, name: str) -> str:
    """The first method called `name`, up to the next."""
    match = re.search(rf"^    def {name}\(.*?(?=^    def |^class |\Z)", text, re.M | re.S)
    return match[0] if match else ""


@EACH
def test_keys_equal_those_that_the_version_reads(version: str) -> None:
    """A wrong table would refuse a supported key, or accept a key that the version ignores."""
    texts = [text for text in files_of(version).values() if "additional_config" in text]
    assert ascend.keys_in(texts) == ascend.keys_of(Version(version))


@EACH
def test_features_equal_those_of_the_version(version: str) -> None:
    """Weights left in NZ, graphs that read old weights of MLA, missing routed experts."""
    has = ascend.features(Version(version))
    assert "VLLM_ASCEND_ENABLE_NZ" in source(version, "envs.py")
    wake = method(source(version, "worker/worker_v1.py", "worker/worker.py"), "wake_up")
    assert ("weight_nz_mode" in wake) == has.weight_nz_key
    assert "raise ValueError" in wake, "it wakes up with weights in NZ"
    latent = method(source(version, "attention/mla_v1.py"), "process_weights_after_loading")
    assert ("self.W_UV.copy_(" in latent and "self.W_UK_T.copy_(" in latent) == has.mla_in_place
    assert "self.W_UV = W_UV.transpose(0, 1).contiguous()" in latent
    runner = source(version, "worker/model_runner_v1.py")
    assert ("model_config.enable_return_routed_experts" in runner) == has.routed_experts


@EACH
def test_wake_up_replaces_experts_in_the_versions_of_put_back(version: str) -> None:
    """Otherwise put_back names wrong versions, or vllm-ascend no longer replaces parameters."""
    wake = method(source(version, "worker/worker_v1.py", "worker/worker.py"), "wake_up")
    turns = "w13_data = torch.nn.Parameter(w13_data, requires_grad=False)" in " ".join(wake.split())
    assert turns == (Version(version) >= Version("0.12.0rc1"))
    assert ("setattr(parent_module, param_name, w2_data)" in wake) == turns


@EACH
def test_experts_are_repacked_only_from_loaded_weights(version: str) -> None:
    """If a method keeps copies of weights, or transposes weights twice, a layerwise reload would mix old and new ones."""
    if Version(version) < Version("0.13.0"):
        pytest.skip("no layerwise reload in its vLLM")
    text = source(version, "ops/fused_moe/fused_moe.py")
    repack = " ".join(method(text, "process_weights_after_loading").split())
    for name in ("w13_weight", "w2_weight"):
        assert f"self._maybe_pad_weight(layer.{name}.data).transpose( 1, 2).contiguous()" in repack or (
            f"self._maybe_pad_weight(layer.{name}.data).transpose(1, 2).contiguous()" in repack
        )
    assert "super(UnquantizedFusedMoEMethod, self).process_weights_after_loading" in repack, "it may make a kernel"
    assert "moe_kernel" not in text.replace("moe_kernel_size", "")


@EACH
def test_sleep_refuses_expandable_segments(version: str) -> None:
    """An engine that sleeps with expandable segments keeps its memory; vllm-ascend asks for them itself without sleep."""
    assert '"expandable_segments:True" not in' in source(version, "device_allocator/camem.py")
    if "expandable_segments:True" in (platform := source(version, "platform.py")):
        assert "enable_sleep_mode" in platform


# --- additional_config --------------------------------------------------------------------------


@pytest.fixture
def running(monkeypatch):
    """Makes vllm-ascend of some version the installed one, with the keys of the table."""

    def set_version(version: str | None) -> None:
        monkeypatch.setattr(ascend, "installed", lambda: Version(version) if version else None)
        keys = ascend.keys_of(Version(version)) if version else frozenset()
        monkeypatch.setattr(ascend, "_keys_installed", lambda: keys)

    return set_version


def refusal(config: object) -> str:
    with pytest.raises(ValueError) as error:
        arguments_of("vllm").check_engine_args({"additional_config": config}, "rollout")
    return str(error.value)


def test_keys_of_a_version(running) -> None:
    running("0.11.0rc1")
    arguments_of("vllm").check_engine_args(
        {"additional_config": {"torchair_graph_config": {"enabled": False}, "refresh": True}}, "rollout"
    )
    assert "does not read it, versions from 0.13.0 on do" in refusal({"eplb_config": {}})
    running("0.23.1.dev4+g1234567")  # a checkout of releases/v0.23.0
    arguments_of("vllm").check_engine_args({"additional_config": {"enable_sleep_mode_extra_cleanup": True}}, "rollout")
    message = refusal({"torchair_graph_config": {}})
    assert (
        "vllm-ascend 0.23.1.dev4+g1234567 does not read it, versions from 0.11.0rc1 until before 0.12.0rc1 do"
        in message
    )
    assert "compilation_config.cudagraph_mode" in message
    assert "vLLM's scheduler is used" in refusal({"ascend_scheduler_config": {"enabled": True}})
    assert "from 0.13.0 until before 0.14.0rc1 and from 0.19.1rc1 on" in ascend._unknown(
        "mix_placement", "x", Version("0.18.0"), frozenset()
    )
    assert "did you mean 'enable_cpu_binding'" in refusal({"enable_cpu_bindings": True})
    assert refusal({"nonsense": True}).endswith(
        ".nonsense: vllm-ascend 0.23.1.dev4+g1234567 reads no such key; leave it out"
    )
    assert "rollout.engine_args.additional_config.weight_nz_mode cannot be set" in refusal({"weight_nz_mode": 2})
    assert "over the candidates of each device" in refusal({"enable_reduce_sample": True})
    assert "must be a mapping" in refusal("{}")
    message = refusal({1: True})  # YAML's `1: true`
    assert message == "rollout.engine_args.additional_config has the key 1, but vllm-ascend's keys are text"


def test_without_vllm_ascend_only_keys_unknown_to_all_versions_are_refused(running) -> None:
    running(None)
    arguments_of("vllm").check_engine_args(
        {"additional_config": {"torchair_graph_config": {}, "scheduler_config": {}}}, "rollout"
    )
    assert "no version of vllm-ascend reads such a key; did you mean 'scheduler_config'" in refusal(
        {"schedular_config": 1}
    )


def test_keys_are_read_from_the_installed_source(tmp_path, monkeypatch) -> None:
    """A version later than the table has keys that it does not name."""
    package = tmp_path / "vllm_ascend" / "sub"
    package.mkdir(parents=True)
    (tmp_path / "vllm_ascend" / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "a.py").write_text(
        'x = additional_config.get(\n    "first", 1)\ny = (vllm_config.additional_config or {}).get("second")\n'
        'z = self._get_config_value(\n    additional_config,\n    "third", None)\n'
        'if "fourth" in vllm_config.additional_config:\n    additional_config["fifth"]\n'
        'config.get("not_it")'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ascend, "installed", lambda: Version("9.0"))
    ascend._keys_installed.cache_clear()
    for key in ("first", "second", "third", "fourth", "fifth"):
        ascend.check_additional_config({key: 1}, "x")
    with pytest.raises(ValueError, match=r"vllm-ascend 9\.0 reads no such key"):
        ascend.check_additional_config({"not_it": 1}, "x")
    ascend.check_additional_config({"refresh": True}, "x")  # known, though these sources are not seen to read it
    ascend._keys_installed.cache_clear()


@EACH
def test_samplers_are_made_without_the_mode_of_log_probs_and_obey_it(version: str) -> None:
    """Else `set_log_probs_mode` is not needed any more, or no longer enough."""
    if Version(version) < Version("0.18.0"):
        pytest.skip("megarl needs 0.18 or later")
    assert "self.sampler = AscendSampler()" in source(version, "worker/model_runner_v1.py")
    sampling = method(source(version, "sample/sampler.py"), "forward_native")
    assert 'self.logprobs_mode == "processed_logprobs"' in sampling


def test_a_sampler_returns_log_probs_in_the_engines_mode() -> None:
    sampler = SimpleNamespace(
        logprobs_mode="raw_logprobs", topk_topp_sampler=SimpleNamespace(logprobs_mode="raw_logprobs")
    )
    ascend.set_log_probs_mode(sampler, "processed_logprobs")
    assert sampler.logprobs_mode == sampler.topk_topp_sampler.logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize("executor", ["external_launcher", "ray"])
def test_executors_that_take_other_devices_are_refused(executor: str) -> None:
    with pytest.raises(ValueError, match=f"distributed_executor_backend cannot be {executor}"):
        arguments_of("vllm").check_engine_args({"distributed_executor_backend": executor}, "rollout")


# --- what an engine starts with -----------------------------------------------------------------


@pytest.fixture
def spec(tmp_path) -> EngineSpec:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 4}))
    return EngineSpec("e0", str(tmp_path), "bfloat16", 64, load_weights=False, sleep_mode=True)


def latent(spec: EngineSpec, **engine_args: object) -> EngineSpec:
    Path(spec.model_path, "config.json").write_text(json.dumps({"model_type": "deepseek_v2", "kv_lora_rank": 8}))
    return EngineSpec("e0", spec.model_path, "bfloat16", 64, load_weights=False, engine_args=dict(engine_args))


def test_nz_is_disabled_in_environment_and_config(spec, running) -> None:
    platform = pytest.importorskip("megarl.platform.npu").NPUPlatform()
    assert engine_env("vllm", platform.rollout_env(), 1, {})["VLLM_ASCEND_ENABLE_NZ"] == "0"
    running("0.18.0")
    assert build_engine_args(spec, "npu")["additional_config"] == {}
    running("0.23.0")
    assert build_engine_args(spec, "npu")["additional_config"] == {"weight_nz_mode": 0}
    assert "additional_config" not in build_engine_args(spec, "cuda")
    with_config = EngineSpec(
        "e0", spec.model_path, "bfloat16", 64, engine_args={"additional_config": {"refresh": True}}
    )
    assert build_engine_args(with_config, "npu")["additional_config"] == {"refresh": True, "weight_nz_mode": 0}
    assert with_config.engine_args == {"additional_config": {"refresh": True}}, "the recipe's own was changed"
    assert build_engine_args(spec, "npu")["enable_sleep_mode"] is True


def test_the_task_queue_follows_the_recipe() -> None:
    """2 with graphs: torch_npu refuses to capture. 1 without: slower."""
    platform = pytest.importorskip("megarl.platform.npu").NPUPlatform()

    def queue(**engine_args: object) -> str:
        return engine_env("vllm", platform.rollout_env(), 1, engine_args)["TASK_QUEUE_ENABLE"]

    assert (
        queue() == queue(compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"}) == queue(enforce_eager=False) == "1"
    )
    assert queue(enforce_eager=True) == queue(compilation_config={"cudagraph_mode": "none"}) == "2"
    assert "TASK_QUEUE_ENABLE" not in engine_env("vllm", {}, 1, {"enforce_eager": True})


def test_a_wrong_compilation_config_names_its_recipe_section(spec) -> None:
    judge = replace(latent(spec, compilation_config=3), load_weights=True, recipe_section="judge")
    with pytest.raises(ValueError, match=r"judge\.engine_args\.compilation_config must be a mapping, not 3"):
        build_engine_args(judge, "cpu")


@pytest.mark.skipif(torch_npu() is None, reason=missing("torch_npu"))
def test_torch_npu_refuses_graphs_at_queue_2() -> None:
    library = torch_npu()
    assert library is not None
    refusal_text = b"Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture"
    assert any(refusal_text in file.read_bytes() for file in library.rglob("*.so"))


@pytest.mark.parametrize(
    "config, key",
    [
        ({"enable_fused_mc2": 1}, "enable_fused_mc2"),
        ({"eplb_config": {"dynamic_eplb": True}}, "eplb_config"),
        ({"eplb_config": {"expert_map_record_path": "x.json"}}, "eplb_config"),
        ({"layer_sharding": ["o_proj"]}, "layer_sharding"),
        ({"multistream_overlap_shared_expert": True}, "multistream_overlap_shared_expert"),
    ],
)
def test_settings_that_conflict_with_weight_updates_are_refused(spec, running, config, key) -> None:
    running("0.23.0")
    fixed_model = EngineSpec(
        "e0", spec.model_path, "bfloat16", 64, load_weights=False, engine_args={"additional_config": config}
    )
    for refuse in (check_plan, build_engine_args):
        with pytest.raises(RecipeError, match=f"additional_config.{key}"):
            refuse(fixed_model, "npu")
    fixed = EngineSpec("e0", spec.model_path, "bfloat16", 64, engine_args={"additional_config": config})
    check_plan(fixed, "npu")  # its weights never change
    check_plan(fixed_model, "cuda")


def test_fused_experts_are_also_refused_in_the_environment(spec, running, monkeypatch) -> None:
    running("0.18.0")
    for value in ("1", "true"):
        monkeypatch.setenv("VLLM_ASCEND_ENABLE_FUSED_MC2", value)
        with pytest.raises(ValueError, match=f"the environment has VLLM_ASCEND_ENABLE_FUSED_MC2={value}.* Unset it"):
            check_plan(spec, "npu")
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_FUSED_MC2", "0")
    check_plan(spec, "npu")


def test_graphs_of_latent_attention_need_updates_in_place(spec, running) -> None:
    running("0.17.0rc1")
    with pytest.raises(RecipeError, match=r"enforce_eager(.|\n)*vllm-ascend 0.18"):
        check_plan(latent(spec), "npu")
    check_plan(latent(spec, enforce_eager=True), "npu")
    running("0.18.0rc1")
    check_plan(latent(spec), "npu")


def test_routing_replay_is_refused_before_version_0_15(spec, running) -> None:
    running("0.14.0rc1")
    routing = EngineSpec("e0", spec.model_path, "bfloat16", 64, return_routed_experts=True)
    with pytest.raises(RecipeError, match=r"routing_replay(.|\n)*0.15"):
        check_plan(routing, "npu")
    running("0.15.0rc1")
    check_plan(routing, "npu")


def test_the_plan_of_a_recipe_is_checked(running) -> None:
    """Checked before any process starts; other checks report a missing model."""
    running("0.17.0rc1")
    recipe = load_recipe(ROOT / "recipes" / "grpo_deepseek_v3.yaml")
    check_device(recipe, "npu")
    recipe.model.path = str(ROOT / "tests" / "nowhere")
    check_device(recipe, "npu")
