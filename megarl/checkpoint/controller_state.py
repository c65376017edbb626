"""The controller's state in a checkpoint: plain values, and groups that are sampled or partly sampled, but not yet trained on.

`controller.json` holds the values and the groups' scalars and texts, `waiting.npz` the groups' vectors.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megarl.atomic_files import write_synced
from megarl.rollout.admission import TriedGroup
from megarl.rollout.begun_groups import BegunGroup
from megarl.types import (
    DraftCount,
    Group,
    InlineData,
    Partial,
    Sample,
    SampleFailure,
    SampleImages,
    SampleTokens,
    Span,
    TokenScores,
    ToolUse,
    Turn,
)

_VECTORS = ("tokens", "loss_mask", "rollout_log_probs", "routed_experts")
_TEACHER = ("log_probs", "top_tokens", "top_log_probs")
_IMAGES = ("pixels", "grids", "starts", "seconds")
_PARTIAL_VECTORS = ("tokens", "log_probs")


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the controller's `state` (plain values and a SampleSource's state) into `folder`, and sync it."""
    vectors: dict[str, np.ndarray] = {}
    source = dict(state["source"])
    source["gathered"] = [[write_group(item, vectors) for item in batch] for batch in source["gathered"]]
    source["waiting"] = [write_group(item, vectors) for item in source.get("waiting", [])]
    source["begun"] = _write_begun(source.get("begun", {}), vectors)
    plain = {**state, "source": source}
    file = io.BytesIO()
    np.savez(file, **vectors)  # type: ignore[arg-type]
    write_synced(folder / "waiting.npz", file.getvalue())
    write_synced(folder / "controller.json", json.dumps(plain).encode())


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Read the controller's state from a checkpoint, as passed to `write_state`."""
    state: dict[str, Any] = json.loads((checkpoint / "controller.json").read_text())
    with np.load(checkpoint / "waiting.npz", allow_pickle=False) as vectors:
        source = state["source"]
        source["gathered"] = [[read_group(item, vectors) for item in batch] for batch in source["gathered"]]
        source["waiting"] = [read_group(item, vectors) for item in source.get("waiting", [])]
        source["begun"] = _read_begun(source.get("begun", []), vectors)  # older checkpoints have none
    return state


def _write_begun(groups: Mapping[int, BegunGroup], vectors: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the plain values of begun groups. Adds the tokens and log-probs of all of them to `vectors`, as one vector each."""
    samples = [partial for group in groups.values() for partial in group.partials]
    for name in _PARTIAL_VECTORS if samples else ():
        vectors[f"begun.{name}"] = np.concatenate([getattr(each, name) for each in samples])
    return [
        {
            "number": number,
            "checksum": group.checksum,
            "samples": [
                {
                    "tokens": len(partial.tokens),
                    "spans": [[span.start, span.version] for span in partial.spans],
                    "finish_reason": partial.finish_reason,
                }
                for partial in group.partials
            ],
        }
        for number, group in groups.items()
    ]


def _read_begun(items: list[dict[str, Any]], vectors: Any) -> dict[int, BegunGroup]:
    if not items:
        return {}
    groups, start = {}, 0
    tokens, log_probs = (vectors[f"begun.{name}"] for name in _PARTIAL_VECTORS)
    for item in items:
        partials = []
        for sample in item["samples"]:
            part = slice(start, start + sample["tokens"])
            spans = tuple(Span(*span) for span in sample["spans"])
            partials.append(Partial(tokens[part], log_probs[part], spans, sample["finish_reason"]))
            start = part.stop
        groups[item["number"]] = BegunGroup(item["checksum"], tuple(partials))
    return groups


def write_group(item: TriedGroup, vectors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the plain values of a group, as JSON has them, and add the vectors of its samples to `vectors`."""
    group = item.group
    texts, tokens = [], group.samples[0].data.get()
    owners: dict[int, int] = {}  # by identity of images: the first sample that has them; samples may share the prompt's
    for index, sample in enumerate(tokens):
        written = {"text": sample.text, "reason": sample.reason, "turns": [asdict(turn) for turn in sample.turns]}
        if sample.images is not None:
            written["images"] = owners.setdefault(id(sample.images), index)
        texts.append(written)
        for name in _VECTORS:
            if (vector := getattr(sample, name)) is not None:
                vectors[f"{group.number}.{index}.{name}"] = vector
        if sample.teacher is not None:
            vectors.update(
                {f"{group.number}.{index}.teacher.{name}": getattr(sample.teacher, name) for name in _TEACHER}
            )
        if written.get("images") == index:
            for name in _IMAGES:
                if (vector := getattr(sample.images, name)) is not None:
                    vectors[f"{group.number}.{index}.images.{name}"] = vector
    samples = [{**asdict(_without_data(sample)), "data": None} for sample in group.samples]
    return {
        "accepted": item.accepted,
        "words": texts,  # empty if the vectors of a filtered group were freed
        "number": group.number,
        "prompt_uid": group.prompt_uid,
        "data_source": group.data_source,
        "samples": samples,
        "greedy": {**asdict(_without_data(group.greedy)), "data": None} if group.greedy is not None else None,
        "failures": [asdict(failure) for failure in group.failures],
        "scoring_retries": group.scoring_retries,
        "sampled_again": group.sampled_again,
        "judge_seconds": group.judge_seconds,
    }


def read_group(item: dict[str, Any], vectors: Any) -> TriedGroup:
    """Return the group that `write_group` has written. vectors: its vectors, by name."""
    number = item["number"]
    if "words" not in item:
        raise ValueError(
            "waiting groups in this checkpoint were written by an earlier megarl with another text format: resume with that "
            "version, or start a new run from its exported weights"
        )
    shared = _read_images(f"{number}", vectors)  # in checkpoints before the images of tools
    owners = {texts["images"] for texts in item["words"] if "images" in texts}
    images = {owner: _read_images(f"{number}.{owner}", vectors) for owner in owners}
    data = InlineData(
        [
            SampleTokens(
                text=texts["text"],
                reason=texts["reason"],
                turns=tuple(Turn(**turn) for turn in texts["turns"]),
                images=images[texts["images"]] if "images" in texts else shared,
                teacher=_read_teacher(f"{number}.{index}.teacher", vectors),
                **{name: vectors[key] for name in _VECTORS if (key := f"{number}.{index}.{name}") in vectors},
            )
            for index, texts in enumerate(item["words"])
        ]
    )
    group = Group(
        number=number,
        prompt_uid=item["prompt_uid"],
        data_source=item["data_source"],
        samples=[_read_sample(values, data) for values in item["samples"]],
        greedy=_read_sample(item["greedy"], InlineData([])) if item.get("greedy") else None,
        failures=tuple(SampleFailure(**failure) for failure in item.get("failures", ())),
        scoring_retries=item.get("scoring_retries", 0),
        sampled_again=item.get("sampled_again", {}),
        judge_seconds=item.get("judge_seconds", 0.0),
    )
    return TriedGroup(group, item["accepted"])


def _read_images(prefix: str, vectors: Any) -> SampleImages | None:
    names = {name: f"{prefix}.images.{name}" for name in _IMAGES}
    if names[_IMAGES[0]] not in vectors:
        return None
    return SampleImages(**{name: vectors[key] for name, key in names.items() if key in vectors})


def _read_teacher(prefix: str, vectors: Any) -> TokenScores | None:
    if f"{prefix}.{_TEACHER[0]}" not in vectors:
        return None
    return TokenScores(**{name: vectors[f"{prefix}.{name}"] for name in _TEACHER})


def _read_sample(values: dict[str, Any], data: InlineData) -> Sample:
    steps = tuple((token, reward) for token, reward in values.get("steps", ()))  # JSON has no tuples
    tool_use = ToolUse(**values["tool_use"]) if values.get("tool_use") else None
    drafts = DraftCount(**values["drafts"]) if values.get("drafts") else None
    version = values.pop("version", 0)  # of checkpoints before `spans`
    spans = tuple(Span(**span) for span in values.get("spans", [{"start": 0, "version": version}]))
    return Sample(**{**values, "data": data, "steps": steps, "tool_use": tool_use, "drafts": drafts, "spans": spans})


def _without_data(sample: Sample) -> Sample:
    return Sample(**{**sample.__dict__, "data": InlineData([])})
