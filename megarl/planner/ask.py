"""Asks the process that is any rank what ranks hold; see child.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.config.load import to_yaml
from megarl.config.schema import Recipe
from megarl.planner.workload import Workload


@dataclass(frozen=True)
class Question:
    """About one rank of a recipe's actor, or of its critic. `work`: None asks for what it holds alone.

    The recipe's `model.path` (the critic's) needs a config.json and nothing else.
    """

    recipe: Recipe
    rank: int
    critic: bool = False
    work: Workload | None = None


def ask(questions: list[Question], processes: int = 2) -> list[dict[str, Any]]:
    """Answers as `child.answer` gives them, in the order of the questions; `processes` work at a time."""
    with tempfile.TemporaryDirectory() as directory:
        files: dict[int, str] = {}
        for question in questions:
            if id(question.recipe) not in files:
                path = Path(directory) / f"{len(files)}.yaml"
                path.write_text(to_yaml(question.recipe), encoding="utf-8")
                files[id(question.recipe)] = str(path)
        asked = [
            {
                "recipe": files[id(question.recipe)],
                "critic": question.critic,
                "rank": question.rank,
                "work": question.work and asdict(question.work),
            }
            for question in questions
        ]
        done = subprocess.run(
            [sys.executable, "-m", "megarl.planner.child"],
            input=json.dumps({"questions": asked, "processes": processes}),
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    if done.returncode:
        raise RuntimeError(f"the planner's process ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return list(json.loads(done.stdout))
