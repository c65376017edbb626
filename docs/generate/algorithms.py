"""Write the tables of docs/algorithms.md from the registries: ``python -m docs.generate.algorithms``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl.algorithms.advantages import AdvantageEstimator
from megarl.algorithms.catalogue import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from megarl.algorithms.returns import gae

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "algorithms.md"
LEARNED = ROOT / "docs" / "learned.json"
_OTHER_COLUMNS = ("advantage", "loss", "aggregation", "kl_coef", "kl_in_reward")


def tables() -> dict[str, str]:
    """Return the tables of the page by the name in their markers."""
    return {
        "recipes": _recipes(),
        "advantages": _table(
            (name, _estimate(ADVANTAGES[name]), ADVANTAGES[name].settings) for name in ADVANTAGES.names()
        ),
        "losses": _table((name, LOSSES[name].function, _loss_settings(name)) for name in LOSSES.names()),
        "aggregations": _table((name, AGGREGATIONS[name], ()) for name in AGGREGATIONS.names()),
        "kl": _table((name, KL_ESTIMATORS[name], ()) for name in KL_ESTIMATORS.names()),
    }


def _estimate(estimator: AdvantageEstimator) -> Callable[..., Any]:
    by_position = estimator.of_positions.function if estimator.of_positions else gae
    return estimator.function or estimator.of_tokens or by_position


def document(page: str) -> str:
    """Return `page` with new tables between ``<!-- NAME -->`` and ``<!-- end -->``."""
    for name, table in tables().items():
        before, marker, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert marker and end, f"{PAGE} has no markers for the table '{name}'"
        page = f"{before}{marker}{table}\n{end}{after}"
    return page


def proven_in(name: str) -> str:
    """Return the file in tests/ that tests the function `name`."""
    if name in ADVANTAGES:
        exceptions = {
            "gae": "algorithms/test_values.py",
            "grpo_process": "algorithms/test_process_rewards.py",
            "optimal_token_baseline": "algorithms/test_optimal_baseline.py",
            "on_policy_distillation": "rollout/test_distillation.py",
            "soft_mean": "algorithms/test_squared_losses.py",
        }
        return exceptions.get(name, "algorithms/test_advantages.py")
    loss = LOSSES[name]
    if name == "gvpo":
        return "algorithms/test_squared_losses.py"
    if loss.needs_top:
        return "rollout/test_distillation.py"
    return "algorithms/test_preference_losses.py" if loss.whole_groups else "algorithms/test_policy_loss_gradients.py"


def _loss_settings(name: str) -> tuple[str, ...]:
    """Return the settings that a loss reads, with its defaults where they differ from the recipe's."""
    loss = LOSSES[name]
    names = dict.fromkeys((*loss.settings, *loss.defaults))
    return tuple(f"{key}: {loss.defaults[key]}" if key in loss.defaults else key for key in names)


def _recipes() -> str:
    """Return the table of base recipes. The first line of a file names the algorithm and its paper."""
    from omegaconf import OmegaConf

    learned = json.loads(LEARNED.read_text())
    lines = [
        "| algorithm | paper | `recipes/base/` | advantage | loss | aggregation | KL to the reference | further keys of `algorithm` | proven in `tests/` | learned, in `recipes/tiny/` |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for file in sorted((ROOT / "recipes" / "base").glob("*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(content, dict)
        algorithm = _algorithm_of(file)
        if not algorithm:
            continue
        name, paper = _title(file)
        chosen = [algorithm[key] for key in ("advantage", "loss", "aggregation")]
        proofs = sorted({proven_in(function) for function in chosen[:2] if function != "none"})
        cells = [
            name,
            paper,
            f"`{file.name}`",
            *(f"`{function}`" for function in chosen),
            _kl(algorithm),
            "<br>".join(f"`{key}: {_plain(value)}`" for key, value in algorithm.items() if key not in _OTHER_COLUMNS),
            ", ".join(f"`{proof}`" for proof in proofs),
            _learned(learned.get(file.stem)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _algorithm_of(file: Path) -> dict[str, Any]:
    """Return the section `algorithm` of a recipe, merged with its bases."""
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict)
    bases = content.get("base", [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged |= _algorithm_of(file.parent / base)
    return merged | content.get("algorithm", {})


def _title(file: Path) -> tuple[str, str]:
    """Parse name and paper from the first line, ``# Name (paper): ...``."""
    head = file.read_text().partition("\n")[0].lstrip("# ")
    name = re.split(r" \(|[:,]", head)[0]
    paper = re.search(r"\((.*?arXiv [\d.]+|.*?)\)", head)
    return name, paper.group(1) if paper else ""


def _kl(algorithm: dict[str, Any]) -> str:
    loss = LOSSES[algorithm["loss"]]
    if loss.needs_reference:
        return "part of the loss"
    if not algorithm.get("kl_coef"):
        return "none"
    return f"{_plain(algorithm['kl_coef'])} in the {'reward' if algorithm.get('kl_in_reward') else 'loss'}"


def _plain(value: Any) -> str:
    return json.dumps(value).replace("|", "\\|") if isinstance(value, (dict, list, bool)) else str(value)


def _learned(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    before, after = (f"{result[when]:.2f}" for when in ("before", "after"))
    return f"`{result['measure']}` {before} -> {after}, {result['steps']} steps"


def _table(rows: Iterable[tuple[str, Callable[..., Any], tuple[str, ...]]]) -> str:
    lines = ["| name | description | settings | file |", "|---|---|---|---|"]
    for name, function, settings in rows:
        text = " ".join((function.__doc__ or "").split()).replace("|", "\\|").replace("``", "`")
        file = function.__module__.removeprefix("megarl.algorithms.").replace(".", "/") + ".py"
        lines.append(f"| `{name}` | {text} | {', '.join(f'`{setting}`' for setting in settings)} | `{file}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text()))
    print(f"wrote {PAGE}")
