"""Compare reading a data set, from files to tokenized prompts, with the tokenizer alone.

    MEGARL_GSM8K=folder python -m benchmarks.data [--rounds 7] [--repeat 1]

MEGARL_GSM8K names the folder with GSM8K's train.jsonl and test.jsonl. The tokenizer is a byte-level BPE of 16,384 tokens,
trained on the questions and answers. The cases alternate on the same rows. Seconds are CPU time, which other processes
disturb less than wall time; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from megarl.commands.data.gsm8k import prepare
from megarl.commands.data.tiny_tokenizer import CHAT_TEMPLATE, EOS, PAD, TURN_START
from megarl.data import PromptDataset, Tokenizer, load_tokenizer
from megarl.data.rows import iterate_rows, write_parquet
from megarl.data.tokenizer import HuggingFaceTokenizer
from megarl.recipe.schema import DataConfig

VOCABULARY = 16_384
# Qwen's pre-tokenization pattern.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(out: Path, texts: list[str]) -> Tokenizer:
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [PAD, TURN_START, EOS]
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    out.mkdir(parents=True)
    backend.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(out)


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of `work`, including ended child processes."""
    start = os.times()
    work()
    return sum(os.times()[:4]) - sum(start[:4])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=1, help="copies of the rows")
    arguments = parser.parse_args()
    source = os.environ.get("MEGARL_GSM8K")
    if source is None:
        parser.error("set MEGARL_GSM8K to the folder of GSM8K's train.jsonl and test.jsonl")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = [
            row.values
            for file in prepare(source, root / "gsm8k")[0]
            for row in iterate_rows(Path(file), ("prompt",), optional=("data_source", "reward_model", "extra_info"))
        ]
        write_parquet(root / "rows.parquet", rows * arguments.repeat)
        info = [row["extra_info"] for row in rows]
        tokenizer = make_tokenizer(root / "tokenizer", [row["question"] + row["answer"] for row in info])
        compare(root, tokenizer, arguments.rounds)


def compare(root: Path, tokenizer: Tokenizer, rounds: int) -> None:
    def read(cache: Path | None, workers: int | None = 1) -> PromptDataset:
        config = DataConfig(cache=str(cache) if cache else None, workers=workers)
        return PromptDataset([root / "rows.parquet"], tokenizer, config)

    texts = [prompt.text for prompt in read(root / "cache")]
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(texts))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    cases: dict[str, Callable[[], object]] = {
        "the tokenizer alone": lambda: tokenizer.encode_batch(texts),
        "the tokenizer as transformers calls it": lambda: tokenizer._hf(texts, add_special_tokens=False),
        "files to prompts": lambda: read(None),
        "files to prompts, two processes": lambda: read(None, 2),
        "files to prompts, from the cache": lambda: read(root / "cache"),
    }
    measured = [{name: seconds(work) for name, work in cases.items()} for _ in range(rounds)]
    print(f"{len(texts):,} prompts, {tokens:,} tokens\n\n| | CPU s | ratio |\n|---|---|---|")
    for name in cases:
        ratio = statistics.median(times[name] / times["the tokenizer alone"] for times in measured)
        print(f"| {name} | {statistics.median(times[name] for times in measured):.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
