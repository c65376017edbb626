"""Difference between the log-probs of engine and trainer for the engine's samples: a table for docs/numerics.md.

    python -m benchmarks.numerics.engine_gap [--dtype float32 bfloat16] [--models qwen3 deepseek_v3] [--updates 3] [--sharded]

Each case starts the processes of a run: trainers under torchrun's environment and a rollout process with its engine, with
weight sync between them (`engine_gap_run`). tests/weight_sync/test_engine_gap.py checks limits for float32.
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

from megarl.commands.data.tiny_model import KINDS, make_tiny_model
from megarl.rewards import ScoreRequest
from tests.support.trainer_processes import run_ranks

TIMEOUT = 1500.0  # seconds a case may take, on a busy machine

# Large weights make attention and logits far from uniform, which exposes errors.
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
    **{kind: (kind, {}) for kind in KINDS},
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}),
    "deepseek_v3": ("deepseek_v3", {**_GROUPED, "num_nextn_predict_layers": 1}),
    "deepseek_v3_yarn": ("deepseek_v3", {**_GROUPED, "rope_scaling": _YARN, "max_position_embeddings": 128}),
    "gemma3_text": (
        "gemma3_text",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "initializer_range": 0.06},
    ),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "kimi_k2": ("kimi_k2", {"rope_scaling": _YARN, "max_position_embeddings": 128}),
    "qwen3_next": (
        "qwen3_next",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "initializer_range": 0.04},
    ),
}
"""Kind of `make_tiny_model`, and configuration in addition to the tiny sizes, by model: every kind, with other sizes where the
tiny ones use less of the architecture, and variants."""

ONLY_BFLOAT16 = ("qwen3_next",)  # vLLM: "CPU GDN attention requires BF16"


def score(request: ScoreRequest) -> float:
    """Return an arbitrary reward that differs between samples: the update only has to move the weights."""
    return zlib.crc32(request.response.encode()) / 2**32


@dataclass(frozen=True)
class Case:
    """One model, in one layout."""

    model: str  # a key of MODELS
    dtype: str = "float32"
    updates: int = 3  # optimizer steps, each followed by a weight sync
    processes: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)  # keys of the recipe's `megatron`
    temperature: float = 1.0
    # Tensors that are sent wrong afterwards, one at a time; ("*",): all tensors, a layer's experts together.
    disturb: tuple[str, ...] = ()
    sharded: bool = False  # trainers send the slices that engines need, not whole tensors

    @property
    def route(self) -> str:
        """The route of weight sync. vLLM takes the experts of gpt-oss by the sharded one only. It sends no tensor wrong."""
        return "sharded" if self.sharded or self.model == "gpt_oss" else "full"


@dataclass(frozen=True)
class Gap:
    """|trainer's - engine's log-prob| over the tokens that the engine sampled with one version's weights."""

    label: str  # "start", "update 1", ..., "not synced", or the name of a tensor that was sent wrong
    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True)
class Result:
    case: Case
    gaps: list[Gap]  # after the start and after each update
    stale: Gap  # after an optimizer step without a weight sync
    disturbed: list[Gap]
    least_change: tuple[
        float, str
    ]  # minimum over updates and tensors of a tensor's largest change, and that tensor's name


def write_model(name: str, directory: Path) -> Path:
    """Write the random model `name` of MODELS with a fixed seed. Returns its directory."""
    kind, sizes = MODELS[name]
    path = make_tiny_model(kind, directory / name, seed=0, **{**_SHARP, **sizes})  # type: ignore[arg-type]
    if sizes.get("num_nextn_predict_layers"):
        _add_prediction_layer(path)
    return path


def _add_prediction_layer(path: Path) -> None:
    """Append a layer for multi-token prediction after the last layer, as in checkpoints of DeepSeek-V3."""
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
    prediction = {
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": torch.full((hidden, 2 * hidden), 0.01),
        "shared_head.norm.weight": torch.ones(hidden),
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    layer |= {f"model.layers.{extra}.{name}": weight for name, weight in prediction.items()}
    save_file(weights | layer, path / "model.safetensors", metadata={"format": "pt"})


def measure(case: Case, directory: Path) -> Result:
    """Run `case` in new processes. Models and logs are written under `directory`.

    Raises AssertionError with the end of a process's output if it fails.
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
    """Return the results as a Markdown table with one row per model and data type."""
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


def tables(
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    models: Sequence[str] = (),
    updates: int = 3,
    *,
    sharded: bool = False,
) -> str:
    """Measure all models (or `models`) in all data types, by one route of weight sync. Returns the Markdown table. Takes minutes."""
    results = []
    for dtype in dtypes:
        for model in models or MODELS:
            if dtype == "float32" and model in ONLY_BFLOAT16:
                continue
            with tempfile.TemporaryDirectory() as directory:
                results.append(measure(Case(model, dtype, updates, sharded=sharded), Path(directory)))
    return table(results)


def engine_gap(quick: bool) -> str:
    """Return the section of docs/numerics.md. `quick`: only float32, after one update."""
    figures = tables(("float32",), updates=1) if quick else tables()
    return f"""## The engine's log-probs and the trainer's

vLLM on a CPU samples tiny random models, and the trainer computes the log-probs of the same tokens. The table shows
|difference| over all sampled tokens, after the start and after optimizer steps. Each step moves every weight by about 0.01,
and weight sync sends the result to the engine. In float32 tests/weight_sync/test_engine_gap.py requires at most 5e-5 for each
token. In bfloat16 engine and trainer round in different orders, so the test sets no limit. Mixtures of experts have larger maxima
in bfloat16, as expected if rounding routes tokens to other experts; the routing was not recorded.

`python -m benchmarks.numerics engine_gap{" --quick" if quick else ""}`

{figures}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[])
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--sharded", action="store_true", help="the sharded route of weight sync")
    arguments = parser.parse_args()
    print(tables(arguments.dtype, arguments.models, arguments.updates, sharded=arguments.sharded))


if __name__ == "__main__":
    main()
