"""Judge process: an engine that writes verdicts on sampled responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megarl import engines
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.engines.base import EngineSpec
from megarl.errors import cut_middle
from megarl.recipe.judge import JUDGE, JudgeConfig
from megarl.rollout.judge.verdicts import JudgeTemplate, number_in
from megarl.types import Completion, DataRef, GenerationRequest, Prompt, SampleFailure, Sampling, derived_seed

_SHOWN = 2000  # characters of a verdict in logs and reports
_SHOWN_IN_CAUSE = 80
JUDGE_SEEDS = 0x10D6E  # differs from the policy's


@dataclass(frozen=True)
class Judgement:
    """Score or failure of a sample, and the number of repeated attempts."""

    result: float | SampleFailure
    retries: int = 0


class JudgeCodec:
    """Encode a sample as tokens of the judge's prompt, and decode the judge's verdict to a score."""

    def __init__(self, tokenizer: Tokenizer, settings: JudgeConfig):
        assert settings.prompt is not None
        self.tokenizer, self.settings = tokenizer, settings
        self.template, self.pattern = JudgeTemplate(settings.prompt), re.compile(settings.pattern)

    def tokens(self, prompt: Prompt, response: str) -> tuple[int, ...]:
        """Return the tokens of the judge's prompt for a sample, of any length. Raises ValueError if the template cannot
        be rendered with the row."""
        content = self.tokenizer.break_added_tokens(self.template.render(prompt, response))
        messages = [{"role": "user", "content": content}]
        return tuple(
            self.tokenizer.encode(self.tokenizer.render_text(messages, True, self.settings.chat_template_args))
        )

    def fitting_tokens(self, prompt: Prompt, response: str) -> tuple[int, ...]:
        """Like `tokens`, but raise ValueError if they exceed judge.max_prompt_length. Responses are not truncated, because
        a verdict on a part is not a verdict on the whole."""
        tokens, limit = self.tokens(prompt, response), self.settings.max_prompt_length
        if len(tokens) > limit:
            raise ValueError(
                f"the judge's prompt for it has {len(tokens)} of the judge's tokens, "
                f"and judge.max_prompt_length is {limit}"
            )
        return tokens

    def score(self, verdict: str) -> float | None:
        """Return the scaled number of a verdict; None if it has no number."""
        number = number_in(verdict, self.pattern)
        return None if number is None else number / self.settings.scale


class JudgeServer:
    """Runs inside a service process (see cluster/): groups are judged concurrently."""

    def __init__(self, engine: str, spec: EngineSpec, settings: JudgeConfig, run_seed: int | None):
        assert settings.path is not None
        self.engine, self.settings, self.run_seed = engines.create(engine, spec), settings, run_seed
        self.codec = JudgeCodec(load_tokenizer(settings.path), settings)
        # A call to the engine blocks a thread, and many groups may finish sampling at the same time.
        self.calls = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="engine-call")

    async def start(self) -> dict[str, Any]:
        """Load the engine; returns its description."""
        return await asyncio.get_running_loop().run_in_executor(self.calls, self.engine.start)

    async def judge(self, number: int, prompt: Prompt, responses: DataRef) -> tuple[list[Judgement], list[str]]:
        """Judge the `responses` of a group. Returns each sample's judgement and its verdict's shortened text."""
        return await asyncio.get_running_loop().run_in_executor(self.calls, self._judge, number, prompt, responses)

    async def shutdown(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self.calls, self.engine.shutdown)
        self.calls.shutdown(wait=False)

    def _judge(self, number: int, prompt: Prompt, data: DataRef) -> tuple[list[Judgement], list[str]]:
        responses: list[str] = data.get()
        judgements: dict[int, Judgement] = {}
        texts = [""] * len(responses)
        questions: dict[int, tuple[int, ...]] = {}  # without a score so far
        for index, response in enumerate(responses):
            try:
                questions[index] = self.codec.fitting_tokens(prompt, response)
            except ValueError as error:
                texts[index] = str(error)
                judgements[index] = Judgement(SampleFailure(JUDGE, prompt.uid, "error", str(error)))
        for attempt in range(self.settings.attempts):
            if not questions:
                break
            for index, verdict in self._sample_verdicts(number, attempt, questions).items():
                text, is_cut = self.codec.tokenizer.decode(verdict.tokens.tolist()), verdict.finish_reason == "length"
                texts[index] = cut_middle(text, _SHOWN)  # the end has the number
                score = None if is_cut else self.codec.score(text)  # "Score: 1" may be the start of "Score: 10"
                if score is None:
                    judgements[index] = self._no_number(prompt, text, is_cut)
                else:
                    judgements[index] = Judgement(score, attempt)
                    del questions[index]
        return [judgements[index] for index in range(len(responses))], texts

    def _sample_verdicts(
        self, number: int, attempt: int, questions: dict[int, tuple[int, ...]]
    ) -> dict[int, Completion]:
        """Sample a verdict for each of `questions` in a single call to the engine."""
        seed = None if self.run_seed is None else derived_seed(self.run_seed, JUDGE_SEEDS, number, attempt)
        settings = self.settings
        sampling = Sampling(1, settings.max_tokens, settings.temperature, stop_token_ids=self.codec.tokenizer.stop_ids)
        requests = [
            GenerationRequest(
                index,
                Prompt(f"sample {index} of group {number}", tokens, "", ""),
                sampling,
                None if seed is None else seed + index,
            )
            for index, tokens in questions.items()
        ]
        answers: dict[int, Completion] = {}

        def finished(index: int, completions: Sequence[Completion]) -> None:
            answers[index] = completions[0]

        self.engine.generate(requests, finished)
        return answers

    def _no_number(self, prompt: Prompt, last: str, is_cut: bool) -> Judgement:
        attempts = self.settings.attempts
        cut, none = f"judge.max_tokens = {self.settings.max_tokens} cuts", "judge.pattern finds no number in"
        cause = f"{cut if is_cut else none} its verdict, which ends with {last[-_SHOWN_IN_CAUSE:]!r}"
        return Judgement(SampleFailure(JUDGE, prompt.uid, "error", cause, attempts), attempts - 1)
