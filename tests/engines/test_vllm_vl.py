"""A real vLLM that samples from prompts with images and videos: its log-probs are the actor's, before and after an update.

The actor is Megatron's, in a separate process; this process is the rollout process.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.agents.trajectory import Trajectory
from megarl.engines.base import EngineSpec
from megarl.rollout.assemble import vectors
from megarl.types import GenerationRequest, Prompt, SampleImages, Sampling
from tests.engines.test_vllm import EngineProcess, full_sender
from tests.support.megatron_runs import launch
from tests.support.vl_model import has_timestamps, sample_images, sequences, write_processor, write_vl_model

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture
def process() -> Any:
    stand_ins = str(Path(__file__).parents[1] / "stand_ins")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            patch.syspath_prepend(stand_ins)  # the engine's process takes sys.path over,
            patch.setenv("PYTHONPATH", f"{stand_ins}:{os.environ.get('PYTHONPATH', '')}")  # child processes do not
        process = EngineProcess()
    yield process
    process.close()


def requests(model: str) -> list[GenerationRequest]:
    """Every sequence is a prompt, and so is the last video again, faster; siblings share their images and videos."""
    result = []
    for number, (tokens, pictures) in enumerate(sequences(timestamps=has_timestamps(model))):
        prompt = Prompt(f"p{number}", tuple(tokens.tolist()), "", "x")
        result.append(GenerationRequest(number, prompt, Sampling(2, 12), 100 * number, sample_images(pictures)))
    slow = next(request for request in result[::-1] if request.images is not None)
    if slow.images.seconds is not None:  # type: ignore[union-attr]
        fast = replace(slow.images, seconds=slow.images.seconds * 9)  # type: ignore[union-attr,type-var]
        result.append(replace(slow, group=len(result), images=fast))
    return result


def actor(
    directory: Path, model: str, steps: int, samples: list[Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the actor's log-probs of the engine's samples after `steps` of training, and its weights one step later."""
    name = f"steps{steps}"
    (directory / f"{name}.samples").write_bytes(pickle.dumps(samples))
    case = {"name": name, "kind": "samples", "model": model, "megatron": {}, "per_micro": 3, "steps": steps}
    launch(1, [case], directory)
    return torch.load(directory / f"{name}.log_probs.pt"), torch.load(directory / f"{name}.next.pt")


@pytest.mark.parametrize("model", ["vl", "qwen3_vl", "qwen3_vl_moe"])
def test_log_probs_are_the_actors_at_start_and_after_each_update(model: str, tmp_path: Path, process: Any) -> None:
    directory = tmp_path
    processor = "Qwen2_5_VLProcessor" if model == "vl" else "Qwen3VLProcessor"
    write_processor(write_vl_model(directory / "models" / model, model), processor)
    spec = EngineSpec("e0", str(directory / "models" / model), "float32", max_model_len=128)
    info = process.begin("start", spec).result(400)
    wave = requests(model)
    weights: dict[str, torch.Tensor] = {}
    sender = full_sender(process, info)
    for version in range(4):
        if version:
            updating = process.begin("update_weights", version)
            report = sender.send(version, weights.items)
            assert updating.result(120).streams == report.streams
        _, completions = process.generate(wave)
        samples = [
            vectors(r, Trajectory.of(completion, ""), "", "", with_tools=False)
            for r in wave
            for completion in completions[r.group]
        ]
        assert all(
            np.array_equal(s.tokens[: len(r.prompt.tokens)], r.prompt.tokens)
            for r, s in zip(wave, samples[::2], strict=True)
        )
        expected, weights = actor(directory, model, version, samples)
        gaps = [
            np.abs(s.rollout_log_probs - e.numpy())[s.loss_mask].max() for s, e in zip(samples, expected, strict=True)
        ]
        print(f"after {version} updates: {max(gaps):.2e}")
        assert max(gaps) < 5e-5, gaps
    sender.close()
    with pytest.raises(ValueError, match=r"p1.*takes 6 placeholder tokens from index 3"):
        broken = SampleImages(wave[1].images.pixels, wave[1].images.grids, wave[1].images.starts + 1)  # type: ignore[union-attr]
        process.generate([GenerationRequest(99, wave[1].prompt, Sampling(1, 2), 0, broken)])
    process.shutdown()
