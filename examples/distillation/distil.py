"""On-policy distillation of the quickstart's model after RL into its model before RL, and how near the student comes.

python -m examples.distillation.distil
"""

import json
from pathlib import Path

from megarl import load_recipe, train

RECIPE = "examples/distillation/recipe.yaml"


def compare(run: Path) -> str:
    """Return the student's distance to the teacher and its accuracy, at the first and the last step of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/reward_kl_penalty" in line]
    first, last = steps[0], steps[-1]
    distance = f"{first['actor/reward_kl_penalty']:.3f} -> {last['actor/reward_kl_penalty']:.3f}"
    reward = f"{first['rollout/rewards/mean']:.2f} -> {last['rollout/rewards/mean']:.2f}"
    return f"distance to the teacher, per token: {distance}\nreward, which the student never sees: {reward}"


if __name__ == "__main__":  # engines start processes that import this file
    recipe = load_recipe(RECIPE)
    if not Path(recipe.teacher.path).exists():
        raise SystemExit(f"{recipe.teacher.path} does not exist: run `bash launch/quickstart.sh` first")
    print(compare(train(recipe)))
