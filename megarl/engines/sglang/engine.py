"""SGLang as a rollout engine, through its offline `Engine`.

Written for SGLang 0.5.23, tested on the CPU (tests/support/sglang_cpu.py), never run on a device. SGLang samples in child
processes and replies through an asyncio loop, which the owning thread runs for a moment in each `step`. A failing child
process also ends this process (SIGQUIT, `cluster.process.die_on_quit`), which the controller notices.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megarl.engines.backed import TAGS, BackedEngine, asleep_after_wake, check_tokens
from megarl.engines.base import EngineRefused, EngineSpec
from megarl.engines.group import EngineGroup
from megarl.engines.partials import as_partial
from megarl.engines.sglang.args import LOADER, build_engine_args, eos_ids, merged_because
from megarl.engines.sglang.worker import read_results, update_task
from megarl.types import Completion, GenerationRequest, Partial, Sampling
from megarl.weight_sync.session import Session, UpdateReport, WeightSyncError, host_id, merge_reports

_GRAPHS = "cuda_graph"  # SGLang's third tag; sleep frees it only with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1
_STEP_SECONDS = 0.05  # that a step waits for a finished sample


class SglangEngine(BackedEngine):
    """SGLang as a rollout engine. Its process must start with the environment of `engine_env`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._sglang = _SglangBackend(spec)
        super().__init__(self._sglang, spec)

    def pause(self) -> None:
        self.call(self._sglang.pause)
        super().pause()

    def resume(self) -> None:
        self.call(self._sglang.resume)
        super().resume()


class _SglangBackend:
    """Drives SGLang's Engine. Methods run in the owning thread, `check` in any thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._engine: Any = None
        self._vocab_size = 0
        self._eos_ids: set[int] = set()
        self._session: Session | None = None
        self._tasks: dict[str, list[asyncio.Task]] = {}  # per request: one task per sample, in seed order
        self._requests: dict[str, GenerationRequest] = {}
        self._paused = False
        self.unloaded: str | None = None if spec.load_weights else "has dummy weights"
        self.staged: int | None = None
        self.asleep: tuple[str, ...] = ()  # of TAGS

    def join(self, group: EngineGroup) -> None:
        raise EngineRefused(f"engine {self._spec.name!r}: SGLang's engines form no groups (rollout.data_parallel)")

    def start(self) -> dict[str, Any]:
        asyncio.set_event_loop(asyncio.new_event_loop())  # SGLang uses the thread's loop
        import sglang
        from sglang.srt.entrypoints.engine import Engine

        from megarl.platform import select

        if not hasattr(Engine, "begin_weight_update"):
            raise RuntimeError(
                f"SGLang {sglang.__version__} has no begin_weight_update, which weight updates need; install 0.5.23 or later"
            )
        device = self._spec.device or select().name
        self._engine = Engine(**build_engine_args(self._spec, device))
        self._vocab_size = self._engine.tokenizer_manager.model_config.vocab_size
        self._eos_ids = eos_ids(self._spec.model_path)
        return {
            "engine": "sglang",
            "version": sglang.__version__,
            "device": device,
            "can_sleep": self._spec.sleep_mode,
            "can_update_in_flight": False,
            "merged_because": merged_because(self._spec, device),
            "receivers": [[f"{self._spec.name}/{rank}", host_id()] for rank in range(self._spec.tensor_parallel)],
        }

    def check(self, request: GenerationRequest) -> None:
        check_tokens(request, self._spec, self._vocab_size)
        uid, stops = request.prompt.uid, set(request.sampling.stop_token_ids)
        if request.images is not None or request.prompt_top_k is not None:
            raise ValueError(f"prompt {uid!r} has images or prompt_top_k: megarl supports neither with SGLang")
        if stops and not stops >= self._eos_ids:
            raise ValueError(
                f"prompt {uid!r} has the stop tokens {sorted(stops)}, and SGLang would also stop at the model's eos tokens "
                f"{sorted(self._eos_ids - stops)}; make them stop tokens, too"
            )

    def admit(self, key: str, request: GenerationRequest) -> None:
        self._requests[key] = request
        self._tasks[key] = [
            self._engine.loop.create_task(self._sample(f"{key}-{index}", request, index))
            for index in range(request.sampling.n)
        ]

    async def _sample(self, name: str, request: GenerationRequest, index: int) -> dict[str, Any]:
        return await self._engine.async_generate(
            input_ids=list(request.prompt.tokens),
            sampling_params=_sampling_params(request.sampling, self._seed(request, index)),
            return_logprob=request.sampling.temperature > 0,
            rid=name,
        )

    def _seed(self, request: GenerationRequest, index: int) -> int | None:
        """Return the seed of a sample; None if SGLang would ignore it (`rollout.seeded: false`)."""
        return None if request.seed is None or not self._spec.seeded else request.seed + index

    def step(self) -> list[tuple[str, list[Completion]]]:
        unfinished = [task for tasks in self._tasks.values() for task in tasks if not task.done()]
        if unfinished:
            first = asyncio.wait(unfinished, timeout=_STEP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            self._engine.loop.run_until_complete(first)
        finished = []
        for key in [key for key, tasks in self._tasks.items() if all(task.done() for task in tasks)]:
            request, tasks = self._requests.pop(key), self._tasks.pop(key)
            finished.append(
                (key, [_completion(task.result(), request.sampling, self._spec.recipe_section) for task in tasks])
            )
        return finished

    def lengths(self, key: str) -> dict[int, int]:
        raise EngineRefused(f"SGLang has no lengths of running requests ({key}), because it takes no weights meanwhile")

    def partials(self, key: str) -> list[Partial] | None:
        raise EngineRefused(f"SGLang returns the tokens of a running request ({key}) only when it ends")

    def hand_over(self, keys: list[str]) -> dict[str, list[Partial] | None]:
        """Abort requests: SGLang then returns their tokens so far. A sample may finish meanwhile."""
        if self._paused:
            raise EngineRefused(
                f"engine {self._spec.name!r} is paused, and SGLang ends no request then; resume it first"
            )
        tasks = {key: self._tasks.pop(key) for key in keys}
        for key, of_request in tasks.items():
            for index, task in enumerate(of_request):
                if not task.done():
                    self._engine.tokenizer_manager.abort_request(f"{key}-{index}")
        self._run(asyncio.gather(*(task for of_request in tasks.values() for task in of_request)))
        sampling = {key: self._requests.pop(key).sampling for key in keys}
        section = self._spec.recipe_section
        return {key: [_partial(task.result(), sampling[key], section) for task in tasks[key]] for key in keys}

    def cancel(self, keys: list[str]) -> None:
        tasks = []
        for key in keys:
            del self._requests[key]
            for index, task in enumerate(self._tasks.pop(key)):
                self._engine.tokenizer_manager.abort_request(f"{key}-{index}")
                task.cancel()
                tasks.append(task)
        self._run(asyncio.gather(*tasks, return_exceptions=True))

    def _run(self, awaitable: Any) -> Any:
        return self._engine.loop.run_until_complete(awaitable)

    def pause(self) -> None:
        """Pause the schedulers between two steps; their reply to the next request confirms it."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._run(self._engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode="in_place")))
        self._engine.get_server_info()
        self._paused = True

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._run(self._engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput()))
        self._paused = False

    def connect_weight_sync(self, session: Session) -> str | None:
        if session.sharded:
            return "SGLang loads only whole tensors"
        self._session = session  # each rank joins at its first update
        return None

    def update_weights(self, version: int, running: int) -> UpdateReport:
        name = self._spec.name
        if running:
            raise EngineRefused(
                f"SGLang engine {name!r} cannot update weights while {running} requests run; let them finish or abort"
            )
        if "weights" in self.asleep:
            raise EngineRefused(f"engine {name!r} has no memory for weights while they sleep; wake them first")
        if self._session is None:
            raise EngineRefused(f"engine {name!r} has no weight sync session; connect it first")
        report = merge_reports(self._receive(self._session, version))
        self.unloaded = None
        return report

    def load_weights(self, running: int) -> int:
        raise EngineRefused("SGLang loads weights as they arrive")

    def _receive(self, session: Session, version: int) -> list[UpdateReport]:
        folder = tempfile.mkdtemp(prefix="megarl-sglang-")
        try:
            task = update_task(session.to_json(), self._spec.name, version, folder)
            _check_success(self._engine.begin_weight_update(), "begin a weight update")
            loaded = self._engine.update_weights_from_tensor(
                [(task, torch.zeros(1))], load_format=LOADER, flush_cache=True
            )
            _check_success(loaded, "update its weights")
            results = read_results(folder, self._spec.tensor_parallel)
            failed = [f"rank {rank}: {result['error']}" for rank, result in enumerate(results) if "error" in result]
            if failed:
                raise WeightSyncError(f"engine {self._spec.name!r} did not load version {version}: {'; '.join(failed)}")
            _check_success(self._engine.end_weight_update(), "end a weight update")
            return [UpdateReport(**result["report"]) for result in results]
        finally:
            shutil.rmtree(folder)

    def sleep(self, running: int) -> None:
        if not self._spec.sleep_mode:
            raise EngineRefused(f"engine {self._spec.name!r} cannot sleep: it was started without sleep_mode")
        if running:
            raise EngineRefused(f"engine {self._spec.name!r} cannot sleep while {running} requests run")
        self._engine.release_memory_occupation()
        self.asleep = TAGS
        self.unloaded = "dropped its weights when it went to sleep"

    def profile(self, name: str | None) -> None:
        raise EngineRefused("engines of rollout.engine=sglang are not traced")  # validation rejects such a recipe

    def wake(self, tags: Sequence[str] | None) -> None:
        if not self._spec.sleep_mode:
            raise EngineRefused(f"engine {self._spec.name!r} cannot sleep, so it cannot wake")
        tags = self.asleep if tags is None else tags
        asleep = asleep_after_wake(tags, self.asleep, self._spec.name)
        graphs = [] if asleep else [_GRAPHS]  # graphs need weights and KV cache
        self._engine.resume_memory_occupation([*tags, *graphs])
        self.asleep = asleep

    def shutdown(self) -> None:
        if self._engine is None:
            return
        self._engine.shutdown()  # ends all child processes of this process; scorer pools are closed before
        self._engine = None


def _sampling_params(sampling: Sampling, seed: int | None) -> dict[str, Any]:
    return {
        "n": 1,
        **({} if seed is None else {"sampling_seed": seed}),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # ignore_eos would ignore stop_token_ids, too
    }


def _completion(output: dict[str, Any], sampling: Sampling, section: str) -> Completion:
    """Convert SGLang's output of one sample. Log-probs are over the whole vocabulary at the sampling temperature."""
    reason = (output["meta_info"]["finish_reason"] or {}).get("type")
    if reason not in ("stop", "length"):
        raise RuntimeError(f"SGLang ended a request with {output['meta_info']['finish_reason']!r}")
    length = len(output["output_ids"])
    if reason == "length" and length != sampling.max_tokens:
        raise RuntimeError(
            f"SGLang cut a response at {length} of {sampling.max_tokens} tokens: its KV cache is too small for one "
            f"sample; raise {section}.engine_args.mem_fraction_static"
        )
    return Completion(*_sampled(output, sampling), reason)


def _partial(output: dict[str, Any], sampling: Sampling, section: str) -> Partial:
    """Convert SGLang's output of a sample that was aborted, or that has finished before the abort."""
    if (output["meta_info"]["finish_reason"] or {}).get("type") != "abort":
        return replace(as_partial(_completion(output, sampling, section)), spans=())
    tokens, log_probs = _sampled(output, sampling)
    reason = "length" if len(tokens) == sampling.max_tokens else None
    if len(tokens) and tokens[-1] in sampling.stop_token_ids:
        reason = "stop"
    return Partial(tokens, log_probs, (), reason)


def _sampled(output: dict[str, Any], sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of an output and their log-probs, NaN for greedy samples: int32 and float32 [tokens]."""
    tokens = np.asarray(output["output_ids"], np.int32)
    if sampling.temperature == 0:
        return tokens, np.full(len(tokens), np.nan, np.float32)
    scored = output["meta_info"]["output_token_logprobs"]  # (log-prob, token, text) each
    if [token for _, token, *_ in scored] != tokens.tolist():
        raise RuntimeError(
            f"SGLang returned log-probs of {len(scored)} tokens that are not the {len(tokens)} of the response"
        )
    return tokens, np.asarray([value for value, *_ in scored], np.float32)


def _check_success(result: Any, action: str) -> None:
    succeeded, message = result
    if not succeeded:
        raise RuntimeError(f"SGLang did not {action}: {message}")
