"""megarl's share of a rollout process's CPU time at 1,000 requests, and what the process holds in memory.

    python -m benchmarks.rollout_process [--groups 63] [--samples 16] [--tokens 48] [--unseeded]

A real `RolloutServer` with vLLM on the CPU and a random Qwen3 with 0.2 million parameters samples and scores word problems, all
submitted at once, after a warm-up. vLLM's time is the CPU time of its thread inside `LLMEngine.step` and `add_request`. The rest of
the process and its scorers' processes is megarl's: requests and seeds, conversion of outputs, detokenization, scoring, groups.
Memory is private and resident memory at marks of the process's life.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.process_memory import Marks, table

if TYPE_CHECKING:
    from megarl.rollout.server import RolloutServer

PROMPT = 256  # tokens of each prompt, so that a group has something to share


class Spent:
    """CPU seconds inside wrapped calls, by label, each in its thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Count the seconds of a method of `owner`. Nested calls of wrapped methods count in both labels."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.thread_time() - begin

        setattr(owner, name, timed)


def children_seconds() -> float:
    """Return the CPU seconds of the living descendants of this process, the scorers' processes."""
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    parents = {os.getpid()}
    for _ in range(4):  # levels
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = entry.read_text()
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            fields = text[text.rindex(")") + 2 :].split()
            number = int(text.split(" ", 1)[0])
            if int(fields[1]) in parents and number not in parents:
                parents.add(number)
                total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process's threads by Python name; `other` are threads of libraries."""
    names = {thread.native_id: thread.name.rstrip("0123456789_") for thread in threading.enumerate()}
    ticks, seconds = os.sysconf("SC_CLK_TCK"), dict[str, float]()
    for entry in Path("/proc/self/task").iterdir():
        fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        name = names.get(int(entry.name), "other")
        seconds[name] = seconds.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def requests(first: int, groups: int, samples: int, tokens: int, seeded: bool) -> list[Any]:
    from megarl.types import GenerationRequest, Prompt, Sampling

    sampling = Sampling(n=samples, max_tokens=tokens, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=())
    return [
        GenerationRequest(
            group=number,
            prompt=Prompt(
                f"row/{number}", tuple(10 + (number * 31 + i * 7) % 80 for i in range(PROMPT)), "A problem.", "openai/gsm8k",
                ground_truth="18",
            ),
            sampling=sampling,
            seed=1000 * number if seeded else None,
        )
        for number in range(first, first + groups)
    ]  # fmt: skip


async def sample(server: RolloutServer, first: int, groups: int, options: argparse.Namespace) -> list[Any]:
    """Return the groups of requests, the first one numbered `first`. Raises RuntimeError if a group failed."""
    from megarl.cluster.failures import Raised
    from megarl.rollout.collect.collector import MOST_GROUPS

    wave = requests(first, groups, options.samples, options.tokens, not options.unseeded)
    submitted = asyncio.create_task(server.submit(wave))
    finished: list[Any] = []
    while len(finished) < groups:
        finished += (await server.collect(MOST_GROUPS))[0]
    await submitted
    errors = [f"group {number}: {group.message}" for number, group in finished if isinstance(group, Raised)]
    if errors:
        raise RuntimeError(f"{len(errors)} of {groups} groups failed; the first is {errors[0]}")
    return [group for _, group in finished]


def count_prefills(scheduler: Any) -> list[int]:
    """Return a list with the number of prompt tokens that vLLM's scheduler has scheduled since this call; it grows later."""
    prefilled, schedule = [0], scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        prefilled[0] += sum(count for count in output.num_scheduled_tokens.values() if count > 1)
        return output

    scheduler.schedule = counted
    return prefilled


async def measure(folder: str, options: argparse.Namespace, marks: Marks) -> dict[str, Any]:
    """Run in the process of the rollout: sample after a warm-up, and return the figures."""
    from megarl.engines.base import EngineSpec
    from megarl.recipe.sandbox import SandboxConfig
    from megarl.recipe.schema import RewardConfig
    from megarl.rollout.server import RolloutServer

    marks.add("megarl's rollout server")
    spec = EngineSpec(
        name="engine0", model_path=folder, dtype="float32", max_model_len=PROMPT + options.tokens, seeded=not options.unseeded,
        engine_args={"max_num_seqs": 256, "kv_cache_memory_bytes": 128 << 20, "max_num_batched_tokens": 8192}
        | ({"block_size": options.block} if options.block else {}),
    )  # fmt: skip
    server = RolloutServer("vllm", spec, folder, RewardConfig(), ["openai/gsm8k"], SandboxConfig())
    import torch

    torch.set_num_threads(1)
    marks.add("torch")
    from megarl.engines.vllm.compat import import_engine

    import_engine()
    marks.add("vLLM's imports")
    await server.start()
    marks.add("engine: model of 1 MiB, KV cache of 128 MiB, buffers, processes of scorers")

    await sample(server, 0, 4, options)
    spent, backend = Spent(), cast(Any, server.engine)._backend
    prefilled = count_prefills(backend._engine.engine_core.engine_core.scheduler)
    spent.wrap(backend._engine, "step", "vllm")
    spent.wrap(backend._engine, "add_request", "vllm")
    spent.wrap(backend, "step", "engine thread: steps")
    spent.wrap(backend, "admit", "engine thread: requests")
    spent.wrap(server.tokenizer, "decode", "detokenization")
    spent.wrap(server, "_group", "groups and vectors")
    scorers, threads = children_seconds(), thread_seconds()
    begin = time.process_time()
    groups = await sample(server, 1000, options.groups, options)
    process = time.process_time() - begin
    after, scorers = thread_seconds(), children_seconds() - scorers
    marks.add(f"after {options.groups * options.samples:,} requests")
    assert len(groups) == options.groups and not any(group.failures for group in groups), groups[0].failures
    seconds = spent.seconds
    figures = {
        "whole": process + scorers,
        "vllm": seconds["vllm"],
        "libraries": after.get("other", 0.0) - threads.get("other", 0.0),
        "conversion of outputs and requests": seconds["engine thread: steps"]
        + seconds["engine thread: requests"]
        - seconds["vllm"],
        "detokenization": seconds["detokenization"],
        "groups and vectors": seconds["groups and vectors"],
        "scorers' processes": scorers,
        "prefilled": prefilled[0] / (options.groups * PROMPT),
        "block": backend._engine.vllm_config.cache_config.block_size,
    }
    await server.shutdown()
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=63)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of each response")
    parser.add_argument("--block", type=int, help="tokens of a block of the KV cache; vLLM's default on CPUs is 128")
    parser.add_argument("--unseeded", action="store_true", help="rollout.seeded: false")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is None:
        _in_process(options, list(sys.argv[1:] if arguments is None else arguments))
        return
    marks = Marks()
    print(json.dumps({"figures": asyncio.run(measure(options.inside, options, marks)), "marks": marks.marks}))


def _in_process(options: argparse.Namespace, arguments: list[str]) -> None:
    """Measure in a process with the environment of an engine, and print the tables."""
    from benchmarks.trl.job import make_model
    from megarl.engines import engine_env
    from megarl.platform.cpu import CPUPlatform

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), "0.2M", moe=False, seed=0)
        environment = {**os.environ, **engine_env("vllm", CPUPlatform().rollout_env(), 1, {}), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "benchmarks.rollout_process", "--inside", model, *arguments]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    figures = result["figures"]
    whole, count = figures["whole"], options.groups * options.samples
    own = whole - figures["vllm"] - figures["libraries"]
    prefilled, block = figures.pop("prefilled"), int(figures.pop("block"))
    print(f"{own / whole:.1%} of the rollout process's CPU time is megarl's; load {os.getloadavg()[0]:.1f}\n")
    shared = (PROMPT - 1) // block * block / PROMPT  # whole blocks before the prompt's last token
    least = 1 + (options.samples - 1) * (1 - shared)
    print(
        f"{prefilled:.2f} prefills of a prompt for {options.samples} samples; {least:.2f} with all blocks of {block} tokens shared\n"
    )
    print(f"| share | part, {count:,} requests of {options.tokens} tokens | CPU s |\n|---|---|---|")
    named = sum(value for name, value in figures.items() if name != "whole")
    for name, value in {**figures, "the rest of megarl: threads, event loop": whole - named}.items():
        print(f"| {value / whole:.1%} | {name} | {value:.2f} |")
    print()
    table(result["marks"])


if __name__ == "__main__":
    main()
