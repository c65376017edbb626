"""What flows through megarl: Prompt -> Group of Samples -> Shard -> MicroBatch.

The index law: every per-token vector has ``len(tokens)`` entries and index t describes token t.
The shift by one between a logit and the token it predicts happens once, in
megatron/output_heads.py and the PackedStream that it reads.

Control and data are apart. A `Sample` is what the controller decides from (lengths, reward,
version): a few hundred bytes. Its token vectors (`SampleTokens`) stay where they were made,
behind a `DataRef`, until the trainer that needs them asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np


@dataclass(frozen=True)
class PromptImage:
    """One image of a prompt as its row gives it, encoded: what is kept and moved until the prompt is sampled."""

    where: str  # "train.parquet, row 17, image 0": for errors
    data: bytes | None = field(repr=False)  # a whole PNG, JPEG, ...; None: the file at `path` is
    path: str  # "" where `data` counts
    tokens: int  # placeholders that it takes in the prompt
    start: int = 0  # index of the first of them


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt data set, ready to be sampled from.

    Example: ``Prompt(uid="openai/gsm8k/17", tokens=(5, 80, 9), text="Question: ...",
    data_source="openai/gsm8k", ground_truth="72")``.
    """

    uid: str  # stable over runs: names the row
    tokens: tuple[int, ...]
    text: str  # what `tokens` says, for people
    data_source: str  # selects the scorer
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    question: str = ""  # what the row's messages say, without the chat template's own
    images: tuple[PromptImage, ...] = ()  # in the order of their placeholders, which `tokens` holds expanded


@dataclass(frozen=True)
class Sampling:
    """How an engine samples; names and meanings are vLLM's. ``temperature=0`` is greedy."""

    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampleImages:
    """The images of one sample as the model's vision tower reads them, in the order of their tokens.

    Example: an image of 4 x 6 patches, of which 2 x 2 become a token, whose 6 tokens start at index 3:
    ``SampleImages(pixels=array [24, 1176], grids=array([[1, 4, 6]]), starts=array([3]))``.
    """

    pixels: np.ndarray  # float32 [patches of all images, numbers of a patch]
    grids: np.ndarray  # int64 [images, 3]: frames (1), rows and columns of patches
    starts: np.ndarray  # int64 [images]: index of each image's first placeholder token


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be sampled ``sampling.n`` times. Sample i draws from seed + i, or without a seed (`rollout.seeded`)
    from the engine's generator."""

    group: int  # names the group over the whole run
    prompt: Prompt
    sampling: Sampling
    seed: int | None
    images: SampleImages | None = None  # those of the prompt, once the rollout process has prepared them
    with_greedy: bool = False  # also one greedy sample, for the group's baseline
    prompt_top_k: int | None = None  # also `Completion.prompt`, with so many likeliest tokens a place; None: not


@dataclass(frozen=True)
class TokenScores:
    """What a model says of given tokens: of each under the distribution after the tokens before it, at temperature 1.

    Entry 0, which nothing predicts, is 0 throughout.
    """

    log_probs: np.ndarray  # float32 [L]: of the tokens themselves
    top_tokens: np.ndarray  # int32 [L, K]: the likeliest tokens in each place, in falling order
    top_log_probs: np.ndarray  # float32 [L, K]: theirs


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one sample.

    ``log_probs[i]`` is the log-probability of ``tokens[i]`` under the distribution before any
    top-p or top-k filter, at the sampling temperature.
    """

    tokens: np.ndarray  # int32 [response]
    log_probs: np.ndarray  # float32 [response]
    finish_reason: str  # "stop" | "length"
    # int16 [prompt + response, layers, topk]: the experts that each token went to; -1 where the engine did not
    # say (the last token is never read). None: not asked for.
    routed_experts: np.ndarray | None = None
    prompt: TokenScores | None = None  # of the prompt's tokens; None: not asked for


@dataclass(frozen=True)
class Turn:
    """One turn of a response: the policy's, or a tool's answer to a call in the policy's turn before it.

    Example: ``Turn("tool", "4\\n", tokens=9, name="code_interpreter", arguments={"code": "print(2 + 2)"})``.
    """

    role: Literal["assistant", "tool"]
    text: str  # special tokens left out; of a tool, what it answered
    tokens: int = 0  # of the sample that are this turn's, the template's own around it included
    name: str = ""  # of the tool
    arguments: dict[str, Any] = field(default_factory=dict)  # that the policy called it with
    failure: Literal["", "refused", "error", "timeout", "crash"] = (
        ""  # why `text` is not the tool's answer but of a failure
    )
    seconds: float = 0.0  # that the tool ran
    reward: float = 0.0  # that the tool gave


@dataclass
class SampleTokens:
    """The token vectors of one sample, prompt and response in one piece (all of length L)."""

    tokens: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]: tokens that the policy chose and that the loss counts
    rollout_log_probs: np.ndarray  # float32 [L]: the engine's own; 0 where it sampled nothing
    text: str = ""  # the response as text, for people
    routed_experts: np.ndarray | None = None  # int16 [L, layers, topk]: see `Completion`
    images: SampleImages | None = None  # siblings of a group share one object
    teacher: TokenScores | None = None  # what a teacher says of `tokens`
    turns: tuple[Turn, ...] = ()  # where an agent loop made the response: what `text` is made of, for people
    reason: str = ""  # why the scorer gave what it gave, in its words


class DataRef(Protocol):
    """Where vectors lie, sample by sample: a group's SampleTokens, or what a worker computed for some samples.

    Ray's form is an object reference, the local one holds them.
    """

    def get(self) -> list[Any]: ...


@dataclass(frozen=True)
class InlineData:
    """A DataRef to vectors in this process."""

    samples: list[Any]

    def get(self) -> list[Any]:
        return self.samples


Steps = tuple[tuple[int, float], ...]
"""Rewards of steps within a response: (index of the token that ends the step, in the whole sample; reward)."""


@dataclass(frozen=True)
class ToolUse:
    """What an agent loop did for one sample."""

    turns: int = 1  # the policy's
    calls: int = 0  # of tools
    failures: int = 0  # of these calls: refused, raised, too slow or crashed
    timeouts: int = 0  # of these failures
    seconds: float = 0.0  # that tools ran, calls of one turn one after another


@dataclass
class Sample:
    """What the controller knows of one sample. Its vectors are ``data.get()[index]``."""

    group: int
    index: int  # position within the group
    data: DataRef
    prompt_length: int
    response_length: int
    loss_tokens: int  # tokens with loss_mask set
    reward: float = 0.0  # all of it: the outcome, and what `steps` earn
    reward_parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None  # what the scorer took for the answer: majority votes count it
    # "stop" | "length"; of an agent loop also "turns" or "tool_time": its limit came before the policy was done; "failed": it
    # could not be finished, and its group is left out
    finish_reason: str = "stop"
    version: int = 0  # of the weights that sampled it
    steps: Steps = ()
    tool_use: ToolUse | None = None  # None: no agent loop

    @property
    def length(self) -> int:
        return self.prompt_length + self.response_length

    @property
    def outcome(self) -> float:
        """What is earned at the end: the reward less what was earned in `steps`."""
        return self.reward - math.fsum(reward for _, reward in self.steps)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class SampleFailure:
    """Why a sample has no reward, after all retries: its scorer failed, or a tool could not be used. `kind` is that of the
    last attempt: what was called raised or broke its contract, it ran for too long and was killed, or its process ended."""

    source: str  # "scorer 'gsm8k'", "tool 'search'"
    uid: str  # of the row
    kind: Literal["error", "timeout", "crash"]
    cause: str
    attempts: int = 1

    def __str__(self) -> str:
        times = f" ({self.attempts} attempts)" if self.attempts > 1 else ""
        return f"{self.source} failed on row {self.uid!r}: {self.cause}{times}"


@dataclass
class Group:
    """Samples of one prompt, in the order of their seeds. Groups are numbered in admission order.

    A sample that could not be finished or scored has the reward NaN and is among `failures`: nobody trains on such a group.
    """

    number: int
    prompt_uid: str
    data_source: str
    version: int
    samples: list[Sample]
    greedy: Sample | None = None  # scored, not trained on: a baseline; it has no vectors
    failures: tuple[SampleFailure, ...] = ()
    scoring_retries: int = 0  # attempts that failed and were made again, over all samples
    judge_seconds: float = 0.0  # that it waited for its verdicts; 0: there is no judge


@dataclass(frozen=True)
class ShardSample:
    """One sample as a trainer needs it: where its vectors are, and the controller's scalars for it.

    ``loss_weight`` is what each of its masked tokens weighs in the loss: normalisers are counted
    over the whole mini batch by the controller, so a sum over tokens is all that workers do.
    """

    data: DataRef
    index: int
    length: int
    number: int = 0  # within the batch: names the sample where shards of different layouts meet
    reward: float = 0.0  # what its last token earns: the outcome, without `steps`
    advantage: float = 0.0
    loss_weight: float = 0.0
    steps: Steps = ()  # what tokens within it earn
    step_advantages: Steps = ()  # added to `advantage` at the tokens up to each step's end


@dataclass(frozen=True)
class Shard:
    """What one data-parallel rank trains on in one controller step.

    ``mini_batches[m]`` lists the micro batches of optimizer step m; a micro batch lists indices
    into ``samples``. Every data-parallel rank has the same number of micro batches. ``loss_tokens[m]``
    counts the masked tokens of mini batch m over all ranks: the normaliser of token-mean metrics.
    """

    samples: list[ShardSample]
    mini_batches: list[list[list[int]]]
    loss_tokens: list[int]


Metrics = dict[str, float]


def fetch(samples: Sequence[ShardSample]) -> list[SampleTokens]:
    """The token vectors of `samples`, each group's fetched once."""
    groups: dict[int, list[SampleTokens]] = {}
    vectors = []
    for sample in samples:
        if id(sample.data) not in groups:
            groups[id(sample.data)] = sample.data.get()
        vectors.append(groups[id(sample.data)][sample.index])
    return vectors
