"""A judge's process: one engine that writes verdicts on what the policy has sampled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl import engines
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engines.base import EngineSpec
from megarl.recipe.judge import JUDGE, JudgeConfig
from megarl.rollout.judge.verdicts import Question, number_in, shortened
from megarl.types import Completion, DataRef, GenerationRequest, Prompt, SampleFailure, Sampling

_SHOWN = 2000  # characters of a verdict that people see
_SHOWN_IN_CAUSE = 80
_OWN_SEEDS = 0x10D6E  # apart from the policy's


@dataclass(frozen=True)
class Verdict:
    """What became of one sample: its score, or why there is none, and the attempts that were made again before."""

    result: float | SampleFailure
    retries: int = 0


class Interrogation:
    """A judge's side of its questions: from a sample to tokens, and from its answer to a score."""

    def __init__(self, tokenizer: Tokenizer, settings: JudgeConfig):
        assert settings.prompt is not None
        self.tokenizer, self.settings = tokenizer, settings
        self.question, self.pattern = Question(settings.prompt), re.compile(settings.pattern)

    def tokens(self, prompt: Prompt, response: str) -> tuple[int, ...]:
        """The question about one sample as the judge reads it, however long. Raises ValueError where the template cannot be
        rendered with the row."""
        said = self.tokenizer.break_added_tokens(self.question.ask(prompt, response))
        messages = [{"role": "user", "content": said}]
        return tuple(
            self.tokenizer.encode(self.tokenizer.render_text(messages, True, self.settings.chat_template_args))
        )

    def fitting_tokens(self, prompt: Prompt, response: str) -> tuple[int, ...]:
        """`tokens`; ValueError where they are more than judge.max_prompt_length, too: of a response that was cut to fit, a
        judge would say what is not true of it."""
        tokens, limit = self.tokens(prompt, response), self.settings.max_prompt_length
        if len(tokens) > limit:
            raise ValueError(
                f"the question about it has {len(tokens)} of the judge's tokens, and judge.max_prompt_length is {limit}"
            )
        return tokens

    def score(self, verdict: str) -> float | None:
        """None: it has no number."""
        number = number_in(verdict, self.pattern)
        return None if number is None else number / self.settings.scale


class JudgeServer:
    """Runs inside a service process (see cluster/): groups are judged as they come, many at a time."""

    def __init__(self, engine: str, spec: EngineSpec, settings: JudgeConfig, run_seed: int | None):
        assert settings.path is not None
        self.engine, self.settings, self.run_seed = engines.create(engine, spec), settings, run_seed
        self.asks = Interrogation(load_tokenizer(settings.path), settings)
        # A call to the engine blocks a thread until it is done, and a wave may end at once.
        self.calls = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="engine-call")

    async def start(self) -> dict[str, Any]:
        """Load the engine; returns its description."""
        return await asyncio.get_running_loop().run_in_executor(self.calls, self.engine.start)

    async def judge(self, number: int, prompt: Prompt, said: DataRef) -> tuple[list[Verdict], list[str]]:
        """Of each sample of a group, of which the policy's texts lie behind `said`, the verdict's result; and the verdicts' texts as
        people see them."""
        return await asyncio.get_running_loop().run_in_executor(self.calls, self._judge, number, prompt, said)

    async def shutdown(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self.calls, self.engine.shutdown)
        self.calls.shutdown(wait=False)

    def _judge(self, number: int, prompt: Prompt, said: DataRef) -> tuple[list[Verdict], list[str]]:
        responses: list[str] = said.get()
        verdicts: list[Verdict | None] = [None] * len(responses)
        texts = [""] * len(responses)
        questions: dict[int, tuple[int, ...]] = {}
        for index, response in enumerate(responses):
            try:
                questions[index] = self.asks.fitting_tokens(prompt, response)
            except ValueError as error:
                verdicts[index] = Verdict(SampleFailure(JUDGE, prompt.uid, "error", str(error)))
        for attempt in range(self.settings.attempts):
            waiting = [index for index in questions if verdicts[index] is None]
            if not waiting:
                break
            for index, text in self._asked(number, attempt, {index: questions[index] for index in waiting}).items():
                score = self.asks.score(text)
                texts[index] = shortened(text, _SHOWN)
                verdicts[index] = None if score is None else Verdict(score, attempt)
        found = [verdict or self._none(prompt, text) for verdict, text in zip(verdicts, texts, strict=True)]
        return found, texts

    def _asked(self, number: int, attempt: int, questions: dict[int, tuple[int, ...]]) -> dict[int, str]:
        """The engine's answers, all asked for at once."""
        seed = None if self.run_seed is None else judge_seed(self.run_seed, number, attempt)
        settings = self.settings
        sampling = Sampling(1, settings.max_tokens, settings.temperature, stop_token_ids=self.asks.tokenizer.stop_ids)
        requests = [
            GenerationRequest(
                index,
                Prompt(f"sample {index} of group {number}", tokens, "", ""),
                sampling,
                None if seed is None else seed + index,
            )
            for index, tokens in questions.items()
        ]
        answers: dict[int, str] = {}

        def finished(index: int, completions: Sequence[Completion]) -> None:
            answers[index] = self.asks.tokenizer.decode(completions[0].tokens.tolist())

        self.engine.generate(requests, finished)
        return answers

    def _none(self, prompt: Prompt, last: str) -> Verdict:
        attempts = self.settings.attempts
        cause = f"judge.pattern finds no number in its verdict, which ends with {last[-_SHOWN_IN_CAUSE:]!r}"
        return Verdict(SampleFailure(JUDGE, prompt.uid, "error", cause, attempts), attempts - 1)


def judge_seed(run_seed: int, group: int, attempt: int) -> int:
    """Seed of the verdict on a group's first sample. Nothing else changes it."""
    words = np.random.SeedSequence([run_seed, _OWN_SEEDS, group, attempt]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(2))
