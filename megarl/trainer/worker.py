"""Trainer process: the calls that actor and critic share.

Every rank runs the same calls in the same order. Results for the rank's shard (old log-probs, reference log-probs,
values) stay with its micro batches until the update.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from megarl import platform as platforms
from megarl.algorithms.catalogue import LOSSES, import_modules
from megarl.algorithms.inputs import TokenOutcomes
from megarl.algorithms.process_advantages import step_returns, step_rewards_per_token
from megarl.algorithms.shaping import kl_penalties
from megarl.algorithms.spikes import GradNorms
from megarl.cluster.key_value_store import join_ranks
from megarl.data.tokenizer import template_text
from megarl.platform.base import Profiler
from megarl.platform.installed import paused_collector
from megarl.platform.load import DeviceSampler, HostLoad, MachineLoad
from megarl.recipe.hub_inputs import with_local_model
from megarl.recipe.observe import trace_options
from megarl.recipe.schema import Recipe
from megarl.types import DataRef, SampleTokens, Shard, ShardSample, Steps, fetch
from megarl.weight_sync.session import host_id

if TYPE_CHECKING:  # these modules import Megatron, which the platform must prepare
    from megarl.megatron.batch import MicroBatch
    from megarl.megatron.checkpoint.rank_part import Save
    from megarl.megatron.moe.recorded_routing import Routing
    from megarl.megatron.trainer import Trainer

CAUSES_OF_BROKEN_WEIGHTS = (
    "Resume from an earlier checkpoint with another setting: a lower optimizer.lr, clip_grad, or other rewards; "
    "metrics.jsonl shows the step at which grad_norm or the loss changed."
)

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound="Worker")
PhaseCall = Callable[Concatenate[W, P], T]


def traced(phase: str) -> Callable[[PhaseCall[W, P, T]], PhaseCall[W, P, T]]:
    """Decorate a Worker's call so that, with observe.profile_discrete, it is traced into a folder named `phase`."""

    def mark(call: PhaseCall[W, P, T]) -> PhaseCall[W, P, T]:
        @functools.wraps(call)
        def wrapped(self: W, *args: P.args, **kwargs: P.kwargs) -> T:
            folder = self.profile_folder
            if folder is None:
                return call(self, *args, **kwargs)
            self._start_trace(folder / phase)
            try:
                return call(self, *args, **kwargs)
            finally:
                assert self.profiler is not None
                self.profiler.stop()
                self.profiler = None

        return wrapped

    return mark


def import_trainer() -> None:
    """Import Megatron and what trainers of both roles need of it. The platform must be prepared."""
    with paused_collector():
        import megarl.megatron.trainer  # noqa: F401


class Worker:
    """One rank of a model in training.

    Rank and world size come from the environment. `weights_only`: load the model for export, without an optimizer.
    """

    def __init__(self, recipe: Recipe, total_optimizer_steps: int, weights_only: bool = False):
        self.recipe = recipe = with_local_model(recipe)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        import_modules(recipe.algorithm)
        self.platform = platforms.select(recipe.cluster.device)
        with paused_collector():
            self.platform.prepare()  # before any module imports megatron

            import torch

        torch.set_num_threads(recipe.cluster.threads)
        torch.use_deterministic_algorithms(recipe.train.deterministic)
        self.platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        join_ranks(self.platform.process_group_backend, timedelta(seconds=recipe.cluster.timeout))
        import_trainer()
        self.trainer: Trainer = self._make_trainer(total_optimizer_steps, weights_only)
        self.check_weights(f"the files of {recipe.model.path} are broken")
        # One process of each machine reports the machine's load.
        self.host_load = HostLoad() if os.environ.get("LOCAL_RANK", "0") == "0" else None
        look = self.platform.device_load()
        self.device_load = DeviceSampler(look) if look is not None else None
        if self.device_load is not None:
            self.device_load.start()
        self.profiler: Profiler | None = None  # set while it records
        self.profile_folder: Path | None = None  # set while each `traced` call writes a separate trace
        self.save: Save | None = None  # of the last checkpoint
        self._held: tuple[int, int] | None = (0, 0)  # `hold`'s step, and the optimizer steps at its time
        self.batches: list[list[MicroBatch]] = []  # per mini batch
        self.members: list[list[list[int]]] = []  # per micro batch: shard indices of its samples
        self.rewards: list[float] = []  # per sample of the shard: reward of its last token
        self.steps: list[Steps] = []  # per sample of the shard: rewards of earlier tokens
        self.groups: list[int] = []  # per sample of the shard: index of its group within the batch

    def _make_trainer(self, total_optimizer_steps: int, weights_only: bool) -> Trainer:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return this rank's coordinates in the parallel layout, its process and its model."""
        process = {"host": host_id(), "machine": socket.gethostname(), "pid": os.getpid()}
        process |= {"device_name": self.platform.device_name()}
        return {**asdict(self.trainer.coordinates), **process, **self.trainer.describe()}

    def machine_load(self) -> MachineLoad:
        """Return the load of this machine and device since the last call."""
        host = self.host_load.take() if self.host_load is not None else {}
        if self.device_load is None:
            return MachineLoad(socket.gethostname(), host)
        return MachineLoad(socket.gethostname(), host, self.device_load.take(), self.device_load.problem)

    def sees(self, path: str) -> tuple[str, bool]:
        """Return this machine's name, and whether `path` exists on it."""
        return socket.gethostname(), os.path.exists(path)

    def start_profile(self, directory: str, ranks: list[int]) -> None:
        """Trace this rank until `stop_profile`, if it is one of `ranks`.

        With observe.profile_discrete, each `traced` call has a separate trace.
        """
        if self.rank not in ranks:
            return
        if self.recipe.observe.profile_discrete:
            self.profile_folder = Path(directory)
        else:
            self._start_trace(Path(directory))

    def stop_profile(self) -> None:
        """Stop tracing and write the trace."""
        self.profile_folder = None
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def _start_trace(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.profiler = self.platform.profiler(folder, f"rank{self.rank}", trace_options(self.recipe.observe))
        self.profiler.start()

    # --- one step -------------------------------------------------------------------------------

    def gather_vectors(self, samples: Sequence[ShardSample]) -> tuple[None, list[list[SampleTokens]]]:
        """Fetch the vectors of `samples` from their groups, and return them as one part, in their order."""
        return None, [fetch(samples)]

    def load_shard(self, shard: Shard) -> None:
        """Fetch the vectors of this rank's samples and lay out its micro batches."""
        vectors = fetch(shard.samples)
        self.members, self.rewards = shard.mini_batches, [sample.reward for sample in shard.samples]
        self.steps, self.groups = [sample.steps for sample in shard.samples], [sample.group for sample in shard.samples]
        self.batches = [
            [
                self._micro_batch([(shard.samples[i], vectors[i]) for i in members], loss_tokens)
                for members in mini_batch
            ]
            for mini_batch, loss_tokens in zip(shard.mini_batches, shard.loss_tokens, strict=True)
        ]

    def _outcomes(
        self, batch: MicroBatch, members: list[int], kl: dict[int, np.ndarray], kl_weight: float
    ) -> TokenOutcomes:
        """Return the outcomes of a micro batch with the samples `members` (shard indices).

        kl: KL vectors by shard index; empty: no KL in the reward. A sample without one has loss weight 0, and its penalty
        is 0.
        """
        mask = batch.vectors["loss_mask"].cpu().numpy() > 0
        rewards, step_rewards, penalties = np.array([self.rewards[member] for member in members]), None, None
        if any(self.steps[member] for member in members):
            masks = zip(members, np.split(mask, np.cumsum(batch.lengths)[:-1]), strict=True)
            steps = [step_rewards_per_token(self.steps[member], part) for member, part in masks]
            step_rewards = np.concatenate(steps)
        if kl:
            vectors = [kl.get(member, np.zeros(length)) for member, length in zip(members, batch.lengths, strict=True)]
            penalties = kl_penalties(vectors, kl_weight)
        groups = np.array([self.groups[member] for member in members])
        return TokenOutcomes(rewards, mask, batch.lengths, step_rewards, penalties, groups=groups)

    def _micro_batch(self, members: list[tuple[ShardSample, SampleTokens]], loss_tokens: int) -> MicroBatch:
        import torch

        from megarl.megatron.batch import MicroBatch
        from megarl.megatron.images import Images

        def join(pieces: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(pieces).astype(np.float32)).to(self.platform.device())

        # A sample of weight 0 (filtered, or the filler of an empty micro batch) is computed but excluded from the loss.
        masks = [vectors.loss_mask * float(sample.loss_weight > 0) for sample, vectors in members]
        stale = self.recipe.rollout.max_staleness > 0
        whole_groups = LOSSES[self.recipe.algorithm.loss].whole_groups
        return MicroBatch(
            tokens=torch.from_numpy(np.concatenate([vectors.tokens for _, vectors in members]).astype(np.int64)).to(
                self.platform.device()
            ),
            lengths=[len(vectors.tokens) for _, vectors in members],
            counted=[sample.loss_weight > 0 for sample, _ in members],
            vectors={
                "loss_mask": join(masks),
                "loss_weights": join(
                    [mask * sample.loss_weight for mask, (sample, _) in zip(masks, members, strict=True)]
                ),
                "token_share": join([mask / max(loss_tokens, 1) for mask in masks]),
                "advantages": join([_advantages(sample, vectors) for sample, vectors in members]),
                "rollout_log_probs": join([vectors.rollout_log_probs for _, vectors in members]),
                **({"versions": join([token_versions(sample) for sample, _ in members])} if stale else {}),
                **(
                    {"groups": join([np.full(sample.length, sample.group) for sample, _ in members])}
                    if whole_groups
                    else {}
                ),
            },
            routing=self._routing([vectors for _, vectors in members]),
            images=Images.of([vectors.images for _, vectors in members]),
        )

    def _routing(self, vectors: list[SampleTokens]) -> Routing | None:
        """Return the engine's expert choices, for `megatron.routing_replay: rollout`; None otherwise."""
        if self.recipe.megatron.routing_replay != "rollout":
            return None
        import torch

        from megarl.megatron.moe.recorded_routing import Routing

        experts = [sample.routed_experts for sample in vectors]
        assert all(part is not None for part in experts), "the engine was started without return_routed_experts"
        return Routing(tokens=torch.from_numpy(np.concatenate(experts)))  # type: ignore[arg-type]

    def skip_spikes(self, norms: list[float]) -> None:
        """Skip further updates if their gradient norm is a spike. norms: gradient norms of the newest applied updates (`GradNorms.state`)."""
        self.trainer.norms = GradNorms(self.recipe.train, norms)

    # --- weights --------------------------------------------------------------------------------

    def stage_save(self, directory: str, copy: bool) -> tuple[int, list[str]]:
        """Stage this rank's part of a checkpoint. `copy`: copy it to host memory, so that training can continue.

        Returns the number of bytes to write under `directory` and the receipts: paths within `directory` of files that
        appear when a part is on disk. Raises BrokenWeights.
        """
        self.check_weights(f"they are not saved. {CAUSES_OF_BROKEN_WEIGHTS}")
        self.save = self.trainer.stage_save(Path(directory), copy=copy)
        return self.save.bytes, [os.path.relpath(self.save.receipt, directory)]

    def write_save(self) -> None:
        """Start writing the staged part in the background."""
        assert self.save is not None, "stage_save comes first"
        self.save.start()

    def save_done(self, wait: bool) -> bool:
        """Return whether the part is on disk. `wait`: wait until it is. Raises the error of a failed write."""
        assert self.save is not None, "stage_save comes first"
        if wait:
            self.save.wait()
        return self.save.done()

    def hold(self, step: int | None) -> None:
        """Note that this rank holds the weights after `step`, until an update or `load` changes them. None: it does not."""
        self._held = None if step is None else (step, self.trainer.step)

    def held_step(self) -> int | None:
        """Return the step after which this rank holds the weights; None if they have changed since `hold`. Waits for the end of a
        save in progress, which its controller can no longer commit."""
        if self.save is not None:
            self.save.abandon()
        return self._held[0] if self._held is not None and self._held[1] == self.trainer.step else None

    def load(self, directory: str) -> str | None:
        """Load a checkpoint. Returns a notice if the run does not continue bit for bit, else None. Raises BrokenWeights."""
        self.hold(None)
        notice = self.trainer.load(Path(directory))
        self.check_weights(f"resume from a checkpoint before {directory}")
        return notice

    def save_hf(self, directory: str) -> None:
        """Write the weights as a Hugging Face model. Raises BrokenWeights."""
        self.check_weights(f"nothing is exported to {directory}. {CAUSES_OF_BROKEN_WEIGHTS}")
        model, change = self.recipe.model, self.trainer.export_change
        template = template_text(self.recipe.data.chat_template, model.tokenizer or model.path)
        tokenizer = Path(model.tokenizer) if model.tokenizer else None
        self.trainer.export_change = replace(change, tokenizer=tokenizer, chat_template=template)
        self.trainer.save_hf(Path(directory))

    def check_weights(self, event: str) -> None:
        """Raise BrokenWeights if this rank's weights are not finite or too large. `event`: the end of its message."""
        from megarl.megatron.weight_check import check_weights

        self.trainer.finish_param_gather()
        check_weights(self.trainer.model.chunks, event)

    def save_adapter(self, directory: str) -> None:
        from megarl.megatron.trainer import PolicyTrainer

        assert isinstance(self.trainer, PolicyTrainer), "a critic has no adapters"
        self.trainer.save_adapter(Path(directory))

    def compare_with_hf(self, directory: str) -> tuple[int, int]:
        """Compare an exported model with the weights. Returns the numbers of equal and of untrained tensors."""
        result = self.trainer.compare_with_hf(Path(directory))
        return result.equal, result.untrained

    def offload_optimizer(self) -> None:
        self.trainer.offload_optimizer()

    def offload_weights(self) -> None:
        self.trainer.offload_weights()

    def onload(self) -> None:
        self.trainer.onload()

    def shutdown(self) -> None:
        """Leave the process group at the end of a run."""
        import torch

        torch.distributed.destroy_process_group()


def token_versions(sample: ShardSample) -> np.ndarray:
    """Return the version of the weights that sampled each token: int64 [length]; the first version for the prompt."""
    starts = [0, *(sample.prompt_length + span.start for span in sample.spans[1:]), sample.length]
    return np.repeat([span.version for span in sample.spans], np.diff(starts))


def _advantages(sample: ShardSample, vectors: SampleTokens) -> np.ndarray:
    """Return each token's advantage from the plan, with step advantages: float64 [L]."""
    advantages = np.full(len(vectors.tokens), sample.advantage)
    if not sample.step_advantages:
        return advantages
    return advantages + step_returns(sample.step_advantages, vectors.loss_mask)


def collect_parts(parts: list[tuple[DataRef, list[int]]]) -> dict[int, np.ndarray]:
    """Fetch vectors from another group's processes, by shard index. Samples without loss weight are in no part."""
    return {member: vector for data, members in parts for member, vector in zip(members, data.get(), strict=True)}


def kernel_notices(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return notices of trainers with other kernels in native layers than trainer 0's. Each rank selects its kernels by
    testing them, so ranks may differ.

    ranks: results of `describe`.
    """
    first: str = ranks[0]["kernels"]
    deviating: dict[str, list[int]] = {}  # kernels -> trainers
    for number, rank in enumerate(ranks):
        if rank["kernels"] != first:
            deviating.setdefault(rank["kernels"], []).append(number)
    return [
        f"trainers {numbers} compute with other kernels than trainer 0, so their sums are rounded differently. "
        f"Their kernels: {text}. Trainer 0's kernels: {first}"
        for text, numbers in deviating.items()
    ]
