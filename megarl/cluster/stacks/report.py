"""Say who waits for whom: from the states of a group's processes to lines of text. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.cluster.failures import ProcessInfo
from megarl.cluster.stacks.capture import GroupCount, ProcessStacks, ThreadStack
from megarl.errors import pluralize, spans_of

SHOWN = 4  # ranks or places of ranks that a list shows in full
_WAITING_FRAMES = 2  # innermost callers of a function that waits
_FRAMES = 10  # innermost frames of other threads
_RANGES = 8  # ranges of ranks in a text
_ALL = GroupCount(name="", description="default_pg", size=0, count=None)
_NO_THREAD = ThreadStack(name="", call=False, frames=[], wait=None, layer=None, backward=False)


@dataclass(frozen=True)
class GroupStacks:
    """States of a group's processes, in rank order. `call`: the call that runs, for `seconds`; "" if none does."""

    name: str  # "trainer", "critic"; "service" for engines, "controller"
    places: Sequence[ProcessInfo]
    stacks: Sequence[ProcessStacks]
    call: str = ""
    seconds: float = 0.0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> GroupStacks:
        return cls(**{**values, "places": [ProcessInfo(**place) for place in values["places"]]})


@dataclass(frozen=True)
class Situation:
    """Ranks of a call, sorted by state. `missing`: others wait for them, or nothing shows that they wait."""

    waiting: list[int]  # in a function that meets other ranks
    missing: list[int]
    busy: list[int]  # compute, or wait for their device
    returned: list[int]  # and are not missing
    lags: dict[int, list[str]]  # by rank: groups in which others have started more collectives


def situation(group: GroupStacks) -> Situation:
    """Sort the ranks of a call.

    A rank that has started fewer collectives in a process group than another rank is behind: the others cannot go on without
    it. Counts also show this on devices, where a rank starts collectives without waiting for them.
    """
    ranks = range(len(group.stacks))
    silent = {rank for rank in ranks if group.stacks[rank]["problem"]}
    running = {rank for rank in ranks if _call_threads(group.stacks[rank])} | silent
    waiting = {rank for rank in running if _main_thread(group.stacks[rank])["wait"]}
    behind, ahead, lags = set(), set(), defaultdict(list)
    for members in _members(group.stacks).values():
        counts = {rank: entry["count"] for rank, entry in members.items() if entry["count"] is not None}
        for rank, count in counts.items():
            if fewer := max(counts.values()) - count:
                behind.add(rank)
                lags[rank].append(f"{pluralize(fewer, 'collective')} behind in {_name(members[rank])}")
            elif count > min(counts.values()):
                ahead.add(rank)
    late = behind - (running & waiting)
    # The strongest evidence that some rank satisfies. Nothing is known of silent ranks, so they explain the wait of the others.
    evidence = [late - ahead, late]
    if not silent:
        evidence += [running - waiting - ahead, running - waiting]
    missing = silent | next(filter(None, evidence), set())
    return Situation(
        waiting=sorted(waiting),
        missing=sorted(missing),
        busy=sorted(running - waiting - missing),
        returned=sorted(set(ranks) - running - missing),
        lags=dict(lags),
    )


def lines_of(group: GroupStacks, read_log: Callable[[str], str] | None = None) -> list[str]:
    """Describe the ranks of a call; [] if none runs.

    read_log: returns the last lines of an output file; they are added for missing ranks.
    """
    if not group.call:
        return []
    state = situation(group)
    blocks = [
        ("waiting for others:", _waiting(group, state.waiting, {} if state.missing else state.lags)),
        ("waiting for the device, or busy:", _waiting(group, state.busy, {})),
        ("others wait for:" if state.waiting or state.lags else "running:", _missing(group, state, read_log)),
        ("returned from the call:", [format_ranks(state.returned)] if state.returned else []),
    ]
    return [line for title, lines in blocks if lines for line in (title, *_indented(lines))]


def process_lines(place: ProcessInfo, stacks: ProcessStacks) -> list[str]:
    """Describe a process that is not a trainer: its threads that do something."""
    lines = [": ".join([str(place), *_conditions(stacks)])]
    for thread in stacks.get("threads", []):
        frames = [text for text in thread["frames"] if not text.startswith("ray/") and "megarl/cluster/" not in text]
        frames = (frames or thread["frames"])[:_FRAMES]
        lines += _indented([f"thread {thread['name'] or 'of native code'}:", *_indented(frames)])
    return lines + _indented(stacks.get("outside", []))


def _waiting(group: GroupStacks, ranks: Iterable[int], lags: dict[int, list[str]]) -> list[str]:
    names = _members(group.stacks)
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        thread = _main_thread(group.stacks[rank])
        wait = thread["wait"]
        members = names.get(wait["group"], {}) if wait is not None else {}
        place = f"{wait['function']} in {_name(next(iter(members.values()), _ALL))}{_among(members)}" if wait else ""
        text = ", ".join(filter(None, [place, _where(thread), *lags.get(rank, [])]))
        alike[(text, *_callers(thread)[:_WAITING_FRAMES])].append(rank)
    return _some(
        [
            [f"{format_ranks(ranks)}{text and ': ' + text}", *_indented(frames)]
            for (text, *frames), ranks in alike.items()
        ]
    )


def _missing(group: GroupStacks, state: Situation, read_log: Callable[[str], str] | None) -> list[str]:
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in state.missing:
        stacks = group.stacks[rank]
        thread = _main_thread(stacks)
        running = stacks["problem"] or _call_threads(stacks)
        parts = [_where(thread) if running else "has returned from the call", *_conditions(stacks)]
        text = ", ".join(filter(None, [*parts, *state.lags.get(rank, [])]))
        alike[(text, *thread["frames"][:_FRAMES], *stacks.get("outside", []))].append(rank)
    blocks = []
    for (text, *frames), ranks in alike.items():
        place, unfinished = group.places[ranks[0]], group.stacks[ranks[0]].get("unfinished", [])
        more = f", and {format_ranks(ranks[1:])} alike" if ranks[1:] else ""
        details = [*frames, *([f"not finished: {'; '.join(unfinished)}"] if unfinished else [])]
        if read_log is not None and place.log:
            tail = read_log(place.log)
            details += [f"its output, {place.log}, ends:" if tail else f"its output: {place.log}", *tail.splitlines()]
        blocks.append([f"{place}{more}{text and ': ' + text}", *_indented(details)])
    return _some(blocks)


def _some(blocks: list[list[str]]) -> list[str]:
    more = [f"... and {len(blocks) - SHOWN} others"] if len(blocks) > SHOWN else []
    return [line for block in blocks[:SHOWN] for line in block] + more


def _call_threads(stacks: ProcessStacks) -> list[ThreadStack]:
    return [thread for thread in stacks.get("threads", []) if thread["call"]]


def _main_thread(stacks: ProcessStacks) -> ThreadStack:
    """Return the thread that shows where a call is: the one that waits, else a thread of autograd, else the call's."""
    threads = [thread for thread in stacks.get("threads", []) if thread["call"] or thread["wait"] or not thread["name"]]
    return max(threads, key=lambda t: (t["wait"] is not None, not t["name"], t["call"]), default=_NO_THREAD)


def _callers(thread: ThreadStack) -> list[str]:
    """Return the frames outside of the function that waits."""
    wait, frames = thread["wait"], thread["frames"]
    inner = [number for number, text in enumerate(frames) if wait and text.endswith(f" {wait['function']}")]
    return frames[inner[-1] + 1 :] if inner else frames


def _where(thread: ThreadStack) -> str:
    """ "forward of layer 3", "backward", or "" if neither a layer nor autograd is on the stack."""
    if thread["layer"] is None:
        return "backward" if thread["backward"] else ""
    return f"{'backward' if thread['backward'] else 'forward'} of layer {thread['layer']}"


def _conditions(stacks: ProcessStacks) -> list[str]:
    texts = {
        "D": "blocked in the kernel (state D), as by a file system or a device driver",
        "T": "stopped (state T), as by SIGSTOP or Ctrl-Z",
    }
    return list(filter(None, [stacks["problem"], texts.get(stacks.get("state", ""), "")]))


def _members(stacks: Sequence[ProcessStacks]) -> dict[str, dict[int, GroupCount]]:
    """Process groups by torch's name, as the ranks that have answered report them: rank -> entry."""
    members: dict[str, dict[int, GroupCount]] = defaultdict(dict)
    for rank, process in enumerate(stacks):
        for entry in process.get("groups", []):
            members[entry["name"]][rank] = entry
    return members


def _name(entry: GroupCount) -> str:
    """ "the tensor model parallel group" for Megatron's TENSOR_MODEL_PARALLEL_GROUP."""
    if entry["description"] == "default_pg":
        return "the group of all trainers"
    words = entry["description"].removesuffix("_GROUP").replace("_GROUP_", "_").replace("_", " ").lower()
    return f"the {words} group" if words not in ("", "undefined") else "a group"


def _among(members: dict[int, GroupCount]) -> str:
    """Format the ranks of a process group that have answered."""
    if not members:
        return ""
    size = next(iter(members.values()))["size"]
    return f" ({format_ranks(members)}{f' of {size}' if len(members) < size else ''})"


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: "rank 1", "ranks 0-2, 5"."""
    ranks = sorted(ranks)
    parts = spans_of(ranks)
    texts = ["-".join(map(str, part)) for part in parts[:_RANGES]]
    more = f", ... ({len(ranks)} ranks)" if len(parts) > _RANGES else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}{more}"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
