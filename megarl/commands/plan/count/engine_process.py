"""Counting process for engine ranks: builds any rank of any engine on tensors without memory. Started by `rank_client.py`."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from megarl.commands.plan import vllm_rank
from megarl.engines import arguments_of
from megarl.engines.base import EngineSpec

vllm_rank.prepare()  # before vLLM is imported, below

from megarl.commands.plan.count.serve import serve  # noqa: E402
from megarl.commands.plan.vllm_memory import counted  # noqa: E402
from megarl.engines.vllm.needed_slices import needed_slices  # noqa: E402


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Handle one request: return the rank's memory, or, with a file of `tensors`, the slices that it needs.

    The result is {"error": ...} for a rank that does not exist or with a loader that cannot be traced.
    """
    spec = EngineSpec(**question["spec"])
    bounds = arguments_of(question["engine"]).limits(spec)
    if question["engine"] != "vllm":
        spec = dataclasses.replace(spec, engine_args={})
    try:
        if question["tensors"] is None:
            return dataclasses.asdict(counted(vllm_rank.build(spec, question["rank"]), spec, bounds))
        built = vllm_rank.build(dataclasses.replace(spec, quantization=None), question["rank"])  # needs the same slices
        tensors = json.loads(Path(question["tensors"]).read_text(encoding="utf-8"))
        return {"description": base64.b64encode(needed_slices(built.model, tensors).to_bytes()).decode()}
    except (ValueError, RuntimeError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    serve(answer, int(sys.argv[1]), "vllm.model_executor.model_loader.utils")
