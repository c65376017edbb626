"""A rollout process: one engine, and the scorers of what it samples.

The controller submits requests and collects groups; a group comes back scored, as control data
(lengths, rewards) beside the token vectors, so that the controller need not touch the latter.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from megarl import engines, rewards
from megarl.agents.setup import Agents, AgentSetup
from megarl.agents.trajectory import AgentLoop, Trajectory
from megarl.data.images import ImageReader
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.base import EngineSpec, GroupRank
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig
from megarl.rewards.scoring import Outcome, Scoring
from megarl.rewards.settings import ScorerSettings
from megarl.rewards.weighted import terms_of
from megarl.rollout.assemble import control_data, question, said, vectors
from megarl.types import Completion, GenerationRequest, Group, SampleFailure, SampleTokens
from megarl.weight_sync.session import Session

T = TypeVar("T")


class RolloutServer:
    """Runs inside a service process (see cluster/): async methods answer while others are in flight."""

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
    ):
        """`sources`: data sources to be scored. `images`: reads those of prompts; None: they have none. `agent`: samples are
        made by an agent loop. `judged`: what the policy said in each group is asked for (`said`), once."""
        self.images = images
        self.engine = engines.create(engine, spec)
        self.tokenizer = load_tokenizer(tokenizer)  # for text alone: stop tokens come with each request
        self.scoring = Scoring(
            terms_of(reward.function, reward.functions, sources, ScorerSettings(reward.remote, sandbox)),
            reward,
            sandbox,
        )
        self.agents = Agents(agent, self.tokenizer) if agent is not None else None
        self.loop: AgentLoop | None = None
        self.texts = ThreadPoolExecutor(max_workers=4, thread_name_prefix="texts")
        # A call to the engine blocks a thread until it is done; under continuous admission many are under way.
        self.calls = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="engine-call")
        self.version = 0  # of the weights the engine holds
        self._results: dict[int, asyncio.Future[tuple[Group, list[SampleTokens]]]] = {}
        self._said: dict[int, list[str]] | None = {} if judged else None
        self._settling: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    async def open_rendezvous(self, host: str) -> GroupRank:
        """Open the rendezvous of this engine's group. `host`: this machine's address for the other engines."""
        from megarl.engines.group import Rendezvous

        self.rendezvous = Rendezvous(host)
        return self.rendezvous.first

    async def start(self, group_rank: GroupRank | None = None) -> dict[str, Any]:
        """Load the engine; returns its description. `group_rank`: its rank in its group, if any."""
        description = await self._in_thread(self.engine.start, *([] if group_rank is None else [group_rank]))
        await self._in_thread(self.scoring.start)
        if self.agents is not None:
            self.loop = await self.agents.start()
        return description

    async def submit(self, requests: list[GenerationRequest]) -> None:
        """Admit `requests` all at once, in their order; returns when all are sampled. Each group is to be collected."""
        ready: list[GenerationRequest] = []
        for request, failure in await asyncio.gather(*map(self._with_images, requests)):
            if failure is None:
                ready.append(request)
            else:  # its group is left out, as where a scorer fails
                self._settle(request, _nothing(request, failure))
        if ready and self.loop is None:
            await self._sample_groups(ready)
        elif ready and self.loop is not None:
            await self._run_loops(self.loop, ready)

    async def _sample_groups(self, requests: list[GenerationRequest]) -> None:
        loop = asyncio.get_running_loop()
        by_group = {request.group: request for request in requests}
        sampled: dict[int, list[Completion]] = {}

        def finished(group: int, completions: list[Completion]) -> None:  # in the engine's thread
            sampled[group] = completions
            own = max(group, _greedy_twin(group))
            twins = [own, _greedy_twin(own)] if by_group[own].with_greedy else [own]
            if all(twin in sampled for twin in twins):
                everything = [one for twin in twins for one in sampled.pop(twin)]
                loop.call_soon_threadsafe(lambda: self._settle(by_group[own], self._of_one_turn(everything)))

        everything = [one for request in requests for one in (request, *_greedy_request(request))]
        await self._in_thread(self.engine.generate, everything, finished)

    async def _of_one_turn(self, completions: list[Completion]) -> list[Trajectory]:
        def read() -> list[Trajectory]:
            return [Trajectory.of(one, self.tokenizer.decode(one.tokens.tolist())) for one in completions]

        return await self._in_texts(read)

    async def _run_loops(self, agent: AgentLoop, requests: list[GenerationRequest]) -> None:
        """Every sample goes its own way from its first turn on; the first turns are admitted at once."""
        loop = asyncio.get_running_loop()
        alone = [(request, one) for request in requests for one in _one_by_one(request)]
        first: list[asyncio.Future[Completion]] = [loop.create_future() for _ in alone]

        def finished(number: int, completions: list[Completion]) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(first[number].set_result, completions[0])

        running: dict[int, list[asyncio.Task[Trajectory]]] = {}
        for (request, one), turn in zip(alone, first, strict=True):
            task = loop.create_task(agent.run(one, turn, self._sample_turn))
            running.setdefault(request.group, []).append(task)
        for request in requests:
            self._settle(request, asyncio.gather(*running[request.group]))
        numbered = [replace(one, group=number) for number, (_, one) in enumerate(alone)]
        everything = [task for tasks in running.values() for task in tasks]
        try:
            await asyncio.gather(self._in_thread(self.engine.generate, numbered, finished), *everything)
        except BaseException:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)  # the first one's is raised
            raise

    async def _sample_turn(self, request: GenerationRequest) -> Completion:
        done: list[Completion] = []
        await self._in_thread(self.engine.generate, [request], lambda _, completions: done.extend(completions))
        return done[0]

    async def collect(self, group: int) -> tuple[Group, list[SampleTokens]]:
        """Wait for one submitted group: its control data and, sample by sample, its token vectors.

        Where `submit` fails the group never comes: the caller watches both.
        """
        try:
            return await self._result(group)
        finally:
            del self._results[group]

    async def _with_images(self, request: GenerationRequest) -> tuple[GenerationRequest, SampleFailure | None]:
        """`request`, whose prompt's images are prepared here, so that what travelled was the encoded files; and why they
        could not be: of a damaged file often no more than the header had been read before."""
        if not request.prompt.images:
            return request, None
        assert self.images is not None
        in_thread = asyncio.get_running_loop().run_in_executor
        try:
            return replace(request, images=await in_thread(self.texts, self.images.prepare, request.prompt)), None
        except (ValueError, OSError) as error:
            return request, SampleFailure("images", request.prompt.uid, "error", str(error))

    async def said(self, group: int) -> tuple[None, list[str]]:
        """What the policy said in each sample of a group that was collected: all that a judge reads of it."""
        assert self._said is not None
        return None, self._said.pop(group)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.calls, function, *args)

    async def _in_texts(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.texts, function, *args)

    def _result(self, group: int) -> asyncio.Future[tuple[Group, list[SampleTokens]]]:
        """Calls may overtake each other on their way here, so whoever is first makes the future."""
        if group not in self._results:
            self._results[group] = asyncio.get_running_loop().create_future()
        return self._results[group]

    async def connect_weight_sync(self, session: Session) -> str | None:
        """Join the trainers' weight exchange; returns why the engine cannot, of a planned one."""
        return await self._in_thread(self.engine.connect_weight_sync, session)

    async def update_weights(self, version: int) -> Any:
        """Receive the weights of `version` from the trainers; returns the engine's report of what arrived."""
        report = await self._in_thread(self.engine.update_weights, version)
        self.version = version
        return report

    async def watch(self) -> None:
        """Return when the engine has been shut down; raise as soon as it has failed."""
        await self._in_thread(self.engine.watch)

    async def sleep(self) -> None:
        await self._in_thread(self.engine.sleep)

    async def wake(self, tags: list[str]) -> None:
        await self._in_thread(self.engine.wake, tags)

    async def start_profile(self, name: str) -> None:
        await self._in_thread(self.engine.start_profile, name)

    async def stop_profile(self) -> None:
        await self._in_thread(self.engine.stop_profile)

    async def shutdown(self) -> None:
        try:  # what takes longest comes last: whoever shuts this down has little patience
            if self.agents is not None:
                await self.agents.close()
        finally:
            try:
                await asyncio.to_thread(self.scoring.close)
            finally:  # not in `calls`, where more turns may wait than there are threads
                await asyncio.to_thread(self.engine.shutdown)
        self.texts.shutdown(wait=False)
        self.calls.shutdown(wait=False)

    def _settle(self, request: GenerationRequest, sampled: Awaitable[list[Trajectory]]) -> None:
        """Score a group once it is `sampled`, its greedy sample last where there is one, while others are sampled; then
        it can be collected."""

        async def settle() -> None:
            try:
                self._result(request.group).set_result(await self._scored(request, await sampled))
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- whoever collects the group is told
                self._result(request.group).set_exception(error)

        task = asyncio.get_running_loop().create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _scored(self, request: GenerationRequest, sampled: list[Trajectory]) -> tuple[Group, list[SampleTokens]]:
        with_tools = self.loop is not None
        unfinished = [one.failure for one in sampled if one.failure is not None]
        if unfinished:  # the group is left out: there is nothing to score
            outcomes: list[Outcome] = [(one.failure or rewards.Score(math.nan), 0) for one in sampled]
        else:
            outcomes = await self.scoring.score([question(request.prompt, one, with_tools) for one in sampled])
        return await self._in_texts(self._group, request, sampled, outcomes)

    def _group(
        self, request: GenerationRequest, sampled: list[Trajectory], outcomes: list[Outcome]
    ) -> tuple[Group, list[SampleTokens]]:
        """The group of the first `n` samples; one more is the greedy one."""
        prompt, count, with_tools = request.prompt, request.sampling.n, self.loop is not None
        together = list(zip(sampled, outcomes, strict=True))
        decode = self.tokenizer.decode
        samples = [
            control_data(request, index % count, one, result, self.version, decode, with_tools)
            for index, (one, (result, _)) in enumerate(together)
        ]
        group = Group(
            number=request.group,
            prompt_uid=prompt.uid,
            data_source=prompt.data_source,
            version=self.version,
            samples=samples[:count],
            greedy=samples[count] if len(samples) > count else None,
            failures=tuple(result for result, _ in outcomes if isinstance(result, SampleFailure)),
            scoring_retries=sum(repeated for _, repeated in outcomes),
        )
        if self._said is not None and not group.failures:
            self._said[request.group] = ["\n".join(said(one)) for one in sampled[:count]]
        texts = [decode(one.tokens.tolist()) if with_tools else "\n".join(said(one)) for one in sampled[:count]]
        reasons = ["" if isinstance(result, SampleFailure) else result.reason for result, _ in outcomes]
        return group, [
            vectors(request, one, text, reason, with_tools)
            for one, text, reason in zip(sampled[:count], texts, reasons, strict=False)
        ]


def _greedy_twin(group: int) -> int:
    """The number under which a group's greedy sample goes through the engine, and the group of such a number: groups
    count from 0, so no group has it."""
    return -1 - group


def _greedy_request(request: GenerationRequest) -> list[GenerationRequest]:
    if not request.with_greedy:
        return []
    greedy = replace(request.sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1)
    return [replace(request, group=_greedy_twin(request.group), sampling=greedy, with_greedy=False)]


def _one_by_one(request: GenerationRequest) -> list[GenerationRequest]:
    """Each sample of a group as a request of its own, with its seed within the group, if it has one; the greedy one last."""
    one = replace(request, sampling=replace(request.sampling, n=1), with_greedy=False)
    seeds = [None if request.seed is None else request.seed + index for index in range(request.sampling.n)]
    alone = [replace(one, seed=seed) for seed in seeds]
    return [*alone, *_greedy_request(request)]


async def _nothing(request: GenerationRequest, failure: SampleFailure) -> list[Trajectory]:
    """The samples of a group that could not be begun."""
    return [Trajectory.of_nothing(failure)] * (request.sampling.n + request.with_greedy)
