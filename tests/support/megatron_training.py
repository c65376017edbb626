"""Trainers, batches and results in the trainer processes of tests/megatron. Import it before
Megatron: the import prepares the platform."""

from __future__ import annotations

from typing import Any

from megarl.platform import select

platform = select("cpu")  # tests/support/mindspeed_ranks.py and transformer_engine_ranks.py replace it
platform.prepare()

import torch  # noqa: E402

from tests.support.megatron_models import CLIP_GRAD, ENTROPY_COEF, LENGTHS, LOSS_SCALE, TEMPERATURE, global_batch  # noqa: E402
from tests.support.trainer_processes import forget_last_model  # noqa: E402
from tests.support.vl_model import images_of, sequences  # noqa: E402

torch.set_num_threads(1)
TIMEOUT = 1234.5


def recipe_of(case: dict[str, Any]) -> Any:
    from megarl.recipe.schema import Recipe

    recipe = Recipe()
    recipe.model.path, recipe.model.dtype = case["model"], case.get("dtype", "float32")
    recipe.model.table = case.get("table")
    recipe.model.freeze_vision_tower = case.get("frozen_tower", False)
    recipe.cluster.timeout = TIMEOUT
    # A large epsilon keeps Adam's update smooth in the gradient, so that rounding stays rounding.
    # Without decay, nothing but a gradient moves a weight.
    optimizer = recipe.actor.optimizer
    optimizer.lr, optimizer.eps, optimizer.clip_grad = 1e-2, 1e-2, CLIP_GRAD
    optimizer.weight_decay = case.get("weight_decay", 0.0)
    for name, value in case.get("megatron", {}).items():
        setattr(recipe.megatron, name, value)
    for name, value in case.get("lora", {}).items():
        setattr(recipe.lora, name, value)
    return recipe


def build(case: dict[str, Any], *, weights_only: bool = False) -> Any:
    from megarl.megatron.trainer import PolicyTrainer

    forget_last_model()
    return PolicyTrainer(recipe_of(case), platform, total_optimizer_steps=10, weights_only=weights_only)


def micro_batches(trainer: Any, per_micro: int) -> tuple[list[Any], list[list[int]]]:
    """Return this data-parallel rank's share of the same global batch, and the numbers of its sequences."""
    from megarl.megatron.batch import MicroBatch

    tokens, advantages = global_batch()
    with_images = trainer.model.image_layout is not None
    if with_images:
        timestamps = trainer.model.image_layout.tokens_per_second is None
        tokens = [sequence for sequence, _ in sequences(timestamps=timestamps)]
    share = len(LENGTHS) // trainer.coordinates.dp_size
    mine = list(range(len(LENGTHS)))[trainer.coordinates.dp_rank * share :][:share]
    numbers = [mine[i : i + per_micro] for i in range(0, len(mine), per_micro)]
    batches = [
        MicroBatch(
            torch.cat([tokens[i] for i in group]),
            [LENGTHS[i] for i in group],
            vectors_of(torch.cat([advantages[i] for i in group])),
            images=images_of(group, timestamps=timestamps) if with_images else None,
        )
        for group in numbers
    ]
    return batches, numbers


def vectors_of(advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    ones = torch.ones_like(advantages)
    return {
        "advantages": advantages,
        "loss_mask": ones,
        "loss_weights": ones * LOSS_SCALE,
        "token_share": ones * LOSS_SCALE,
    }


def objective(x: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A sum with a global scale and an entropy bonus, independent of a rank's counts."""
    loss = ((-x.log_probs * x.advantages - ENTROPY_COEF * x.entropy) * x.loss_weights).sum()
    return loss, {"loss": loss.detach(), "tokens": torch.tensor(float(len(x.log_probs)))}


def train(trainer: Any, batches: list[Any], steps: int, function: Any = objective) -> list[dict[str, float] | None]:
    step = {"temperature": TEMPERATURE, "with_entropy": True}
    metrics = [trainer.train_step(batches, function, **step) for _ in range(steps)]
    for of_step in metrics:
        assert of_step is None or 0.01 < of_step.pop("perf/max_memory_allocated_gb") < 100
    return metrics


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    exported = [(name, weight.clone()) for name, weight in trainer.export_weights()]
    weights = dict(exported)
    assert len(weights) == len(exported), "a name came twice, which weight sync refuses"
    return weights


def gradient_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The last step's clipped gradients from the gradient buffers, by Hugging Face name."""
    parameters = [parameter for chunk in trainer.model.chunks for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    gradient = weights_of(trainer)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return gradient
