"""Compare megarl's losses with the functions of verl and verl-recipe that they are converted from.

    git clone https://github.com/verl-project/verl
    git clone https://github.com/verl-project/verl-recipe
    python -m benchmarks.verl_losses verl verl-recipe

The functions are taken from the files of the checkouts, without their imports, and called on the same random batch in float64.
Printed are the loss and the largest difference of its gradient. Exit status 1 if one differs by more than 1e-9 of its size
(1e-5 for the forward KL, which verl computes in float32).
"""

from __future__ import annotations
import __future__

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.catalogue import ADVANTAGES
from megarl.algorithms.inputs import LossInputs, Outcomes
from megarl.algorithms.objective import objective
from megarl.recipe.algorithm import AlgorithmConfig

PROMPTS, SAMPLES, LONGEST = 6, 4, 9
TOP, VOCABULARY = 5, 40


@dataclass(frozen=True)
class Comparison:
    """verl's and megarl's loss, and their gradients, of the same shape."""

    name: str
    losses: tuple[float, float]
    gradients: tuple[Tensor, Tensor]
    tolerance: float = 1e-9

    @property
    def errors(self) -> tuple[float, float]:
        """Relative differences of the loss and of the gradient's largest entry."""
        (verls, ours), (theirs, mine) = self.losses, self.gradients
        size = max(abs(verls), 1e-12)
        return abs(verls - ours) / size, float((theirs - mine).abs().max() / theirs.abs().max())

    @property
    def equal(self) -> bool:
        return max(self.errors) < self.tolerance


def functions_of(file: Path, *names: str, **stand_ins: Any) -> SimpleNamespace:
    """Return functions that a file defines at its top level. `stand_ins`: values of the other names that they use.

    Raises ValueError if the file lacks one.
    """
    tree = ast.parse(file.read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    if missing := {*names} - {node.name for node in nodes}:
        raise ValueError(
            f"{file} has no function {', '.join(sorted(missing))}: check out the commit that the page names"
        )
    for node in nodes:
        node.decorator_list = []
    code = compile(ast.Module([*nodes], []), str(file), "exec", __future__.annotations.compiler_flag)
    values = {"torch": torch, "F": torch.nn.functional, **stand_ins}
    exec(code, values)
    return SimpleNamespace(**{name: values[name] for name in names})


class Batch:
    """Samples of PROMPTS prompts, as verl's padded matrices [samples, LONGEST] and as megarl's concatenated tokens."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        count = PROMPTS * SAMPLES
        self.lengths = torch.randint(1, LONGEST + 1, (count,), generator=random).tolist()
        self.mask = (torch.arange(LONGEST) < torch.tensor(self.lengths)[:, None]).double()
        self.old = -torch.rand(count, LONGEST, dtype=torch.float64, generator=random) * 3
        self.log_probs = self.old + 0.3 * torch.randn(count, LONGEST, dtype=torch.float64, generator=random)
        self.groups = torch.arange(count) // SAMPLES
        self.rewards = torch.randn(count, dtype=torch.float64, generator=random)

    def outcomes(self) -> Outcomes:
        return Outcomes(self.rewards.numpy(), self.groups.numpy(), np.array(self.lengths))

    def inputs(self, advantages: Tensor) -> LossInputs:
        """Return megarl's inputs with the weights of a mean over samples. advantages: of samples."""
        lengths = torch.tensor(self.lengths)
        present, tokens = self.mask.bool(), lengths.repeat_interleave(lengths)
        weights = 1.0 / (tokens * len(self.lengths)).double()
        return LossInputs(
            log_probs=self.log_probs[present].clone().requires_grad_(),
            old_log_probs=self.old[present],
            advantages=advantages.repeat_interleave(lengths),
            loss_mask=torch.ones_like(weights),
            loss_weights=weights,
            token_share=weights,
            lengths=self.lengths,
            groups=self.groups.repeat_interleave(lengths).double(),
        )


def compare(
    name: str, batch: Batch, verls: Tensor, leaf: Tensor, ours: LossInputs, config: AlgorithmConfig
) -> Comparison:
    """Compare verl's loss of the matrix `leaf` with megarl's of the same log-probs."""
    loss, _ = objective(ours, config)
    (gradient,) = torch.autograd.grad(loss, ours.log_probs)
    (theirs,) = torch.autograd.grad(verls, leaf)
    return Comparison(name, (verls.item(), loss.item()), (theirs[batch.mask.bool()], gradient))


def gvpo(recipe: Path) -> Comparison:
    """recipe/gvpo: a sum over the samples of a micro batch. It is divided by samples / n here, as the converter does."""
    distributed = SimpleNamespace(get_world_size=lambda group: 1)
    stand_ins = {
        "torch": SimpleNamespace(unique=torch.unique, distributed=distributed),
        "allgather_dict_tensors": lambda tensors, size, group: tensors,
    }
    function = functions_of(recipe / "gvpo/gvpo_core_algos.py", "compute_policy_loss_gvpo", **stand_ins)
    mesh = SimpleNamespace(_flatten=lambda: SimpleNamespace(get_group=lambda: None))
    batch, beta = Batch(1), 0.1
    config = AlgorithmConfig(loss="gvpo", gvpo_beta=beta, advantage="grpo", normalize_by_std=False)
    advantages = advantages_of(batch, config)
    leaf = batch.log_probs.clone().requires_grad_()
    matrix = advantages[:, None] * batch.mask
    total = function.compute_policy_loss_gvpo(batch.old, leaf, matrix, batch.mask, beta, batch.groups, mesh, SAMPLES)
    return compare("gvpo", batch, total / PROMPTS, leaf, batch.inputs(advantages), config)


def advantages_of(batch: Batch, config: AlgorithmConfig) -> Tensor:
    estimator = ADVANTAGES[config.advantage].function
    assert estimator is not None
    return torch.tensor(estimator(batch.outcomes(), config))


def sppo(verl: Path, recipe: Path) -> Comparison:
    """recipe/sppo: rewards minus their soft mean, then the squared difference from the log-ratio."""
    masked = functions_of(verl / "verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    loss_of = functions_of(recipe / "sppo/dp_actor.py", "compute_sppo_loss", verl_F=masked).compute_sppo_loss
    softmean = functions_of(recipe / "sppo/sppo_ray_trainer.py", "softmean").softmean
    batch, eta = Batch(2), 0.7
    config = AlgorithmConfig(loss="sppo", sppo_eta=eta, advantage="soft_mean")
    leaf = batch.log_probs.clone().requires_grad_()
    rewards = batch.rewards - softmean(batch.rewards, eta, keepdim=True)
    loss, _, _ = loss_of(batch.old, leaf, rewards, batch.mask, eta)
    return compare("sppo", batch, loss, leaf, batch.inputs(advantages_of(batch, config)), config)


def forward_kl(verl: Path, least: float | None) -> Comparison:
    """verl's forward_kl_topk, with the limit 0 of verl/trainer/distillation/losses.py."""
    file = verl / "verl/trainer/distillation/fsdp/losses.py"
    names = "compute_forward_kl_topk", "kl_divergence"
    functions = functions_of(file, *names, get_ulysses_sequence_parallel_world_size=lambda: 1)
    random = torch.Generator().manual_seed(3)
    tokens = PROMPTS * LONGEST
    teacher, logits = (2 * torch.randn(tokens, VOCABULARY, dtype=torch.float64, generator=random) for _ in range(2))
    top = torch.log_softmax(teacher, -1).topk(TOP)
    options = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=least))
    leaf = logits.clone()[None].requires_grad_()
    nested = [torch.nested.nested_tensor([each], layout=torch.jagged) for each in (top.values, top.indices)]
    losses = functions.compute_forward_kl_topk(leaf, *nested, options, "thd")["distillation_losses"]
    verls = losses.clamp_min(0.0).mean()
    (theirs,) = torch.autograd.grad(verls, leaf)
    policy = logits.clone().requires_grad_()
    share = torch.full((tokens,), 1 / tokens, dtype=torch.float64)
    ours = LossInputs(
        log_probs=torch.zeros(tokens, dtype=torch.float64),
        loss_mask=torch.ones_like(share),
        loss_weights=share,
        token_share=share,
        lengths=[LONGEST] * PROMPTS,
        reference_top_log_probs=top.values,
        top_log_probs=torch.log_softmax(policy, -1).gather(1, top.indices),
    )
    config = AlgorithmConfig(
        loss="gkd", advantage="none", reference="teacher", distill_rest=False, distill_min_log_prob=least
    )
    loss, _ = objective(ours, config)
    (gradient,) = torch.autograd.grad(loss, policy)
    name = "forward_kl_topk" + ("" if least is None else f", log_prob_min_clamp={least:g}")
    return Comparison(name, (verls.item(), loss.item()), (theirs[0], gradient), tolerance=1e-5)


def comparisons(verl: Path, recipe: Path) -> Iterator[Comparison]:
    yield gvpo(recipe)
    yield sppo(verl, recipe)
    yield forward_kl(verl, None)
    yield forward_kl(verl, -3.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verl", type=Path, help="a checkout of verl")
    parser.add_argument("recipe", type=Path, help="a checkout of verl-recipe")
    arguments = parser.parse_args()
    print("| loss | verl | megarl | gradient, largest difference |\n|---|---|---|---|")
    equal = True
    for comparison in comparisons(arguments.verl, arguments.recipe):
        verls, ours = comparison.losses
        print(f"| {comparison.name} | {verls:.9g} | {ours:.9g} | {comparison.errors[1]:.1e} |")
        equal = equal and comparison.equal
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
