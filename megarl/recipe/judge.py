"""The recipe's section `judge`. The model and the question are checked with the data (megarl/preflight/judge.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional

from megarl.recipe.key import key

JUDGE = "judge"
"""The judge's name in `reward.function`, `reward.functions` and metrics."""


@dataclass
class JudgeConfig:
    """A fixed language model that reads question and response and writes a verdict, of which a number is a term of the reward, in engines on devices of its own; see docs/rewards.md. There is one where `reward.function` or `reward.functions` names `judge`."""

    path: Optional[str] = key(
        None, "Hugging Face directory of the judge, with a tokenizer and chat template of its own."
    )
    engine: str = key("vllm", "Engine.")
    engines: int = key(1, "Engines, each a replica of the judge.", at_least=1)
    tensor_parallel: int = key(1, "Tensor-parallel size inside an engine.", at_least=1)
    dtype: Optional[Literal["float32", "bfloat16", "float16"]] = key(None, "Data type. Unset: `model.dtype`.")
    engine_args: dict[str, Any] = key({}, "Further arguments of the engine, as `rollout.engine_args`.")
    prompt: Optional[str] = key(
        None,
        "What the judge is asked of a sample: a Jinja template that reads `response`, and `prompt`, `ground_truth` and `extra_info` as it likes. It becomes the one user message of a chat.",
    )
    chat_template_args: dict[str, Any] = key(
        {}, "Arguments of the judge's chat template, e.g. {enable_thinking: false}."
    )
    pattern: str = key(
        r"Score: *(10|[0-9])\b",
        "Regular expression of the score in a verdict: its first group is the number. The last match counts.",
    )
    scale: float = key(10.0, "The number is divided by it.", above=0)
    right_from: Optional[float] = key(
        None,
        "A score, after the division, of at least this counts as right in evaluation (part `accuracy`), unless another scorer says what is right. Unset: whatever the whole reward says.",
    )
    max_prompt_length: int = key(
        8192, "Longest question to the judge, in its tokens. A sample for which it is longer has no reward.", at_least=1
    )
    max_tokens: int = key(512, "Longest verdict, in tokens.", at_least=1)
    temperature: float = key(0.6, "Sampling temperature of verdicts; 0 is greedy.", at_least=0)
    attempts: int = key(
        3,
        "Verdicts that are sampled, each with another seed, until one has a number. A sample without any has no reward: its group is left out and counted, as where a scorer fails.",
        at_least=1,
    )
    timeout: float = key(
        1800.0,
        "Seconds in which an engine of the judge finishes no group although some wait for it: the run then fails, naming it.",
        above=0,
    )
