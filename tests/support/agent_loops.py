"""Agent loops as users write them; see tests/agents/test_agent_loops.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

from megarl.agents import LoopSample, Response, ToolUnavailable, agent_loop


@agent_loop
class SecondLook:
    """Asks whether the policy is sure, and returns both turns. docs/agent_loops.md has this loop."""

    def __init__(self, question: str = "Are you sure?") -> None:
        self.question = question

    async def run(self, sample: LoopSample) -> Response:
        response = Response()
        response.add_sampled(await sample.generate(sample.prompt))
        response.add(sample.reply_tokens(self.question))
        response.add_sampled(await sample.generate([*sample.prompt, *response.tokens]))
        return response


@agent_loop
class BestOfTwo:
    """Samples two answers at once, and keeps the longer one; it earns the difference."""

    async def run(self, sample: LoopSample) -> Response:
        turns = await asyncio.gather(sample.generate(sample.prompt), sample.generate(sample.prompt))
        shorter, longer = sorted(turns, key=lambda turn: len(turn.tokens))
        response = Response(
            reward=len(longer.tokens) - len(shorter.tokens), extra_info={"shorter": len(shorter.tokens)}
        )
        response.add_sampled(longer)
        return response


@agent_loop
class OwnPrompt:
    """Writes its own prompt, judges greedily, and trains on the second half of the answer."""

    async def run(self, sample: LoopSample) -> Response:
        prompt = sample.tokenizer.encode("2 + 2 =")
        turn = await sample.generate(prompt, max_tokens=6)
        await sample.generate([*prompt, *turn.tokens], temperature=0.0, max_tokens=1)
        half = len(turn.tokens) // 2
        mask = [False] * half + [True] * (len(turn.tokens) - half)
        return Response(list(turn.tokens), mask, prompt=prompt, extra_info={"source": sample.data_source})


@agent_loop
class Broken:
    """Fails as the row says, after a turn."""

    async def run(self, sample: LoopSample) -> Response:
        turn = await sample.generate(sample.prompt)
        kind = sample.context.extra_info["fails"]
        response = Response()
        response.add_sampled(turn)
        if kind == "raises":
            raise KeyError("no such page")
        if kind == "unavailable":
            raise ToolUnavailable("the search engine is down")
        if kind == "other tokens":
            response.tokens[0] += 1
        if kind == "no mask":
            response.mask = [False] * len(response.tokens)
        if kind == "lengths":
            response.mask.append(True)
        if kind == "text":
            return "done"  # type: ignore[return-value]
        if kind == "reward":
            response.reward = float("nan")
        if kind == "extra":
            response.extra_info = {"page": Path("x")}
        if kind == "long prompt":
            response.prompt = [5] * 5000
        if kind == "temperature":
            response = Response()
            response.add_sampled(await sample.generate(sample.prompt, temperature=0.5))
        if kind == "empty request":
            await sample.generate([])
        if kind == "foreign tokens":
            await sample.generate([10**6])
        if kind == "one of two":
            await asyncio.gather(sample.generate(sample.prompt), sample.generate([]))
        if kind == "no room":
            await sample.generate(sample.prompt, max_tokens=0)
        if kind == "top_p":
            await sample.generate(sample.prompt, top_p=2.0)
        if kind == "hangs":
            subprocess.Popen(["sleep", "300"])
            time.sleep(300)
        if kind == "crashes":
            os._exit(3)
        return response


@agent_loop
class Endless:
    """Continues as long as the engine answers."""

    async def run(self, sample: LoopSample) -> Response:
        response = Response()
        while (turn := await sample.generate([*sample.prompt, *response.tokens])).tokens:
            response.add_sampled(turn)
        return response


@agent_loop
class Careful:
    """Acquires a file, and releases it also if the run ends before the sample."""

    async def run(self, sample: LoopSample) -> Response:
        lock = Path(sample.context.extra_info["lock"])
        lock.touch()
        try:
            response = Response()
            response.add_sampled(await sample.generate(sample.prompt))
            return response
        finally:
            lock.unlink()


@agent_loop
class EvenTokens:
    """Two turns with a fixed text between them; the reward is the share of even token ids, of which a random policy has a half."""

    def __init__(self, length: int) -> None:
        self.length = length

    async def run(self, sample: LoopSample) -> Response:
        response = Response()
        response.add_sampled(await sample.generate(sample.prompt, max_tokens=self.length))
        response.add(sample.reply_tokens("Go on"))
        tokens = [*sample.prompt, *response.tokens]
        response.add_sampled(await sample.generate(tokens, max_tokens=self.length))
        policy_tokens = [token for token, counts in zip(response.tokens, response.mask, strict=True) if counts]
        response.reward = sum(token % 2 == 0 for token in policy_tokens) / len(policy_tokens)
        return response
