"""The cache returns rows only for identical inputs; every failure has a fallback with a notice."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.commands.data.tiny_tokenizer import CHAT_TEMPLATE, make_tiny_tokenizer
from megarl.data import PromptDataset, SFTDataset, Tokenizer, load_tokenizer
from megarl.data import encode as encoding
from megarl.data import prompts as prompt_rows
from megarl.data.cache import Encoded
from megarl.data.rows import Row
from megarl.recipe.schema import DataConfig

ROWS = 1200  # more than encode.LEAST_CACHED


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_tiny_tokenizer(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [
        {"prompt": f"{n}+1? 四", "response": f" {n + 1}", "data_source": "x", "reward_model": {"ground_truth": str(n)}}
        for n in range(ROWS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def encoded_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that each call tokenized; empty if all came from the cache."""
    calls: list[int] = []
    real = prompt_rows.encode_prompts

    def counting(rows: Any, tokenizer: Tokenizer, config: DataConfig) -> list[Encoded]:
        calls.append(len(rows))
        return real(rows, tokenizer, config)

    monkeypatch.setattr(prompt_rows, "encode_prompts", counting)
    return calls


def cached(tmp_path: Path, **settings: Any) -> DataConfig:
    return DataConfig(cache=str(tmp_path / "cache"), **settings)


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.bin"))


def test_cached_rows_equal_encoded_rows(
    tmp_path: Path, rows: Path, tokenizer: Tokenizer, encoded_rows: list[int]
) -> None:
    dataset = PromptDataset([rows], tokenizer, cached(tmp_path))
    assert sum(encoded_rows) == ROWS and len(entries(tmp_path)) == 1
    encoded_rows.clear()
    again = PromptDataset([rows], tokenizer, cached(tmp_path))
    assert not encoded_rows and list(again) == list(dataset) and not again.notices
    examples = [SFTDataset([rows], tokenizer, cached(tmp_path), 100) for _ in range(2)]
    assert len(entries(tmp_path)) == 2, "demonstrations of the same file are other texts"
    for first, same in zip(*examples, strict=True):
        assert (first.uid, first.text) == (same.uid, same.text)
        np.testing.assert_array_equal(first.tokens, same.tokens)
        np.testing.assert_array_equal(first.loss_mask, same.loss_mask)
        assert same.loss_mask.dtype == bool and same.tokens.dtype == np.int32


def test_the_cache_entry_depends_on_everything_that_changes_tokens(
    tmp_path: Path, rows: Path, tokenizer: Tokenizer, encoded_rows: list[int]
) -> None:
    """Stale tokens would train on another template, tokenizer or file than the recipe's, unseen."""

    def makes(file: Path = rows, by: Tokenizer = tokenizer, **settings: Any) -> bool:
        encoded_rows.clear()
        PromptDataset([file], by, cached(tmp_path, **settings))
        return bool(encoded_rows)

    assert makes()
    shutil.copy(rows, tmp_path / "elsewhere.jsonl")
    assert not makes(tmp_path / "elsewhere.jsonl"), "contents count, not names"
    assert not makes(max_prompt_length=500), "how long rows may be changes no token"
    assert makes(chat_template=False)
    rows.write_text(rows.read_text().replace("0+1?", "0-1?", 1))
    assert makes()
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "other")
    assert not makes(by=load_tokenizer(tmp_path / "other")), "a tokenizer counts by its files, wherever they lie"
    settings = tmp_path / "other" / "tokenizer_config.json"
    thinking = CHAT_TEMPLATE + "{% if enable_thinking %}<think>{% endif %}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": thinking}))
    other = load_tokenizer(tmp_path / "other")
    assert makes(by=other)
    assert makes(by=other, chat_template_args={"enable_thinking": True})


def test_the_date_belongs_to_the_cache_key_of_a_dated_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.today() == ""
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    dated = "{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": dated}))
    assert len(load_tokenizer(tmp_path / "tokenizer").today()) == len("2026-01-01")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:40] + b"?" + data[41:], lambda data: b""]
)
def test_a_damaged_entry_is_rewritten_with_a_notice(
    tmp_path: Path, rows: Path, tokenizer: Tokenizer, encoded_rows: list[int], damage: Any
) -> None:
    dataset = PromptDataset([rows], tokenizer, cached(tmp_path))
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    encoded_rows.clear()
    again = PromptDataset([rows], tokenizer, cached(tmp_path))
    assert sum(encoded_rows) == ROWS and list(again) == list(dataset)
    assert again.notices == [f"the tokenized rows in {entry} were damaged: they are tokenized again"]
    assert entry.read_bytes() == whole


def test_rows_are_read_without_a_writable_cache(tmp_path: Path, rows: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    data = PromptDataset([rows], tokenizer, cached(tmp_path))
    assert len(data) == ROWS and any("set data.cache" in notice for notice in data.notices)
    assert PromptDataset([rows], tokenizer, DataConfig(cache=None)).notices == []


def read_in_a_process(folder: str, rows: str, gate: Any) -> None:
    tokenizer = load_tokenizer(f"{folder}/tokenizer")
    gate.wait()
    data = PromptDataset([rows], tokenizer, DataConfig(cache=f"{folder}/cache"))
    assert len(data) == ROWS and not data.notices, data.notices


def test_concurrent_writes_of_one_entry_leave_it_intact(tmp_path: Path, rows: Path, tokenizer: Tokenizer) -> None:
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(2)
    both = [context.Process(target=read_in_a_process, args=(str(tmp_path), str(rows), gate)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert len(entries(tmp_path)) == 1 and not list((tmp_path / "cache").rglob("*.partial"))
    assert PromptDataset([rows], tokenizer, cached(tmp_path)).notices == []


def test_worker_processes_give_the_same_rows_in_the_same_order(rows: Path, tokenizer: Tokenizer) -> None:
    alone = PromptDataset([rows], tokenizer, DataConfig(cache=None, workers=1))
    together = PromptDataset([rows], tokenizer, DataConfig(cache=None, workers=2))
    assert list(together) == list(alone) and not together.notices


def test_a_wrong_row_in_a_worker_process_is_named(rows: Path, tokenizer: Tokenizer) -> None:
    rows.write_text(rows.read_text() + json.dumps({"prompt": 3, "data_source": "x", "reward_model": {}}) + "\n")
    with pytest.raises(ValueError, match=f"line {ROWS + 1}: column 'prompt' is 3"):
        PromptDataset([rows], tokenizer, DataConfig(cache=None, workers=2))


def dies_in_a_child(rows: list[Row], tokenizer: Tokenizer, config: DataConfig) -> list[Encoded]:
    if multiprocessing.parent_process() is not None:
        os._exit(9)  # as the kernel ends one for memory
    return prompt_rows.encode_prompts(rows, tokenizer, config)


def test_dead_worker_processes_are_replaced_with_a_notice(rows: Path, tokenizer: Tokenizer) -> None:
    notices: list[str] = []
    files = [Row(f"row {n}", {"prompt": str(n)}) for n in range(ROWS)]
    encoded = encoding.encode_rows(files, dies_in_a_child, tokenizer, DataConfig(workers=2), notices.append)
    assert len(encoded) == ROWS and "data.workers=1" in notices[0]


def test_worker_processes_start_only_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert [encoding.automatic_workers(rows) for rows in (1, 39_999, 40_000, 10**7)] == [1, 1, 2, 8]
