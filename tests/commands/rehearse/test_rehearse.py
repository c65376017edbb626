"""The tiny copy of a recipe: kept and changed settings, the list of changes, and the training run."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file
from transformers import CONFIG_MAPPING

from docs.generate.supported_recipes import Row, rows
from megarl import load_recipe
from megarl.algorithms.advantages import uses_critic
from megarl.commands.data import tiny_weights
from megarl.commands.data.tiny_weights import write_weights
from megarl.commands.rehearse import command
from megarl.commands.rehearse.changes import Changes, leaf_settings
from megarl.commands.rehearse.command import faults, rehearse, table
from megarl.commands.rehearse.data import columns_of
from megarl.commands.rehearse.layout import layers_for, shrink_layout
from megarl.commands.rehearse.model import shrink_model
from megarl.commands.rehearse.settings import shrink_settings
from megarl.commands.rehearse.tiny_copy import TinyCopy, make_tiny_copy
from megarl.errors import InputError, RecipeError
from megarl.hf import published
from megarl.hf.config import number_of_experts, text_fields
from megarl.hf.families import FAMILIES
from megarl.hf.families.sizes import head_size
from megarl.megatron.layout import check_layout
from megarl.preflight.survey import prepare_training
from megarl.recipe.trainers import MegatronConfig
from tests.support.megatron_models import MODELS
from tests.support.megatron_models import write_model as write_hf_model
from tests.support.stack import run

ROOT = Path(__file__).parents[3]
ROWS = {row.path.name: row for row in rows()}
EACH = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
recipe_of = functools.cache(lambda row: load_recipe(row.path))
RESUMED = ("grpo_deepseek_v3.yaml", "ppo_qwen3_8b.yaml", "sft_peft_qwen3_8b.yaml")


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM imports torchvision for vision models; without it, names are sufficient."""
    if importlib.util.find_spec("torchvision") is None:
        stand_ins = str(Path(__file__).parents[2] / "stand_ins")
        monkeypatch.setenv("PYTHONPATH", f"{stand_ins}:{os.environ.get('PYTHONPATH', '')}")


@EACH
def test_train_accepts_a_tiny_copy_and_every_change_is_listed(row: Row, tmp_path: Path) -> None:
    """Model, layout, data and scorers are read as `train` reads them. The table must list every setting of the recipe and
    every change, since a setting without a line would seem to have been rehearsed."""
    tiny = make_tiny_copy(row.path, [], tmp_path)
    prepare_training(tiny.recipe)
    original, now = dict(leaf_settings(recipe_of(row))), dict(leaf_settings(tiny.recipe))
    changes = {change.key: change for change in tiny.changes}
    assert len(changes) == len(tiny.changes), "a setting is listed twice"
    in_parts = {"reward.function", *(key for key in {**original, **now} if key.startswith("reward.functions."))}
    added = {"rollout.engine_args.kv_cache_memory_bytes", "rollout.engine_args.max_num_seqs"} - original.keys()
    assert original.keys() - in_parts <= changes.keys()
    different = {key for key in {**original, **now} if original.get(key) != now.get(key)} - in_parts - added
    assert different <= {key for key, change in changes.items() if change.outcome != "kept"}
    assert all(
        original[key] == now[key] for key, change in changes.items() if change.outcome == "kept" and key in original
    )
    assert all(len(line) <= 100 for line in table(tiny.changes, 100).splitlines())


@EACH
def test_the_tiny_copy_keeps_parallel_dimensions_above_1(row: Row) -> None:
    """With enough processes each parallel dimension stays above 1; with two processes, at least one does."""
    recipe = recipe_of(row)
    parts = [(recipe.megatron, recipe.cluster.trainers)]
    parts += [(recipe.critic.megatron, recipe.critic.trainers)] if uses_critic(recipe.algorithm) else []
    for layout, trainers in parts:
        for processes in (1, 2, 3, 4, 16):
            small, count = shrink_layout(layout, trainers, processes)
            assert count <= processes
            check_layout(shrink_model(published.read(row.shape), layers_for(small), Changes()), small, count)
            cut = [name for name in vars(layout) if name.endswith("_parallel") and (getattr(layout, name) or 1) > 1]
            kept = [name for name in cut if (getattr(small, name) or 1) > 1]
            assert kept == cut or processes < 16
            assert bool(kept) == bool(cut) or processes == 1


def test_tiny_copies_keep_uneven_stages() -> None:
    layout = MegatronConfig(pipeline_parallel=8, first_stage_layers=6, last_stage_layers=7)
    small, _ = shrink_layout(layout, 8, 2)
    assert (small.first_stage_layers, small.last_stage_layers, layers_for(small)) == (3, 1, 4)
    virtual, _ = shrink_layout(replace(layout, virtual_pipeline=3), 8, 2)
    assert (virtual.virtual_pipeline, virtual.first_stage_layers, virtual.last_stage_layers) == (2, 6, None)
    check_layout({"num_attention_heads": 2, "vocab_size": 8, "num_hidden_layers": layers_for(virtual)}, virtual, 2)


@pytest.mark.parametrize("name", published.names())
def test_a_tiny_copy_keeps_the_models_structure(name: str) -> None:
    """Kept: the ratio of heads, dense layers before experts, tied weights, scaling of positions, choice of experts."""
    small = text_fields(shrink_model(published.read(name), 2, Changes()))
    config = text_fields(published.read(name))
    assert small["model_type"] == (FAMILIES[config["model_type"]].alone or (config["model_type"],))[0]
    for field in ("tie_word_embeddings", "rope_theta", "n_shared_experts", "num_nextn_predict_layers"):
        assert small.get(field) == config.get(field)
    assert config["num_attention_heads"] // config["num_key_value_heads"] == (
        small["num_attention_heads"] // small["num_key_value_heads"]
    )
    scaling, tiny = config.get("rope_scaling") or {}, small.get("rope_scaling") or {}
    assert scaling.get("type") == tiny.get("type") and scaling.get("factor") == tiny.get("factor")
    if sections := scaling.get("mrope_section"):
        head = head_size(small)
        assert sum(tiny["mrope_section"]) == head // 2 and len(tiny["mrope_section"]) == len(sections)
    assert (number_of_experts(small) > 0) == (number_of_experts(config) > 0)
    if config.get("first_k_dense_replace"):
        assert 0 < small["first_k_dense_replace"] < small["num_hidden_layers"]
    if config.get("n_group", 1) > 1:
        assert 1 <= small["topk_group"] < small["n_group"]
        assert (
            config["num_experts_per_tok"] // config["topk_group"] == small["num_experts_per_tok"] // small["topk_group"]
        )
    if name != "quickstart":  # which is as small
        assert small["hidden_size"] < config["hidden_size"] and small["num_hidden_layers"] < config["num_hidden_layers"]


@pytest.mark.parametrize("name", MODELS)
def test_weights_have_transformers_names_and_shapes(name: str, tmp_path: Path) -> None:
    path = write_hf_model(name, tmp_path)
    config = text_fields(json.loads((path / "config.json").read_text()))
    write_weights(tmp_path / "model.safetensors", {**config, "initializer_range": 0.05}, 0, 0.1)
    written, expected = ({key: value.shape for key, value in load_file(file).items()} for file in (tmp_path / "model.safetensors", path / "model.safetensors"))  # fmt: skip
    untrained = FAMILIES[config["model_type"]].carried
    assert written == {name: shape for name, shape in expected.items() if not name.startswith(untrained)}


@pytest.mark.parametrize(
    "kind",
    [kind for kind in FAMILIES if kind in CONFIG_MAPPING and "vision_config" not in CONFIG_MAPPING[kind].sub_configs],
)
def test_a_config_written_by_transformers_5_is_shrunk(kind: str, tmp_path: Path) -> None:
    """The config has a kind per layer and derived sizes, which transformers refuses if they disagree."""
    config = CONFIG_MAPPING[kind](num_hidden_layers=6, dtype="bfloat16")
    written = json.loads(config.to_json_string(use_diff=False))
    small = shrink_model(written, 2, Changes())
    write_weights(tmp_path / "model.safetensors", small, 0, 0.1)
    read = CONFIG_MAPPING[kind].from_dict(small)
    read.validate()
    again = json.loads(json.dumps(read.to_dict()))
    assert {key: again[key] for key in small if key in again} == small
    assert small["dtype"] == "float32" and "torch_dtype" not in small


def test_a_vision_config_written_by_transformers_5_is_shrunk(tmp_path: Path) -> None:
    """The config has a text section, the sections of its heads in `rope_parameters`, and colours under the new name."""
    import transformers

    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {"num_hidden_layers": 6, "rope_parameters": rotary}  # transformers then writes `architectures` as null
    written = transformers.Qwen2_5_VLConfig(text_config=text, architectures=["Whole"]).to_dict()
    small = shrink_model(written, 2, Changes())
    assert small["architectures"] == ["Whole"]
    assert small["rope_parameters"] == {**rotary, "mrope_section": [4, 6, 6]} and "rope_scaling" not in small
    write_weights(tmp_path / "model.safetensors", small, 0, 0.1)
    read = transformers.Qwen2_5_VLConfig.from_dict(small).get_text_config()
    read.validate()
    assert (read.num_hidden_layers, read.rope_parameters["mrope_section"]) == (2, [4, 6, 6])


@pytest.mark.parametrize("name", ["Qwen3-VL-8B-Instruct", "Qwen3-VL-30B-A3B-Instruct"])
def test_tensors_of_deepstack_towers_are_the_published_ones(name: str) -> None:
    """Names and shapes follow from config.json for the whole model, and for the tiny one, which transformers reads."""
    import transformers

    config = published.read(name)
    shapes = dict(tiny_weights.shapes(config))
    assert (
        sum(map(prod, shapes.values()))
        == {"qwen3_vl": 8_767_123_696, "qwen3_vl_moe": 31_070_754_032}[config["model_type"]]
    )
    small = shrink_model(config, 2, Changes())
    model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**small))
    held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".experts." not in name}
    assert held == {name: shape for name, shape in tiny_weights.shapes(small) if ".experts." not in name}


def test_rows_have_the_columns_of_the_file_if_it_exists(tmp_path: Path) -> None:
    """The source is read from the file, else from the folder's name; a recipe without both is refused: no scorer is chosen."""
    recipe = load_recipe(ROOT / "recipes" / "grpo_qwen3_8b.yaml")
    (tmp_path / "gsm8k").mkdir()
    file = tmp_path / "gsm8k" / "train.jsonl"
    columns = partial(columns_of, recipe, "data.eval_files")
    assert columns(str(file)).data_source == "openai/gsm8k"
    file.write_text(json.dumps({"data_source": "me/own", "prompt": "1 + 1", "images": [1]}) + "\n")
    assert (columns(str(file)).data_source, columns(str(file)).layout) == ("me/own", "pictures")
    file.write_text(json.dumps({"data_source": "me/own", "prompt": "<video>", "images": [], "videos": [["a"]]}) + "\n")
    assert columns(str(file)).layout == "films"
    with pytest.raises(RecipeError, match=r"set reward\.function"):
        columns("data/unheard_of/train.parquet")
    assert columns("hf://openai/gsm8k/main/test") == columns("data/gsm8k/test.parquet")
    with pytest.raises(RecipeError, match=r"set reward\.function"):
        columns("hf://org/unheard_of/test")


def test_a_template_of_the_recipe_does_not_fit_the_tiny_tokenizer(tmp_path: Path) -> None:
    template = "data.chat_template='{{ messages[0].content }}<|eot|>'"
    tiny = make_tiny_copy(ROOT / "recipes" / "grpo_qwen3_8b.yaml", [template], tmp_path)
    assert tiny.recipe.data.chat_template is True
    assert [change.key for change in tiny.changes].count("data.chat_template") == 1


def test_a_scorer_of_the_user_keeps_its_arguments(tmp_path: Path) -> None:
    """`rehearse` adds the coin as a second scorer; the arguments are not passed to it."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):\n    return bonus\n"
    )
    overrides = [f"reward.function={tmp_path}/mine.py:compute_score", "reward.arguments.bonus=2"]
    tiny = make_tiny_copy(ROOT / "recipes" / "grpo_qwen2.5_0.5b.yaml", overrides, tmp_path / "copy")
    assert tiny.recipe.reward.arguments == {"bonus": 2} and len(tiny.recipe.reward.functions) == 2
    prepare_training(tiny.recipe)


def test_an_empty_first_row_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "grpo_qwen3_8b.yaml")
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"data_source": "openai/gsm8k", "prompt": "", "images": []}) + "\n"
    )
    with pytest.raises(RecipeError, match=r"the first row of .*train\.jsonl has an empty prompt"):
        columns_of(recipe, "data.train_files", str(tmp_path / "train.jsonl"))


def test_a_temporary_folder_is_removed_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))
    start = partial(rehearse, ROOT / "recipes" / "grpo_qwen3_8b.yaml", processes=None, shape=None, resume=False)
    with pytest.raises(RecipeError):
        start(["data.eval_files=[unheard_of/a.parquet]"], out=None)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda folder: SimpleNamespace(free=300_000))
    with pytest.raises(InputError, match="0 MiB free"):
        start([], out=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("data.eval_files=[unheard_of/a.parquet]", "data.eval_files"),
        ("data.mix={own: {files: [unheard_of/a.parquet], weight: 1}}", "data.mix.own.files"),
    ],
)
def test_an_incomplete_copy_is_removed_and_the_setting_is_named(written: str, key: str, tmp_path: Path) -> None:
    """An error while the model is written removes the folder: it would block the next rehearsal."""
    recipe = ROOT / "recipes" / "grpo_qwen3_8b.yaml"
    off = ["data.train_files=[]"] if ".mix" in key else []
    with pytest.raises(RecipeError) as raised:
        rehearse(recipe, [written, *off], out=tmp_path, processes=None, shape=None, resume=False)
    assert key in str(raised.value) and "data.train_files" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_small_settings_are_not_enlarged() -> None:
    """A recipe that is as small as a tiny copy keeps its sizes."""
    recipe = load_recipe(ROOT / "recipes" / "ppo_qwen3_8b.yaml")
    recipe.data.prompts_per_step, recipe.evaluation.limit = 2, 1
    recipe.data.max_prompt_length, recipe.rollout.max_response_length = 48, 8
    recipe.actor.max_tokens_per_micro_batch = recipe.critic.max_tokens_per_micro_batch = 60
    changes = Changes()
    shrink_settings(recipe, None, changes)
    ends = ("prompts_per_step", "limit", "max_prompt_length", "max_response_length", "max_tokens_per_micro_batch")
    assert not [change for change in changes.items if change.key.endswith(ends)]


@pytest.mark.parametrize(("override", "replay"), [("computed", "old_log_probs"), ("rollout", "none")])
def test_a_tiny_copy_replays_experts_that_a_cpu_engine_returns(override: str, replay: str, tmp_path: Path) -> None:
    """vLLM on a CPU returns no expert choices, so the copy of a recipe that replays the engine's would be refused."""
    path = ROOT / "recipes" / "cuda" / "gspo_moonlight_16b.yaml"
    tiny = make_tiny_copy(path, [f"algorithm.old_log_probs={override}"], tmp_path)
    assert tiny.recipe.megatron.routing_replay == replay
    (change,) = [change for change in tiny.changes if change.key == "megatron.routing_replay"]
    assert (change.before, change.after) == ("rollout", replay)
    prepare_training(tiny.recipe)


def test_profiled_steps_ranks_and_mini_batches_fit_the_tiny_copy(tmp_path: Path) -> None:
    """Otherwise `train` rejects the tiny copy of a valid recipe."""
    overrides = [
        "observe.profile_steps=[5,9]",
        "observe.profile_ranks=[7]",
        "data.prompts_per_step=3",
        "actor.mini_batches=3",
    ]
    tiny = make_tiny_copy(ROOT / "recipes" / "grpo_qwen3_8b.yaml", overrides, tmp_path)
    assert (tiny.recipe.observe.profile_steps, tiny.recipe.observe.profile_ranks) == ([2], [0])
    assert (tiny.recipe.data.prompts_per_step, tiny.recipe.actor.mini_batches) == (2, 2)


def test_a_rehearsal_sends_no_alerts(tmp_path: Path) -> None:
    tiny = make_tiny_copy(ROOT / "recipes" / "grpo_qwen3_8b.yaml", ["observe.alerts.url=ALERT_URL"], tmp_path)
    assert tiny.recipe.observe.alerts.url is None
    assert "observe.alerts.url" in [change.key for change in tiny.changes if change.outcome == "left out"]


def test_faults_in_the_metrics_are_reported(tmp_path: Path) -> None:
    """Refused: a loss that is not finite, an update without effect, an engine with other weights, a missing step."""
    recipe = replace(load_recipe(ROOT / "recipes" / "grpo_qwen3_8b.yaml"), runs_dir=str(tmp_path), name="run")
    tiny = TinyCopy(tmp_path / "tiny_copy.yaml", recipe, {}, [])
    (tmp_path / "run").mkdir()
    good = [{"step": 0, "eval/loss": 1.0}, {"step": 1, "actor/loss": 0.5}, {"step": 2, "actor/loss": 0.5}]
    stale = {"step": 2, "rollout/logprob_gap_mean": 0.2, "rollout/staleness_max": 1.0}
    bad = [{"step": 1, "actor/loss": "NaN", "rollout/logprob_gap_mean": 0.2}, {"step": 3, "actor/skipped_updates": 1.0}]
    for lines, count in ((good, 0), ([*good[:2], stale], 0), (bad, 4), (good[:2], 1)):
        (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert len(faults(tiny, 2)) == count, faults(tiny, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/base/grpo.yaml", "model.path=nowhere"], "# Shape: NAME"),
        (["recipes/quickstart.yaml", "--shape", "Qwen3-8b"], "Nearest: Qwen3-8B"),
        (["recipes/grpo_qwen3_8b.yaml", "--out", "recipes"], "is not empty"),
    ],
)
def test_bad_input_is_reported_before_the_start(arguments: list[str], message: str) -> None:
    done = run("rehearse", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.stack
def test_a_failed_rehearsal_ends_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with the cause of the failure, not with the list of settings."""
    monkeypatch.setattr(command, "train_copy", lambda tiny, resume: (1, "megarl train again"))
    out = tmp_path / "tiny"
    recipe = ROOT / "recipes" / "dapo_qwen3_30b.yaml"
    assert rehearse(recipe, [], out=out, processes=None, shape=None, resume=True) == 1
    printed = capsys.readouterr()
    assert "could not be exercised" not in printed.out and printed.err.endswith("the failure: megarl train again\n")
    lines = (out / command.REPORT).read_text().splitlines()
    assert any(len(line) > 100 for line in lines) and not any(
        line.endswith("...") and "{" not in line for line in lines
    )


@pytest.mark.parametrize(
    ("out", "words"),
    [("/proc/no/such", "cannot be created"), ("full", "0 MiB free, and a tiny copy with its run needs 64")],
)
def test_an_unusable_folder_is_rejected_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, words: str
) -> None:
    monkeypatch.setattr(command.shutil, "disk_usage", lambda folder: SimpleNamespace(free=300_000))
    with pytest.raises(ValueError, match=words):
        command._folder(tmp_path / out)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("megatron.extra.swap_optimiser=true", "Nearest: swap_optimizer"),
        ("megatron.extra.reuse_fp32_param=true", "use swap_optimizer instead"),
        ("megatron.expert_parallel=48", "expert_parallel=48 does not divide"),
    ],
)
def test_errors_of_the_full_recipe_are_found(tmp_path: Path, override: str, words: str) -> None:
    """The tiny copy drops device settings and shrinks the layout, so it would run."""
    with pytest.raises(ValueError, match=words):
        make_tiny_copy(ROOT / "recipes" / "grpo_deepseek_v3.yaml", [override], tmp_path)


@pytest.mark.slow
@EACH
def test_every_row_is_rehearsed(row: Row, tmp_path: Path) -> None:
    """Real Megatron, vLLM, mbridge and Ray run two steps, and some recipes a third after a resume."""
    resume = "--resume" if row.path.name in RESUMED else "--no-resume"
    done = run("rehearse", str(row.path), "--out", str(tmp_path / "tiny"), resume, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "no problems" in done.stdout
