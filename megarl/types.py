"""The data types of a run: Prompt -> Group of Samples -> Shard -> MicroBatch.

Index convention: every per-token vector has ``len(tokens)`` entries, and index t describes token t. The shift by one
between a logit and the token it predicts happens once, in megatron/heads/output_heads.py and the PackedStream that it reads.

Control and data are separate. The controller decides from `Sample` (lengths, reward, versions), a few hundred bytes. The
token vectors (`SampleTokens`) lie behind a `DataRef` until a trainer fetches them: in Ray's object store, or with torchrun in the
controller's memory. `MicroBatch` is defined in megatron/batch.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np


@dataclass(frozen=True)
class PromptImage:
    """One encoded image of a prompt, as its data row gives it; decoded when the prompt is sampled."""

    where: str  # "train.parquet, row 17, image 0": for error messages
    data: bytes | None = field(repr=False)  # the bytes of a PNG, JPEG, ... file; None: read `path`
    path: str  # "" if `data` is set
    tokens: int  # number of placeholder tokens in the prompt; 0 for a frame of a video
    start: int = 0  # index of the first placeholder


@dataclass(frozen=True)
class PromptVideo:
    """One video of a prompt: encoded frames in the order of time, decoded when the prompt is sampled.

    Example: 5 frames for Qwen3-VL make 3 runs of placeholders, one per pair of frames; the last frame is repeated:
    ``PromptVideo("train.parquet, row 17, video 0", frames, fps=2.0, tokens=12, starts=(9, 35, 61))``.
    """

    where: str
    frames: tuple[PromptImage, ...]
    fps: float  # frames per second
    tokens: int  # number of placeholder tokens of each run
    starts: tuple[int, ...]  # index of the first placeholder of each run


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt data set, tokenized.

    Example: ``Prompt(uid="openai/gsm8k/17", tokens=(5, 80, 9), text="Question: ...",
    data_source="openai/gsm8k", ground_truth="72")``.
    """

    uid: str  # identifies the row, stable over runs
    tokens: tuple[int, ...]
    text: str  # `tokens` as text, for logs
    data_source: str  # selects the scorer
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    question: str = ""  # text of the row's messages, without the chat template's
    messages: tuple[dict[str, Any], ...] = ()  # the row's messages, if a scorer reads them
    images: tuple[PromptImage, ...] = ()  # in the order of their placeholders in `tokens`, which are expanded
    videos: tuple[PromptVideo, ...] = ()  # likewise


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, with vLLM's names and meanings. ``temperature=0`` is greedy."""

    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampleImages:
    """The images and videos of one sample as input of the model's vision tower, in token order.

    Each run of placeholder tokens is an image here: a picture, a video of Qwen2.5-VL, or one time step (temporal patch: two frames)
    of a video of Qwen3-VL.

    Example: an image of 4 x 6 patches, 2 x 2 patches per token; its 6 tokens start at index 3:
    ``SampleImages(pixels=array [24, 1176], grids=array([[1, 4, 6]]), starts=array([3]))``.
    """

    pixels: np.ndarray  # float32 [patches of all images, values per patch]
    grids: np.ndarray  # int64 [images, 3]: time steps (more than 1: a video), rows and columns of patches
    starts: np.ndarray  # int64 [images]: index of each image's first placeholder token
    seconds: np.ndarray | None = None  # float64 [images]: from time step to time step; None: every image has one step

    @property
    def seconds_or_zeros(self) -> np.ndarray:
        """`seconds`, or zeros: float64 [images]."""
        return np.zeros(len(self.starts)) if self.seconds is None else self.seconds


@dataclass(frozen=True)
class Span:
    """Consecutive response tokens of one weight version. It ends where the next span begins; tool tokens belong to the span before."""

    start: int  # index of its first token, in a completion or in a sample's response
    version: int  # of the weights


@dataclass(frozen=True)
class Partial:
    """A sample so far: plain data, with which any engine can continue it. ``log_probs`` as in `Completion`."""

    tokens: np.ndarray  # int32 [tokens so far]
    log_probs: np.ndarray  # float32 [tokens so far]
    spans: tuple[Span, ...]  # versions rise; () without tokens
    finish_reason: str | None = None  # "stop" | "length"; None: unfinished


@dataclass(frozen=True)
class GenerationRequest:
    """A request for ``sampling.n`` samples of one prompt.

    Sample i uses seed + i, or the engine's generator without a seed (`rollout.seeded`). A sample that an engine continues
    after k tokens uses a seed derived from its seed and k.
    """

    group: int  # group number, unique in the run
    prompt: Prompt
    sampling: Sampling
    seed: int | None
    images: SampleImages | None = None  # of the prompt, after the rollout process has prepared them
    with_greedy: bool = False  # also one greedy sample, for the group's baseline
    prompt_top_k: int | None = None  # also `Completion.prompt`, with the top k tokens per position; None: no
    # What another engine, or this one before a restart, has sampled of each sample, in seed order, then of the greedy
    # sample. (): nothing.
    partials: tuple[Partial, ...] = ()


@dataclass(frozen=True)
class TokenScores:
    """A model's log-probs of existing tokens, each conditioned on the tokens before it, at temperature 1.

    Entry 0 has no prediction and is 0.
    """

    log_probs: np.ndarray  # float32 [L]: of the tokens themselves
    top_tokens: np.ndarray  # int32 [L, K]: the most likely tokens at each position, in descending order
    top_log_probs: np.ndarray  # float32 [L, K]: their log-probs


@dataclass(frozen=True)
class DraftCount:
    """Number of tokens that drafts proposed for a sample in speculative decoding, and number of these that the sample took."""

    proposed: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCount) -> DraftCount:
        return DraftCount(self.proposed + other.proposed, self.accepted + other.accepted)


@dataclass(frozen=True)
class Completion:
    """An engine's output for one sample.

    ``log_probs[i]`` is the log-prob of ``tokens[i]`` before any top-p or top-k filter, at the sampling temperature.
    """

    tokens: np.ndarray  # int32 [response]
    log_probs: np.ndarray  # float32 [response]
    finish_reason: str  # "stop" | "length"
    # int16 [prompt + response, layers, topk]: the experts of each token; -1 if the engine did not report them (the last
    # token is never read). None: not requested.
    routed_experts: np.ndarray | None = None
    prompt: TokenScores | None = None  # of the prompt's tokens; None: not requested
    spans: tuple[Span, ...] = (Span(0, 0),)  # set by the engine's loop; versions rise
    # Without the tokens of engines that sampled a part before; None: no speculative decoding, or not reported.
    drafts: DraftCount | None = None


@dataclass(frozen=True)
class Turn:
    """One turn of a response: the policy's, a tool's result for a call in the preceding policy turn, or an interaction's reply to
    that turn.

    Example: ``Turn("tool", "4\\n", tokens=9, name="code_interpreter", arguments={"code": "print(2 + 2)"})``.
    """

    role: Literal["assistant", "tool", "user"]
    text: str  # without special tokens; for a tool, its result
    # Number of the sample's tokens in this turn, chat template included: of several tools' results in a row an equal share; 0 of a
    # reply that ends the sample.
    tokens: int = 0
    name: str = ""  # of the tool
    arguments: dict[str, Any] = field(default_factory=dict)  # of the tool call
    failure: Literal["", "refused", "error", "timeout", "crash"] = ""  # set if `text` describes a failure of the tool
    seconds: float = 0.0  # run time of the tool or interaction
    # From the tool or interaction; of the policy's last turn: from the final states of tools with state.
    reward: float = 0.0


@dataclass
class SampleTokens:
    """The token vectors of one sample, prompt and response concatenated (all of length L)."""

    tokens: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]: loss tokens, which the policy chose and the loss counts
    rollout_log_probs: np.ndarray  # float32 [L]: from the engine; 0 for tokens that were not sampled
    text: str = ""  # the response as text, for logs
    routed_experts: np.ndarray | None = None  # int16 [L, layers, topk]: see `Completion`
    images: SampleImages | None = None  # samples of a group share one object
    teacher: TokenScores | None = None  # a teacher's scores of `tokens`
    turns: tuple[Turn, ...] = ()  # of an agent loop: the parts of `text`, for logs
    reason: str = ""  # the scorer's explanation of the reward


class DataRef(Protocol):
    """Reference to a list with one entry per sample: a group's SampleTokens, or a worker's results.

    Under Ray it is an object reference; `InlineData` holds the list.
    """

    @property
    def is_lost(self) -> bool:
        """True if the controller knows that the machine which stored the list is lost, so that `get` fails."""

    def get(self) -> list[Any]: ...


@dataclass(frozen=True)
class InlineData:
    """A DataRef to data in this process."""

    samples: list[Any]
    is_lost: ClassVar[bool] = False

    def get(self) -> list[Any]:
        return self.samples


Steps = tuple[tuple[int, float], ...]
"""Rewards of steps within a response: (index in the sample of the token that ends the step, reward)."""


@dataclass(frozen=True)
class ToolUse:
    """Tool statistics of one sample."""

    turns: int = 1  # policy turns
    calls: int = 0  # tool calls
    failures: int = 0  # failed calls: refused, raised, timed out or crashed
    timeouts: int = 0  # failed calls that timed out
    seconds: float = 0.0  # total run time of tools and of an interaction; calls of one turn run sequentially


TOO_SLOW = "too_slow"
"""Reward part 1 of a response that counts as wrong (`slow_is_wrong`), since its scorer reached `reward.timeout`."""


@dataclass
class Sample:
    """The controller's record of one sample. Its vectors are ``data.get()[index]``."""

    group: int
    index: int  # position within the group
    data: DataRef
    prompt_length: int
    response_length: int
    loss_tokens: int  # tokens with loss_mask set
    reward: float = 0.0  # total: the outcome plus the rewards of `steps`
    reward_parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None  # extracted by the scorer; majority votes count it
    # "stop" | "length"; in an agent loop also "turns" or "tool_time" (a limit ended it) and "failed" (it could not be
    # finished, and its group is excluded)
    finish_reason: str = "stop"
    spans: tuple[Span, ...] = (Span(0, 0),)  # weights that sampled its response; versions rise
    steps: Steps = ()
    tool_use: ToolUse | None = None  # None: no agent loop
    drafts: DraftCount | None = None  # None: no speculative decoding, or not reported

    @property
    def length(self) -> int:
        return self.prompt_length + self.response_length

    @property
    def outcome(self) -> float:
        """Return the reward at the end of the response: the total less the rewards of `steps`."""
        return self.reward - math.fsum(reward for _, reward in self.steps)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def version(self) -> int:
        """Return the version of the weights that sampled its first token."""
        return self.spans[0].version


FailureKind = Literal["error", "timeout", "crash", "unavailable"]


@dataclass(frozen=True)
class SampleFailure:
    """The reason why a sample has no reward after all retries: its scorer failed, or a tool was unusable.

    `kind` describes the last attempt: an exception or a violated contract, a timeout, the end of the process, or a service that
    could not be used.
    """

    source: str  # "scorer 'gsm8k'", "tool 'search'"
    uid: str  # of the row
    kind: FailureKind
    cause: str
    attempts: int = 1

    def __str__(self) -> str:
        times = f" ({self.attempts} attempts)" if self.attempts > 1 else ""
        return f"{self.source} failed on row {self.uid!r}: {self.cause}{times}"


@dataclass
class Group:
    """Samples of one prompt, in the order of their seeds. Groups are numbered in admission order.

    A sample that could not be finished or scored has reward NaN and an entry in `failures`; such a group is not trained on.
    """

    number: int
    prompt_uid: str
    data_source: str
    samples: list[Sample]
    greedy: Sample | None = None  # scored as a baseline, not trained on; it has no vectors
    failures: tuple[SampleFailure, ...] = ()
    scoring_retries: int = 0  # repeated scoring attempts, over all samples
    # Samples with tools that were sampled again from their start, by the cause: see `SampleFailure.kind`.
    sampled_again: dict[FailureKind, int] = field(default_factory=dict)
    judge_seconds: float = 0.0  # time spent waiting for judge verdicts; 0 without a judge
    scoring_seconds: float = 0.0  # from its last token to its scores, without the judge


@dataclass(frozen=True)
class ShardSample:
    """One sample as a trainer needs it: a reference to its vectors, and its scalars.

    ``loss_weight`` is the weight of each of its loss tokens in the loss. The controller counts normalizers over the whole
    mini batch, so workers only sum over tokens.
    """

    data: DataRef
    index: int
    length: int
    number: int = 0  # index within the batch: identifies the sample in shards of different layouts
    group: int = 0  # index of its group within the batch
    reward: float = 0.0  # reward of its last token: the outcome, without `steps`
    advantage: float = 0.0
    loss_weight: float = 0.0
    steps: Steps = ()  # rewards of tokens within it
    step_advantages: Steps = ()  # added to `advantage` at the tokens up to each step's end
    prompt_length: int = 0
    spans: tuple[Span, ...] = (Span(0, 0),)  # weights that sampled its response


@dataclass(frozen=True)
class Shard:
    """The samples of one data-parallel rank in one controller step.

    ``mini_batches[m]`` lists the micro batches of optimizer step m; a micro batch is a list of indices into ``samples``.
    Every data-parallel rank has the same number of micro batches. ``loss_tokens[m]`` counts the loss tokens of mini batch
    m over all ranks: the normalizer of token-mean metrics.
    """

    samples: list[ShardSample]
    mini_batches: list[list[list[int]]]
    loss_tokens: list[int]


Metrics = dict[str, float]


def fetch(samples: Sequence[ShardSample]) -> list[SampleTokens]:
    """Return the token vectors of `samples`, fetching each group once."""
    groups: dict[int, list[SampleTokens]] = {}
    vectors = []
    for sample in samples:
        if id(sample.data) not in groups:
            groups[id(sample.data)] = sample.data.get()
        vectors.append(groups[id(sample.data)][sample.index])
    return vectors


def derived_seed(*words: int) -> int:
    """Return a seed of 62 bits that depends only on `words`."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(2))
