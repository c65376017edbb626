"""The job that both frameworks run: sizes, model, rows, rewards, and the record that the rewards write.

TRL's Python imports this file too, so its top level needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Size:
    """A model's size, and a batch that takes seconds to a minute on two cores."""

    model: dict[str, int]  # fields of config.json
    experts: dict[str, int]  # further fields of the mixture of experts
    prompts: int  # per step
    learning_rate: float
    micro_batch: int = 8  # samples of a forward and backward pass
    cache_mib: int = 256  # the engine's KV cache


SIZES = {
    "0.2M": Size({}, {}, 32, 2e-3, micro_batch=64, cache_mib=128),
    "20M": Size(
        {
            "hidden_size": 384,
            "intermediate_size": 1408,
            "num_hidden_layers": 10,
            "num_attention_heads": 6,
            "head_dim": 64,
        },
        {"moe_intermediate_size": 352},
        8,
        5e-4,
    ),
    "100M": Size(
        {
            "hidden_size": 768,
            "intermediate_size": 2816,
            "num_hidden_layers": 13,
            "num_attention_heads": 12,
            "head_dim": 64,
        },
        {"moe_intermediate_size": 704},
        2,
        2e-4,
    ),
}


@dataclass(frozen=True)
class Job:
    """The settings that both frameworks share.

    model: folder of the starting model; rows: a file of `make_rows`; prompts: per step; samples: per prompt;
    response, prompt_limit: longest, in tokens; threads: of each process;
    micro_batch: samples of a forward and backward pass; reward: a name of `FUNCTIONS`.
    """

    model: str
    rows: str
    prompts: int
    samples: int
    response: int
    prompt_limit: int
    cache_mib: int
    learning_rate: float
    clip: float
    steps: int
    seed: int
    threads: int
    micro_batch: int
    reward: str

    @property
    def batch(self) -> int:
        """Samples per step."""
        return self.prompts * self.samples

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Job:
        return Job(**json.loads(path.read_text()))


def make_model(folder: Path, size: str, moe: bool, seed: int) -> str:
    """Write the random starting model, Qwen3 or Qwen3-MoE with four experts, in float32. Returns its folder."""
    from megarl.commands.data.tiny_model import make_tiny_model

    kind: Literal["qwen3_moe", "qwen3"] = "qwen3_moe" if moe else "qwen3"
    sizes = {**SIZES[size].model, **(SIZES[size].experts if moe else {})}
    return str(make_tiny_model(kind, folder / f"{kind}-{size}", seed, 0.0, **sizes))


def end_early(folder: str, tokens: float) -> None:
    """Change the model of `make_model` so that each token ends the response with a probability of about 1 / `tokens`.

    Lengths are then long-tailed, as in reinforcement learning, where most responses are much shorter than the limit. The first
    number of the hidden states is constant: all embeddings have it, and no layer changes it. The end-of-text row of the output
    layer reads only this number.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from megarl.commands.data.tiny_tokenizer import EOS_ID

    path = Path(folder) / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][:, 0] = 4 * weights["model.embed_tokens.weight"].norm(dim=1).mean()
    weights["lm_head.weight"][:, 0] = 0.0
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    save_file(weights, path, {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(10, model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model.model(ids).last_hidden_state[:, 32:, 0]
        totals = model(ids).logits[:, 32:].logsumexp(-1)
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        too_long = (middle * states - totals).sigmoid().mean() < 1 / tokens
        low, high = (middle, high) if too_long else (low, middle)
    weights["lm_head.weight"][EOS_ID] = 0.0
    weights["lm_head.weight"][EOS_ID, 0] = high
    save_file(weights, path, {"format": "pt"})


def make_rows(path: Path, count: int, seed: int) -> None:
    """Write `count` of the quickstart's word problems as JSON lines that both frameworks read."""
    from megarl.commands.data.word_problems import DATA_SOURCE, draw

    rng = random.Random(seed)
    problems = [draw(rng, held_out=False) for _ in range(count)]
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": problem.prompt,
            "reward_model": {"ground_truth": str(problem.results[1])},
        }
        for problem in problems
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def digits(response: str, answer: str) -> float:
    """Share of digits among a response's characters. Random weights learn it, and it does not depend on the length."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def accuracy(response: str, answer: str) -> float:
    """GSM8K's rule: 1 for the right number after ####, else 0. Needs a model that has learned the form of an answer."""
    from megarl.rewards.base import ScoreRequest
    from megarl.rewards.gsm8k import gsm8k

    return float(gsm8k(ScoreRequest(response, answer, ""))["score"])


FUNCTIONS: dict[str, Callable[[str, str], float]] = {"digits": digits, "accuracy": accuracy}


def record(path: str, rewards: list[float]) -> None:
    """Append a line `seconds reward` for each sample, in one write that other processes' lines do not split."""
    now = time.time()
    with open(path, "ab", buffering=0) as file:
        file.write("".join(f"{now:.4f} {reward:.6f}\n" for reward in rewards).encode())


def recorded_score(request: Any, name: str, path: str) -> float:
    """Score a sample of megarl and record it: `reward.function` of megarl's recipe."""
    reward = FUNCTIONS[name](request.response, request.ground_truth)
    record(path, [reward])
    return reward


def environment(threads: int) -> dict[str, str]:
    """Return the variables of both commands. Thread pools of OpenMP and MKL have `threads` threads in each process."""
    root = str(Path(__file__).parents[2])
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **dict.fromkeys(names, str(threads)), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
