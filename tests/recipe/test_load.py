"""Recipes: layers merge in order; an error names file, key, value and remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megarl.preflight.load import load_recipe
from megarl.recipe import RecipeError, to_yaml
from megarl.recipe.derived.offload import offloads
from megarl.recipe.load import all_keys, read_recipe, setting_of
from megarl.recipe.schema import Recipe
from megarl.recipe.text import flat_settings, settings_of

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.yaml").write_text("model: {path: some/model}\nrollout: {temperature: 0.5, top_p: 1}\n")
    (tmp_path / "base" / "lr.yaml").write_text("actor: {optimizer: {lr: 1e-4}}\nrollout: {temperature: 0.6}\n")
    (tmp_path / "recipe.yaml").write_text(
        "base: [base/model.yaml, base/lr.yaml]\nactor: {optimizer: {betas: [0.9, 0.98]}}\n"
        "megatron: {extra: {moe_permute_fusion: true}}\n"
    )
    return tmp_path


def refused(folder: Path, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(folder / "recipe.yaml", overrides)
    return caught.value


def test_later_layers_override_earlier_ones(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml", ["train.steps=7", "megatron.extra.moe_grouped_gemm=true"])
    assert recipe.model.path == "some/model"
    assert recipe.rollout.temperature == 0.6  # the later base wins
    assert recipe.actor.optimizer.lr == 1e-4  # 1e-4 without a dot is a number, too
    assert recipe.actor.optimizer.betas == (0.9, 0.98)
    assert recipe.train.steps == 7
    assert recipe.megatron.extra == {"moe_permute_fusion": True, "moe_grouped_gemm": True}
    assert recipe.actor.optimizer.clip_grad == Recipe().actor.optimizer.clip_grad


def test_a_length_that_is_left_open_does_not_contradict_the_other(folder: Path) -> None:
    (folder / "base" / "lr.yaml").write_text("train:\n  epochs: 2\n  steps: ???\n")
    assert [error.key for error in read_recipe(folder / "recipe.yaml").errors] == ["train.steps"]


def test_resolved_recipe_loads_to_itself(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml")
    (folder / "resolved.yaml").write_text(to_yaml(recipe))
    assert load_recipe(folder / "resolved.yaml") == recipe


@pytest.mark.parametrize(
    "text", ["12e3", "007", "1_000", "10:30", "yes", "null", "a: b", "#x", "", "é", "1.5", "~", "- a"]
)
def test_texts_that_yaml_would_read_otherwise_are_quoted(folder: Path, text: str) -> None:
    recipe = load_recipe(folder / "recipe.yaml", [f"observe.project={json.dumps(text)}"], check=False)
    written = to_yaml(recipe)
    assert written == OmegaConf.to_yaml(OmegaConf.structured(recipe)), (
        "as OmegaConf writes it, which takes five times as long"
    )
    (folder / "resolved.yaml").write_text(written)
    assert load_recipe(folder / "resolved.yaml", check=False) == recipe


def test_two_recipes_share_no_mutable_default() -> None:
    first, second = Recipe(), Recipe()
    first.megatron.extra["x"] = 1
    first.evaluation.ks.append(4)
    assert second.megatron.extra == {} and second.evaluation.ks == [1]


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("rollout.temprature=1", "rollout.temprature", "did you mean rollout.temperature?"),
        ("temperature=1", "temperature", "did you mean rollout.temperature or "),
        ("rollout.temperature=warm", "rollout.temperature", "float"),
        ("rollout.temperature=-1", "rollout.temperature", "above 0"),
        ("rollout=3", "rollout", "section"),
        ("rollout.dtype=float8", "rollout.dtype", "float32"),
        ("train.steps", "train.steps", "key=value"),
        ("algorithm.loss=ppo_clop", "algorithm.loss", "ppo_clip"),
        ("algorithm.aggregation=mean", "algorithm.aggregation", "token_mean"),
        ("rollout.max_staleness=0.001", "rollout.max_staleness", "less than a prompt"),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt", "2 or more"),
        ("actor.optimizer.betas=[.nan,0.9]", "actor.optimizer.betas", "must be in [0, 1)"),
        ("actor.mini_batches=5", "actor.mini_batches", "divisor"),
        ("megatron.tensor_parallel=2", "cluster.trainers", "multiple of 2"),
        ("megatron.sequence_parallel=true", "megatron.sequence_parallel", "tensor_parallel > 1"),
        ("megatron.extra={moe_aux_loss_coeff: 0.1}", "megatron.extra.moe_aux_loss_coeff", "megatron.moe_aux_loss_coef"),
        (
            "megatron.extra={context_parallel_size: 2}",
            "megatron.extra.context_parallel_size",
            "megatron.context_parallel",
        ),
        ("megatron.extra={num_layers: 1}", "megatron.extra.num_layers", "config.json"),
        ("megatron.extra={calculate_per_token_loss: false}", "megatron.extra.calculate_per_token_loss", "leave it out"),
        (
            "megatron.extra={moe_token_dispatcher_type: allgather}",
            "megatron.extra.moe_token_dispatcher_type",
            "use alltoall",
        ),
        (
            "megatron.extra={moe_expert_capacity_factor: 1.0}",
            "megatron.extra.moe_expert_capacity_factor",
            "drops tokens",
        ),
        ("megatron.extra={moe_z_loss_coeff: 0.1}", "megatron.extra.moe_z_loss_coeff", "megatron.moe_z_loss_coef"),
        ("evaluation.every=5", "data.eval_files", "held-out"),
        ("evaluation.ks=[4]", "evaluation.ks", "evaluation.samples"),
        ("algorithm.advantage=none", "algorithm.advantage", "grpo"),
        ("train.source=sft", "algorithm.loss", "sft"),
        ("data.train_files=[rows.csv]", "data.train_files", ".parquet"),
        ("observe.trackers=[wanbd]", "observe.trackers", "wandb"),
        ("name=a/b", "name", "folder"),
        ("train.resume=yes", "train.resume", "a text, not a switch"),  # else a checkpoint named True
        ("model.tokenizer=off", "model.tokenizer", "and 'yes' as a text"),
    ],
)
def test_refusals_name_key_and_remedy(folder: Path, override: str, key: str, words: str) -> None:
    error = refused(folder, override)
    assert error.key == key
    assert words in str(error)
    assert "\n" in str(error) and "Traceback" not in str(error)


def test_errors_name_the_file_of_the_wrong_value(folder: Path) -> None:
    (folder / "base" / "lr.yaml").write_text("rollout: {temperature: -2}\n")
    assert refused(folder).origin == str(folder / "base" / "lr.yaml")
    assert refused(folder, "rollout.temperature=-1").origin == "command line"


def test_top_p_with_another_temperature_is_refused(folder: Path) -> None:
    load_recipe(folder / "recipe.yaml", ["rollout.temperature=0.7"])
    assert "renormalization" in str(refused(folder, "rollout.temperature=0.7", "rollout.top_p=0.9"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.device=cuda"], True),
        (["cluster.device=npu"], True),
        (["cluster.device=cpu"], False),
        (["cluster.device=cuda", "cluster.placement=disaggregated"], False),
        (["cluster.device=cuda", "train.source=sft", "algorithm.loss=sft", "algorithm.advantage=none"], False),
        (["cluster.device=cuda", "megatron.offload=false"], False),
        (["cluster.device=cpu", "megatron.offload=true"], True),
    ],
)
def test_trainers_offload_if_engines_share_their_devices(folder: Path, overrides: list[str], expected: bool) -> None:
    assert offloads(load_recipe(folder / "recipe.yaml", overrides)) is expected


def test_offload_follows_the_device_chosen_by_auto(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml")
    assert (offloads(recipe, "cuda"), offloads(recipe, "cpu")) == (True, False)


def test_combinations_that_would_be_ignored_are_refused(folder: Path) -> None:
    assert refused(folder, "megatron.offload=true", "cluster.placement=disaggregated").key == "megatron.offload"
    no_rows = refused(folder, "evaluation.every=5", "evaluation.at_end=true")
    assert no_rows.remedy.endswith("disable evaluation: evaluation.every=0 evaluation.at_end=false")
    evaluation = ["data.eval_files=[x.jsonl]", "evaluation.at_end=true", "evaluation.temperature=0"]
    load_recipe(folder / "recipe.yaml", evaluation)
    assert refused(folder, *evaluation, "evaluation.samples=4").key == "evaluation.temperature"


@pytest.mark.parametrize("override", ["samples=2", "ks=[]", "temperature=0.5", "top_p=0.9", "greedy=true"])
def test_sampling_settings_are_refused_if_the_evaluation_is_a_loss(folder: Path, override: str) -> None:
    sft = ["train.source=sft", "algorithm.loss=sft", "data.eval_files=[x.jsonl]", "evaluation.every=5"]
    load_recipe(folder / "recipe.yaml", [*sft, "evaluation.limit=3", "evaluation.at_start=true"])
    error = refused(folder, *sft, f"evaluation.{override}")
    assert error.key == f"evaluation.{override.split('=')[0]}" and "samples nothing" in str(error)
    assert refused(folder, "train.source=sft", "algorithm.loss=sft", "evaluation.every=5").key == "data.eval_files"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("base: nowhere.yaml\n", "does not exist"),
        ("base:\n", "a base must be a file name"),
        ("base: 5\n", "a base must be a file name"),
        ("base: [null]\n", "a base must be a file name"),
        (f"base: {'x' * 5000}.yaml\n", "5005 characters"),
        (f"a: {'[' * 3000}{']' * 3000}\n", "nested too deeply"),
        ("".join(f"{' ' * level}a:\n" for level in range(2000)), "nested too deeply"),
        ("base: recipe.yaml\n", "among its own base files"),
        ("model: [unclosed\n", "not YAML"),
        ("- a\n", "mapping"),
    ],
)
def test_broken_files(folder: Path, content: str, words: str) -> None:
    (folder / "recipe.yaml").write_text(content)
    assert words in str(refused(folder))


def test_a_folder_is_no_recipe(folder: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(folder)
    assert error.value.problem == f"{folder} is a folder" and f"that is in {folder}/" in error.value.remedy


def test_missing_recipe_names_the_nearest(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"did you mean .*recipe\.yaml"):
        load_recipe(folder / "recipes.yaml")
    with pytest.raises(RecipeError) as error:  # all names end in .yaml, which says nothing
        load_recipe(folder / "nope.yaml")
    assert "did you mean" not in str(error.value)


def test_a_base_of_a_copied_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a recipe of megarl leaves its base files behind."""
    (tmp_path / "copies").mkdir()
    monkeypatch.chdir(tmp_path)
    copy = Path("copies/mine.yaml")
    copy.write_text((RECIPES / "cuda" / "grpo_qwen3_8b.yaml").read_text())
    with pytest.raises(RecipeError) as caught:
        load_recipe(copy)
    error = caught.value
    assert (error.key, error.value, error.origin) == ("base", "../base/cuda/rl.yaml", "copies/mine.yaml")
    assert f"the file {tmp_path / 'base/cuda/rl.yaml'} does not exist" in error.problem
    assert "relative to the folder of the file that names it" in error.problem
    shipped = RECIPES / "base" / "cuda" / "rl.yaml"
    assert f"write base: {shipped};" in error.remedy
    copy.write_text(copy.read_text().replace("base: ../base/cuda/rl.yaml", f"base: {shipped}"))
    assert load_recipe(copy).name == load_recipe(RECIPES / "cuda" / "grpo_qwen3_8b.yaml").name


@pytest.mark.parametrize(
    ("base", "remedy"), [("base/lrr.yaml", "did you mean .*/base/lr.yaml"), ("recipes.yaml", "^write a path")]
)
def test_another_missing_base(folder: Path, base: str, remedy: str) -> None:
    """The file itself is no remedy."""
    (folder / "recipe.yaml").write_text(f"base: {base}\n")
    error = refused(folder)
    assert error.key == "base" and re.search(remedy, error.remedy)


def test_every_key_is_documented() -> None:
    import dataclasses

    def walk(section: type, prefix: str) -> None:
        for field in dataclasses.fields(section):
            assert "doc" in field.metadata, f"{prefix}{field.name} was not declared with key()"
            if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(field.default_factory):
                walk(field.default_factory, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            else:
                assert field.metadata["doc"], f"{prefix}{field.name} has no text"

    walk(Recipe, "")
    assert "actor.optimizer.lr" in set(all_keys())


@pytest.mark.parametrize(
    "path",
    sorted(path for path in RECIPES.rglob("*.yaml") if "base" not in path.parts),
    ids=lambda path: str(path.relative_to(RECIPES)),
)
def test_shipped_recipes_load(path: Path) -> None:
    load_recipe(path)


@pytest.mark.parametrize("name", ["quickstart.yaml", "tiny/on_policy_distillation.yaml", "retool.yaml"])
def test_settings_are_those_of_the_recipes_text(name: str) -> None:
    """A resume compares the settings of its recipe with those in the text that the earlier run recorded."""
    collector = ["observe.otlp.url=http://127.0.0.1:4318", "observe.otlp.headers={Authorization: TOKEN}"]
    recipe = load_recipe(RECIPES / name, [*collector, "actor.optimizer.lr=1e-6"])
    assert settings_of(recipe) == flat_settings(to_yaml(recipe))


def test_a_boolean_is_not_a_number(folder: Path) -> None:
    """A number is not a switch: with verl's expert_parallel_size, 8 would be read as true and give another layout."""
    with pytest.raises(
        RecipeError, match=r"rollout\.expert_parallel = 8[\s\S]*a switch, not a number[\s\S]*true or false"
    ):
        load_recipe(folder / "recipe.yaml", ["rollout.expert_parallel=8"])


@pytest.mark.parametrize(
    ("override", "choices"),
    [
        ("rollout.seeded=maybe", "auto, true, false"),
        ("weight_sync.route=x", "full, sharded, auto"),
        ("agent.format=x", "hermes, deepseek, gpt_oss"),
    ],
)
def test_errors_spell_choices_as_in_a_recipe(folder: Path, override: str, choices: str) -> None:
    error = refused(folder, override)
    assert error.problem == f"the value is none of {choices}"
    assert "True" not in str(error) and choices.replace(", ", " | ") in error.remedy


def test_a_single_value_becomes_a_list(folder: Path) -> None:
    (folder / "one.yaml").write_text(
        "data: {mix: {easy: {files: a.jsonl}}, eval_files: b.jsonl}\nlora: {targets: q_proj}\n"
    )
    recipe = load_recipe(folder / "one.yaml", ["observe.profile_steps=3", "evaluation.ks=[1,2]"], check=False)
    assert recipe.data.mix["easy"].files == ["a.jsonl"] and recipe.data.eval_files == ["b.jsonl"]
    assert recipe.lora.targets == ["q_proj"] and recipe.observe.profile_steps == [3] and recipe.evaluation.ks == [1, 2]
    error = refused(folder, "data.train_files={a: b}")
    assert "list[str]" in error.remedy


TEXTS = [
    "007",
    "1129_0930",
    "1.10",
    "10:30",
    "1e3",
    "0x10",
    "/tmp/a #1/runs",
    "a: b",
    "a, b",
    "- a",
    "# a",
    "ends with:",
    "a\\b",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_command_line_keeps_a_text_as_it_was_typed(folder: Path, text: str) -> None:
    """YAML reads 1129_0930 as the number 11290930, and a space with # as a comment."""
    overrides = [f"name={text}", f"train.replay={text}", f"data.train_files={text}", f"data.columns.prompt={text}"]
    reading = read_recipe(folder / "recipe.yaml", overrides)
    recipe = reading.recipe
    assert not reading.errors
    assert [recipe.name, recipe.train.replay, *recipe.data.train_files, recipe.data.columns["prompt"]] == [text] * 4
    (folder / "resolved.yaml").write_text(to_yaml(recipe))
    assert read_recipe(folder / "resolved.yaml").recipe == recipe


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.replay=null", "train.replay", None),
        ("train.replay='null'", "train.replay", "null"),
        ('name="a\\tb"', "name", "a\tb"),
        ("name=", "name", ""),
        ("data.train_files=[a.jsonl, b.jsonl]", "data.train_files", ["a.jsonl", "b.jsonl"]),
        ("train.steps=1_000", "train.steps", 1000),
    ],
)
def test_the_command_line_reads_other_values_as_yaml(folder: Path, override: str, key: str, value: object) -> None:
    assert settings_of(read_recipe(folder / "recipe.yaml", [override]).recipe)[key] == value


@pytest.mark.parametrize(
    "text", [*TEXTS, "yes", "null", "'a", '"a', "[a", "{a", "&a", "*a", "|", ">", "!a", "", "pens \u00e9 \U0001f58a"]
)
def test_a_setting_of_a_command_reads_back(folder: Path, text: str) -> None:
    reading = read_recipe(folder / "recipe.yaml", [setting_of("name", text), setting_of("train.replay", text)])
    assert not reading.errors and (reading.recipe.name, reading.recipe.train.replay) == (text, text)


@pytest.mark.parametrize("text", ["007", "1129_0930", "1.10", "10:30"])
def test_a_number_for_a_text_is_refused(folder: Path, text: str) -> None:
    """The file's own words are lost: YAML reads 007 as 7, and the run would get another name."""
    (folder / "base" / "lr.yaml").write_text(f"name: {text}\n")
    error = refused(folder)
    assert error.key == "name" and "a text, not a number" in str(error) and "name: '...'" in str(error)
    (folder / "base" / "lr.yaml").write_text(f"name: '{text}'\n")
    assert load_recipe(folder / "recipe.yaml").name == text
