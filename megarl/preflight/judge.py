"""Checks of the judge: model, question template and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import check_vocabulary, load_tokenizer, unread_arguments
from megarl.errors import RecipeError, as_recipe_error
from megarl.hf.config import context_length
from megarl.hf.families.check import check_sizes
from megarl.preflight.engines import check_heads, overrides_config
from megarl.recipe.judge import JudgeConfig
from megarl.recipe.schema import Recipe
from megarl.rollout.judge.server import JudgeCodec


def check_judge(recipe: Recipe, config: dict[str, Any], sets: Sequence[PromptDataset]) -> None:
    """Raise RecipeError for the judge's model, its question, or the length of a question with the first row of each set.

    `config`: the judge's config.json.
    """
    judge = recipe.judge
    assert judge.path is not None and judge.prompt is not None
    check_judge_model(judge, config)
    with as_recipe_error("judge.path", "give the judge's own Hugging Face directory", judge.path):
        tokenizer = load_tokenizer(judge.path)
        check_vocabulary(tokenizer, config)
    if tokenizer.chat_template is None:
        problem = "its tokenizer has no chat template, which must format the judge's question"
        raise RecipeError("judge.path", problem, "name an instruction-tuned model, or add one", value=judge.path)
    for name in unread_arguments(tokenizer.chat_template, judge.chat_template_args):
        raise RecipeError(
            f"judge.chat_template_args.{name}", "the judge's chat template never reads it", "leave it out"
        )
    try:
        codec = JudgeCodec(tokenizer, judge)
        template_tokens = max(
            (len(codec.tokens(replace(data[0], question=""), "")) for data in sets if len(data)), default=0
        )
    except ValueError as error:
        raise RecipeError("judge.prompt", str(error), "correct the template, or the rows' columns") from error
    if "ground_truth" in codec.template.reads:
        for data in sets:
            row = next((prompt.uid for prompt in data if prompt.ground_truth is None), None)
            if row is not None:
                problem = f"the template reads ground_truth, and row {row} has no reward_model.ground_truth"
                raise RecipeError("judge.prompt", problem, "add it to the rows, or leave it out of the template")
    prompt_tokens = recipe.data.max_prompt_length if "prompt" in codec.template.reads else 0
    longest = template_tokens + prompt_tokens + recipe.rollout.max_response_length
    if longest > judge.max_prompt_length:
        prompt_text = f"data.max_prompt_length is {prompt_tokens} and " if prompt_tokens else ""
        raise RecipeError(
            "judge.max_prompt_length",
            f"the template and a row's other columns take {template_tokens} tokens, {prompt_text}"
            f"rollout.max_response_length {recipe.rollout.max_response_length}: {longest}. Long responses would have no reward",
            f"set it to {longest} or more (the judge may need more tokens for a text than the policy)",
            value=judge.max_prompt_length,
        )


def check_judge_model(judge: JudgeConfig, config: dict[str, Any]) -> None:
    """Raise RecipeError for parallel sizes and lengths that the judge's model does not support."""
    with as_recipe_error("judge.path", "give the judge's own config.json", judge.path):
        check_sizes(config)
    check_heads("judge", judge, config)
    context = context_length(config)
    longest = judge.max_prompt_length + judge.max_tokens
    if context is not None and longest > context and not overrides_config(judge):
        raise RecipeError(
            "judge.max_prompt_length",
            f"with judge.max_tokens = {judge.max_tokens} the judge needs {longest} tokens, and its context is {context} "
            "(max_position_embeddings of its config.json)",
            f"lower the two to a sum of at most {context}",
            value=judge.max_prompt_length,
        )
