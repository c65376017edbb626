"""Environment variables of trainers and engines: of a recipe, of the shell, and computed from model and layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.engines.base import EngineSpec
from megarl.engines.specs import policy_spec
from megarl.engines.vllm.args import required_environment
from megarl.engines.vllm.dispatch_buffers import dispatch_buffer
from megarl.errors import RecipeError
from megarl.hf.published import read
from megarl.platform import environment
from megarl.platform.cuda import CUDAPlatform
from megarl.platform.environment import Requirement, RoleSettings, at_least
from megarl.platform.npu import NPUPlatform
from megarl.preflight.environment import checkpoints_notice, environment_notices, warmup_notice
from megarl.preflight.load import load_recipe
from megarl.recipe.environment import variables
from megarl.recipe.schema import Recipe
from megarl.rollout.start_engines import engine_environment

RECIPES = Path(__file__).parents[2] / "recipes"
ROOT = Path(__file__).parents[2]
DEEPSEEK = RECIPES / "grpo_deepseek_v3.yaml"
FORTY = {"SIZE": at_least(40, "tables are large")}


# --- precedence -----------------------------------------------------------------------------------


def settings(recipe: dict[str, str], required: dict[str, Requirement] | None = None) -> RoleSettings:
    return RoleSettings("engines", {"A": "own", "B": "own"}, recipe, required or {})


def test_the_shell_overrides_the_recipe_and_the_recipe_defaults() -> None:
    environment = settings({"A": "recipe", "C": "recipe"}).environment({"C": "shell", "D": "shell"})
    assert environment == {"A": "recipe", "B": "own", "C": "shell"}
    notices = settings({"A": "recipe"}).notices({"A": "shell", "B": "own"})
    assert notices == ["the environment has A=shell, which is kept; otherwise engines would get A=recipe"]


def test_a_computed_requirement_is_set_raised_or_refused() -> None:
    assert settings({}, FORTY).environment({})["SIZE"] == "40"
    assert settings({"SIZE": "64"}, FORTY).environment({})["SIZE"] == "64"
    assert settings({}, FORTY).environment({"SIZE": "100"})["SIZE"] == "100"
    overruled = settings({}, FORTY)
    assert overruled.environment({"SIZE": "39"})["SIZE"] == "40"
    assert overruled.notices({"SIZE": "39"}) == [
        "the environment has SIZE=39, which is overridden: engines get SIZE=40, since tables are large"
    ]
    with pytest.raises(
        RecipeError, match=r"(?s)cluster.environment.engines.SIZE = '39'.*tables are large.*sets SIZE=40"
    ):
        settings({"SIZE": "39"}, FORTY).environment({})
    assert settings({}, FORTY).environment({"SIZE": "lots"})["SIZE"] == "40"


def test_a_recipe_cannot_undo_what_the_platform_requires() -> None:
    platform_environment = NPUPlatform().rollout_env()
    for name, value in (("TASK_QUEUE_ENABLE", "2"), ("PYTORCH_ALLOC_CONF", "expandable_segments:True")):
        with pytest.raises(RecipeError, match=f"cluster.environment.engines.{name}"):
            RoleSettings("engines", platform_environment, {name: value}).environment({})
    environment = RoleSettings(
        "engines", platform_environment, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    ).environment({})
    assert "PYTORCH_NPU_ALLOC_CONF" not in environment, "torch_npu refuses both names of one setting"


def test_a_value_that_the_shell_keeps_is_not_listed_with_the_recipes_reason() -> None:
    """The notice about the shell names it; `computed` lists only what the recipe sets and requires."""
    role = settings({"A": "recipe"}, FORTY)
    assert role.computed({}) == [("A", "recipe", "cluster.environment"), ("SIZE", "40", "tables are large")]
    assert role.computed({"A": "shell", "SIZE": "100"}) == []
    assert role.computed({"A": "recipe", "SIZE": "39"}) == role.computed({})


def test_spaces_do_not_hide_expandable_segments() -> None:
    """torch's parser of the variable skips spaces."""
    role = RoleSettings("engines", NPUPlatform().rollout_env())
    for value in ("expandable_segments : True", "expandable_segments :true,a:1"):
        assert (
            role.environment({"PYTORCH_NPU_ALLOC_CONF": value})["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:False"
        )


def test_the_remedy_names_the_variable_that_megarl_sets() -> None:
    role = RoleSettings("engines", NPUPlatform().rollout_env(), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    with pytest.raises(RecipeError, match="megarl sets PYTORCH_NPU_ALLOC_CONF=expandable_segments:False"):
        role.check()


def test_a_variable_of_another_device_replaces_nothing() -> None:
    recipe, shell = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}
    npu, cuda = NPUPlatform().trainer_env(60), CUDAPlatform().trainer_env(60)
    on_npu = RoleSettings("trainers", npu, recipe)
    assert on_npu.environment(shell)["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64" and on_npu.notices(shell) == []
    on_cuda = RoleSettings("trainers", cuda, recipe).environment(shell)
    assert "PYTORCH_ALLOC_CONF" not in on_cuda and on_cuda | shell == on_cuda


# --- the recipe's section -------------------------------------------------------------------------


def of(*overrides: str) -> Any:
    return load_recipe(RECIPES / "quickstart.yaml", [f"cluster.environment.{override}" for override in overrides])


def test_roles_have_separate_variables() -> None:
    recipe = of("all.A=1", "all.B=b", "trainers.A=2", "engines.C=3")
    assert variables(recipe.cluster.environment, "trainers") == {"A": "2", "B": "b"}
    assert variables(recipe.cluster.environment, "engines") == {"A": "1", "B": "b", "C": "3"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("all.A=true", "a variable must be text or an integer"),
        ("all.A=1.5", "a variable must be text or an integer"),
        ("all.A-B=1", "an environment variable cannot have this name"),
        ("engines.HF_TOKEN=x", "the name suggests a secret"),
        ("engines.OPENAI_API_KEY=x", "the name suggests a secret"),
        ("trainers.OMP_NUM_THREADS=8", "set cluster.threads"),
        ("all.ASCEND_RT_VISIBLE_DEVICES='0,1'", "megarl sets it for each process"),
        ("all.A='x\\ny'", None),
    ],
)
def test_names_and_values_are_checked(override: str, message: str | None) -> None:
    if message is None:
        assert of(override)
        return
    with pytest.raises(RecipeError, match=message) as raised:
        of(override)
    assert raised.value.key.startswith("cluster.environment.")
    assert "secret" not in message or "'x'" not in str(raised.value), "the secret's value is not printed"


def test_names_that_contain_a_word_for_secrets_are_accepted() -> None:
    assert variables(of("all.TOKENIZERS_PARALLELISM=0").cluster.environment, "engines") == {
        "TOKENIZERS_PARALLELISM": "0"
    }


def test_processes_start_with_the_recipes_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl import cluster

    roles: dict[str, Any] = {}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setitem(environment._SHELL, "FROM_SHELL", "shell")
    monkeypatch.setattr(
        "megarl.cluster.torchrun.cluster.TorchrunCluster", lambda *_, **variables: roles.update(variables)
    )
    recipe = of("all.FROM_SHELL=recipe", "trainers.ONE=1", "engines.TWO=2")
    cluster.connect(recipe, NPUPlatform())
    assert (roles["trainer_env"]["ONE"], roles["trainer_env"]["FROM_SHELL"]) == ("1", "shell")
    spec = policy_spec(recipe, "engine0", updated=False)
    engine = engine_environment(recipe, NPUPlatform(), "vllm", spec).environment()
    assert (engine["TWO"], engine["FROM_SHELL"]) == ("2", "shell") and "TWO" not in roles["trainer_env"]
    notices = environment_notices(recipe, NPUPlatform())
    assert (
        "engines have TWO=2: cluster.environment" in notices and "trainers have ONE=1: cluster.environment" in notices
    )


# --- HCCL_BUFFSIZE --------------------------------------------------------------------------------


def spec_of(**changes: Any) -> EngineSpec:
    return replace(policy_spec(load_recipe(DEEPSEEK, []), "engine0", updated=True), **changes)


def test_the_dispatch_of_deepseek_v3_by_hand() -> None:
    """256 experts on 256 ranks, 64 sequences on TP 2: 32 tokens of a rank. Windows: 2 x 7168 + 64 = 14,400, aligned 14,848."""
    size = 2 * (1 * 32 * 256 * 14848 + (8 + 1) * 32 * 14336)
    buffer = dispatch_buffer(read("DeepSeek-V3"), spec_of())
    assert buffer is not None and buffer.megabytes == -(-size // 2**20) == 240
    assert "1 experts x 32 tokens x 256 ranks x 14848 bytes" in buffer.arithmetic
    required = required_environment(spec_of(), "npu", read("DeepSeek-V3"))
    assert required["HCCL_BUFFSIZE"].value == "240" and required["HCCL_BUFFSIZE"].accepts("240")
    assert not required["HCCL_BUFFSIZE"].accepts("239")
    assert required_environment(spec_of(), "cuda", read("DeepSeek-V3")) == {}


@pytest.mark.parametrize(
    ("engine_args", "tokens"),
    [
        ({"max_num_seqs": 128}, 64),
        ({}, 64),  # vLLM's own 128
        ({"max_num_seqs": 4096}, 512),
        (
            {
                "max_num_seqs": 64,
                "compilation_config": {"cudagraph_capture_sizes": [8, 96]},
                "max_num_batched_tokens": 1024,
            },
            48,
        ),
        ({"max_num_seqs": 64, "compilation_config": {"max_cudagraph_capture_size": 16}, "enforce_eager": True}, 32),
        ({"max_num_seqs": 64, "additional_config": {"enable_prefill_mc2": True}, "max_num_batched_tokens": 512}, 256),
    ],
)
def test_tokens_of_a_rank(engine_args: dict[str, Any], tokens: int) -> None:
    buffer = dispatch_buffer(read("DeepSeek-V3"), spec_of(engine_args=engine_args))
    assert buffer is not None and f" x {tokens} tokens x 256 ranks" in buffer.arithmetic


def test_engines_without_spread_experts_need_no_buffer() -> None:
    assert dispatch_buffer(read("DeepSeek-V3"), spec_of(expert_parallel=False, data_parallel=1)) is None
    assert dispatch_buffer(read("Qwen3-8B"), spec_of()) is None
    small = required_environment(spec_of(engine_args={"max_num_seqs": 16}), "npu", read("DeepSeek-V3"))
    assert small == {}, "HCCL's default is enough"


def test_a_run_sets_the_buffer_with_a_notice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read("DeepSeek-V3")))
    recipe = load_recipe(DEEPSEEK, [f"model.path={tmp_path}"])
    (notice,) = (
        notice_text for notice_text in environment_notices(recipe, NPUPlatform()) if "HCCL_BUFFSIZE" in notice_text
    )
    assert notice.startswith("engines have HCCL_BUFFSIZE=240: vllm-ascend needs 2 x (1 experts")
    small = load_recipe(DEEPSEEK, [f"model.path={tmp_path}", "cluster.environment.engines.HCCL_BUFFSIZE=200"])
    with pytest.raises(RecipeError, match=r"(?s)HCCL_BUFFSIZE = '200'.*240 MB for the dispatch.*leave it out"):
        environment_notices(small, NPUPlatform())


def test_plan_and_doctor_show_the_buffer(tmp_path: Path) -> None:
    from megarl.commands.doctor.recipe import environment as looked_at
    from megarl.commands.plan.environment import environment_of
    from megarl.platform.device_table import device_named

    recipe = load_recipe(DEEPSEEK, ["cluster.environment.trainers.ONE=1"])
    models = {"rollout": read("DeepSeek-V3")}
    trainers, engines = environment_of(recipe, models, device_named("910C"))
    assert (trainers.role, trainers.name, trainers.value) == ("trainers", "ONE", "1")
    assert (engines.role, engines.name, engines.value) == ("engines", "HCCL_BUFFSIZE", "240")
    recipe.cluster.environment.trainers = {}
    assert environment_of(recipe, models, device_named("H100"))[-1].name == "HCCL_BUFFSIZE", (
        "the recipe says device: npu"
    )
    (tmp_path / "config.json").write_text(json.dumps(read("DeepSeek-V3")))
    recipe.model.path = str(tmp_path)
    (finding,) = looked_at(recipe, "npu")
    assert finding.status == "ok" and "HCCL_BUFFSIZE=240" in finding.text
    recipe.cluster.environment.all = {"HCCL_BUFFSIZE": 100}
    (finding,) = looked_at(recipe, "npu")
    assert finding.status == "FAIL" and "240 MB" in finding.text


def test_plan_counts_buffers_inherited_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers have 400 MiB a communicator without the variable, 2 x 500 with it; engines that need 240 MB keep theirs if the
    shell has less."""
    from megarl.commands.plan.count.libraries import counted_libraries
    from megarl.commands.plan.environment import OF_SHELL, environment_of
    from megarl.platform.device_table import device_named

    recipe, models, device = load_recipe(DEEPSEEK, []), {"rollout": read("DeepSeek-V3")}, device_named("910C")
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    before = counted_libraries(recipe, models, device).communicators
    monkeypatch.setenv("HCCL_BUFFSIZE", "500")
    after = counted_libraries(recipe, models, device).communicators
    assert after["actor"] == before["actor"] * 1000 // 400
    assert after["rollout"] - before["rollout"] == 2 * (500 - 240) * 2**20, "of the dispatch alone"
    assert {(variable.role, variable.value, variable.why) for variable in environment_of(recipe, models, device)} == {
        ("trainers", "500", OF_SHELL),
        ("engines", "500", OF_SHELL),
    }
    trainers, engines = sorted(
        environment_of(recipe, models, device, {"HCCL_BUFFSIZE": "120"}),
        key=lambda variable: variable.role,
        reverse=True,
    )
    assert (trainers.value, engines.value) == ("120", "240") and "vllm-ascend needs" in engines.why
    monkeypatch.setenv("HCCL_BUFFSIZE", "lots")
    assert counted_libraries(recipe, models, device).communicators == before


def test_plan_refuses_the_same_variables_as_a_deterministic_run() -> None:
    from megarl.commands.plan.environment import environment_of
    from megarl.platform.device_table import device_named

    overrides = ["train.deterministic=true", "cluster.environment.engines.VLLM_BATCH_INVARIANT=0"]
    recipe = load_recipe(RECIPES / "grpo_qwen3_8b.yaml", overrides)
    with pytest.raises(RecipeError, match=r"engines\.VLLM_BATCH_INVARIANT"):
        environment_notices(recipe, NPUPlatform())
    with pytest.raises(RecipeError, match=r"engines\.VLLM_BATCH_INVARIANT"):
        environment_of(recipe, {"rollout": read("Qwen3-8B")}, device_named("910C"))


def test_the_neutral_allocator_variable_has_precedence() -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    shell = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    role = RoleSettings("trainers", variables)
    assert role.environment(shell) == shell, "torch would ignore the other name"
    (notice,) = role.notices(shell)
    assert "PYTORCH_ALLOC_CONF=max_split_size_mb:64, which is kept" in notice


def test_a_warm_up_longer_than_the_run_has_a_notice() -> None:
    recipe = load_recipe(DEEPSEEK)
    recipe.train.steps, recipe.actor.mini_batches = 5, 2
    recipe.actor.optimizer.warmup_steps = 10
    assert warmup_notice(recipe) is None
    recipe.actor.optimizer.warmup_steps = 40
    assert "has 10 optimizer steps" in str(warmup_notice(recipe)) and "reaches 25%" in str(warmup_notice(recipe))


def test_a_long_run_without_checkpoints_has_a_notice() -> None:
    recipe = Recipe()
    recipe.train.steps = 1000
    assert "no checkpoint is written before the end of the run's 1000 steps" in str(checkpoints_notice(recipe.train))
    recipe.train.save_every = 1000
    assert "no checkpoint is written before the end" in str(checkpoints_notice(recipe.train))
    recipe.train.save_every = 500
    assert "a checkpoint is written only after every 500 steps" in str(checkpoints_notice(recipe.train))
    recipe.train.save_at_end = False
    assert "a checkpoint is written only after every 500 steps" in str(checkpoints_notice(recipe.train))
    recipe.train.save_every = 0
    assert checkpoints_notice(recipe.train) is None, "the user wants no checkpoints"
    recipe.train.save_every, recipe.train.save_at_end = 101, True
    assert "only after every 101 steps" in str(checkpoints_notice(recipe.train))
    for every in (100, 20):
        recipe.train.save_every = every
        assert checkpoints_notice(recipe.train) is None
    recipe.train.save_every, recipe.train.steps = 0, 50
    assert checkpoints_notice(recipe.train) is None


@pytest.mark.parametrize(
    "path", [*ROOT.glob("recipes/*.yaml"), *ROOT.glob("recipes/cuda/*.yaml")], ids=lambda path: path.name
)
def test_no_preset_loses_many_steps(path: Path) -> None:
    assert checkpoints_notice(load_recipe(path).train) is None
