"""Imports of the vLLM engine's processes; see `tests.support.forks`."""

from __future__ import annotations

import importlib

for name in (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "megarl.engines.vllm.engine",
    "tests.support.engine_process",
):
    importlib.import_module(name)
