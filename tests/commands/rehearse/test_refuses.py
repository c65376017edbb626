"""Models that cannot be rehearsed are refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.commands.rehearse.tiny_copy import make_tiny_copy
from megarl.errors import RecipeError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["grpo_deepseek_v3.2.yaml", "gspo_glm5.yaml"])
def test_a_model_without_an_engine_on_a_cpu_is_refused(name: str, tmp_path: Path) -> None:
    """Its engine would fail a minute after the start."""
    with pytest.raises(RecipeError, match="vLLM's CPU build has no sparse attention"):
        make_tiny_copy(ROOT / "recipes" / "cuda" / name, [], tmp_path)
    assert not list(tmp_path.iterdir())
