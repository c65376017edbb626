"""An engine in a child process, and trainers that send it weights, for the stages `engine` and `weight_sync`."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from megarl import engines
from megarl import platform as platforms
from megarl.cluster.torchrun.local_service import LocalService
from megarl.commands.accept.context import StageContext
from megarl.commands.accept.ranks import LocalRanks, rank_environment
from megarl.commands.accept.tiny_families import batch
from megarl.engines.base import EngineSpec, GroupRank
from megarl.recipe.schema import Recipe
from megarl.sandbox.usage import cpu_and_memory
from megarl.trainer.actor import ActorWorker
from megarl.types import Completion, GenerationRequest, Prompt, Sampling

PROBE = "megarl.commands.accept.engine_probe:EngineProbe"
TRAINER = "megarl.commands.accept.engine_probe:WeightSyncRank"
START_SECONDS, CALL_SECONDS = 600.0, 300.0
MAX_LENGTH = 256


class EngineProbe:
    """A `megarl.engines.backed.BackedEngine` that runs its methods in threads and measures its memory."""

    def __init__(self, name: str, spec: EngineSpec) -> None:
        self.engine, self.device = engines.create(name, spec), spec.device or "auto"

    async def open_rendezvous(self, host: str) -> GroupRank:
        """Open the rendezvous of this engine's group in this process, at `host`."""
        from megarl.engines.group import Rendezvous

        self.rendezvous = Rendezvous(host)
        return self.rendezvous.first

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return a method of the engine as a function that runs it in a thread."""
        return functools.partial(asyncio.to_thread, getattr(self.engine, method))

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Return the samples of all requests, in the order of their groups."""
        results: dict[int, list[Completion]] = {}
        await asyncio.to_thread(self.engine.generate, requests, results.__setitem__)
        return [completion for group in sorted(results) for completion in results[group]]

    async def sample_dummy_weights(self) -> None:
        """Let a started engine with dummy weights (`EngineSpec.load_weights`) sample without a weight update."""
        self.engine._backend.unloaded = None

    async def free_memory(self) -> float | None:
        """Return the free memory of the engine's device in GiB; None on a CPU."""
        platform = platforms.select(self.device)
        if platform.kind.package:
            importlib.import_module(platform.kind.package)
        return platform.free_memory()

    async def resident(self) -> float:
        """Return the resident host memory of this process and its descendants in GiB."""
        return cpu_and_memory(os.getpid())[1] / 2**30


class WeightSyncRank(ActorWorker):
    """A trainer of a tiny model, with additional methods for the stages."""

    def set_weight_sync(self, route: str, transport: str) -> None:
        """Let the next `open_weight_sync` take this way."""
        self.recipe.weight_sync.route, self.recipe.weight_sync.transport = route, transport  # type: ignore[assignment]

    def share_memory(self, size: int) -> dict[str, Any]:
        """Share memory with the bytes 0, 1, 2, ..., and return its handle."""
        import torch

        self.shared = self.platform.shareable_memory(size)
        self.shared.memory.copy_(torch.arange(size).to(torch.uint8))
        self.platform.synchronize()
        return self.shared.handle()

    def change(self, seed: int) -> None:
        """Scale all weights, in the same way on all ranks, so that every version has different weights."""
        import torch

        with torch.no_grad():
            for chunk in self.trainer.model.chunks:
                for parameter in chunk.parameters():
                    parameter.data.mul_(1.0 + 0.01 * seed)

    def probe(self, samples: list[list[int]]) -> list[list[float]] | None:
        """Return the log-probs of each token of each sample; None if this is not the last pipeline stage."""
        import torch

        from megarl.megatron.batch import MicroBatch

        tokens = torch.tensor([token for sample in samples for token in sample], device=self.platform.device())
        lengths = [len(sample) for sample in samples]
        rows = self.trainer.log_probs([MicroBatch(tokens, lengths)], temperature=1.0)
        if rows is None:
            return None
        return [part.tolist() for part in rows[0][0].float().cpu().split(lengths)]

    def send_and_die(self, version: int) -> Any:
        """Send weights, but let the last rank exit after packing its first bucket."""
        from megarl.weight_sync.sender import Sender

        if self.rank == self.world_size - 1:
            assert isinstance(self.sender, Sender) and self.sender.session.sharded, "full sync sends from rank 0 only"
            outgoing = self.sender._outgoing
            assert outgoing is not None, "an earlier update has connected this rank"
            outgoing.send = lambda *_: os._exit(9)  # type: ignore[method-assign]
        return self.send_weights(version)


class MemoryReader:
    """A process that maps the memory of another process."""

    def __init__(self, device: str) -> None:
        self.platform = platforms.select(device)

    def read(self, handle: dict[str, Any]) -> list[int]:
        self.platform.set_device(0)
        return self.platform.open_shared(handle).cpu().tolist()


def tiny_recipe(context: StageContext, family: str, trainers: int, **megatron: Any) -> Recipe:
    """Return a recipe for the family's tiny model. Trainers and engine share devices if there are too few."""
    recipe = Recipe()
    recipe.name, recipe.runs_dir = f"tiny-{family}", str(context.folder)
    recipe.model.path = str(context.shared / family)
    recipe.model.dtype = "float32" if context.tiny else "bfloat16"
    recipe.cluster.device, recipe.cluster.trainers = context.device, trainers  # type: ignore[assignment]
    recipe.cluster.threads = 1 if context.tiny else 4
    recipe.cluster.placement = "colocated" if shares_devices(context) else "disaggregated"
    recipe.weight_sync.check_every, recipe.weight_sync.timeout, recipe.weight_sync.bucket_mb = 1, 120.0, 1
    recipe.train.steps = 10
    for name, value in megatron.items():
        setattr(recipe.megatron, name, value)
    return recipe


def shares_devices(context: StageContext) -> bool:
    """Return True if engine and trainers share devices: with one device, but never on a CPU."""
    return not context.tiny and context.settings.devices < 2


def start_engine(
    context: StageContext, recipe: Recipe, *, load_weights: bool, number: int = 0, group: int = 1, **engine_args: Any
) -> LocalService:
    """Start the process of an engine of the recipe's model on the last device of this machine.

    group: number of engines in a group, on the last `group` devices. number: the index of this engine in the group.
    """
    platform, args = platforms.select(context.device), {**_arguments(context), **engine_args}
    spec = EngineSpec(
        name=f"probe{number}",
        model_path=recipe.model.path,
        dtype=recipe.model.dtype,
        max_model_len=MAX_LENGTH,
        data_parallel=group,
        expert_parallel=group > 1,
        engine_args=args,
        load_weights=load_weights,
        sleep_mode=not context.tiny,
        device=context.device,
    )
    env = engines.engine_env("vllm", platform.rollout_env(), recipe.cluster.threads, args)
    env |= visible(context, [context.settings.devices - group + number])
    log = context.folder / ("engine.log" if group == 1 else f"engine-{number}-of-{group}.log")
    return LocalService(PROBE, ("vllm", spec), name=f"engine {number}", log=log, env=env)


def visible(context: StageContext, devices: Sequence[int]) -> dict[str, str]:
    """Return the variable that restricts a process to these devices; empty on a CPU.

    devices: indices among the devices that this process sees.
    """
    variable = platforms.select(context.device).kind.visible
    if not variable:
        return {}
    devices_here = (os.environ.get(variable) or ",".join(map(str, range(context.settings.devices)))).split(",")
    return {variable: ",".join(devices_here[number] for number in devices)}


def start_trainers(context: StageContext, recipe: Recipe, size: int, name: str) -> LocalRanks:
    """Start `size` trainers of the recipe's model, with logs in the folder `name`."""
    return LocalRanks(context.folder / name, TRAINER, (recipe, 10), size, rank_environment(context))


def start_all(group: Sequence[LocalService]) -> tuple[list[dict[str, Any]], float]:
    """Load an engine, or all engines of a group at once. Return their descriptions and the seconds."""
    began = time.monotonic()
    if len(group) == 1:
        return [group[0].call("start").result(START_SECONDS)], time.monotonic() - began
    first: GroupRank = group[0].call("open_rendezvous", "127.0.0.1").result(START_SECONDS)
    calls = [engine.call("start", replace(first, rank=rank, size=len(group))) for rank, engine in enumerate(group)]
    return [call.result(START_SECONDS) for call in calls], time.monotonic() - began


def _arguments(context: StageContext) -> dict[str, Any]:
    if context.tiny:
        return {"kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 16}
    share = 0.3 if shares_devices(context) else 0.6
    return {"gpu_memory_utilization": share, "max_num_seqs": 128}


def requests(family: str, count: int, tokens: int, temperature: float = 1.0) -> list[GenerationRequest]:
    """Return `count` requests for `tokens` tokens each. Sequences of the batch are the prompts."""
    sequences = batch(family)
    sampling = Sampling(n=1, max_tokens=tokens, temperature=temperature)
    requests = []
    for number in range(count):
        tokens_of_prompt = sequences[number % len(sequences)].tokens.tolist()
        prompt = Prompt(f"probe/{number}", tuple(tokens_of_prompt), "", "probe")
        requests.append(GenerationRequest(number, prompt, sampling, 1000 + number))
    return requests


def gap(family: str, sent: list[GenerationRequest], sampled: list[Completion], trainers: Any) -> float:
    """Return the mean absolute difference, in nats per token, of the engine's and the trainers' log-probs of samples."""
    samples = [
        [*request.prompt.tokens, *completion.tokens.tolist()] for request, completion in zip(sent, sampled, strict=True)
    ]
    rows = next(answer for answer in trainers.call("probe", samples) if answer is not None)
    differences = [
        abs(trainer - float(engine))
        for row, completion in zip(rows, sampled, strict=True)
        for trainer, engine in zip(row[-len(completion.tokens) :], completion.log_probs, strict=True)
    ]
    return sum(differences) / len(differences)


def timed(call: Any, seconds: float = CALL_SECONDS) -> tuple[Any, float]:
    """Wait for a service's call. Return its result and the seconds."""
    began = time.monotonic()
    return call.result(seconds), time.monotonic() - began
