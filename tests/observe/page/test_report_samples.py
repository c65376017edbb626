"""Samples in samples/ and in the report: turns, reasons, and texts that are long or hostile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.observe.json_lines import json_line
from megarl.observe.page import report_samples
from megarl.observe.page.bundle import static_files, static_text
from megarl.observe.page.report import write_report
from megarl.observe.page.report_samples import (
    MAX_TURNS,
    TURNS_BYTES,
    _fair_length,
    cut_tokens,
    embedded_samples,
    shortened,
    spread,
)
from megarl.observe.run_dir import RunDirectory
from megarl.observe.samples import read_samples, sample_records
from megarl.types import Group, InlineData, Sample, SampleTokens
from tests.support.agent_run import Words, make_agent_run, tool_group
from tests.support.html_page import MARKUP, Page
from tests.support.viewed_runs import make_run


def test_a_record_omits_default_values() -> None:
    record, *_ = sample_records([tool_group(7, "openai/gsm8k", 3, "x")], 3, 1, Words("What is 6 times 7?"))  # type: ignore[arg-type]
    assert record["reason"] == "the last box holds nothing x"
    assert record["tool_use"] == {"turns": 3, "calls": 2, "failures": 1, "timeouts": 1, "seconds": 30.127}
    assert (record["row"], record["group"], record["index"]) == ("openai/gsm8k/7", 7, 0)
    first, answered, _, failed, _, user = record["turns"]
    assert set(first) == {"role", "text", "tokens"}
    assert answered == {
        "role": "tool",
        "text": "42\nx",
        "tokens": 9,
        "name": "code_interpreterx",
        "arguments": {"code": "print(6 * 7)  # x"},
        "seconds": 0.127,
        "reward": 0.25,
    }
    assert user == {"role": "user", "text": "Thank you. x", "reward": 0.5}
    assert (failed["failure"], failed["seconds"]) == ("timeout", 30.0)
    plain = Sample(0, 0, InlineData([SampleTokens(np.zeros(3), np.zeros(3), np.zeros(3), "so")]), 1, 2, 2)
    (record,) = sample_records([Group(0, "row", "mine", [plain])], 1, 1, Words("why"))  # type: ignore[arg-type]
    assert not {"turns", "reason", "tool_use"} & set(record) and record["response"] == "so"


def test_turns_become_the_response_of_the_page(tmp_path: Path) -> None:
    make_agent_run(tmp_path, ["openai/gsm8k"])
    data = json.loads(Page(write_report(tmp_path)).scripts[0])
    looped, *_, plain = [sample["record"] for sample in data["samples"][0]["samples"]]
    assert [turn["role"] for turn in looped["turns"]] == ["assistant", "tool", "assistant", "tool", "assistant", "user"]
    assert looped["turns"][3]["arguments"] == [["query", ""], ["limit", "3"]]
    assert "response" not in looped, "it is in its turns already"
    assert looped["reason"].startswith("the last box holds") and len(plain["turns"]) == 1
    assert "all of it" in read_samples(RunDirectory(tmp_path), 4)[0]["response"], "samples/ has it as one text, too"


def test_texts_of_tools_and_scorers_are_escaped(tmp_path: Path) -> None:
    """Texts, tool answers, arguments, tools' names, reasons and data sources with tags that would end the script."""
    make_agent_run(tmp_path / "plain", ["openai/gsm8k", "mine"])
    make_agent_run(tmp_path / "evil", ["openai/gsm8k", MARKUP], MARKUP)
    plain, evil = Page(write_report(tmp_path / "plain")), Page(write_report(tmp_path / "evil"))
    assert [tag for tag, _ in evil.elements] == [tag for tag, _ in plain.elements]
    assert not set("<>&") & set(evil.scripts[0])
    data = json.loads(evil.scripts[0])
    record = data["samples"][0]["samples"][0]["record"]
    assert MARKUP in record["reason"] and MARKUP in record["turns"][1]["text"]
    assert MARKUP in record["turns"][1]["arguments"][0][1] and MARKUP in record["turns"][0]["text"]
    sources = [source for source, _ in data["answers"]["runs/0/sources"]["steps"][-1]["tables"][0]["rows"]]
    assert MARKUP in sources


def test_the_pages_script_creates_only_text() -> None:
    """The page's script must not write HTML, which would make markup of a sample's text."""
    scripts = [name for name in static_files() if name.endswith(".js")]
    assert len(scripts) > 10
    for name in scripts:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTML|eval\(", static_text(name)
        ), name


@pytest.mark.parametrize(
    "lengths, budget, longest",
    [([10, 10, 100], 50, 30), ([10, 10], 50, 10), ([], 50, 0), ([100, 100], 50, 25), ([5, 40, 40], 25, 10)],
)
def test_the_longest_texts_are_shortened_first(lengths: list[int], budget: int, longest: int) -> None:
    assert _fair_length(lengths, budget) == longest


def long_turns(count: int, text: str) -> dict[str, Any]:
    call = {"role": "tool", "text": text, "name": "code_interpreter", "arguments": {"code": text}}
    short = {"role": "assistant", "text": "So 42.", "tokens": 3}
    return {"prompt": "p", "response": text * count, "reward": 1.0, "turns": [call, short] * (count // 2)}


@pytest.mark.parametrize("text", ["x" * 50_000, "数" * 50_000, "a" * 20_000 + "😀" * 20_000, "\ud800" * 9_000])
def test_long_turns_have_a_budget_in_bytes(text: str) -> None:
    """The budget counts bytes, also of four-byte characters: 120 such steps would make a page too large for a browser."""
    record = shortened(long_turns(6, text))
    assert len(json_line(record)) < 1.3 * TURNS_BYTES  # JSON escapes some characters
    assert [turn["text"] for turn in record["turns"][1::2]] == ["So 42."] * 3, "short turns are whole"
    shown = record["turns"][0]["text"]
    assert "characters left out here" in shown and shown.startswith(
        text[:1].encode("utf-8", "backslashreplace").decode()
    )


def test_many_turns_are_cut_in_the_middle() -> None:
    record = shortened(long_turns(2_000, "x" * 100))
    assert len(record["turns"]) == MAX_TURNS + 1
    assert record["turns"][MAX_TURNS // 2]["text"] == f"{2_000 - MAX_TURNS:,} turns left out here"
    assert len(json_line(record)) < TURNS_BYTES + 20_000


def test_invalid_turns_are_shown_as_far_as_possible() -> None:
    """samples/ may come from another program, and a policy may write any names and arguments."""
    odd = {"role": "tool", "name": "n" * 999, "arguments": {f"a{i}": [i, {"b": None}] for i in range(999)}}
    record = shortened({"response": "r", "turns": [odd, "no turn", {"arguments": "none"}]})
    assert len(record["turns"]) == 2 and len(record["turns"][0]["name"]) < 200
    assert record["turns"][0]["arguments"][0] == ("a0", '[0, {"b": null}]')
    assert record["turns"][0]["arguments"][-1] == ("…", "979 arguments left out here")
    for nothing in (None, [], "text", [3]):
        record = shortened({"response": "r", "turns": nothing})
        assert "turns" not in record and record["response"] == "r"


# ---- a selection of steps, samples and tokens


def test_groups_keep_the_rewards_of_samples_that_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_samples, "MAX_SAMPLES_A_STEP", 2)
    make_run(tmp_path, 3)
    samples = embedded_samples(RunDirectory(tmp_path))
    assert samples.steps == [1, 2, 3] and [group["step"] for group in samples.groups] == [3, 2, 1]
    for group in samples.groups:
        assert len(group["rewards"]) == 4 and len(group["samples"]) == 2
    assert samples.note.startswith("6 of the 48 samples in 3 of 3 files; samples/ has all.")


def test_tokens_have_a_budget_and_the_page_names_those_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, 4)
    first = [group for group in embedded_samples(RunDirectory(tmp_path)).groups if group["group"] % 4 == 0]
    assert all("token_values" in sample["record"] for group in first for sample in group["samples"])
    monkeypatch.setattr(report_samples, "TOKENS_BYTES", 6_000)
    samples = embedded_samples(RunDirectory(tmp_path))
    first = [group for group in samples.groups if group["group"] % 4 == 0]
    have = ["token_values" in sample["record"] for group in first for sample in group["samples"]]
    assert have[:4] == [True] * 4 and not all(have), "the newest step has its tokens"
    assert f"Tokens of {sum(have)} samples; tokens/ has all." in samples.note
    damage = [sample["record"].get("token_damage") for group in first for sample in group["samples"]]
    assert all((text is None) == kept for text, kept in zip(damage, have, strict=True))


def test_long_responses_have_their_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_samples, "MAX_TOKENS", 3)
    record = {"group": 1, "index": 0, "tokens": list("abcde"), "values": {"mask": [1, 1, 1, 0, 1], "odd": 3}}
    assert cut_tokens(record) == {"tokens": ["a", "b", "c"], "values": {"mask": [1, 1, 1]}, "left_out": 2}
    assert cut_tokens({"tokens": None}) == {}


@pytest.mark.parametrize(
    ("count", "order"), [(0, []), (1, [0]), (2, [1, 0]), (4, [3, 1, 2, 0]), (7, [6, 3, 0, 5, 4, 2, 1])]
)
def test_steps_are_taken_from_the_newest_and_then_spread(count: int, order: list[int]) -> None:
    assert spread(count) == order
