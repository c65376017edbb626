"""Rows with images on the real stack: from a parquet file to the trainer, and through a checkpoint."""

from __future__ import annotations

import importlib.util
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.checkpoint.controller_state import load_state
from megarl.data.rows import write_parquet
from megarl.observe.metrics import without_times
from megarl.types import SampleImages
from tests.support.stack import metrics, run
from tests.support.vl_model import write_processor, write_vl_model

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SIZES = [(90, 130), (60, 60), (200, 40), (33, 170)]


def picture(width: int, height: int, seed: int) -> bytes:
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, format="PNG")
    return file.getvalue()


def rows(count: int) -> list[dict[str, Any]]:
    """Rows with zero, one and two images in turn."""
    table = []
    for number in range(count):
        images = [picture(*SIZES[(number + i) % len(SIZES)], seed=10 * number + i) for i in range(number % 3)]
        table.append(
            {
                "data_source": "pictures",
                "prompt": [{"role": "user", "content": f"w{20 + number} <image>" * len(images) + " w7 w8"}],
                "images": [{"bytes": image, "path": None} for image in images],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": number},
            }
        )
    return table


COLORS = [(220, 40, 40), (40, 200, 60), (50, 60, 230), (230, 220, 50)]


def colored(count: int, *, seed: int, shown: bool = True) -> list[dict[str, Any]]:
    """Return rows with a noisy picture of one of four colors. The answer is the color's number, and all rows have the same text.

    shown: False: the picture has a random color, which says nothing about the answer.
    """
    from PIL import Image

    random, table = np.random.default_rng(seed), []
    for number in range(count):
        answer = int(random.integers(4))
        color = COLORS[answer if shown else int(random.integers(4))]
        width, height = (int(side) for side in random.integers(28, 90, 2))
        values = np.clip(np.array(color) + random.normal(0, 30, (height, width, 3)), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(values).save(file, format="PNG")
        table.append(
            {
                "data_source": "colors",
                "prompt": [{"role": "user", "content": "w7 <image> w8"}],
                "images": [{"bytes": file.getvalue(), "path": None}],
                "reward_model": {"style": "rule", "ground_truth": str(answer)},
                "extra_info": {"index": number},
            }
        )
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ and rows.parquet."""
    folder = tmp_path_factory.mktemp("pictures")
    write_vl_model(folder / "model")
    write_processor(folder / "model")
    write_parquet(folder / "rows.parquet", rows(12))
    return folder


def train(folder: Path, runs: Path, name: str, *more: str) -> None:
    arguments = [
        f"model.path={folder}/model", f"data.train_files=[{folder}/rows.parquet]",
        f"data.eval_files=[{folder}/rows.parquet]", f"runs_dir={runs}", f"name={name}",
        "reward.function=tests.support.scorers:letters", "data.max_pixels=12000", *more,
    ]  # fmt: skip
    done = run("train", "tests/fixtures/images.yaml", *arguments)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM imports torchvision for such models; a stand-in with the names suffices."""
    if importlib.util.find_spec("torchvision") is None:
        stand_ins = str(Path(__file__).parents[1] / "stand_ins")
        monkeypatch.setenv("PYTHONPATH", f"{stand_ins}:{os.environ.get('PYTHONPATH', '')}")


def test_engine_and_trainer_read_the_same_images(folder: Path, tmp_path: Path) -> None:
    """Log-probs agree before and after an update that includes the vision tower.

    An image that only one of the two reads, or two swapped images, would give a gap above 0.1.
    """
    train(folder, tmp_path, "run", "train.steps=2")
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["rollout/logprob_gap_max"] < 1e-4 and line["actor/grad_norm"] > 0
        assert line["prompt_length/max"] > 20, "placeholders are counted"
    assert "eval/rewards/mean" in lines[-1]


def test_waiting_groups_keep_their_images_after_a_resume(folder: Path, tmp_path: Path) -> None:
    """One-step-off: the engine has sampled the next batch when a checkpoint is saved. The resumed run trains on it with
    equal metrics."""
    train(folder, tmp_path, "whole", "rollout.max_staleness=1", "rollout.at_update=drain", "train.save_every=2")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_000002"
    waiting = [item.group for batch in load_state(checkpoint)["source"]["gathered"] for item in batch]
    sampled_images = [group.samples[0].data.get()[0].images for group in waiting]
    kept = [images for images in sampled_images if isinstance(images, SampleImages)]
    assert kept and all(len(images.pixels) == images.grids.prod(1).sum() for images in kept)
    resume = f"train.resume={checkpoint}"
    train(folder, tmp_path, "rest", "rollout.max_staleness=1", "rollout.at_update=drain", resume)
    (line,) = metrics(tmp_path / "rest")
    assert without_times([line]) == without_times(metrics(tmp_path / "whole")[2:])


LEARNING = [
    "reward.function=tests.support.scorers:word_of_the_color", "data.prompts_per_step=16", "rollout.samples_per_prompt=8",
    "rollout.max_response_length=1", "rollout.engine_args.max_num_seqs=128", "evaluation.limit=128", "evaluation.at_start=true",
    "algorithm.kl_coef=0", "train.steps=40",
]  # fmt: skip


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["vl", "qwen3_vl"])
def test_a_policy_learns_to_read_the_image(model: str, tmp_path: Path) -> None:
    """From one right answer in four to four in five, on pictures that it has not seen; without the answer in the pictures it stays at
    chance."""
    write_vl_model(tmp_path / "model", model)
    write_processor(tmp_path / "model")
    accuracies = {}
    for name in ("shown", "hidden"):
        write_parquet(tmp_path / "rows.parquet", colored(1024, seed=1, shown=name == "shown"))
        write_parquet(tmp_path / "held_out.parquet", colored(128, seed=2, shown=name == "shown"))
        train(tmp_path, tmp_path, name, *LEARNING, f"data.eval_files=[{tmp_path}/held_out.parquet]")
        accuracies[name] = [
            line["eval/rewards/mean"] for line in metrics(tmp_path / name) if "eval/rewards/mean" in line
        ]
    print(accuracies)
    (before, after), (_, hidden) = accuracies["shown"], accuracies["hidden"]
    assert before < 0.4 and after > 0.8 and hidden < 0.4, accuracies
