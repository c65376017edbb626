"""Imports of the vLLM engine's processes; see `tests.support.forks`."""

import vllm.entrypoints.llm  # noqa: F401
import vllm.v1.engine.core  # noqa: F401
import vllm.v1.engine.llm_engine  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401

import megarl.engines.vllm.engine
import tests.support.engine_process  # noqa: F401
