"""A rank that trains one of the tiny models in a layout and returns results to compare with the references."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.commands.accept import goldens
from megarl.commands.accept.rank import Rank, forget_model
from megarl.commands.accept.tiny_families import FAMILIES, LENGTHS, SKETCHES, batch, sketch_signs


@dataclass(frozen=True)
class Case:
    """One case. `megatron`: fields of the recipe's section; `folder`: folder for a checkpoint, or "" for none."""

    family: str
    model: str
    dtype: str
    megatron: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    per_micro: int = 2

    @property
    def name(self) -> str:
        cuts = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP", "expert_tensor": "ETP"}
        sizes = {cut: self.megatron.get(f"{name}_parallel") for name, cut in cuts.items()}
        layout = "".join(f"{cut}{size}" for cut, size in sizes.items() if size and size > 1) or "1"
        rest = [key for key in self.megatron if not key.endswith("_parallel")]
        return " ".join([self.family, layout, self.dtype, *rest])


class ParityRank(Rank):
    """A rank of the model parity stage. All ranks call `run` together, once per case."""

    def run(self, case: Case) -> dict[str, Any]:
        """Log-probs, sketches of layers, gradients, two optimizer steps, and a resume; see `stages/model_parity.py`.

        The data-parallel rank of a sequence returns its `before` and `after`. They are empty on other pipeline stages than
        the last.
        """
        trainer = self._build(case)
        try:
            return self._run(trainer, case)
        finally:
            del trainer
            forget_model()

    def _build(self, case: Case) -> Any:
        from megarl.megatron.trainer import PolicyTrainer
        from megarl.recipe.schema import Recipe

        recipe = Recipe()
        recipe.model.path, recipe.model.dtype = case.model, case.dtype  # type: ignore[assignment]
        recipe.cluster.device, recipe.cluster.trainers = self.platform.name, self.world_size  # type: ignore[assignment]
        optimizer = recipe.actor.optimizer
        optimizer.lr, optimizer.eps, optimizer.clip_grad = goldens.LEARNING_RATE, goldens.EPSILON, goldens.CLIP_GRAD
        optimizer.weight_decay, optimizer.warmup_steps, optimizer.decay = 0.0, 0, "constant"
        optimizer.betas = goldens.BETAS
        for name, value in case.megatron.items():
            setattr(recipe.megatron, name, value)
        return PolicyTrainer(recipe, self.platform, total_optimizer_steps=10)

    def _run(self, trainer: Any, case: Case) -> dict[str, Any]:
        batches, numbers = micro_batches(trainer, case)
        with Sketches(trainer, numbers) as sketches:
            before = trainer.log_probs(batches, temperature=1.0)
        answer: dict[str, Any] = {"sketches": sketches.sums(self.platform.device())}
        reported = trainer.coordinates.reports
        answer["before"] = by_sequence(before, numbers) if reported else {}
        metrics = [self._step(trainer, batches)]
        answer["tensor_norms"] = gradient_norms(trainer) if self.world_size == 1 else {}
        if case.folder:
            save(trainer, Path(case.folder), self.rank)
            self._offload(trainer)
        metrics.append(self._step(trainer, batches))
        answer["grad_norms"] = [values and values["actor/grad_norm"] for values in metrics]
        after = trainer.log_probs(batches, temperature=1.0)
        answer["after"] = by_sequence(after, numbers) if reported else {}
        if case.folder:
            answer["resumed"] = self._resume(case, batches, after)
        return answer

    @staticmethod
    def _step(trainer: Any, batches: list[Any]) -> dict[str, float] | None:
        metrics: dict[str, float] | None = trainer.train_step(batches, objective, temperature=1.0, with_entropy=False)
        return metrics

    def _offload(self, trainer: Any) -> None:
        """Offload and onload weights and optimizer, as between training and sampling. On a CPU this copies host memory."""
        former, self.platform.can_offload = self.platform.can_offload, True
        try:
            trainer.offload_optimizer()
            trainer.offload_weights()
            trainer.onload()
        finally:
            self.platform.can_offload = former

    def _resume(self, case: Case, batches: list[Any], unbroken: Any) -> float:
        """Compare a trainer resumed from the checkpoint of step 1 with the uninterrupted one.

        Returns the largest difference of log-probs after step 2.
        """
        forget_model()
        resumed = self._build(case)
        resumed.load(Path(case.folder))
        self._step(resumed, batches)
        again = resumed.log_probs(batches, temperature=1.0)
        torch.distributed.barrier()
        if self.rank == 0:
            shutil.rmtree(case.folder)
        if again is None:
            return 0.0
        pairs = zip(again, unbroken, strict=True)
        return float(np.max([float((left[0] - right[0]).abs().max()) for left, right in pairs]))  # keeps a NaN


def save(trainer: Any, folder: Path, rank: int) -> None:
    """Write this rank's part of a checkpoint, and wait for all ranks."""
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    part = trainer.stage_save(folder, copy=True)  # a file would keep the memory of the weights, which is to be freed
    part.start()
    part.wait()
    torch.distributed.barrier()


def micro_batches(trainer: Any, case: Case) -> tuple[list[Any], list[list[int]]]:
    """Return this data-parallel rank's micro batches, and the indices of their sequences."""
    from megarl.megatron.batch import MicroBatch

    sequences = batch(case.family)
    share = len(LENGTHS) // trainer.coordinates.dp_size
    mine = list(range(len(LENGTHS)))[trainer.coordinates.dp_rank * share :][:share]
    numbers = [mine[i : i + case.per_micro] for i in range(0, len(mine), case.per_micro)]
    batches = []
    for group in numbers:
        tokens = torch.from_numpy(np.concatenate([sequences[i].tokens for i in group]))
        advantages = torch.from_numpy(np.concatenate([sequences[i].advantages for i in group]))
        device = trainer.platform.device()
        ones = torch.ones_like(advantages, device=device)
        vectors = {
            "advantages": advantages.to(device),
            "loss_mask": ones,
            "loss_weights": ones / sum(LENGTHS),
            "token_share": ones / sum(LENGTHS),
        }
        images = images_of([sequences[i].images for i in group]) if case.family == "vl" else None
        batches.append(MicroBatch(tokens.to(device), [LENGTHS[i] for i in group], vectors, images=images))
    return batches, numbers


def images_of(pictures: list[Any]) -> Any:
    """Return the Images of a micro batch, or None."""
    from megarl.megatron.images import Images

    every = [(place, picture) for place, sequence in enumerate(pictures) for picture in sequence]
    if not every:
        return None
    pixels = torch.cat([torch.from_numpy(picture.pixels) for _, picture in every])
    grids = torch.tensor([picture.grid for _, picture in every])
    return Images(pixels, grids, [place for place, _ in every], [picture.start for _, picture in every])


def objective(inputs: Any) -> tuple[Any, dict[str, Any]]:
    """Return the policy gradient loss with a weight per token in `loss_weights`."""
    return (-inputs.log_probs * inputs.advantages * inputs.loss_weights).sum(), {}


def by_sequence(rows: Any, numbers: list[list[int]]) -> dict[int, np.ndarray]:
    """Return the log-probs [L] by index of the sequence."""
    result: dict[int, np.ndarray] = {}
    for (log_probs, _), group in zip(rows, numbers, strict=True):
        parts = log_probs.detach().float().cpu().split([LENGTHS[i] for i in group])
        result |= {number: part.numpy() for number, part in zip(group, parts, strict=True)}
    return result


@contextlib.contextmanager
def gradients_as_weights(trainer: Any) -> Iterator[None]:
    """Copy the gradients into the weights inside the block, so that an export has them by their names in the checkpoint.

    Another `.data` would break autograd's hooks.
    """
    parameters = [parameter for chunk in trainer.model.chunks for parameter in chunk.parameters()]
    with torch.no_grad():
        weights = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data.copy_(parameter.main_grad)
        yield
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data.copy_(weight)


def gradient_norms(trainer: Any) -> dict[str, float]:
    """Return the norm of each tensor's clipped gradient by the tensor's name in the checkpoint."""
    with gradients_as_weights(trainer):
        return {name: float(gradient.float().norm()) for name, gradient in trainer.export_weights()}


class Sketches:
    """Hooks that project each decoder layer's output and sum the projections over the tokens of the batch."""

    def __init__(self, trainer: Any, numbers: list[list[int]]) -> None:
        from megarl.megatron.heads.output_heads import language_model

        self.trainer = trainer
        self.hooks: list[Any] = []
        starts = np.concatenate([[0], np.cumsum(LENGTHS)])
        # Of each micro batch: the number of each of its tokens in the whole batch.
        self.order = [np.concatenate([np.arange(starts[i], starts[i + 1]) for i in group]) for group in numbers]
        self.layers = [layer for chunk in trainer.model.chunks for layer in language_model(chunk).decoder.layers]
        self.seen: dict[int, int] = {}
        self.values: dict[int, np.ndarray] = {}

    def __enter__(self) -> Sketches:
        for layer in self.layers:
            self.hooks.append(layer.register_forward_hook(self._keep))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, layer: Any, _: Any, output: Any) -> None:
        """Add the projections of one layer's output. Every layer processes the micro batches in order."""
        from megatron.core import parallel_state

        from megarl.megatron.current_batch import current

        number = layer.layer_number
        tokens = self.order[self.seen.get(number, 0)]
        self.seen[number] = self.seen.get(number, 0) + 1
        hidden = (output[0] if isinstance(output, tuple) else output).detach().float().flatten(0, 1)
        places = current().row_tokens
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        if self.trainer.model.config.sequence_parallel:
            places = places[tp_rank * len(hidden) :][: len(hidden)]
        elif tp_rank:
            return  # the same rows as on the first rank
        assert len(places) == len(hidden), (len(places), len(hidden))
        held = (places >= 0).cpu()
        rows = tokens[places.cpu()[held].numpy()]
        values = hidden.cpu()[held].double().numpy()  # devices may have no float64
        if not len(rows):
            return
        signs = sketch_signs(rows, values.shape[1]).astype(np.float64)
        sums = np.einsum("th,tsh->s", values, signs)
        contribution = np.concatenate([sums, [(values**2).sum()]])
        self.values[number] = self.values.get(number, np.zeros(len(contribution))) + contribution

    def sums(self, device: Any) -> np.ndarray:
        """Return [layers, SKETCHES + 1] over all ranks: projections, and the sum of squares."""
        layers = max(config["num_hidden_layers"] for config in FAMILIES.values())
        table = torch.zeros(layers, SKETCHES + 1, dtype=torch.float32)
        for number, row in self.values.items():
            table[number - 1] = torch.from_numpy(row)
        table = table.to(device)
        torch.distributed.all_reduce(table)
        return table.cpu().numpy()
