"""docs/asynchrony.md and its reference: settings and files exist, and the example loads."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from megarl.recipe.algorithm import AlgorithmConfig
from megarl.recipe.derived.at_update import update_rule
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml
from tests.support.docs_pages import unknown_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "asynchrony.md").read_text()
REFERENCE = (ROOT / "docs" / "asynchrony_reference.md").read_text()


def test_settings_and_files_exist() -> None:
    assert len(re.findall(r"`(?:rollout|algorithm|cluster|data|train|megatron)\.\w+(?:: \w+)?`", PAGE)) > 10
    assert not unknown_settings(PAGE)
    files = re.findall(r"(?:recipes|tests)/[\w/]+\.(?:yaml|py)", PAGE + REFERENCE)
    assert len(files) > 5 and all((ROOT / path).exists() for path in files)


def test_values_exist() -> None:
    (old_log_probs,) = re.findall(r"`algorithm.old_log_probs: (\w+)`", PAGE)
    assert old_log_probs in get_args(get_type_hints(AlgorithmConfig)["old_log_probs"])


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_the_examples_refresh(block: str) -> None:
    recipe = Recipe()

    def apply(section: Any, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            assert hasattr(section, name), name
            if is_dataclass(getattr(section, name)):
                apply(getattr(section, name), value)
            else:
                setattr(section, name, value)

    apply(recipe, yaml.safe_load(block))
    assert update_rule(recipe) == "refresh" and "refresh" in to_yaml(recipe)
