"""The recipe's sections of fixed models with engines: `judge` and `teacher`. megarl/preflight/judge.py checks the judge's model and
its prompt together with the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        "Seconds without a finished group in an engine of the judge, while groups wait, after which it counts as dead.",
        above=0,
    )
    restarts: int = key(
        0,
        "Start an engine of the judge again after it has died, hung for `timeout` or was stopped, while the run goes on: at most this many times without a finished group in between. The other engines judge its groups, or the groups wait for it. The run ends if no engine is left. 0: the death of an engine ends the run.",
        at_least=0,
    )


@dataclass
class SourceTeacher:
    """An entry of `teacher.by_source`."""

    path: str = key("", "The teacher, as `teacher.path`. Required.")
    engines: int = key(1, "Number of its engines.", at_least=1, at_most=MOST_PROCESSES)


@dataclass
class TeacherConfig:
    """The teacher of on-policy distillation (`algorithm.reference: teacher`): a fixed model that computes log-probs
    of the policy's tokens. It runs in separate engines on separate devices."""

    path: Optional[str] = key(
        None,
        "The teacher: a Hugging Face directory or a name on the hub. Its tokenizer must equal the policy's. Required with a teacher.",
    )
    by_source: dict[str, SourceTeacher] = key(
        {},
        "Several teachers, each for the rows with one `data_source`: their `path` and `engines`, instead of `teacher.path` and `teacher.engines`. They share its other settings.",
    )
    engine: str = key("vllm", "Engine, as `rollout.engine`.")
    engines: int = key(1, "Number of engines. Each is a replica of the teacher.", at_least=1, at_most=MOST_PROCESSES)
    tensor_parallel: int = key(1, "Tensor-parallel size within an engine.", at_least=1)
    dtype: Optional[Literal["float32", "bfloat16", "float16"]] = key(None, "Data type. Unset: `model.dtype`.")
    engine_args: dict[str, Any] = key({}, "Further arguments of the engine, as `rollout.engine_args`.")
    timeout: float = key(
        1800.0,
        "Time limit for an engine to process its part of a step's samples, in seconds, after which it counts as dead.",
        above=0,
    )
    restarts: int = key(
        0,
        "Start an engine of the teacher again after it has died, hung for `timeout` or was stopped, while the run goes on: at most this many times without a finished part of a step in between. Another engine of the teacher scores its part, or the part waits for it. The run ends if a teacher has no engine left. 0: the death of an engine ends the run.",
        at_least=0,
    )

    @property
    def by_key(self) -> dict[str, TeacherConfig]:
        """Return the settings of each teacher by the key of its path, in the order in which their engines start."""
        if not self.by_source:
            return {"teacher.path": self}
        return {
            f"teacher.by_source.{source}.path": replace(self, path=part.path, engines=part.engines, by_source={})
            for source, part in self.by_source.items()
        }
