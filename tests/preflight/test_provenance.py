"""Provenance of a start: the command line without secrets, and the digest of the recipe."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from megarl.checkpoint.identity import CONTENTS
from megarl.preflight.provenance import (
    changed_since,
    command_line,
    hosts_and_devices,
    provenance_of,
    recipe_digest,
)
from megarl.recipe.load import read_recipe
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/x/megarl/__main__.py", "train", "a.yaml"], "python -m megarl train a.yaml"),
        (["/env/bin/megarl", "train", "a b.yaml"], "megarl train 'a b.yaml'"),
        (["mine.py", "--fast"], "python mine.py --fast"),
        (["-c"], "-c"),
        ([""], "python"),
        (["megarl", "train.steps=3", "data.max_prompt_length=5"], "megarl train.steps=3 data.max_prompt_length=5"),
        (["megarl", "model.tokenizer=t"], "megarl model.tokenizer=t"),
        (["megarl", "rollout.engine_args.hf_token=abc"], "megarl 'rollout.engine_args.hf_token=***'"),
        (["megarl", "cluster.environment.all.MY_PASSWORD=abc"], "megarl 'cluster.environment.all.MY_PASSWORD=***'"),
        (["megarl", "rollout.engine_args={a: 1, 'api-key': abc}"], "megarl 'rollout.engine_args=***'"),
        (["megarl", "rollout.engine_args={max_num_batched_tokens: 5}"], "megarl 'rollout.engine_args={max_num_batched_tokens: 5}'"),
        (["run.py", "--hf-token", "abc", "rest"], "python run.py --hf-token '***' rest"),
        (["run.py", "--hf-token=abc"], "python run.py '--hf-token=***'"),
        (["megarl", "reward.remote.url=https://me:abc@host/p?key=abc"], "megarl reward.remote.url=https://host/p"),
        (["megarl", "model.path=hf://org/name@main"], "megarl model.path=hf://org/name@main"),
    ],
)  # fmt: skip
def test_command_lines_have_no_secrets(arguments: list[str], expected: str) -> None:
    assert command_line(arguments) == expected
    assert "abc" not in command_line(arguments)


def text(*settings: str) -> str:
    return to_yaml(read_recipe("recipes/quickstart.yaml", settings).recipe)


def test_a_repetition_has_the_recipes_digest() -> None:
    before = recipe_digest(text())
    assert recipe_digest(text("name=other", "runs_dir=/there", "train.resume=auto")) == before
    assert recipe_digest(text("train.seed=1")) != before
    assert recipe_digest(text().replace("\n", "\n# comment\n", 1)) == before
    assert recipe_digest("{}") != before, "of a file from another version"


def test_what_a_start_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/env/bin/megarl", "train", "a.yaml", "hf_token=abc"])
    identity: dict[str, Any] = {CONTENTS: "d1", "model": {"weights": "w1"}}
    recorded = provenance_of(Recipe(), identity)
    assert json.loads(json.dumps(recorded)) == recorded
    assert (recorded["data"], recorded["weights"], recorded["folder"]) == ("d1", "w1", os.getcwd())
    assert recorded["command"] == "megarl train a.yaml 'hf_token=***'"
    assert recorded["recipe"] == recipe_digest(to_yaml(Recipe()))
    assert {"megarl", "commit", "changed", "code", "versions", "system"} <= recorded.keys()


def test_hosts_and_devices() -> None:
    machines = [("trainers", "a"), ("trainers", "b"), ("trainers", "a"), ("engines", "b")]
    assert hosts_and_devices("cuda", machines, ["H100", "H100", "H200"]) == {
        "hosts": {"a": {"trainers": 2}, "b": {"trainers": 1, "engines": 1}},
        "devices": {"kind": "cuda", "trainers": {"H100": 2, "H200": 1}},
    }


def test_a_resume_with_other_versions_has_a_notice() -> None:
    before = {"code": "x", "versions": {"torch": "1"}}
    assert changed_since(before, before) == []
    (notice,) = changed_since(before, {"code": "x", "versions": {"torch": "2"}})
    assert "torch 1 -> 2" in notice
