"""From what was sampled and scored to a group: control data, and the token vectors beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megarl.agents.trajectory import Trajectory
from megarl.rewards import Score, ScoreRequest
from megarl.rollout.step_rewards import Decode, tokens_at
from megarl.types import GenerationRequest, InlineData, Prompt, Sample, SampleFailure, SampleTokens, Steps


def said(trajectory: Trajectory) -> list[str]:
    """What the policy said, turn by turn."""
    return [turn.text for turn in trajectory.turns if turn.role == "assistant"]


def question(prompt: Prompt, trajectory: Trajectory, with_tools: bool) -> ScoreRequest:
    """What scorers see of a sample."""
    return ScoreRequest(
        response="\n".join(said(trajectory)),
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
        prompt_text=prompt.text,
        uid=prompt.uid,
        turns=trajectory.turns if with_tools else (),
    )


def control_data(
    request: GenerationRequest,
    index: int,
    trajectory: Trajectory,
    scored: Score | SampleFailure,
    version: int,
    decode: Decode,
    with_tools: bool,
) -> Sample:
    """What the controller knows of a sample; where its vectors lie is said by the caller."""
    start = len(request.prompt.tokens)
    score = Score(math.nan) if isinstance(scored, SampleFailure) else scored
    steps, earned = steps_of(score, trajectory, decode)
    parts = dict(score.parts)
    if earned:
        parts["steps"] = math.fsum(reward for _, reward in steps)
    return Sample(
        group=request.group,
        index=index,
        data=InlineData([]),
        prompt_length=start,
        response_length=len(trajectory.tokens),
        loss_tokens=int(trajectory.sampled.sum()),
        reward=score.value + earned,
        reward_parts=parts,
        answer=score.answer,
        finish_reason=trajectory.finish_reason,
        version=version,
        steps=tuple((start + token, reward) for token, reward in steps),
        tool_use=trajectory.tool_use if with_tools else None,
    )


def steps_of(score: Score, trajectory: Trajectory, decode: Decode) -> tuple[Steps, float]:
    """(Rewards of steps, by the token of the response that ends each; what of them tools gave.)

    A scorer's step ends at a character of what the policy said, where turns are parted by a line break; a tool's reward
    is that of the turn that called it.
    """
    earned: dict[int, list[float]] = {}
    ends = [end for end, _ in score.steps]
    for place, (_, reward) in zip(_places(ends, trajectory, decode), score.steps, strict=True):
        earned.setdefault(place, []).append(reward)
    given, own = [], -1
    for turn in trajectory.turns:
        own += turn.role == "assistant"
        if turn.reward:
            given.append(turn.reward)
            earned.setdefault(trajectory.ends[own] - 1, []).append(turn.reward)
    return tuple((place, math.fsum(rewards)) for place, rewards in sorted(earned.items())), math.fsum(given)


def _places(ends: Sequence[int], trajectory: Trajectory, decode: Decode) -> list[int]:
    """The token of the response that completes each of the first `ends` characters of what the policy said."""
    places: list[int] = []
    before = 0
    for number, (text, stop) in enumerate(zip(said(trajectory), trajectory.ends, strict=True)):
        within = [end - before for end in ends if before < end <= before + len(text)]
        start = _start_of_turn(trajectory, number)
        places += [start + place for place in tokens_at(within, trajectory.tokens[start:stop].tolist(), text, decode)]
        before += len(text) + 1
        if before in ends:  # the line break behind the turn, which is its end token
            places.append(stop - 1)
    return places[: len(ends)]


def _start_of_turn(trajectory: Trajectory, number: int) -> int:
    """Index of the first token of one of the policy's turns."""
    after = trajectory.ends[number - 1] if number else 0
    return after + int(np.argmax(trajectory.sampled[after:])) if len(trajectory.sampled) > after else after


def vectors(
    request: GenerationRequest, trajectory: Trajectory, text: str, reason: str, with_tools: bool
) -> SampleTokens:
    """Prompt and response in one piece, exactly as sampled: nothing is tokenised again. `text`: the whole response."""
    prompt = request.prompt.tokens
    blank = np.zeros(len(prompt), dtype=np.float32)
    return SampleTokens(
        tokens=np.concatenate([np.asarray(prompt, dtype=np.int32), trajectory.tokens]),
        loss_mask=np.concatenate([blank.astype(bool), trajectory.sampled]),
        rollout_log_probs=np.concatenate([blank, trajectory.log_probs]),
        text=text,
        routed_experts=trajectory.routed_experts,
        images=request.images,
        turns=trajectory.turns if with_tools else (),
        reason=reason,
    )
