"""Rollout process: an engine, and the pool of processes that score its samples.

The controller submits requests and collects scored groups: control data (lengths, rewards), and apart token vectors for trainers.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from megarl import engines, rewards
from megarl.agents.setup import Agents, AgentSetup
from megarl.agents.trajectory import SampleLoop, Trajectory
from megarl.cluster.base import host_name
from megarl.cluster.call_gate import CallGates
from megarl.cluster.outages import Outage
from megarl.data.images import ImageReader
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.base import EngineRefused, EngineSpec, GroupRank, OnFinished
from megarl.engines.partials import greedy_request
from megarl.platform.load import HostLoad, MachineLoad
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards.scoring import Outcome, Scoring
from megarl.rewards.settings import ScorerSettings
from megarl.rewards.weighted import terms_of
from megarl.rollout.assemble import control_data, outcomes_of, policy_turns, vectors
from megarl.rollout.collect.finished import FinishedGroup, FinishedGroups, Scored
from megarl.types import Completion, GenerationRequest, Group, Partial, SampleFailure, SampleTokens
from megarl.weight_sync.session import Session, UpdateReport

P = ParamSpec("P")
T = TypeVar("T")


class RolloutServer:
    """Runs inside a service process (see cluster/): async methods run concurrently."""

    def __init__(
        self,
        engine: str,
        spec: EngineSpec,
        tokenizer: str,
        reward: RewardConfig,
        sources: list[str],
        sandbox: SandboxConfig,
        images: ImageReader | None = None,
        agent: AgentSetup | None = None,
        judged: bool = False,
        chat_template: bool | str = True,
    ):
        """`sources`: data sources to score. `images`: reader of the prompts' images, if any. `agent`: settings of the
        agent loop, if any. `judged`: keep each group's responses until `collect_responses` is called, once per group.
        `chat_template`: the value of `data.chat_template`."""
        self.images = images
        self.gates = CallGates()  # to the services behind scorers and tools
        self.host_load = HostLoad()
        self.engine = engines.create(engine, spec)
        # only for text: stop tokens come with each request
        self.tokenizer = load_tokenizer(tokenizer, chat_template=chat_template)
        self.scoring = Scoring(
            terms_of(reward.function, reward.functions, sources, ScorerSettings.of(reward, sandbox)),
            reward,
            sandbox,
            self.gates,
        )
        self.agents = Agents(agent, self.tokenizer, self.gates, images) if agent is not None else None
        self.agent_loop: SampleLoop | None = None
        self.texts = ThreadPoolExecutor(max_workers=4, thread_name_prefix="texts")
        # `generate` blocks a thread; under continuous admission, many calls run at the same time. Other calls to the engine
        # have separate threads: an update must not wait for a thread of `generate`.
        self.calls = ThreadPoolExecutor(max_workers=_generate_threads(spec), thread_name_prefix="generate")
        self._finished = FinishedGroups()
        self._unsettled: list[
            dict[int, GenerationRequest]
        ] = []  # of each `submit` call: groups that are not sampled yet
        self._responses: dict[int, list[str]] | None = {} if judged else None
        self._settling: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks

    async def open_rendezvous(self, host: str) -> GroupRank:
        """Open the rendezvous of this engine's group. `host`: this machine's address for the other engines."""
        from megarl.engines.group import Rendezvous

        self.rendezvous = Rendezvous(host)
        return self.rendezvous.first

    async def start(self, group_rank: GroupRank | None = None) -> dict[str, Any]:
        """Load the engine; returns its description. `group_rank`: its rank in its group, if any."""
        description = await asyncio.to_thread(self.engine.start, group_rank)
        await asyncio.to_thread(self.scoring.start)
        if self.agents is not None:
            self.agent_loop = await self.agents.start()
        return description

    async def submit(self, requests: list[GenerationRequest]) -> None:
        """Sample `requests`, all at once and in their order; return when all are sampled. The caller must collect each
        group, even after an error."""
        unsettled = {request.group: request for request in requests}
        self._unsettled.append(unsettled)
        try:
            for request, failure in await asyncio.gather(*map(self._with_images, requests)):
                if failure is None:
                    unsettled[request.group] = request
                else:  # the group fails, as after a scorer's failure
                    self._settle(unsettled.pop(request.group), _empty_samples(request, failure))
            if unsettled and self.agent_loop is None:
                await self._sample_groups(unsettled)
            elif unsettled and self.agent_loop is not None:
                await self._run_loops(self.agent_loop, unsettled)
        except BaseException as error:
            for group in unsettled:
                self._finished.fail(group, error)
            unsettled.clear()
            raise
        finally:
            self._unsettled.remove(unsettled)

    async def _sample_groups(self, unsettled: dict[int, GenerationRequest]) -> None:
        """Sample `unsettled` requests, by group, with one turn each. Removes a group when all its samples are complete."""
        loop = asyncio.get_running_loop()

        def settle(group: int, samples: list[Completion]) -> None:
            if group in unsettled:  # else the call was cancelled
                self._settle(unsettled.pop(group), self._single_turns(samples))

        def finished(group: int, completions: list[Completion]) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(settle, group, completions)

        await self._generate(list(unsettled.values()), finished)

    async def _single_turns(self, completions: list[Completion]) -> list[Trajectory]:
        def read() -> list[Trajectory]:
            return [Trajectory.of(sample, self.tokenizer.decode(sample.tokens.tolist())) for sample in completions]

        return await self._in_texts(read)

    async def _run_loops(self, agent: SampleLoop, unsettled: dict[int, GenerationRequest]) -> None:
        """Sample all first turns in one call to the engine; then continue each sample in a separate task.

        Removes every group from `unsettled`: the tasks of its samples set its result.
        """
        loop = asyncio.get_running_loop()
        requests = list(unsettled.values())
        singles = [(request, single) for request in requests for single in _single_requests(request)]
        first: dict[int, asyncio.Future[Completion]] = {single.group: loop.create_future() for _, single in singles}

        def finished(number: int, completions: list[Completion]) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(first[number].set_result, completions[0])

        running: dict[int, list[asyncio.Task[Trajectory]]] = {}
        for request, single in singles:
            task = loop.create_task(agent.run(single, first[single.group], self._sample_turn))
            running.setdefault(request.group, []).append(task)
        failures: list[BaseException] = []  # of the engine

        async def sampled(group: int) -> list[Trajectory]:
            try:
                return await asyncio.gather(*running[group])
            except asyncio.CancelledError:
                if failures:
                    raise failures[0] from None
                raise

        for request in requests:
            self._settle(unsettled.pop(request.group), sampled(request.group))
        all_tasks = [task for tasks in running.values() for task in tasks]
        begun = [single for _, single in singles] if agent.begins_with_prompt else []
        try:
            await asyncio.gather(self._generate(begun, finished), *all_tasks)
        except BaseException as error:
            failures.append(error)
            for task in all_tasks:
                task.cancel()
            await asyncio.gather(*all_tasks, return_exceptions=True)  # the first error is raised below
            raise

    async def _sample_turn(self, request: GenerationRequest) -> Completion:
        done: list[Completion] = []
        await self._generate([request], lambda _, completions: done.extend(completions))
        return done[0]

    async def _generate(self, requests: list[GenerationRequest], on_finished: OnFinished) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.calls, self.engine.generate, requests, on_finished)

    async def collect(self, most: int) -> tuple[list[FinishedGroup], list[list[SampleTokens]]]:
        """Wait for a submitted group that has finished; returns up to `most` of them, and the vectors of the scored ones.

        A group has the error of `submit` if that ends before the group is sampled.
        """
        return await self._finished.take(most)

    async def hand_over(self, groups: list[int]) -> dict[int, tuple[Partial, ...]]:
        """End the sampling of `groups`; returns their samples so far, for requests to another engine.

        `collect` returns an error for these groups. Groups that are already sampled, and scored now, are not returned: collect them.
        """
        self._check_one_turn()
        handed = await asyncio.to_thread(self.engine.hand_over, groups)
        for request in handed:
            for unsettled in self._unsettled:
                unsettled.pop(request.group, None)
            self._finished.fail(request.group, EngineRefused("it was handed over"))
        return {request.group: request.partials for request in handed}

    async def copy_partials(self, number: int) -> dict[int, tuple[Partial, ...]]:
        """Return the samples so far of each group that the engine samples, for a checkpoint. `number`: of the copy, for the tape."""
        self._check_one_turn()
        copied = await asyncio.to_thread(self.engine.copy_running, number)
        return {request.group: request.partials for request in copied}

    def _check_one_turn(self) -> None:
        if self.agents is not None:
            raise EngineRefused("samples of agent loops cannot be continued: the state of tools and users is not known")

    async def _with_images(self, request: GenerationRequest) -> tuple[GenerationRequest, SampleFailure | None]:
        """Add the prepared images of the prompt to `request`; returns the failure if an image is damaged.

        Images are prepared in this process, so requests carry only the encoded files. Earlier checks may have read only
        an image's header.
        """
        if not request.prompt.images and not request.prompt.videos:
            return request, None
        assert self.images is not None
        try:
            return replace(request, images=await self._in_texts(self.images.prepare, request.prompt)), None
        except (ValueError, OSError) as error:
            return request, SampleFailure("images", request.prompt.uid, "error", str(error))

    async def collect_responses(self, group: int) -> tuple[None, list[str]]:
        """Return the policy's text of each sample of a collected group, for the judge."""
        assert self._responses is not None
        return None, self._responses.pop(group)

    async def _in_texts(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.texts, call)

    async def connect_weight_sync(self, session: Session) -> str | None:
        """Join a weight sync session; returns the reason if the engine cannot join a sharded session."""
        return await asyncio.to_thread(self.engine.connect_weight_sync, session)

    async def update_weights(self, version: int) -> UpdateReport:
        """Receive the weights of `version` from the trainers; returns the engine's report."""
        return await asyncio.to_thread(self.engine.update_weights, version)

    async def load_weights(self) -> int:
        """Load the weights that wait in host memory (`rollout.at_update: finish`); returns their version."""
        return await asyncio.to_thread(self.engine.load_weights)

    async def watch(self) -> None:
        """Return when the engine has been shut down; raise as soon as it has failed."""
        await asyncio.to_thread(self.engine.watch)

    async def running_step(self) -> int | None:
        """Return the number of the engine's step that runs, from 1; None between steps."""
        return self.engine.running_step

    async def outages(self, seen: int) -> tuple[int, list[Outage]]:
        """Return the number of changes so far and the services that are down, as soon as this number is not `seen`."""
        return await self.gates.outages(seen)

    async def machine_load(self) -> MachineLoad:
        """Return the load of this machine since the last call."""
        return MachineLoad(host_name(), self.host_load.take())

    async def sleep(self) -> None:
        await asyncio.to_thread(self.engine.sleep)

    async def wake(self, tags: list[str]) -> None:
        await asyncio.to_thread(self.engine.wake, tags)

    async def pause(self) -> None:
        await asyncio.to_thread(self.engine.pause)

    async def resume(self) -> None:
        await asyncio.to_thread(self.engine.resume)

    async def start_profile(self, name: str) -> None:
        await asyncio.to_thread(self.engine.start_profile, name)

    async def stop_profile(self) -> None:
        await asyncio.to_thread(self.engine.stop_profile)

    async def shutdown(self) -> None:
        self.gates.close()
        try:  # the slowest part comes last: the process may be killed before it ends
            if self.agents is not None:
                await self.agents.close()
        finally:
            try:
                await asyncio.to_thread(self.scoring.close)
            finally:
                await asyncio.to_thread(self.engine.shutdown)
        self.texts.shutdown(wait=False)
        self.calls.shutdown(wait=False)

    def _settle(self, request: GenerationRequest, sampled: Awaitable[list[Trajectory]]) -> None:
        """Start a task that awaits the samples of a group (a greedy sample is last), scores them and finishes the group."""

        async def settle() -> None:
            try:
                trajectories = await sampled
                begin = time.monotonic()
                group, tokens = await self._scored(request, trajectories)
                group.scoring_seconds = time.monotonic() - begin
                self._finished.add(request.group, (group, tokens))
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- `collect` returns it
                self._finished.fail(request.group, error)

        task = asyncio.get_running_loop().create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _scored(self, request: GenerationRequest, sampled: list[Trajectory]) -> Scored:
        with_tools = self.agent_loop is not None
        if any(sample.failure is not None for sample in sampled):  # the group has failed and is not scored
            outcomes: list[Outcome] = [(sample.failure or rewards.Score(math.nan), 0) for sample in sampled]
        else:
            outcomes = await outcomes_of(self.scoring.score, request.prompt, sampled, with_tools)
        return await self._in_texts(self._group, request, sampled, outcomes)

    def _group(self, request: GenerationRequest, sampled: list[Trajectory], outcomes: list[Outcome]) -> Scored:
        """Return the group of the first `n` samples, and their vectors. A further sample is the greedy sample."""
        prompt, count, with_tools = request.prompt, request.sampling.n, self.agent_loop is not None
        together = list(zip(sampled, outcomes, strict=True))
        decode = self.tokenizer.decode
        samples = [
            control_data(request, index % count, sample, result, decode, with_tools)
            for index, (sample, (result, _)) in enumerate(together)
        ]
        group = Group(
            number=request.group,
            prompt_uid=prompt.uid,
            data_source=prompt.data_source,
            samples=samples[:count],
            greedy=samples[count] if len(samples) > count else None,
            failures=tuple(result for result, _ in outcomes if isinstance(result, SampleFailure)),
            scoring_retries=sum(repeated for _, repeated in outcomes),
            sampled_again=dict(Counter(kind for sample in sampled for kind in sample.sampled_again)),
        )
        kept = sampled[:count]
        if self._responses is not None and not group.failures:
            self._responses[request.group] = [_response(sample) for sample in kept]
        texts = [decode(sample.tokens.tolist()) if with_tools else _response(sample) for sample in kept]
        reasons = ["" if isinstance(result, SampleFailure) else result.reason for result, _ in outcomes[:count]]
        return group, [
            vectors(request, sample, text, reason, with_tools)
            for sample, text, reason in zip(kept, texts, reasons, strict=True)
        ]


def _generate_threads(spec: EngineSpec | None) -> int:
    """Return the largest number of `generate` calls at a time. A replay holds calls that arrive early: they must not use
    all threads while the call that the tape needs next waits for one."""
    replays = spec is not None and spec.tape is not None and spec.tape.recorded is not None
    return 1 << 20 if replays else 1024


def _response(sample: Trajectory) -> str:
    """Return the policy's text of a sample, without answers of tools."""
    return "\n".join(policy_turns(sample))


def _single_requests(request: GenerationRequest) -> list[GenerationRequest]:
    """Split a group's request into requests for single samples, with their seeds, if any; the greedy sample is last.

    Their group is the sample's number in the run: group x (n + 1) + index. All turns have it: on the engine's tape,
    equal requests of two samples differ by it.
    """
    count = request.sampling.n
    single = replace(request, sampling=replace(request.sampling, n=1), with_greedy=False)
    seeds = [None if request.seed is None else request.seed + index for index in range(count)]
    greedy = [greedy_request(request)] if request.with_greedy else []
    samples = [*(replace(single, seed=seed) for seed in seeds), *greedy]
    return [replace(each, group=request.group * (count + 1) + index) for index, each in enumerate(samples)]


async def _empty_samples(request: GenerationRequest, failure: SampleFailure) -> list[Trajectory]:
    """Return empty samples, for a group with unreadable images."""
    return [Trajectory.failed(failure)] * (request.sampling.n + request.with_greedy)
