"""Groups that are being sampled when a checkpoint is saved, and whether a resumed run can continue them."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.cluster.calls import wait
from megarl.cluster.failures import ClusterError
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.schema import Recipe
from megarl.rollout.engine_handle import SamplingEngine
from megarl.rollout.fleet.fleet import Fleet
from megarl.types import GenerationRequest, Partial

logger = logging.getLogger(__name__)

_CHANGED = "prompts, seeds or sampling settings differ from the checkpoint's"


@dataclass(frozen=True)
class BegunGroup:
    """The samples so far of a group. `checksum`: of its request without partials (`request_checksum`)."""

    checksum: str
    partials: tuple[Partial, ...]  # in seed order, the greedy sample last

    @property
    def tokens(self) -> int:
        return sum(len(partial.tokens) for partial in self.partials)


def request_checksum(request: GenerationRequest) -> str:
    """Return a checksum of the fields that a continued request shares with the first one: prompt, sampling settings and seed."""
    settings = (request.group, request.prompt.uid, request.sampling, request.seed, request.with_greedy)
    checksum = zlib.crc32(repr(settings).encode())
    return f"{zlib.crc32(np.asarray(request.prompt.tokens, dtype='<i8').tobytes(), checksum):08x}"


def cannot_continue_groups(recipe: Recipe) -> str | None:
    """Return why groups of a recipe are sampled again from their start, after a resume or on another engine; None if their
    samples are continued."""
    if recipe.agent.is_used:
        return "the state of their tools or interaction is not in the checkpoint"
    if update_rule(recipe) == "finish":
        return "with rollout.at_update=finish each sample has a single version"
    if recipe.megatron.routing_replay == "rollout":
        return "megatron.routing_replay=rollout needs the experts of all tokens from one engine"
    return None


def copy_partials(
    engines: Sequence[SamplingEngine], version: int, check: Callable[[], None], fleet: Fleet | None = None
) -> dict[int, tuple[Partial, ...]]:
    """Return the samples so far of each group that engines with weights of `version` sample, if any has tokens.

    check: called every second while engines answer; it may raise. fleet: of engines that may die, which then return none.
    """
    serving = range(len(engines)) if fleet is None else fleet.serving
    calls = [
        (index, 0 if fleet is None else fleet.process(index), engines[index].copy_partials(version))
        for index in serving
    ]
    copies = []
    for index, process, call in calls:
        try:
            copies.append(wait(call, check))
        except ClusterError as error:
            if fleet is None or not fleet.lost(index, process, error):
                check()  # raises if too few engines are left, and names all dead ones
                raise
    return {
        number: partials
        for copied in copies
        for number, partials in copied.items()
        if any(len(partial.tokens) for partial in partials)
    }


def copy_in_time(
    engines: Sequence[SamplingEngine], version: int, fleet: Fleet | None = None, seconds: float = 10.0
) -> dict[int, tuple[Partial, ...]]:
    """Return `copy_partials` for the last checkpoint of a run that ends. If an engine fails or takes longer than `seconds`,
    return none, with a warning: saving the weights matters more."""
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"engines did not return them within {seconds:g} s")

    try:
        return copy_partials(engines, version, check, fleet)
    except Exception as error:  # noqa: BLE001 -- the warning names it
        logger.warning("tokens of running groups are not saved, and these are sampled again after a resume: %s", error)
        return {}


class BegunGroups:
    """The begun groups of a resumed checkpoint, and of engines that have handed them over, until they start."""

    def __init__(self, cannot_continue: str | None) -> None:
        """`cannot_continue`: why all groups are sampled again, if they are."""
        self._cannot_continue = cannot_continue
        self._groups: dict[int, BegunGroup] = {}
        self._again: list[int] = []  # groups that are sampled again although the checkpoint has tokens of them
        self._reason = ""
        self._tokens = 0

    def restore(self, groups: Mapping[int, BegunGroup]) -> None:
        self._groups = dict(groups)

    def add(self, number: int, group: BegunGroup) -> None:
        """Add a group that an engine has handed over."""
        self._groups[number] = group

    def continued(self, request: GenerationRequest) -> GenerationRequest:
        """Return `request` with its samples so far, if the checkpoint has any."""
        group = self._groups.pop(request.group, None)
        if group is None:
            return request
        reason = self._cannot_continue or (_CHANGED if group.checksum != request_checksum(request) else None)
        if reason is not None:
            self._again.append(request.group)
            self._reason = reason
            return request
        return self.with_partials(request, group.partials)

    def with_partials(self, request: GenerationRequest, partials: tuple[Partial, ...]) -> GenerationRequest:
        """Return `request` with `partials`, and count their tokens."""
        self._tokens += sum(len(partial.tokens) for partial in partials)
        return replace(request, partials=partials)

    def take_metrics(self) -> dict[str, float]:
        """Return the tokens that engines have taken over since the last call, if any."""
        tokens, self._tokens = self._tokens, 0
        return {"rollout/tokens_taken_over": float(tokens)} if tokens else {}

    def take_notice(self) -> str | None:
        """Return a notice on groups that are sampled again, if any since the last call."""
        again, self._again = self._again, []
        if not again:
            return None
        first = f"{len(again)} groups of which the checkpoint has tokens (the first is {min(again)})"
        return f"{first} are sampled again from their start: {self._reason}"
