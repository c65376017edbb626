"""A stand-in for SGLang's offline engine: its methods and their results, with one table of logits as the model.

`tests/engines/test_sglang_sources.py` compares names and parameters with SGLang's source if MEGARL_SGLANG names an unpacked wheel."""

from __future__ import annotations

import asyncio
import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megarl.engines.sglang import worker

VOCABULARY, END = 16, 15


class Model(torch.nn.Module):
    """A model of one table: the last token's row gives the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, value in weights:
            if name in parameters:  # SGLang skips unknown names, too
                parameters[name].data[: len(value)].copy_(value) if value.dim() else parameters[name].data.copy_(value)


class TokenizerManager:
    def __init__(self, engine: Engine) -> None:
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY)
        self._engine = engine
        self.paused = asyncio.Event()
        self.aborted: list[str] = []

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.append(rid)

    async def pause_generation(self, obj: Any) -> None:
        assert obj.mode == "in_place"
        self._engine.running.clear()

    async def continue_generation(self, obj: Any) -> None:
        self._engine.running.set()


class Engine:
    """An engine built with ServerArgs' fields. `calls` lists the state-changing calls in order."""

    instances: ClassVar[list[Engine]] = []

    def __init__(self, **kwargs: Any) -> None:
        self.arguments, self.calls = kwargs, []
        self.loop = asyncio.get_event_loop_policy().get_event_loop()
        self.running = asyncio.Event()
        self.running.set()
        self.tokenizer_manager = TokenizerManager(self)
        self.model = Model()
        self.asleep: set[str] = set()
        self.session = False
        self.longest = 10**9
        self.seconds = 0.0  # a token takes
        Engine.instances.append(self)

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict, return_logprob: bool, rid: str
    ) -> dict[str, Any]:
        tokens, sampled_log_probs = [], []
        generator = torch.Generator().manual_seed(sampling_params["sampling_seed"])
        limit = min(sampling_params["max_new_tokens"], self.longest)
        stops = set() if sampling_params["ignore_eos"] else {*sampling_params["stop_token_ids"], END}
        last, reason = input_ids[-1], {"type": "length", "length": limit}
        while len(tokens) < limit:
            await self.running.wait()
            await asyncio.sleep(self.seconds)
            if rid in self.tokenizer_manager.aborted:
                reason = {"type": "abort", "message": "Abort in waiting queue"}
                break
            logits = self.model.table[last] * self.model.scale
            if sampling_params["temperature"] == 0:
                last = int(logits.argmax())
            else:
                log_probs = (logits / sampling_params["temperature"]).log_softmax(-1)
                last = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
                sampled_log_probs.append((float(log_probs[last]), last, None))
            tokens.append(last)
            if last in stops:
                reason = {"type": "stop", "matched": last}
                break
        meta: dict[str, Any] = {"id": rid, "finish_reason": reason}
        if return_logprob:
            meta["output_token_logprobs"] = sampled_log_probs
        return {"output_ids": tokens, "meta_info": meta}

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        self.calls.append("begin")
        self.session = True
        return True, "Success"

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        assert "weights" not in self.asleep
        if not self.session:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        if load_format not in self.arguments["custom_weight_loader"]:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        module, _, name = load_format.rpartition(".")
        getattr(sys.modules[module], name)(self.model, named_tensors)
        self.calls.append(f"update, flush {flush_cache}")
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        self.calls.append("end")
        self.session = False
        return True, "Success"

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        assert not self.asleep
        self.asleep = set(tags or ("weights", "kv_cache", "cuda_graph"))
        self.model.table.data.fill_(0)  # weights are dropped
        self.calls.append("release")

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        for tag in tags or ("weights", "kv_cache", "cuda_graph"):
            self.asleep.remove(tag)
        self.calls.append(f"resume {tags}")

    def get_server_info(self) -> dict[str, Any]:
        self.calls.append("info")
        return {}

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def install(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """Install this module as SGLang, on one GPU, until the end of the test."""
    modules = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.engine": {"Engine": Engine},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {
            "PauseGenerationReqInput": lambda mode: SimpleNamespace(mode=mode),
            "ContinueGenerationReqInput": SimpleNamespace,
        },
        "torch_memory_saver": {},
        "sglang.srt.runtime_context": {"get_parallel": lambda: SimpleNamespace(tp_rank=0)},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("megarl.platform.select", lambda: SimpleNamespace(name="cuda"))
    monkeypatch.setattr(worker, "_receivers", {})
    Engine.instances.clear()
    return Engine
