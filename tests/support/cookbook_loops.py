"""The loops of tinker-cookbook, unchanged, on small sums.

Usage: python tests/support/cookbook_loops.py sl|rl MODEL_FOLDER LOG_FOLDER key=value...  (keys of the loop's Config)

The loops load data sets, a tokenizer and a renderer from the hub. This script replaces them with local ones, and the reward with one
that a random model can learn: the share of the letter "e".
"""

from __future__ import annotations

import sys
from typing import Any

import chz
import datasets
from tinker_cookbook import model_info, tokenizer_utils
from tinker_cookbook.recipes import rl_loop, sl_loop
from transformers import AutoTokenizer

ROWS = 512


def rows_of(name: str) -> list[dict[str, Any]]:
    sums = [(first, second) for first in range(2, 34) for second in range(2, 18)][:ROWS]
    questions = [f"What is {first} + {second}?" for first, second in sums]
    answers = [f"{first} + {second} = {first + second}\n#### {first + second}" for first, second in sums]
    if name == "openai/gsm8k":
        return [{"question": question, "answer": answer} for question, answer in zip(questions, answers, strict=True)]
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in zip(questions, answers, strict=True)
    ]


def load_dataset(name: str, *_: Any, **__: Any) -> datasets.DatasetDict:
    return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows_of(name))})


def share_of_e(response: str, answer: str) -> float:
    return response.count("e") / max(1, len(response))


def main(kind: str, model: str, log_path: str, *settings: str) -> None:
    loop: Any = {"sl": sl_loop, "rl": rl_loop}[kind]
    loop.datasets.load_dataset = load_dataset
    tokenizer_utils.register_tokenizer("tiny", lambda: AutoTokenizer.from_pretrained(model))
    model_info.get_recommended_renderer_name = lambda _: (
        "qwen3_instruct"
    )  # the chat format of the quickstart's tokenizer
    rl_loop.get_reward = share_of_e
    if kind == "rl" and "loss_fn" in rl_loop.Config.__annotations__:
        settings = (
            *settings,
            "loss_fn=importance_sampling",
        )  # since 0.6 its default is stable_reinforce, which servers lack
    loop.main(chz.entrypoint(loop.Config, argv=["model_name=tiny", f"log_path={log_path}", "lora_rank=0", *settings]))


if __name__ == "__main__":
    main(*sys.argv[1:])
