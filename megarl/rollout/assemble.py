"""Convert sampled and scored trajectories to a group: control data (Sample) and token vectors (SampleTokens)."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from megarl.agents.trajectory import Trajectory
from megarl.rewards import Score, ScoreRequest
from megarl.rewards.scoring import Outcome
from megarl.rollout.step_rewards import Decode, tokens_at
from megarl.types import GenerationRequest, InlineData, Prompt, Sample, SampleFailure, SampleTokens, Steps


def policy_turns(trajectory: Trajectory) -> list[str]:
    """Return the texts of the policy's turns."""
    return [turn.text for turn in trajectory.turns if turn.role == "assistant"]


def score_request(prompt: Prompt, trajectory: Trajectory, with_tools: bool) -> ScoreRequest:
    """Return the scorers' input for a sample."""
    return ScoreRequest(
        response="\n".join(policy_turns(trajectory)),
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info={**prompt.extra_info, **trajectory.extra_info},
        prompt_text=prompt.text,
        uid=prompt.uid,
        turns=trajectory.turns if with_tools else (),
        messages=prompt.messages,
        loop_fields=tuple(trajectory.extra_info),
    )


async def outcomes_of(
    score: Callable[[list[ScoreRequest]], Awaitable[list[Outcome]]],
    prompt: Prompt,
    sampled: Sequence[Trajectory],
    with_tools: bool,
) -> list[Outcome]:
    """Return the samples' rewards: from the agent loop, if it has returned one, else from the scorers."""
    unscored = [score_request(prompt, sample, with_tools) for sample in sampled if sample.outcome is None]
    scored = iter(await score(unscored) if unscored else [])
    return [next(scored) if sample.outcome is None else (Score(sample.outcome), 0) for sample in sampled]


def _prompt(request: GenerationRequest, trajectory: Trajectory) -> tuple[int, ...]:
    return request.prompt.tokens if trajectory.prompt is None else trajectory.prompt


def control_data(
    request: GenerationRequest,
    index: int,
    trajectory: Trajectory,
    scored: Score | SampleFailure,
    decode: Decode,
    with_tools: bool,
) -> Sample:
    """Return the controller's part of a sample. The caller sets the location of its vectors."""
    start = len(_prompt(request, trajectory))
    score = Score(math.nan) if isinstance(scored, SampleFailure) else scored
    steps, tool_reward = steps_of(score, trajectory, decode)
    parts = dict(score.parts)
    if tool_reward:
        parts["steps"] = math.fsum(reward for _, reward in steps)
    return Sample(
        group=request.group,
        index=index,
        data=InlineData([]),
        prompt_length=start,
        response_length=len(trajectory.tokens),
        loss_tokens=int(trajectory.sampled.sum()),
        reward=score.value + tool_reward,
        reward_parts=parts,
        answer=score.answer,
        finish_reason=trajectory.finish_reason,
        spans=trajectory.spans,
        steps=tuple((start + token, reward) for token, reward in steps),
        tool_use=trajectory.tool_use if with_tools else None,
        drafts=trajectory.drafts,
    )


def steps_of(score: Score, trajectory: Trajectory, decode: Decode) -> tuple[Steps, float]:
    """Return the step rewards, each with the response token that ends the step, and the sum of the tools' rewards.

    A scorer's step ends at a character of the policy's turns, joined by line breaks. A tool's reward counts at the end
    of the turn that called the tool, and a reward of a tool's final state at the end of the last turn
    (`agent.tool_rewards: steps`).
    """
    rewards_at: dict[int, list[float]] = {}  # by response token
    ends = [end for end, _ in score.steps]
    for token, (_, reward) in zip(_end_tokens(ends, trajectory, decode), score.steps, strict=True):
        rewards_at.setdefault(token, []).append(reward)
    tool_rewards, policy_turn = [], -1
    for turn in trajectory.turns:
        policy_turn += turn.role == "assistant"
        if turn.reward and trajectory.adds_rewards:
            tool_rewards.append(turn.reward)
            rewards_at.setdefault(trajectory.ends[policy_turn] - 1, []).append(turn.reward)
    return tuple((token, math.fsum(rewards)) for token, rewards in sorted(rewards_at.items())), math.fsum(tool_rewards)


def _end_tokens(ends: Sequence[int], trajectory: Trajectory, decode: Decode) -> list[int]:
    """Return, for each of `ends` (numbers of characters of the policy's turns), the response token that completes them."""
    tokens: list[int] = []
    before = 0
    for number, (text, stop) in enumerate(zip(policy_turns(trajectory), trajectory.ends, strict=True)):
        within = [end - before for end in ends if before < end <= before + len(text)]
        start = _start_of_turn(trajectory, number)
        tokens += [start + token for token in tokens_at(within, trajectory.tokens[start:stop].tolist(), text, decode)]
        before += len(text) + 1
        if before in ends:  # the line break after the turn is its end token
            tokens.append(stop - 1)
    return tokens[: len(ends)]


def _start_of_turn(trajectory: Trajectory, number: int) -> int:
    """Return the index of the first token of the policy's turn `number`."""
    after = trajectory.ends[number - 1] if number else 0
    return after + int(np.argmax(trajectory.sampled[after:])) if len(trajectory.sampled) > after else after


def vectors(
    request: GenerationRequest, trajectory: Trajectory, text: str, reason: str, with_tools: bool
) -> SampleTokens:
    """Return the vectors of prompt plus response, without re-tokenization. `text`: the whole response."""
    prompt = _prompt(request, trajectory)
    blank = np.zeros(len(prompt), dtype=np.float32)
    return SampleTokens(
        tokens=np.concatenate([np.asarray(prompt, dtype=np.int32), trajectory.tokens]),
        loss_mask=np.concatenate([blank.astype(bool), trajectory.sampled]),
        rollout_log_probs=np.concatenate([blank, trajectory.log_probs]),
        text=text,
        routed_experts=trajectory.routed_experts,
        images=request.images if trajectory.images is None else trajectory.images,
        turns=trajectory.turns if with_tools else (),
        reason=reason,
    )
