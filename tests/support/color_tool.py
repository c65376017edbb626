"""A tool that answers with a noisy picture of one of four colors, and the scorer of what the policy then says."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from megarl.agents import Answer, Context, tool
from megarl.rewards import ScoreRequest

COLORS = [(220, 40, 40), (40, 200, 60), (50, 60, 230), (230, 220, 50)]


@tool
def look(context: Context) -> Answer:
    """Shows a picture."""
    random = np.random.default_rng(context.extra_info["index"])
    width, height = (int(side) for side in random.integers(28, 90, 2))
    noise = random.normal(0, 30, (height, width, 3))
    pixels = np.clip(np.array(COLORS[context.extra_info["color"]]) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), format="PNG")
    return Answer("seen", images=(file.getvalue(),))


def number_of_the_color(request: ScoreRequest) -> dict[str, float]:
    """1 if the last turn is the color's number. A random digit of four is right in one of four cases."""
    right = len(request.turns) > 1 and request.turns[-1].text.strip() == str(request.ground_truth)
    return {"score": float(right), "accuracy": float(right)}
