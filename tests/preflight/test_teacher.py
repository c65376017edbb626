"""Errors in the teacher's settings, before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megarl.commands.data.word_problems import DATA_SOURCE
from megarl.data.tokenizer import check_same_tokens, load_tokenizer
from megarl.preflight.engines_and_devices import demand_of
from megarl.preflight.load import load_recipe
from megarl.preflight.survey import prepare_training
from megarl.recipe import RecipeError
from tests.support.stack import ROOT

SAMPLED = ROOT / "recipes" / "tiny" / "on_policy_distillation.yaml"
GKD = ROOT / "recipes" / "tiny" / "gkd.yaml"


@pytest.mark.parametrize(
    ("recipe", "overrides", "key", "words"),
    [
        (GKD, ["algorithm.reference=start"], "algorithm.reference", "the likeliest tokens of a teacher"),
        (GKD, ["teacher.path=null"], "teacher.path", "teacher's model is unset"),
        (GKD, ["teacher.by_source.code.path=x"], "teacher.path", "names a teacher for each data source"),
        (GKD, ["teacher.path=null", "teacher.by_source.code.engines=2"], "teacher.by_source.code.path", "model is unset"),
        (GKD, ["teacher.path=null", "teacher.engines=2", "teacher.by_source.code.path=x"], "teacher.engines", "of each teacher"),
        (GKD, ["algorithm.advantage=grpo"], "algorithm.advantage", "gkd reads no advantages"),
        (GKD, ["rollout.temperature=0.7"], "rollout.temperature", "at temperature 1"),
        (GKD, ["algorithm.loss=reinforce"], "algorithm.distill_top_k", "only gkd reads it"),
        (GKD, ["algorithm.distill_beta=1.5"], "algorithm.distill_beta", "at most 1"),
        (SAMPLED, ["algorithm.reference=start"], "teacher", "algorithm.reference is not teacher"),
        (SAMPLED, ["algorithm.kl_in_reward=false"], "algorithm.kl_in_reward", "needs the KL of each token in the reward"),
        (SAMPLED, ["algorithm.kl_estimator=low_var_kl"], "algorithm.kl_estimator", "only `kl` gives the gradient of the KL"),
        (SAMPLED, ["algorithm.kl_target=0.1"], "algorithm.kl_target", "learns only from the KL"),
        (GKD, ["algorithm.dynamic_sampling.enabled=true"], "algorithm.dynamic_sampling.enabled", "read no rewards"),
        (SAMPLED, ["algorithm.overlong.penalty_buffer=4"], "algorithm.overlong.penalty_buffer", "read no rewards"),
        (SAMPLED, ["algorithm.kl_coef=0"], "algorithm.kl_estimator", "algorithm.kl_coef is 0"),
        (ROOT / "recipes/tiny/rloo.yaml", ["teacher.engines=2"], "teacher", "this section has no effect"),
        (
            ROOT / "recipes/tiny/gspo.yaml", ["algorithm.reference=teacher", "teacher.path=x"], "algorithm.reference",
            "does not use a reference policy",
        ),
        (
            ROOT / "recipes/quickstart_sft.yaml", ["algorithm.kl_coef=1", "algorithm.reference=teacher", "teacher.path=x"],
            "algorithm.reference", "train.source is 'sft'",
        ),
    ],
)  # fmt: skip
def test_refusals(recipe: Path, overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    assert caught.value.key == key and words in str(caught.value), str(caught.value)


@pytest.fixture
def other_family(quickstart_data: Path, tmp_path: Path) -> Path:
    """The quickstart's model with the numbers of two tokens swapped."""
    path = tmp_path / "other"
    shutil.copytree(quickstart_data / "model", path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    file.write_text(json.dumps(content))
    return path


def prepared(quickstart_data: Path, teacher: Path | None, *more: str) -> None:
    prepare_training(
        load_recipe(
            GKD,
            [
                f"model.path={quickstart_data}/model", f"data.train_files=[{quickstart_data}/data/train.parquet]",
                f"data.eval_files=[{quickstart_data}/data/test.parquet]", f"teacher.path={teacher or 'null'}", *more,
            ],
        )
    )  # fmt: skip


def test_a_teacher_with_a_different_tokenizer_is_refused(quickstart_data: Path, other_family: Path) -> None:
    prepared(quickstart_data, quickstart_data / "model")
    with pytest.raises(ValueError, match=r"'7' has id \d+ in the former and has id \d+ in the latter.*of one family"):
        prepared(quickstart_data, other_family)


def test_a_teacher_can_have_more_tokens(quickstart_data: Path, tmp_path: Path) -> None:
    larger = tmp_path / "larger"
    shutil.copytree(quickstart_data / "model", larger)
    file = larger / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["<more>"] = max(content["model"]["vocab"].values()) + 50
    file.write_text(json.dumps(content))
    small, large = load_tokenizer(quickstart_data / "model"), load_tokenizer(larger)
    check_same_tokens(small, large)
    with pytest.raises(ValueError, match=r"'<more>' has id \d+ in the former and is missing from the latter"):
        check_same_tokens(large, small)


def test_errors_of_the_teachers_files_and_settings_name_its_keys(quickstart_data: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        prepared(quickstart_data, tmp_path / "nowhere")
    assert caught.value.key == "teacher.path"
    with pytest.raises(RecipeError) as caught:
        prepared(quickstart_data, quickstart_data / "model", "algorithm.distill_top_k=100000")
    assert caught.value.key == "algorithm.distill_top_k"
    with pytest.raises(ValueError, match=r"teacher\.engine_args\.max_num_seq: .* did you mean 'max_num_seqs'"):
        prepared(quickstart_data, quickstart_data / "model", "teacher.engine_args.max_num_seq=4")
    with pytest.raises(ValueError, match=r"teacher\.engine_args\.max_logprobs .* set algorithm\.distill_top_k instead"):
        prepared(quickstart_data, quickstart_data / "model", "teacher.engine_args.max_logprobs=4")
    with pytest.raises(ValueError, match=r"teacher\.engine is 'vlm'.*'vllm'"):
        prepared(quickstart_data, quickstart_data / "model", "teacher.engine=vlm")


def test_several_teachers_are_checked_separately(quickstart_data: Path, other_family: Path) -> None:
    """Each teacher reads the policy's tokens, each data source has a teacher, and all their engines need devices."""
    source, model = DATA_SOURCE, quickstart_data / "model"

    def teachers(**paths: Path) -> str:
        each = ", ".join(f"{name}: {{path: {path}, engines: 2}}" for name, path in paths.items())
        return f"teacher.by_source={{{each}}}"

    both = [teachers(**{source: model, "other": model})]
    prepared(quickstart_data, None, *both)
    assert demand_of(load_recipe(GKD, ["teacher.path=null", *both])).fixed[0].engines == 4
    with pytest.raises(ValueError, match=r"teacher\.by_source\.other\.path[\s\S]*'7' has id \d+ in the former"):
        prepared(quickstart_data, None, teachers(**{source: model, "other": other_family}))
    with pytest.raises(RecipeError, match="no teacher for the data source 'megarl/word_problems' of training rows"):
        prepared(quickstart_data, None, teachers(other=model))
