"""Errors in the judge's settings, before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megarl.data import PromptDataset, load_tokenizer
from megarl.preflight.judge import check_judge, check_judge_model
from megarl.preflight.load import load_recipe
from megarl.preflight.survey import prepare_evaluation, prepare_training
from megarl.recipe import RecipeError
from megarl.recipe.judge import JudgeConfig
from tests.support.stack import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
JUDGE = ["reward.functions={gsm8k: 1.0, judge: 0.5}", "judge.path=some/model", "judge.prompt='Grade {{ response }}.'"]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (JUDGE[:1], "judge.path", "but its model is unset"),
        (JUDGE[:2], "judge.prompt", "its question is unset"),
        (["reward.function=judge", *JUDGE[1:2]], "judge.prompt", "its question is unset"),
        (JUDGE[1:], "judge", "this section has no effect"),
        ([*JUDGE, "judge.pattern='Score: [0-9'"], "judge.pattern", "it is not a regular expression: unterminated"),
        ([*JUDGE, "judge.pattern='Score: [0-9]'"], "judge.pattern", "it has no group"),
        ([*JUDGE, "judge.temperature=0"], "judge.attempts", "every attempt returns the same verdict"),
        ([*JUDGE, "judge.scale=0"], "judge.scale", "must be above 0"),
        ([*JUDGE, "reward.functions.judge=0"], "reward.functions.judge", "a weight must be finite"),
        ([*JUDGE, "reward.functions={judge: 1, 'mine:judge': 1}"], "reward.functions", "which is the metric of 'judge'"),
        ([*JUDGE, "algorithm.advantage=remax"], "algorithm.advantage", "cannot read the text of greedy samples"),
    ],
)  # fmt: skip
def test_refusals(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, overrides)
    assert caught.value.key == key and words in str(caught.value), str(caught.value)


def test_a_judge_is_refused_with_demonstrations() -> None:
    with pytest.raises(RecipeError, match=r"train\.source is 'sft'"):
        load_recipe(ROOT / "recipes" / "quickstart_sft.yaml", JUDGE)


def test_the_base_recipe_lacks_only_a_model() -> None:
    from megarl.rollout.judge.verdicts import JudgeTemplate

    recipe = load_recipe(ROOT / "recipes" / "base" / "judge.yaml", check=False)
    assert recipe.judge.prompt is not None
    assert JudgeTemplate(recipe.judge.prompt).reads == {"prompt", "ground_truth", "response"}
    assert (recipe.judge.pattern, recipe.judge.scale) == (JudgeConfig().pattern, 10.0)


class TestItsModelAndQuestion:
    @pytest.fixture
    def prepare(self, quickstart_data: Path):
        def prepared(*more: str, evaluation: bool = False) -> None:
            recipe = load_recipe(
                QUICKSTART,
                [
                    f"model.path={quickstart_data}/model", f"data.train_files=[{quickstart_data}/data/train.parquet]",
                    f"data.eval_files=[{quickstart_data}/data/test.parquet]", *JUDGE, f"judge.path={quickstart_data}/model",
                    "judge.max_prompt_length=448", "judge.max_tokens=64", *more,
                ],
            )  # fmt: skip
            (prepare_evaluation if evaluation else prepare_training)(recipe)

        return prepared

    @pytest.mark.parametrize("evaluation", [False, True])
    def test_valid_judge_prompts_are_accepted_and_invalid_ones_named(self, prepare, evaluation: bool) -> None:
        prepare("judge.engine_args.max_num_seqs=4", evaluation=evaluation)
        with pytest.raises(RecipeError, match=r"(?s)no attribute 'solution'.*correct the template") as caught:
            prepare("judge.prompt='{{ response }} {{ extra_info.solution }}'", evaluation=evaluation)
        assert caught.value.key == "judge.prompt"
        with pytest.raises(RecipeError, match="never reads `response`"):
            prepare("judge.prompt='Grade {{ prompt }}.'", evaluation=evaluation)
        with pytest.raises(ValueError, match=r"judge\.engine is 'vlm'.*'vllm'"):
            prepare("judge.engine=vlm", evaluation=evaluation)

    def test_engine_arguments(self, prepare) -> None:
        with pytest.raises(ValueError, match=r"judge\.engine_args\.max_num_seq: .* did you mean 'max_num_seqs'"):
            prepare("judge.engine_args.max_num_seq=4")
        message = r"judge\.engine_args\.max_model_len .* set judge\.max_prompt_length and judge\.max_tokens instead"
        with pytest.raises(ValueError, match=message):
            prepare("judge.engine_args.max_model_len=4")
        with pytest.raises(ValueError, match=r"judge\.engine_args\.model .* set judge\.path instead"):
            prepare("judge.engine_args.model=x")

    def test_chat_template(self, prepare, quickstart_data: Path, tmp_path: Path) -> None:
        with pytest.raises(RecipeError) as caught:
            prepare("judge.chat_template_args={enable_thinkin: false}")
        assert caught.value.key == "judge.chat_template_args.enable_thinkin"
        plain = tmp_path / "plain"
        shutil.copytree(quickstart_data / "model", plain)
        file = plain / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        del settings["chat_template"]
        file.write_text(json.dumps(settings))
        with pytest.raises(RecipeError, match="its tokenizer has no chat template"):
            prepare(f"judge.path={plain}")
        with pytest.raises(RecipeError, match="the directory does not exist"):
            prepare(f"judge.path={tmp_path}/nowhere")

    def test_prompts_longer_than_the_judges_context_are_refused(self, prepare) -> None:
        """The tiny model has a context of 512 tokens = 448 + 64."""
        with pytest.raises(
            RecipeError, match=r"judge\.max_tokens = 65 the judge needs 513 tokens, and its context is 512"
        ):
            prepare("judge.max_tokens=65")
        prepare("judge.max_tokens=65", "judge.engine_args.hf_overrides={max_position_embeddings: 1024}")

    def test_prompts_that_may_exceed_the_limit_are_refused_with_the_arithmetic(self, prepare) -> None:
        """The quickstart's prompts are 64 tokens at most, its responses 48."""
        both = "judge.prompt='{{ prompt }} {{ response }}'"
        with pytest.raises(RecipeError) as caught:
            prepare(both, "judge.max_prompt_length=50")
        judge_bytes = int(str(caught.value).split("take ")[1].split()[0])
        assert (
            f"take {judge_bytes} tokens, data.max_prompt_length is 64 and rollout.max_response_length 48: {judge_bytes + 112}"
            in str(caught.value)
        )
        prepare(both, f"judge.max_prompt_length={judge_bytes + 112}")
        with pytest.raises(RecipeError):
            prepare(both, f"judge.max_prompt_length={judge_bytes + 111}")
        prepare(f"judge.max_prompt_length={judge_bytes + 111}")  # one that does not read the prompt

    def test_a_sample_without_a_row_that_fits_is_not_asked(self, quickstart_data: Path) -> None:
        """`plan` samples large files. Rows outside of the sample may be shorter, so the sample may keep no row."""
        settings = [*JUDGE, f"judge.path={quickstart_data}/model", "judge.max_prompt_length=448", "judge.max_tokens=64"]
        recipe = load_recipe(
            QUICKSTART, [*settings, "data.max_prompt_length=1", "data.overlong_prompts=filter", "data.cache=null"]
        )
        file, tokenizer = quickstart_data / "data" / "train.parquet", load_tokenizer(quickstart_data / "model")
        empty = PromptDataset([file], tokenizer, recipe.data, sample=2)
        assert not len(empty)
        config = json.loads((quickstart_data / "model" / "config.json").read_text())
        check_judge(recipe, config, [empty])


CONFIG = {
    "model_type": "qwen3_moe", "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "vocab_size": 128,
    "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 36, "max_position_embeddings": 512,
}  # fmt: skip


def test_a_judge_on_sglang_has_sglangs_arguments() -> None:
    """Only vLLM's names were known: the longer context was refused, and an argument recommended that SGLang lacks."""
    judge = JudgeConfig(path="m", engine="sglang", max_prompt_length=1000, max_tokens=24)
    with pytest.raises(RecipeError, match="its context is 512"):
        check_judge_model(judge, CONFIG)
    judge.engine_args = {"json_model_override_args": '{"max_position_embeddings": 1024}'}
    check_judge_model(judge, CONFIG)
    judge.tensor_parallel = 8
    with pytest.raises(RecipeError, match=r"over 8 devices of an engine(.|\n)*set judge\.engine_args\.ep_size=8"):
        check_judge_model(judge, CONFIG)
    judge.engine_args["ep_size"] = 2  # each expert on 4 devices
    check_judge_model(judge, CONFIG)
    judge.engine, judge.engine_args = "vllm", {"hf_overrides": {"max_position_embeddings": 1024}}
    with pytest.raises(RecipeError, match=r"set judge\.engine_args\.enable_expert_parallel=true"):
        check_judge_model(judge, CONFIG)
