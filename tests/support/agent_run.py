"""A run directory with several data sources and an agent loop's samples, written by megarl's writers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from megarl.observe.log import RunLog
from megarl.observe.samples import sample_records
from megarl.recipe.schema import Recipe
from megarl.rollout.admission import TriedGroup
from megarl.rollout.evaluate import by_source, evaluation_metrics
from megarl.rollout.metrics import agent_figures, sampled_figures
from megarl.types import Group, InlineData, Sample, SampleFailure, SampleTokens, ToolUse, Turn


class Words:
    """A tokenizer with the methods that sample records use."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def decode(self, tokens: list[int]) -> str:
        return self.prompt


def turns(text: str) -> tuple[Turn, ...]:
    call = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
    return (
        Turn("assistant", f"Let me work it out. {text}\n{call}", tokens=41),
        Turn("tool", f"42\n{text}", 9, f"code_interpreter{text}", {"code": f"print(6 * 7)  # {text}"}, "", 0.127, 0.25),
        Turn("assistant", f"And once more, to be sure.\n{call}", tokens=33),
        Turn(
            "tool",
            f"Tool failed: ran longer than 30 s {text}",
            12,
            "search",
            {"query": text, "limit": 3},
            "timeout",
            30.0,
        ),
        Turn("assistant", "The answer is \\boxed{42}.", tokens=12),
        Turn("user", f"Thank you. {text}", reward=0.5),
    )


def tool_group(number: int, source: str, step: int, text: str) -> Group:
    """A group with two samples that call tools and two that do not."""
    vectors, samples = [], []
    for index in range(4):
        right, looped = (index + step) % 2 == 0, index < 2
        reason = f"the last box holds {'42, as asked' if right else 'nothing'} {text}"
        words = SampleTokens(
            np.arange(120, dtype=np.int32),
            np.ones(120, bool),
            np.zeros(120, np.float32),
            f"all of it {text}",
            reason=reason,
        )
        words.turns = turns(text) if looped else (Turn("assistant", f"I think it is 42. {text}", 12),)
        use = ToolUse(3, 2, 1, 1, 30.127) if looped else ToolUse()
        ended = "turns" if looped and not right else "stop"
        parts = {"accuracy": float(right), "format": 0.5}
        samples.append(
            Sample(number, index, InlineData([]), 12, 108, 57, float(right), parts, finish_reason=ended, tool_use=use)
        )
        vectors.append(words)
    for sample in samples:
        sample.data = InlineData(vectors)
    return Group(number, f"{source}/{number}", source, samples)


def unscored_group(number: int, source: str) -> Group:
    samples = [Sample(number, i, InlineData([]), 12, 30, 30, math.nan, tool_use=ToolUse()) for i in range(4)]
    kinds = ("timeout", "timeout", "crash", "error")
    failures = tuple(SampleFailure("scorer 'mine'", f"{source}/{number}", kind, "it failed", 3) for kind in kinds)
    return Group(number, f"{source}/{number}", source, samples, failures=failures, scoring_retries=8)


def make_agent_run(path: Path, sources: list[str], text: str = "", steps: int = 4) -> None:
    """Four steps and two evaluations; in step 2 the last source could not be scored. `text` is part of every user-supplied string."""
    recipe = Recipe(name="tools")
    recipe.observe.console, recipe.observe.tensorboard, recipe.observe.report = "plain", False, False
    with RunLog(recipe, path, 1, steps) as log:
        for step in range(1, steps + 1):
            tried = [TriedGroup(tool_group(i, source, step + i, text), True) for i, source in enumerate(sources)]
            groups = [item.group for item in tried]
            if step == 2:
                tried.append(TriedGroup(unscored_group(len(sources), sources[-1]), False))
            samples = [sample for group in groups for sample in group.samples]
            log.add({"rollout/rewards/mean": float(np.mean([sample.reward for sample in samples]))})
            log.add({**agent_figures(samples), **sampled_figures(tried)})
            log.samples(step, sample_records(groups, step, len(groups), Words(f"What is 6 times 7? {text}")))
            if step in (1, steps):
                log.evaluation(step, {**evaluation_metrics(groups, [], [1, 4]), **by_source(groups, [], [1, 4])})
            log.step(step)
