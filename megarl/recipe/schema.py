"""Every setting of a recipe, as typed dataclasses: with algorithm.py and training.py, the only place that holds defaults.

Each field is declared with ``key(default, doc)``; the text becomes ``docs/recipes.md``
(``python -m docs.generate.recipes``), so it is written for the one who writes the recipe.
Nothing here imports torch: a recipe loads and is validated in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional

from megarl.platform.kinds import KINDS, DeviceName
from megarl.recipe.agent import AgentConfig
from megarl.recipe.algorithm import AlgorithmConfig
from megarl.recipe.data import DataConfig
from megarl.recipe.environment import EnvironmentConfig
from megarl.recipe.judge import JudgeConfig
from megarl.recipe.key import key
from megarl.recipe.observe import ObserveConfig
from megarl.recipe.remote import RemoteConfig
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.training import ActorConfig, CriticConfig, LoraConfig, MegatronConfig, ModelConfig


@dataclass
class RewardConfig:
    """How samples are scored; see docs/rewards.md. Scorers run in processes of their own beside each engine, but for
    those that declare to be cheap, to which `processes` and `timeout` do not apply."""

    function: Optional[str] = key(
        None,
        "A scorer for every row: a registered name, `judge` (section `judge`), or `module:function`. Unset: chosen by each row's `data_source`.",
    )
    functions: dict[str, float] = key(
        {},
        "Several scorers for every row, named as in `reward.function`, each with its weight in the sum that is the reward, e.g. {gsm8k: 1.0, 'my_module:brevity': 0.1}. Instead of `reward.function`.",
    )
    processes: int = key(
        4, "Processes that score, beside each engine; and as many again for scorers that are async.", at_least=1
    )
    concurrent: int = key(64, "Samples that an async scorer has under way at a time, in each process.", at_least=1)
    timeout: float = key(
        10.0,
        "Seconds that a scorer may take for one sample, waiting not counted. A process that takes longer is killed and replaced.",
        above=0,
    )
    memory_mb: Optional[int] = key(
        None,
        "MiB of memory of its own that a process which scores may have, and each that it starts; past it, allocating fails (RLIMIT_DATA). Unset: no limit.",
        at_least=1,
    )
    retries: int = key(
        1,
        "Further attempts where a scorer raises, returns no finite number, takes too long or dies. A sample that fails in all of them has no reward: its group is left out, another is sampled in its place, and both are counted.",
        at_least=0,
    )
    max_failed_share: float = key(
        0.5,
        "Stop the run where more than this share of the last groups (a step's, at least 8) could not be scored; of an evaluation, of its problems.",
        at_least=0,
        at_most=1,
    )
    remote: RemoteConfig = key(RemoteConfig, "")


@dataclass
class RolloutConfig:
    """Sampling, and the engines that do it."""

    engine: str = key("vllm", "Rollout engine: `vllm`, or `sglang`, on accelerators alone.")
    engines: int = key(1, "Engines, each a replica of the policy.", at_least=1)
    tensor_parallel: int = key(1, "Tensor-parallel size inside an engine.", at_least=1)
    data_parallel: int = key(
        1,
        "Engines of a group, so many consecutive ones of `rollout.engines`, over all of which the experts of an MoE model are "
        "spread (DP). Each has the rest of the model, requests and devices of its own; a group may span machines.",
        at_least=1,
    )
    expert_parallel: Optional[bool] = key(
        None,
        "Of an MoE model, give each device whole experts, those of a layer spread over all devices of an engine, or of a "
        "group (EP), instead of a part of each. Unset: in groups alone (`rollout.data_parallel`).",
    )
    dtype: Optional[Literal["float32", "bfloat16", "float16"]] = key(
        None, "The engine's data type. Unset: `model.dtype`."
    )
    samples_per_prompt: int = key(8, "Samples of each prompt: the group.", at_least=1)
    max_response_length: int = key(1024, "Longest response, in tokens.", at_least=1)
    temperature: float = key(
        1.0, "Sampling temperature; the trainer's log-probs are taken at the same temperature.", above=0
    )
    top_p: float = key(1.0, "Nucleus sampling; 1 samples the whole distribution.", above=0, at_most=1)
    top_k: int = key(-1, "Top-k sampling; -1 samples the whole distribution.", at_least=-1)
    seeded: Literal["auto", True, False] = key(
        "auto",
        "Give each sample a random generator with a seed of its own, so that it does not depend on the batch that computes it, and a repeated or resumed run samples the same. Costs a Python loop over requests in every decode step. false: an engine draws all samples of a weight version from one generator. auto: true on CPUs and with `train.deterministic`, else false. Evaluation samples are always seeded in vLLM.",
    )
    max_staleness: int = key(
        0,
        "Versions that a sample may lag behind the policy it trains. 0: synchronous. 1: one-step-off, engines sample the next batch while the actor learns.",
        at_least=0,
    )
    admission: Literal["wave", "continuous"] = key(
        "wave",
        "When replacements of filtered groups start: all at once when the running ones are done (with seeded samples repeatable to the last bit; of engines in groups, up to rounding), or each at once (busier engines).",
    )
    engine_args: dict[str, Any] = key(
        {}, "Further arguments of the engine, under the engine's own names, e.g. {max_num_seqs: 256}."
    )
    timeout: float = key(
        3600.0,
        "Seconds in which no group finishes although some are under way, in training or evaluation: the run then fails, naming them.",
        above=0,
    )
    start_timeout: float = key(1800.0, "Seconds an engine may take to load, to go to sleep or to wake.", above=0)

    @property
    def spreads_experts(self) -> bool:
        """Whether each device has whole experts."""
        return self.data_parallel > 1 if self.expert_parallel is None else self.expert_parallel


@dataclass
class TeacherConfig:
    """The teacher of on-policy distillation (`algorithm.reference: teacher`): a fixed model that reads the policy's tokens, in engines on devices of its own."""

    path: Optional[str] = key(None, "Hugging Face directory of the teacher. Its tokenizer must be the policy's.")
    engine: str = key("vllm", "Engine.")
    engines: int = key(1, "Engines, each a replica of the teacher.", at_least=1)
    tensor_parallel: int = key(1, "Tensor-parallel size inside an engine.", at_least=1)
    dtype: Optional[Literal["float32", "bfloat16", "float16"]] = key(None, "Data type. Unset: `model.dtype`.")
    engine_args: dict[str, Any] = key({}, "Further arguments of the engine, as `rollout.engine_args`.")
    timeout: float = key(1800.0, "Seconds that an engine may take to read a step's samples.", above=0)


@dataclass
class EvaluationConfig:
    """Evaluation on `data.eval_files`. RL samples answers and scores them. SFT and DPO (`train.source`) compute the loss,
    and refuse the keys that say how to sample: samples, ks, temperature, top_p, greedy."""

    every: int = key(0, "Evaluate every so many steps; 0: never in between.", at_least=0)
    at_start: bool = key(False, "Evaluate before the first step.")
    at_end: bool = key(False, "Evaluate after the last step.")
    samples: int = key(1, "Samples a problem (n): pass@1 is their mean, pass@k and maj@k are over n.", at_least=1)
    ks: list[int] = key([1], "The k of pass@k and maj@k, each at most `evaluation.samples`.")
    temperature: float = key(1.0, "Sampling temperature.", at_least=0)
    top_p: float = key(1.0, "Nucleus sampling.", above=0, at_most=1)
    greedy: bool = key(False, "Also one greedy answer a problem.")
    limit: Optional[int] = key(None, "Only the first so many rows.", at_least=1)


@dataclass
class TrainConfig:
    """The run."""

    source: Literal["rollout", "sft", "preferences"] = key(
        "rollout",
        "Where samples come from: engines (RL), the data set's own answers (SFT), or its pairs of a chosen and a rejected answer (DPO).",
    )
    steps: int = key(1, "Controller steps.", at_least=1)
    seed: int = key(0, "Seed of everything random.", at_least=0)
    deterministic: bool = key(
        False,
        "Trainers compute with kernels whose sums have a fixed order alone (torch.use_deterministic_algorithms, Megatron's deterministic_mode, and what the device's libraries read in the environment), so that the same batch gives the same update to the last bit in the same layout. Slower on devices; an operation that has no such kernel is an error. Engines of vLLM then run in its batch-invariant mode where the device has it: docs/numerics.md says what that covers.",
    )
    save_every: int = key(
        0, "Checkpoint every so many steps; 0: only at the end where `train.save_at_end`.", at_least=0
    )
    save_at_end: bool = key(True, "Checkpoint after the last step.")
    export_at_end: bool = key(
        False,
        "Also write the trained weights as a Hugging Face model to the run's `hf/`, read back and compared; with adapters the merged weights, and the adapters in PEFT's format to `hf_adapter/`.",
    )
    save_in_background: bool = key(
        False,
        "Go on training while a checkpoint is written: the loop waits only until the trainers have copied their part to host memory, of which that takes as much as the checkpoint is large. The next save, and the end of the run, wait for it.",
    )
    keep_checkpoints: int = key(2, "Newest checkpoints kept; older ones are deleted.", at_least=1)
    keep_every: int = key(
        0, "Checkpoints of every so many steps are kept for good, beside the newest; 0: none are.", at_least=0
    )
    verify_checkpoints: Literal["checksums", "sizes"] = key(
        "checksums",
        "What a resume holds a checkpoint to before anything starts: every byte (it is read once, some GB/s), or the presence and sizes of its files.",
    )
    stop_after_skipped: int = key(
        5,
        "Stop the run after so many steps in a row in which every update was skipped, the actor's or the critic's: gradient norms were not finite, or dynamic sampling found no group. Until then no new checkpoint takes an older one's place. 0: never.",
        at_least=0,
    )
    resume: str = key(
        "never",
        "`never`, `auto` (newest whole checkpoint of the run's directory, if there is one; a damaged one is passed over, and said) or a checkpoint's path. The layout may be another one than it was written in.",
    )


@dataclass
class ClusterConfig:
    """Machines and processes."""

    device: DeviceName = key("auto", f"Accelerator. auto: {', else '.join(kind.name for kind in KINDS)}.")
    transport: Literal["auto", "ray", "torchrun"] = key(
        "auto", "How worker processes are reached. auto: torchrun when started by it, else Ray."
    )
    trainers: int = key(1, "Trainer processes, one a device. Under torchrun: --nproc-per-node.", at_least=1)
    device_peak_tflops: Optional[float] = key(
        None,
        "Dense bf16 peak of a trainer's device in TFLOP/s, which `perf/mfu` is a share of. Unset: known by the device's name; of an unknown one there is no MFU.",
        above=0,
    )
    placement: Literal["colocated", "disaggregated"] = key(
        "colocated", "Engines on the trainers' devices in turn with them, or on devices of their own."
    )
    ray_address: Optional[str] = key(
        None,
        "Ray cluster to join (`auto` or host:port). Unset: RAY_ADDRESS if set, else a private one on this machine.",
    )
    threads: int = key(1, "CPU threads of each process (OMP_NUM_THREADS).", at_least=1)
    timeout: float = key(1800.0, "Seconds until a collective of the trainers that does not move is given up.", above=0)
    environment: EnvironmentConfig = key(EnvironmentConfig, "")


@dataclass
class ExchangeConfig:
    """Weights from the trainer to the engines."""

    route: Literal["export", "planned", "auto"] = key(
        "auto",
        "auto: planned where recipe, model and engines allow it, else export; a notice at the start says which, and why. "
        "planned: every trainer rank sends the slices that engine ranks need, once (vLLM alone, and no adapters). export: "
        "mbridge gathers the model, rank 0 sends all of it to every engine rank.",
    )
    check_every: int = key(
        0,
        "With planned slices, and with adapters alone: the first update, and every so many after it, is held to mbridge's "
        "export, tensor by tensor; 0: the first one alone.",
        at_least=0,
    )
    adapters: Literal["auto", "only", "merged"] = key(
        "auto",
        "With `lora.rank`. only: engines get the model's weights once and then adapters alone, which they apply beside them. "
        "merged: whole weights every time, which contain what adapters add. auto: adapters alone where the engines can hold "
        "them, else merged; a notice at the start says which, and why.",
    )
    transport: Literal["auto", "shared_memory", "ipc", "collective", "device", "files"] = key(
        "auto",
        "auto: shared memory for engines on the sending trainer's host, gloo for others; collective: gloo for all. ipc: as auto, "
        "but planned slices stay in the trainers' device memory, which engines of the host map. device: "
        "planned slices from a device's memory to another's, over the collective library of these devices; for disaggregated engines. files: whole tensors, as "
        "safetensors in `directory`, where the last two versions can be looked at; slow, and export alone.",
    )
    directory: Optional[str] = key(
        None,
        "With transport files: where they are, in a folder of the run's name, on a file system that trainers and engines "
        "share. Unset: `exchange` in the run's directory.",
    )
    bucket_mb: int = key(
        64,
        "Size of a bucket in MiB; a larger tensor has a bucket of its own. With planned slices a rank holds four at most, and "
        "tensors are cut.",
        at_least=1,
    )
    timeout: float = key(
        600.0, "Seconds until a silent peer fails the update, or the connection that it needs.", above=0
    )
    silence: float = key(
        8.0,
        "With planned slices: seconds without a sign of life, in an update, after which a rank is taken for stopped, or its "
        "machine or network for gone. Each rank gives one a second, however busy it is; raise it where machines swap or are "
        "paused. Below `exchange.timeout`.",
        at_least=3,
    )


@dataclass
class Recipe:
    """A whole recipe. A YAML file holds differences from these defaults; `base:` names parents."""

    name: str = key("run", "Name of the run; its directory is `runs_dir`/`name`.")
    runs_dir: str = key("runs", "Where run directories are made.")
    model: ModelConfig = key(ModelConfig, "")
    data: DataConfig = key(DataConfig, "")
    reward: RewardConfig = key(RewardConfig, "")
    rollout: RolloutConfig = key(RolloutConfig, "")
    agent: AgentConfig = key(AgentConfig, "")
    sandbox: SandboxConfig = key(SandboxConfig, "")
    teacher: TeacherConfig = key(TeacherConfig, "")
    judge: JudgeConfig = key(JudgeConfig, "")
    algorithm: AlgorithmConfig = key(AlgorithmConfig, "")
    actor: ActorConfig = key(ActorConfig, "")
    lora: LoraConfig = key(LoraConfig, "")
    critic: CriticConfig = key(CriticConfig, "")
    megatron: MegatronConfig = key(MegatronConfig, "")
    train: TrainConfig = key(TrainConfig, "")
    evaluation: EvaluationConfig = key(EvaluationConfig, "")
    cluster: ClusterConfig = key(ClusterConfig, "")
    exchange: ExchangeConfig = key(ExchangeConfig, "")
    observe: ObserveConfig = key(ObserveConfig, "")
