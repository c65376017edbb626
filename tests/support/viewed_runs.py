"""Run directories for `megarl view`: with every kind of data, and large."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from megarl.observe.log import RunLog
from megarl.recipe.schema import Recipe

QUESTION = "<|user|>\nMia has {} apples and buys {} more. How many apples does she have?\n<|assistant|>\n"


def make_run(
    path: Path, steps: int = 12, *, name: str = "view", seed: int = 0, text: str = "", live: bool = False
) -> RunLog:
    """Write a run with curves, phases, waits, groups, tools, token values and notices, by megarl's own writers.

    text: part of each text of samples and notices. live: the log stays open, and the run's lock is held.
    """
    recipe = Recipe(name=name)
    recipe.observe.console, recipe.observe.tensorboard, recipe.observe.report = "plain", False, False
    recipe.train.seed, recipe.train.steps = seed, steps
    log = RunLog(recipe, path, 1, steps + (1000 if live else 0)).__enter__()
    log.evaluation(0, {"pass@1": 0.2, "greedy": 0.25})
    for step in range(1, steps + 1):
        add_step(log, step, seed=seed, text=text)
    log.warn(f"engine 1 was slow at step 3 {text}")
    if not live:
        log.close("finished")
    return log


def add_step(log: RunLog, step: int, *, seed: int = 0, text: str = "") -> None:
    """Write one step with 4 groups of 4 samples; the samples of the first group have token values."""
    random_ = random.Random(seed * 10_000 + step)
    for phase in ("gen", "old_log_prob", "update_actor", "weight_sync"):
        with log.phase(phase):
            pass
    level = 1 - math.exp(-step / 20)
    log.add({"rollout/rewards/mean": level + random_.uniform(-0.1, 0.1), "critic/rewards/mean": 0.9 * level})
    log.add({"critic/rewards/min": 0.0, "critic/rewards/max": 1.0, "response_length/mean": 80 + step})
    log.add({"actor/entropy": 1.5 * math.exp(-step / 30), "actor/grad_norm": random_.uniform(0.1, 2)})
    log.add({"rollout/logprob_gap_mean": 1e-4 * random_.random(), "perf/throughput": 1000 + 10 * step})
    log.add({"rollout/wait_seconds/engines": 0.001, "rollout/engines_idle": 0.25, "fleet/serving": 2})
    records = [sample(step, group, index, random_, text) for group in range(4) for index in range(4)]
    log.samples(step, records)
    values = [token_record(record, random_) for record in records[:4]]
    log.tokens(step, values)
    log.step(step)


def sample(step: int, group: int, index: int, random_: random.Random, text: str = "") -> dict[str, Any]:
    right = group == 0 or random_.random() < 0.5
    record: dict[str, Any] = {
        "prompt": QUESTION.format(step, group) + text,
        "response": f"She has {step} + {group} = {step + group} apples. {text}\n#### {step + group if right else 0}",
        "reward": float(right),
        "reason": "the last number is right" if right else f"the last number is 0 {text}",
        "parts": {"accuracy": float(right)},
        "steps": [],
        "prompt_length": 20,
        "response_length": 12,
        "finish_reason": "stop" if index else "length",
        "version": step - 1,
        "staleness": index % 2,
        "data_source": "apples" if group < 3 else f"pears{text}",
        "row": f"apples/{step}/{group}",
        "group": step * 4 + group,
        "index": index,
    }
    if group == 1:
        failed = index == 3
        tool = {
            "role": "tool",
            "text": f"{step + group}{text}",
            "tokens": 4,
            "name": f"calculator{text}",
            "arguments": {"expression": f"{step} + {group}{text}"},
            "seconds": 0.1,
        }
        record["turns"] = [
            {
                "role": "assistant",
                "text": f'Let me add.\n<tool_call>\n{{"name": "calculator"}}\n</tool_call>{text}',
                "tokens": 9,
            },
            {**tool, "failure": "timeout"} if failed else tool,
            {"role": "assistant", "text": record["response"], "tokens": 12},
        ]
        record["tool_use"] = {"turns": 2, "calls": 1, "failures": int(failed), "timeouts": int(failed), "seconds": 0.1}
    return record


def token_record(record: dict[str, Any], random_: random.Random) -> dict[str, Any]:
    """Return the token values of a sample, with the keys of `token_values.token_records`."""
    tokens = [piece for piece in record["response"].replace(" ", "\0 ").split("\0") if piece]
    engine = [-random_.expovariate(2) for _ in tokens]
    old = [value + random_.gauss(0, 0.02) for value in engine]
    return {
        "group": record["group"],
        "index": record["index"],
        "tokens": tokens,
        "values": {
            "mask": [int(i != 2) for i in range(len(tokens))],
            "versions": [record["version"]] * len(tokens),
            "rollout_log_probs": engine,
            "old_log_probs": old,
            "log_probs": [value + random_.gauss(0, 0.1) for value in old],
            "advantages": [record["reward"] - 0.5] * len(tokens),
            "entropy": [random_.random() for _ in tokens],
        },
    }


def make_large_run(path: Path, *, steps: int, samples_per_step: int) -> None:
    """Write a run with many samples directly: metrics.jsonl, samples/, recipe and summary, in the writers' formats."""
    samples = path / "samples"
    samples.mkdir(parents=True)
    (path / "recipe.resolved.yaml").write_text("name: large\n")
    (path / "summary.json").write_text(
        json.dumps({"name": "large", "status": "finished", "error": None, "sessions": []})
    )
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, **{f"actor/metric_{i}": step / (i + 1) for i in range(40)}, "timing_s/step": 10.0}
            file.write(json.dumps(line | {"rollout/rewards/mean": step / steps}) + "\n")
    random_ = random.Random(0)
    for step in range(1, steps + 1):
        lines = [json.dumps(sample(step, i // 8, i % 8, random_)) for i in range(samples_per_step)]
        (samples / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
