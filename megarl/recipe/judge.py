"""The recipe's section `judge`. megarl/preflight/judge.py checks its model and its prompt together with the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional

from megarl.recipe.key import MOST_PROCESSES, key

JUDGE = "judge"
"""The judge's name in `reward.function`, `reward.functions` and metrics."""


@dataclass
class JudgeConfig:
    """A fixed language model that reads question and response and writes a verdict with a number, which is a term of
    the reward. It runs in separate engines on separate devices; see docs/rewards.md. Active if `reward.function`
    or `reward.functions` names `judge`."""

    path: Optional[str] = key(
        None,
        "The judge: a Hugging Face directory or a name on the hub, with its tokenizer and chat template. Required with a judge.",
    )
    engine: str = key("vllm", "Engine, as `rollout.engine`.")
    engines: int = key(1, "Number of engines. Each is a replica of the judge.", at_least=1, at_most=MOST_PROCESSES)
    tensor_parallel: int = key(1, "Tensor-parallel size within an engine.", at_least=1)
    dtype: Optional[Literal["float32", "bfloat16", "float16"]] = key(None, "Data type. Unset: `model.dtype`.")
    engine_args: dict[str, Any] = key({}, "Further arguments of the engine, as `rollout.engine_args`.")
    prompt: Optional[str] = key(
        None,
        "The judge's user message for a sample: a Jinja template that reads `response`, and may read `prompt`, `ground_truth` and `extra_info`. megarl inserts a space into each of the judge's special tokens in the rendered prompt, the template's text included.",
    )
    chat_template_args: dict[str, Any] = key(
        {}, "Arguments of the judge's chat template, e.g. {enable_thinking: false}."
    )
    pattern: str = key(
        r"Score: *(10|[0-9])\b",
        "Regular expression of the score in a verdict. Its first group is the number. The last match counts.",
    )
    scale: float = key(10.0, "Divisor of the number.", above=0)
    right_from: Optional[float] = key(
        None,
        "Minimum score, after the division, that counts as right in evaluation (part `accuracy`), unless another scorer decides. Unset: the whole reward decides.",
    )
    max_prompt_length: int = key(
        8192,
        "Maximum length of the judge's prompt, in the judge's tokens. A sample with a longer prompt has no reward.",
        at_least=1,
    )
    max_tokens: int = key(
        512, "Maximum length of a verdict, in tokens. A longer verdict is cut and has no number.", at_least=1
    )
    temperature: float = key(0.6, "Sampling temperature of verdicts. 0: greedy.", at_least=0)
    attempts: int = key(
        3,
        "Maximum verdicts per sample, each with another seed, until a verdict has a number. A sample without a number has no reward: its group is left out and counted, as after a scorer failure.",
        at_least=1,
    )
    timeout: float = key(
        1800.0,
        "Seconds without a finished group in an engine of the judge, while groups wait, after which the run fails and names the engine.",
        above=0,
    )
