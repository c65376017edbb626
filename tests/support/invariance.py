"""One batch, the ways to split it, and the differences of their results, for the invariance tests and
benchmarks/numerics.

The batch takes a run's path: groups -> `plan_step` -> `ActorWorker` -> the metrics of a step. The gradient
follows from the weights: Adam with betas of 0 and an epsilon far above every gradient is plain gradient descent, so
the change of each exported weight is its gradient times a constant.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.algorithms.correction import Mismatch, total_mismatch
from megarl.recipe.algorithm import AlgorithmConfig, CorrectionConfig, OverlongConfig
from megarl.recipe.schema import Recipe
from megarl.types import Group, InlineData, Sample, SampleTokens, TokenScores
from tests.support.megatron_models import write_model
from tests.support.trainer_processes import CASES, run_ranks

PROMPTS = [47, 98, 31, 71]
"""Prompt lengths of the groups, in tokens; lengths vary as in GSM8K's questions and answers."""
RESPONSES = [[88, 121, 35], [64, 9, 143], [52, 77, 29], [118, 60]]
"""Eleven samples: a number that two ranks cannot share evenly, one sample a micro batch."""
TRUNCATED = (3, 0)
"""A sample that the loss leaves out (`algorithm.overlong.filter`)."""
MEAN_LOG_PROB = -5.55  # of the untrained models over 256 tokens
STEP = 1e4
"""How far weights move a unit of gradient: far enough for a float32 weight to hold seven digits of it."""
EPSILON = 1e3  # gradients are below 1, so Adam's denominator is this number to within 0.1 %, and the same in all cases
EXPERTS_AGAIN = {"extra": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}}
AUX = {"moe_aux_loss_coef": 0.3, "moe_z_loss_coef": 0.01}
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
TOP_K = 8  # teacher tokens per position
PRODUCTS = "rollout/mismatch_chi2_sequence"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo_clip": {},
    "gspo": {"loss": "gspo", "clip_low": 0.01, "clip_high": 0.01},
    "kl_cov": {"loss": "kl_cov", "cov_share": 0.052},
    "clip_cov": {"loss": "clip_cov", "cov_share": 0.052, "cov_low": 0.01, "cov_high": 3.0},
    "m2po": {"loss": "m2po", "second_moment": 0.001, "old_log_probs": "rollout"},
    "corrected": {
        "correction": CorrectionConfig(
            weights="token", truncate=1.1, normalize=True, reject={"token_ratio": [0.8, 5.0]}
        )
    },
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "gamma": 0.99, "kl_in_reward": True},
    "on_policy_distillation": {"advantage": "on_policy_distillation", "kl_estimator": "kl", "kl_in_reward": True},
    "optimal_token_baseline": {
        "advantage": "optimal_token_baseline",
        "tail_baseline": "zero",
        "correction": CorrectionConfig(weights="token", truncate=1.1, normalize=True),
    },
    "gkd": {"loss": "gkd", "reference": "teacher", "distill_top_k": TOP_K},
    "gvpo": {"loss": "gvpo", "normalize_by_std": False},
    "sppo": {"loss": "sppo", "advantage": "soft_mean"},
}
"""What looks beyond a token: at its sequence, at the mini batch, or at the batch."""
OTHERS = tuple(ALGORITHMS)[1:]
WHOLE = 100_000  # tokens: a micro batch that holds everything


@dataclass(frozen=True)
class Split:
    """Split and loss weights of one layout's batch."""

    max_tokens: int = 400
    aggregation: str = "token_mean"
    packing: bool = True
    algorithm: str = "ppo_clip"  # of ALGORITHMS


@dataclass(frozen=True)
class Layout:
    """A model on some processes, and the splits of the batch it computes."""

    model: str
    processes: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)
    splits: tuple[Split, ...] = (Split(),)

    @property
    def name(self) -> str:
        settings = [f"{key}={value}" for key, value in self.megatron.items() if key not in AUX and key != "extra"]
        again = ["recompute=moe"] if "extra" in self.megatron else []
        losses = ["router-losses"] if set(AUX) <= set(self.megatron) else []
        return " ".join([self.model, f"processes={self.processes}", *settings, *again, *losses])


@dataclass(frozen=True)
class Case:
    """One split of one layout."""

    layout: Layout
    split: Split

    @property
    def name(self) -> str:
        form = "packed" if self.split.packing else "padded"
        algorithm = "" if self.split.algorithm == "ppo_clip" else f" {self.split.algorithm}"
        return f"{self.layout.name} | {form} {self.split.max_tokens} {self.split.aggregation}{algorithm}"

    @property
    def file(self) -> str:
        return self.name.replace(" ", "-").replace("|", "") + ".pt"

    @property
    def reference(self) -> Case:
        """One process, one micro batch."""
        losses = {key: value for key, value in self.layout.megatron.items() if key in AUX}
        return Case(
            Layout(self.layout.model, 1, losses), Split(WHOLE, self.split.aggregation, algorithm=self.split.algorithm)
        )


def cases_of(layouts: Iterable[Layout]) -> list[Case]:
    return [Case(layout, split) for layout in layouts for split in layout.splits]


def splits_of(layouts: Iterable[Layout]) -> list[Case]:
    """Cases other than reference cases."""
    return [case for case in cases_of(layouts) if case.name != case.reference.name]


def batch() -> list[Group]:
    """Four groups: tokens of different lengths, prompts and a tool's output excluded."""
    random = np.random.default_rng(11)
    groups = []
    for number, (prompt, responses) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        vectors, samples = [], []
        for index, response in enumerate(responses):
            mask = np.arange(prompt + response) >= prompt
            if response > 100:
                mask[prompt + 40 : prompt + 60] = False
            noise = random.normal(MEAN_LOG_PROB, 0.25, len(mask))
            tokens = random.integers(0, 250, len(mask)).astype(np.int32)
            sample = SampleTokens(
                tokens, mask, np.where(mask, noise, 0.0).astype(np.float32), teacher=teacher(len(mask))
            )
            vectors.append(sample)
            samples.append(
                Sample(
                    group=number,
                    index=index,
                    data=InlineData(vectors),
                    prompt_length=prompt,
                    response_length=response,
                    loss_tokens=int(mask.sum()),
                    reward=float(random.normal()),
                    finish_reason="length" if (number, index) == TRUNCATED else "stop",
                )
            )
        groups.append(Group(number, f"prompt/{number}", "test", samples))
    return groups


def teacher(length: int) -> TokenScores:
    """Teacher scores of TOP_K tokens at each position, with nine tenths of the probability in total."""
    random = np.random.default_rng(length)
    tokens = np.stack([random.choice(250, TOP_K, replace=False) for _ in range(length)]).astype(np.int32)
    shares = 0.9 * random.dirichlet(np.ones(TOP_K), length)
    return TokenScores(np.zeros(length, np.float32), tokens, np.log(shares).astype(np.float32))


def recipe_of(layout: Layout, model: Path) -> Recipe:
    """Settings of one optimizer step; see `apply` for its size."""
    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = str(model), "float32"
    recipe.algorithm = algorithm_of(layout.splits[0])
    recipe.rollout.max_response_length = 160
    recipe.rollout.temperature = 0.9
    recipe.cluster.device = "cpu"
    optimizer = recipe.actor.optimizer
    optimizer.lr, optimizer.eps, optimizer.betas = STEP * EPSILON, EPSILON, (0.0, 0.0)
    optimizer.weight_decay, optimizer.clip_grad = 0.0, 0.0
    for key, value in layout.megatron.items():
        setattr(recipe.megatron, key, value)
    return recipe


def apply(split: Split, recipe: Recipe) -> None:
    recipe.actor.max_tokens_per_micro_batch = max(1, split.max_tokens // recipe.megatron.context_parallel)
    recipe.megatron.packing = split.packing
    recipe.algorithm = algorithm_of(split)


def algorithm_of(split: Split) -> AlgorithmConfig:
    """Algorithm settings with an entropy bonus and KL."""
    return AlgorithmConfig(
        entropy_coef=0.01,
        kl_coef=0.1,
        overlong=OverlongConfig(filter=True),
        aggregation=split.aggregation,
        **ALGORITHMS[split.algorithm],
    )


def launch(layouts: Sequence[Layout], models: Path, output: Path, timeout: float = 600) -> None:
    """Compute all splits of `layouts`, which need the same number of processes."""
    processes = layouts[0].processes
    assert {layout.processes for layout in layouts} == {processes}
    file = output / f"layouts-{processes}.json"
    file.write_text(json.dumps([asdict(layout) for layout in layouts]))
    run_ranks(
        "tests.support.invariance_worker", processes, [file, models, output], output / f"worker-{processes}", timeout
    )


@dataclass(frozen=True)
class Difference:
    """Relative differences of a case from its reference.

    A number's is |a - b| / |b|; a tensor's, element by element, max |a - b| / max |b|; the whole gradient's, over all
    its elements, ||a - b|| / ||b||.
    """

    loss: float
    metric: float  # of the metric that differs most
    metric_name: str
    grad_norm: float
    gradient: float
    tensor: float  # of the gradient tensor that differs most
    tensor_name: str


def difference(case: Case, results: Path) -> Difference:
    got, expected = load(case, results), load(case.reference, results)
    metrics = {name: _relative(got["metrics"][name], value) for name, value in expected["metrics"].items()}
    assert got["metrics"].keys() == metrics.keys(), got["metrics"].keys() ^ metrics.keys()
    assert metrics.pop(PRODUCTS) < 1e-4, "larger than the rounding of a product over a sequence"
    gaps = {name: got["gradient"][name] - tensor for name, tensor in expected["gradient"].items()}
    assert got["gradient"].keys() == gaps.keys(), got["gradient"].keys() ^ gaps.keys()
    tensors = {name: _share(gap.abs().max(), expected["gradient"][name].abs().max()) for name, gap in gaps.items()}
    whole = _share(_norm(gaps.values()), _norm(expected["gradient"].values()))
    metric, tensor = max(metrics, key=metrics.__getitem__), max(tensors, key=tensors.__getitem__)
    return Difference(
        loss=metrics["actor/loss"],
        metric=metrics[metric],
        metric_name=metric,
        grad_norm=metrics["actor/grad_norm"],
        gradient=whole,
        tensor=tensors[tensor],
        tensor_name=tensor,
    )


def load(case: Case, results: Path) -> dict[str, Any]:
    """`metrics` of the step, the train/rollout gap included, `gradient` by Hugging Face name, and `penalties`: the KL in the
    reward, by number of the sample."""
    result = torch.load(results / case.file, weights_only=True)
    gaps = [Mismatch(**torch.load(file, weights_only=True)) for file in sorted(results.glob(f"{case.file}.gap.*"))]
    return {**result, "metrics": {**result["metrics"], **total_mismatch(gaps).metrics(0)}}


def _relative(value: float, expected: float) -> float:
    return _share(torch.tensor(abs(value - expected), dtype=torch.float64), torch.tensor(abs(expected)))


def _share(gap: torch.Tensor, size: torch.Tensor) -> float:
    return (gap / size).item() if gap else 0.0


def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def other_algorithms() -> list[Layout]:
    """Layouts for algorithms that combine several tokens, with splits that separate these tokens."""
    splits, alone = (tuple(Split(size, algorithm=name) for name in OTHERS) for size in (400, 1))
    return [
        Layout("qwen3", 1, {}, tuple(Split(WHOLE, algorithm=name) for name in OTHERS)),
        Layout("qwen3", 2, {}, splits),
        Layout("qwen3", 2, {"context_parallel": 2}, splits),
        Layout("qwen3", 2, {"pipeline_parallel": 2}, alone),
        # They read all of a cut vocabulary.
        Layout("qwen3", 2, {"tensor_parallel": 2}, (Split(algorithm="gkd"), Split(algorithm="optimal_token_baseline"))),
    ]


def quick() -> list[Layout]:
    """A set that covers each way to split once."""
    moe, padded = "qwen3_moe", Split(packing=False)
    return [
        Layout(moe, 1, AUX, (*(Split(WHOLE, name) for name in AGGREGATIONS), Split(), padded)),
        Layout(moe, 1, {}, (Split(WHOLE),)),
        *other_algorithms(),
        Layout("deepseek_v3", 1, AUX, (Split(WHOLE), Split())),
        Layout(moe, 2, AUX, (Split(), Split(1, "seq_mean_token_sum_norm"))),
        Layout(moe, 2, {**AUX, "tensor_parallel": 2, "expert_parallel": 2}, (Split(), padded)),
        Layout(moe, 2, {**AUX, "context_parallel": 2}, (Split(aggregation="seq_mean_token_sum"), padded)),
        Layout(
            moe,
            2,
            {**AUX, "pipeline_parallel": 2, "virtual_pipeline": 2},
            (Split(aggregation="seq_mean_token_mean"), padded),
        ),
        Layout(moe, 2, {**AUX, "pipeline_parallel": 2, **EXPERTS_AGAIN}),
        Layout("deepseek_v3", 2, {**AUX, "tensor_parallel": 2}),
        Layout("deepseek_v3", 2, {**AUX, "context_parallel": 2}, (padded,)),
    ]


def some_on_four() -> list[Layout]:
    """Layouts on four processes that combine several ways to split."""
    both = (Split(), Split(packing=False))
    three = {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 4}
    return [
        Layout("qwen3", 1, {}, (Split(WHOLE), *both)),
        Layout("qwen3", 4, {}, both),
        Layout("qwen3", 4, {"context_parallel": 2, "pipeline_parallel": 2}, both),
        Layout("qwen3_moe", 4, {**AUX, **three}, both),
        Layout(
            "qwen3_moe",
            4,
            {**AUX, "tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
            both,
        ),
        Layout("deepseek_v3", 4, {**AUX, **three}, both),
    ]


def full() -> list[Layout]:
    """Each layout packed, padded, whole and a sequence at a time, and under every aggregation."""
    forms = (Split(WHOLE), Split(), Split(packing=False), Split(1))
    splits = (*forms, *(Split(aggregation=name) for name in AGGREGATIONS[1:]))
    references = (*splits, *(Split(WHOLE, name) for name in AGGREGATIONS[1:]))
    two: list[dict[str, Any]] = [
        {},
        {"tensor_parallel": 2},
        {"context_parallel": 2},
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 2, "virtual_pipeline": 2},
    ]
    experts: list[dict[str, Any]] = [
        {"expert_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": 2},
        {"pipeline_parallel": 2, "recompute": "full"},
        {"pipeline_parallel": 2, **EXPERTS_AGAIN},
    ]
    four: list[dict[str, Any]] = [
        {},
        {"tensor_parallel": 2, "context_parallel": 2},
        {"tensor_parallel": 2, "pipeline_parallel": 2},
        {"context_parallel": 2, "pipeline_parallel": 2},
    ]
    experts_on_four: list[dict[str, Any]] = [
        {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 4},
        {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
    ]
    of_model = [
        ("qwen3", {}, two, four),
        ("qwen3_moe", {}, experts[:2], []),
        ("qwen3_moe", AUX, [*two, *experts], [*four, *experts_on_four]),
        ("deepseek_v3", AUX, [*two[:4], *experts[:2]], experts_on_four[:1]),
    ]
    layouts = []
    for model, losses, on_two, on_four in of_model:
        layouts.append(Layout(model, 1, losses, references))
        layouts += [Layout(model, 2, {**losses, **sizes}, splits) for sizes in on_two]
        layouts += [Layout(model, 4, {**losses, **sizes}, splits) for sizes in on_four]
    return [*layouts, *other_algorithms()]


def run(layouts: Sequence[Layout], output: Path, timeout: float = 600) -> None:
    """Write the models, and compute all splits of `layouts`: one launch for each number of processes."""
    models = output / "models"
    for model in sorted({layout.model for layout in layouts}):
        write_model(model, models)
    for processes in sorted({layout.processes for layout in layouts}):
        selected = [layout for layout in layouts if layout.processes == processes]
        for first in range(0, len(selected), CASES):
            launch(selected[first : first + CASES], models, output, timeout)
