"""The interface between megarl and an agent loop of the user: it asks for samples by token ids, and returns a response."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from megarl.agents.tool import Context
from megarl.data.tokenizer import Tokenizer
from megarl.types import Sampling, Span

C = TypeVar("C", bound=type)
RUN, ATTRIBUTE = "run", "__megarl_agent_loop__"


@dataclass(frozen=True)
class Sampled:
    """Tokens that the policy has sampled for one request.

    finish_reason: "stop"; "length" at a limit of tokens, without tokens if none fits; "turns" without tokens after
        `agent.max_turns` requests.
    spans: the weights that sampled them; versions rise.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "turns"]
    spans: tuple[Span, ...] = (Span(0, 0),)


@dataclass
class Response:
    """The result of a loop: the tokens after the prompt, of which the loss counts those with `mask`.

    A token with `mask` must be sampled: a request's tokens followed by its `Sampled.tokens` must be the beginning of prompt and
    response. megarl checks this, and takes log-probs and versions from the engine's answers. Tokens after the last one with
    `mask` are left out, and so are tokens beyond `rollout.max_response_length`.

    Example: ``response.add_sampled(turn); response.add(sample.reply_tokens("Are you sure?"))``.

    prompt: token ids, at most `data.max_prompt_length`; None: the row's.
    reward: the sample's reward. Scorers do not see the sample then. None: scorers reward it.
    extra_info: JSON values for scorers, added to the row's `extra_info`.
    """

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    prompt: Sequence[int] | None = None
    reward: float | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)

    def add_sampled(self, turn: Sampled) -> None:
        """Append the policy's tokens, which the loss counts."""
        self.tokens += turn.tokens
        self.mask += [True] * len(turn.tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Append tokens that the loss does not count."""
        added = list(tokens)
        self.tokens += added
        self.mask += [False] * len(added)


class LoopSample(ABC):
    """The sample that a loop makes, and its access to the policy. `generate` may be awaited several times at once.

    Attributes:
        prompt: token ids of the row's prompt, rendered with the chat template.
        messages: of the row, each with `role` and `content`.
        context: the row's `ground_truth`, `extra_info` and `uid`, and the sample's number.
        data_source: of the row.
        sampling: the recipe's settings, in an evaluation `evaluation`'s. `max_tokens` is the limit of the response.
        tokenizer: `encode(text)`, `decode(ids)`, `stop_ids`.
    """

    prompt: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    context: Context
    data_source: str
    sampling: Sampling
    tokenizer: Tokenizer

    @abstractmethod
    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
    ) -> Sampled:
        """Sample a continuation of `tokens`, until a stop token of the model or `max_tokens`.

        max_tokens: at most; None: the rest of `rollout.max_response_length`, counted from the row's prompt.
        temperature, top_p, top_k: None: the recipe's. Tokens that were sampled with other values cannot be trained on.
        """

    @abstractmethod
    def reply_tokens(self, text: str) -> list[int]:
        """Return the tokens of a user's message between two turns of the policy, as the chat template writes it after the end token.

        `text` is shortened to `agent.max_answer_tokens`, and special tokens in it are broken up. Raises ValueError if the
        template is for one turn only.
        """


@dataclass(frozen=True)
class AgentLoopClass:
    """A class of the user. `create`: returns its object for one sample, with a method ``run(sample)``."""

    name: str
    create: Callable[[LoopSample], Any]

    @property
    def title(self) -> str:
        """The loop's name for messages."""
        return f"agent loop {self.name!r}"


def agent_loop(class_: C) -> C:
    """Let a class make the samples of a run: ``@agent_loop``. It is returned unchanged.

    megarl creates an object for each sample, with the recipe's `agent.loop_arguments`, and awaits its method
    ``async def run(self, sample: LoopSample) -> Response``.

    Raises:
        ValueError: the method is missing, is not async, or takes other arguments.
    """
    title = f"agent loop {class_.__name__!r}"
    run = getattr(class_, RUN, None)
    if not callable(run):
        raise ValueError(f"{title}: its class has no method run, which makes a sample")
    if not inspect.iscoroutinefunction(run):
        raise ValueError(f"{title}: its method run must be `async def`: it awaits sample.generate(tokens)")
    try:
        inspect.signature(run).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{title}: its method run must take the sample: {error}") from error
    setattr(class_, ATTRIBUTE, True)
    return class_


def loop_class(class_: Any, arguments: Mapping[str, Any]) -> AgentLoopClass:
    """Return a decorated class with the arguments of its constructor. Raises ValueError if it does not take them."""
    try:
        inspect.signature(class_).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"agent loop {class_.__name__!r} cannot be created with agent.loop_arguments={dict(arguments)}: {error}"
        ) from error
    return AgentLoopClass(class_.__name__, lambda sample: class_(**arguments))
