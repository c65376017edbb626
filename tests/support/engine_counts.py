"""Weights of each worker of a real vLLM, in the layout that the loader writes.

`python -m tests.support.engine_counts` reads an EngineSpec as JSON and prints a line for each worker: [parameters, bytes,
KV cache bytes per token].
"""

from __future__ import annotations

import json
import sys

from megarl.engines.base import EngineSpec
from megarl.engines.vllm.args import build_engine_args, process_env
from megarl.engines.vllm.worker import WorkerExtension


class Counting(WorkerExtension):
    def count(self) -> list[float]:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

        held, as_they_are = (
            [],
            {},
        )  # a reload restores the layout of `held`, and keeps `as_they_are`, which layers may share
        for module in self.model_runner.model.modules():
            parameters = dict(module.named_parameters(recurse=False))
            laid_out = get_layerwise_info(module).restore_metadata[0]
            held += [tensor for name, tensor in laid_out.items() if name in parameters]
            as_they_are |= {id(parameters[name]): parameters[name] for name in parameters.keys() & SKIP_TENSORS}
        held += as_they_are.values()
        specs = self.model_runner.get_kv_cache_spec().values()
        return [
            sum(tensor.numel() for tensor in held),
            sum(tensor.nbytes for tensor in held),
            sum(spec.page_size_bytes / spec.block_size for spec in specs),
        ]


def main() -> None:
    import os

    os.environ.update(process_env(1))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    spec = EngineSpec(**json.load(sys.stdin))
    arguments = {**build_engine_args(spec, "cpu"), "worker_extension_cls": "tests.support.engine_counts.Counting"}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    counts = engine.collective_rpc("count")
    engine.engine_core.shutdown()
    print(*map(json.dumps, counts), sep="\n")


if __name__ == "__main__":
    main()
