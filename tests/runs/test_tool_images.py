"""A policy calls a tool, reads the image of its answer, and learns from it: on the real stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.commands.data.tiny_tokenizer import EOS_ID, FIRST_IMAGE_ID, IMAGE_TOKENS, make_tiny_tokenizer
from megarl.data.rows import write_parquet
from tests.runs.test_images import torchvision  # noqa: F401 - a fixture of every test here
from tests.support.color_tool import COLORS
from tests.support.stack import metrics, run
from tests.support.vl_model import write_processor, write_vl_model

pytestmark = [pytest.mark.stack, pytest.mark.slow]

TOOL = {"name": "look", "description": "Shows a picture."}
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
PROMPT = [{"role": "user", "content": "How many?"}]


def write_model(path: Path, name: str) -> None:
    """Write a tiny model with a tokenizer and a chat template for tools, and for images in their answers."""
    start, end, image, video = range(FIRST_IMAGE_ID, FIRST_IMAGE_ID + len(IMAGE_TOKENS))
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    write_vl_model(path, name, vocabulary=512, eos_token_id=EOS_ID, **ids)
    write_processor(path)
    (path / "chat_template.jinja").unlink()
    make_tiny_tokenizer(path, images=True)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))


def demonstrations(count: int) -> list[dict[str, Any]]:
    """Conversations: the assistant calls the tool, reads an answer without an image, and says one of four digits."""
    random = np.random.default_rng(0)
    return [
        {
            "messages": [
                *PROMPT,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "seen"},
                {"role": "assistant", "content": str(random.integers(len(COLORS)))},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        }
        for _ in range(count)
    ]


def questions(count: int, seed: int, *, shown: bool) -> list[dict[str, Any]]:
    """Rows with the number of a color. shown: it is the color of the picture that the tool shows, which else says nothing."""
    random = np.random.default_rng(seed)
    table = []
    for number in range(count):
        answer, other = (int(color) for color in random.integers(len(COLORS), size=2))
        table.append(
            {
                "data_source": "colors",
                "prompt": PROMPT,
                "reward_model": {"style": "rule", "ground_truth": str(answer)},
                "extra_info": {"index": 1_000_000 * seed + number, "color": answer if shown else other},
            }
        )
    return table


def train(*arguments: str) -> None:
    done = run("train", *arguments, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["vl", "qwen3_vl"])
def test_a_policy_learns_from_the_pictures_of_a_tool(model: str, tmp_path: Path) -> None:
    """SFT teaches the call and a random one of four digits. RL learns each color's digit, unless the picture has another color.

    An image that the engine and the trainer read differently would show as a gap of their log-probs.
    """
    write_model(tmp_path / "model", model)
    write_parquet(tmp_path / "sft.parquet", demonstrations(256))
    common = [f"runs_dir={tmp_path}", "megatron.expert_parallel=1", "cluster.trainers=1", "data.chat_template=true"]
    train(
        "recipes/base/sft.yaml", *common, "name=sft", f"model.path={tmp_path}/model", "model.dtype=float32",
        f"data.train_files=[{tmp_path}/sft.parquet]", "data.prompts_per_step=32", "data.max_prompt_length=64",
        "rollout.max_response_length=64", "cluster.device=cpu", "cluster.threads=1", "actor.optimizer.lr=2.0e-3",
        "train.steps=90", "train.export_at_end=true", "train.save_at_end=false",
    )  # fmt: skip
    accuracies = {}
    for name in ("shown", "hidden"):
        write_parquet(tmp_path / "rows.parquet", questions(1024, 1, shown=name == "shown"))
        write_parquet(tmp_path / "held_out.parquet", questions(128, 2, shown=name == "shown"))
        train(
            "tests/fixtures/images.yaml", *common, f"name={name}", f"model.path={tmp_path}/sft/hf",
            f"data.train_files=[{tmp_path}/rows.parquet]", f"data.eval_files=[{tmp_path}/held_out.parquet]",
            "reward.function=tests.support.color_tool:number_of_the_color", "agent.tools=[tests.support.color_tool:look]",
            "data.prompts_per_step=16", "rollout.samples_per_prompt=8", "rollout.max_response_length=96",
            "rollout.engine_args.max_num_seqs=128", "evaluation.limit=128", "evaluation.at_start=true",
            "algorithm.kl_coef=0", "actor.optimizer.lr=5.0e-4", "train.steps=40",
        )  # fmt: skip
        lines = metrics(tmp_path / name)
        assert max(line["rollout/logprob_gap_max"] for line in lines if "rollout/logprob_gap_max" in line) < 1e-4
        accuracies[name] = [line["eval/rewards/mean"] for line in lines if "eval/rewards/mean" in line]
    print(accuracies)
    (before, after), (_, hidden) = accuracies["shown"], accuracies["hidden"]
    assert before < 0.4 and after > 0.8 and hidden < 0.4, accuracies
