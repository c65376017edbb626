"""How far an engine's log-probs are from the trainer's, for the engine's own samples: a table for docs/numerics.md.

    python -m benchmarks.numerics.engine_gap [--dtype float32 bfloat16] [--models qwen3 deepseek_v3] [--updates 3]

A case runs in processes of its own, which are a run's: trainers under torchrun's environment, a rollout process
with its engine, and the weight exchange between them (`engine_gap_run`). tests/weight_sync/test_engine_gap.py bounds the
figures of float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.commands.data.tiny_model import make_tiny_model
from megarl.rewards import ScoreRequest
from tests.support.trainer_processes import run_ranks

TIMEOUT = 1500.0  # seconds a case may take, on a busy machine

# Weights that are large enough for attention and logits to be far from uniform: errors then show.
_SHARP: dict[str, Any] = {"initializer_range": 0.12, "num_hidden_layers": 3}
_GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}),
    "deepseek_v3": ("deepseek_v3", {**_GROUPED, "num_nextn_predict_layers": 1}),
    "deepseek_v3_yarn": ("deepseek_v3", {**_GROUPED, "rope_scaling": _YARN, "max_position_embeddings": 128}),
}
"""Each model's kind of `make_tiny_model`, and what it has beside the tiny sizes."""


def score(request: ScoreRequest) -> float:
    """Anything that differs between samples: the update has to move the weights, not to teach."""
    return zlib.crc32(request.response.encode()) / 2**32


@dataclass(frozen=True)
class Case:
    """One model, in one layout."""

    model: str  # of MODELS
    dtype: str = "float32"
    updates: int = 3  # optimizer steps, each followed by an exchange
    processes: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)  # keys of the recipe's `megatron`
    temperature: float = 1.0
    # Tensors to be sent wrong afterwards, one at a time; ("*",): every one, a layer's experts together.
    disturb: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gap:
    """|trainer's - engine's log-prob| over the tokens that the engine sampled with one version's weights."""

    what: str  # "start", "update 1", ..., "not exchanged", or the name of a tensor that was sent wrong
    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True)
class Result:
    case: Case
    gaps: list[Gap]  # after the start and after each update
    stale: Gap  # after an optimizer step whose weights were not exchanged
    disturbed: list[Gap]
    least_change: tuple[float, str]  # over updates and tensors, the smallest of a tensor's largest changes; its name


def write_model(name: str, directory: Path) -> Path:
    """Make the random model `name` of MODELS, the same every time; returns its directory."""
    kind, sizes = MODELS[name]
    path = make_tiny_model(kind, directory / name, seed=0, **_SHARP, **sizes)  # type: ignore[arg-type]
    if sizes.get("num_nextn_predict_layers"):
        _add_prediction_layer(path)
    return path


def _add_prediction_layer(path: Path) -> None:
    """Put what DeepSeek-V3's checkpoints hold behind their last layer: a layer for multi-token prediction."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
    weights = load_file(path / "model.safetensors")
    extra, prefix = last + 1, f"model.layers.{last}."
    layer = {
        name.replace(prefix, f"model.layers.{extra}."): weight.clone()
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
    own = {
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": torch.full((hidden, 2 * hidden), 0.01),
        "shared_head.norm.weight": torch.ones(hidden),
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    layer |= {f"model.layers.{extra}.{name}": weight for name, weight in own.items()}
    save_file(weights | layer, path / "model.safetensors", metadata={"format": "pt"})


def measure(case: Case, directory: Path) -> Result:
    """Run `case` in processes of its own. Models are made, and logs written, under `directory`.

    Raises AssertionError, with the end of what it wrote, where a process fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = write_model(case.model, directory)
    file, output = directory / "case.json", directory / "gaps.json"
    file.write_text(json.dumps({"case": asdict(case), "model": str(model), "directory": str(directory)}))
    run_ranks("benchmarks.numerics.engine_gap_run", case.processes, [file, output], directory / "rank", TIMEOUT)
    figures = json.loads(output.read_text())
    return Result(
        case,
        gaps=[Gap(**gap) for gap in figures["gaps"]],
        stale=Gap(**figures["stale"]),
        disturbed=[Gap(**gap) for gap in figures["disturbed"]],
        least_change=(figures["least_change"][0], figures["least_change"][1]),
    )


def table(results: Iterable[Result]) -> str:
    """The results as a Markdown table, a row a model and data type."""
    lines = [
        "| model | data type | tokens | after start: mean, max | after updates: mean, max |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        start, *later = result.gaps
        tokens = sum(gap.tokens for gap in result.gaps)
        mean = sum(gap.mean * gap.tokens for gap in later) / max(sum(gap.tokens for gap in later), 1)
        largest = max((gap.largest for gap in later), default=0.0)
        lines.append(
            f"| {result.case.model} | {result.case.dtype} | {tokens:,} | {start.mean:.1e}, {start.largest:.1e} "
            f"| {mean:.1e}, {largest:.1e} |"
        )
    return "\n".join(lines)


def tables(dtypes: Sequence[str] = ("float32", "bfloat16"), models: Sequence[str] = (), updates: int = 3) -> str:
    """Measure every model (or `models`) in every data type; returns the Markdown table. Takes minutes."""
    results = []
    for dtype in dtypes:
        for model in models or MODELS:
            with tempfile.TemporaryDirectory() as directory:
                results.append(measure(Case(model, dtype, updates), Path(directory)))
    return table(results)


def engine_gap(quick: bool) -> str:
    """The section of docs/numerics.md. `quick`: float32 after one update alone."""
    figures = tables(("float32",), updates=1) if quick else tables()
    return f"""## The engine's log-probs and the trainer's

Tiny random models, sampled by vLLM on a CPU and computed again by the trainer: |difference| of the log-probs of every
sampled token, after the start and after optimizer steps that move every weight by about 0.01 and reach the engine through
the weight exchange. In float32 tests/weight_sync/test_engine_gap.py bounds each token's by 5e-5. In bfloat16 both round, each in its
own order; these figures are reported, not bounded. Mixtures of experts have the larger maxima there, which is what
tokens would show that rounding sends to other experts; where each token went was not recorded.

`python -m benchmarks.numerics engine_gap{" --quick" if quick else ""}`

{figures}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[])
    parser.add_argument("--updates", type=int, default=3)
    arguments = parser.parse_args()
    print(tables(arguments.dtype, arguments.models, arguments.updates))


if __name__ == "__main__":
    main()
