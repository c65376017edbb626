"""The root `Recipe`, and its sections reward, rollout, evaluation, train and cluster.

Sections in other files: model, megatron, lora, actor and critic in trainers.py; teacher in judge.py; algorithm, data, agent, judge,
observe, sandbox and weight_sync in a file of that name; `cluster.environment` in environment.py; `reward.remote` in remote.py.

A field is declared with ``key(default, doc)``: its first argument is the default, and the bounds follow the text. Defaults in
other places:

- `algorithm.loss` sets defaults of some keys of `algorithm` (`apply_loss_defaults` in megarl/preflight/load.py);
- `rollout.quantization` sets the default of `algorithm.correction.weights` (`apply_quantization` there);
- ``None`` and ``auto`` often stand for a value that other keys and the device determine (derived/);
- a device sets defaults of `megatron.ddp` (`DeviceKind.ddp`);
- the limits of `sandbox` come from `megarl.sandbox.base.Limits`.

``python -m docs.generate.recipes`` writes the text to ``docs/recipes.md``, so it addresses the author of a recipe.
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
from megarl.recipe.judge import JUDGE, JudgeConfig, TeacherConfig
from megarl.recipe.key import MOST_PROCESSES, key
from megarl.recipe.observe import ObserveConfig
from megarl.recipe.remote import SERVICES, RemoteConfig
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.trainers import ActorConfig, CriticConfig, LoraConfig, MegatronConfig, ModelConfig
from megarl.recipe.weight_sync import WeightSyncConfig


@dataclass
class RewardConfig:
    """Scoring of samples; see docs/rewards.md. Scorers run in separate processes; `processes` and `timeout` do not
    apply to scorers registered with `in_process=True`."""

    function: Optional[str] = key(
        None,
        "Scorer for all rows: a registered name, `judge` (section `judge`), `reward_model` (section `remote`), or your function: `module:function` or `path/file.py:function`. A function with a parameter `solution_str` is called as verl calls it. Unset: each row's `data_source` selects the scorer.",
    )
    arguments: dict[str, Any] = key(
        {},
        "Keyword arguments of your function in `reward.function`, or of the only one in `reward.functions`, e.g. {strict: true}.",
    )
    functions: dict[str, float] = key(
        {},
        "Several scorers for all rows, each with its weight, e.g. {gsm8k: 1.0, 'my_module:brevity': 0.1}. The reward is the weighted sum. Names as in `reward.function`. Instead of `reward.function`.",
    )
    processes: int = key(
        4, "Scorer processes per engine. Async scorers run in the same number of additional processes.", at_least=1
    )
    concurrent: int = key(64, "Concurrent samples of an async scorer, per process.", at_least=1)
    timeout: float = key(
        10.0,
        "Time limit of a scorer for one sample, in seconds, without queueing. A process that exceeds it is killed and replaced. The scorers `math` and `geometry3k` then count the answer as wrong; others have failed (`reward.retries`). `code` and `code_all` share 80 % of it among the tests of a response.",
        above=0,
    )
    memory_mb: Optional[int] = key(
        None,
        "Limit of the private memory of each scorer process, and of each process that it starts, in MiB (RLIMIT_DATA). Allocations past the limit fail. Unset: no limit.",
        at_least=1,
    )
    retries: int = key(
        1,
        "Further attempts if a scorer raises, returns no finite number, exceeds the time limit or dies. If all attempts fail, the sample has no reward. Its group is left out and replaced by a new group, and both are counted.",
        at_least=0,
    )
    max_failed_share: float = key(
        0.5,
        "Stop the run if scoring failed for more than this share of the most recent groups (as many as a step has, at least 8), or of an evaluation's problems.",
        at_least=0,
        at_most=1,
    )
    remote: RemoteConfig = key(RemoteConfig, "")

    @property
    def own_functions(self) -> list[str]:
        """Names of functions that are not megarl's."""
        names = [self.function or "", *self.functions]
        return [name for name in names if ":" in name and not name.startswith("megarl.")]

    @property
    def uses_judge(self) -> bool:
        """True if the judge is a term of the reward."""
        return JUDGE in (self.function, *self.functions)

    @property
    def services(self) -> list[str]:
        """Names of the scorers among the reward's terms that ask the service of the section `reward.remote`."""
        return [name for name in SERVICES if name in (self.function, *self.functions)]


@dataclass
class RolloutConfig:
    """Sampling, and the engines that sample."""

    engine: str = key("vllm", "Rollout engine: `vllm`, or `sglang` (accelerators only).")
    engines: int = key(1, "Number of engines. Each is a replica of the policy.", at_least=1, at_most=MOST_PROCESSES)
    min_engines: Optional[int] = key(
        None,
        "Fewest engines with which the run goes on. If an engine dies and this many are left, they sample its groups again from the start, and a new process on its devices takes part from the next update on. After a death during an update all engines restart, and the update is repeated. `megarl engines` then also changes the number of engines while the run goes on. Needs engines on separate devices. Unset: each death ends the run (`train.restarts` starts it again).",
        at_least=1,
    )
    tensor_parallel: int = key(1, "Tensor-parallel size within an engine.", at_least=1)
    data_parallel: int = key(
        1,
        "Engines per group (DP). The experts of an MoE model are spread over the engines of a group; each engine has a copy of the other weights, and separate requests and devices. A group is this many consecutive engines of `rollout.engines` and may span machines.",
        at_least=1,
    )
    expert_parallel: Optional[bool] = key(
        None,
        "MoE: place whole experts on each device, spread over all devices of an engine or a group (EP), instead of a part of every expert. Unset: true with engine groups (`rollout.data_parallel` > 1), else false.",
    )
    dtype: Optional[Literal["float32", "bfloat16", "float16"]] = key(
        None, "The engine's data type. Unset: `model.dtype`."
    )
    quantization: Optional[Literal["fp8"]] = key(
        None,
        "fp8: engines hold the matrices of their layers in FP8 (E4M3, a scale for each block of 128 x 128), and quantize the trainers' weights anew at each update; trainers are unchanged. Routers, embeddings, the output layer and norms stay in `dtype`. Sets `algorithm.correction.weights: token`, unless the recipe sets it. vLLM on CUDA. Unset: no quantization.",
    )
    samples_per_prompt: int = key(8, "Samples per prompt (group size).", at_least=1)
    max_response_length: int = key(1024, "Maximum length of a response, in tokens.", at_least=1)
    temperature: float = key(
        1.0, "Sampling temperature. The trainer computes log-probs at the same temperature.", above=0
    )
    top_p: float = key(1.0, "Nucleus sampling. 1: the whole distribution.", above=0, at_most=1)
    top_k: int = key(-1, "Top-k sampling. -1: the whole distribution.", at_least=-1)
    ignore_eos: bool = key(
        False,
        "Every response, of evaluation too, gets `max_response_length` tokens: end-of-text tokens do not end it. For measurements of speed. Refused with tools: end-of-text tokens end the policy's turns.",
    )
    seeded: Literal["auto", True, False] = key(
        "auto",
        "Draw each sample with a separate random generator and seed. A sample then does not depend on its batch, and a repeated or resumed run draws the same samples. Costs a Python loop over requests in every decode step, except in vLLM's Model Runner V2 (its default with CUDA); in SGLang, the deterministic mode of the whole engine. false: an engine draws all samples (vLLM: of a weight version) from one generator. auto: true on CPUs and with `train.deterministic`, else false. Evaluation samples are always seeded in vLLM.",
    )
    max_staleness: float = key(
        0.0,
        "Weight versions that engines may sample ahead of the policy. 0: synchronous. 1: one-step-off; engines sample the next batch while the actor trains. A fraction lets that share of a further batch start. Colocated engines stop while trainers compute; their running requests continue afterwards. `window` adds to the largest lag of a sample, except with `at_update` drain.",
        at_least=0,
    )
    at_update: Literal["auto", "drain", "finish", "refresh", "keep"] = key(
        "auto",
        "How an update of the weights treats running requests. drain: they finish first, on all engines. finish: they finish first on each engine, which keeps the new weights in host memory until then. refresh: they continue with the new weights, and their KV cache is recomputed. keep: they continue with the new weights and the KV cache of the old ones. Each token has the log-prob of the weights that sampled it. auto: refresh with `max_staleness` above 0; drain otherwise, with `train.deterministic` or `admission: wave`, and where requests cannot continue (SGLang, `megatron.routing_replay: rollout`, pipeline parallel engines).",
    )
    refresh_after: Optional[int] = key(
        None,
        "With `at_update: keep`: at an update that would leave a running request with a KV cache of this many versions before, recompute the caches of the engine's running requests. Unset: never.",
        at_least=1,
    )
    window: float = key(
        0.3,
        "Number of groups that may enter a batch before an older, unfinished group, as a share of (`max_staleness` + 1) x `data.prompts_per_step`, rounded up to whole batches. The largest lag rises by these batches. 0: batches are in admission order, as always with drain.",
        at_least=0,
        at_most=1,
    )
    admission: Optional[Literal["wave", "continuous"]] = key(
        None,
        "When replacements of filtered groups start. wave: all together, after the running groups have finished; repeatable bit for bit with seeded samples (up to rounding with engine groups). continuous: each at once, which keeps engines busier. Unset: wave with drain (`at_update`), else continuous.",
    )
    engine_args: dict[str, Any] = key(
        {}, "Further arguments of the engine, under the engine's names, e.g. {max_num_seqs: 256}."
    )
    timeout: float = key(
        3600.0,
        "Seconds without a finished group, while groups are in progress, after which the run fails and names these groups. Applies to training and evaluation. Outages of services do not count.",
        above=0,
    )
    outage_timeout: float = key(
        1800.0,
        "Seconds for which samples wait for a service that is down: a reward service, a tool or an MCP server. No group is lost meanwhile. Then the run saves a checkpoint and ends with the cause.",
        above=0,
    )
    step_timeout: float = key(
        300.0,
        "With `min_engines`: seconds after which an engine counts as hung if one step (the tokens of one decode, or a part of a prefill) has not ended, or its process does not answer. It is killed and replaced like one that has died. The first step of a process has `start_timeout`, since it may compile; time asleep or in an update of the weights does not count. Set it above the longest step, and below `weight_sync.timeout`. 0: never; `timeout` then ends the run. Steps of SGLang are not seen: its `engine_args.watchdog_timeout` (300) limits them.",
        at_least=0,
    )
    start_timeout: float = key(1800.0, "Time limit for an engine to load, sleep or wake, in seconds.", above=0)

    @property
    def spreads_experts(self) -> bool:
        """True if each device has whole experts."""
        return self.data_parallel > 1 if self.expert_parallel is None else self.expert_parallel


@dataclass
class EvaluationConfig:
    """Evaluation on `data.eval_files`. RL samples answers and scores them. SFT and DPO (`train.source`) compute the
    loss, and reject the sampling keys: samples, ks, temperature, top_p, greedy."""

    every: int = key(0, "Interval between evaluations, in steps. 0: none during training.", at_least=0)
    at_start: bool = key(False, "Evaluate before the first step.")
    at_end: bool = key(False, "Evaluate after the last step.")
    samples: int = key(1, "Samples per problem (n). pass@1 is their mean; pass@k and maj@k are over n.", at_least=1)
    ks: list[int] = key([1], "Values of k for pass@k and maj@k, each at most `evaluation.samples`.")
    temperature: float = key(1.0, "Sampling temperature.", at_least=0)
    top_p: float = key(1.0, "Nucleus sampling.", above=0, at_most=1)
    greedy: bool = key(False, "Also sample a greedy answer per problem.")
    limit: Optional[int] = key(
        None, "Number of rows to evaluate, starting with the first. Unset: all rows.", at_least=1
    )


@dataclass
class TrainConfig:
    """The run: length, seed, checkpoints and resume."""

    source: Literal["rollout", "sft", "preferences"] = key(
        "rollout",
        "Source of the samples: engines (`rollout`, RL), the answers in the data set (`sft`), or its pairs of a chosen and a rejected answer (`preferences`, DPO).",
    )
    steps: int = key(1, "Number of controller steps.", at_least=1)
    epochs: Optional[float] = key(
        None,
        "Length of the run in passes over the training rows, instead of `train.steps`: epochs x rows / `data.prompts_per_step` steps, rounded up. The run records the steps. Of both keys the later layer counts (recipe over base, command line over recipe); both in one file are refused. Groups that dynamic sampling leaves out are drawn in addition.",
        above=0,
    )
    seed: int = key(0, "Seed of all random generators.", at_least=0)
    deterministic: bool = key(
        False,
        "Trainers use only kernels with a fixed order of summation, so the same batch in the same layout gives the same update bit for bit. Sets torch.use_deterministic_algorithms, Megatron's deterministic_mode, and the environment variables of the device's libraries. Slower on devices; an operation without such a kernel is an error. vLLM engines run in batch-invariant mode where the device supports it. docs/numerics.md describes the guarantee.",
    )
    save_every: int = key(
        0, "Interval between checkpoints, in steps. 0: only at the end, with `train.save_at_end`.", at_least=0
    )
    save_at_end: bool = key(True, "Write a checkpoint after the last step.")
    grace_seconds: float = key(
        90.0,
        "Seconds after SIGTERM in which the run ends its update, if one runs, saves a checkpoint and stops its processes; set it below the time after which the cluster manager kills the run. The end of this time, or a second SIGTERM, ends the run without that checkpoint; one that is being written by then is completed first. 0: end at once.",
        at_least=0,
    )
    export_at_end: bool = key(
        False,
        "Also write the trained weights as a Hugging Face model to `hf/` in the run's directory, then read them back and compare. With adapters, `hf/` has the merged weights and `hf_adapter/` the adapters in PEFT's format.",
    )
    save_in_background: bool = key(
        False,
        "Continue training while a checkpoint is written. The loop waits only until trainers have copied their part to host memory; the copies take as much memory as the checkpoint. The next save and the end of the run wait for the write.",
    )
    keep_checkpoints: int = key(2, "Number of newest checkpoints to keep. Older checkpoints are deleted.", at_least=1)
    keep_every: int = key(
        0, "Interval of checkpoints that are never deleted, in steps, in addition to the newest. 0: none.", at_least=0
    )
    verify_checkpoints: Literal["checksums", "sizes"] = key(
        "checksums",
        "Check of a checkpoint at a resume, before anything starts. checksums: read every byte once (some GB/s). sizes: presence and sizes of the files.",
    )
    stop_after_skipped: int = key(
        5,
        "Stop the run after this many consecutive steps in which every update of the actor or the critic was skipped, because gradient norms were not finite or spikes (`train.on_spike`), or dynamic sampling left no group. Until then no new checkpoint replaces an older one. 0: never stop.",
        at_least=0,
    )
    on_spike: Optional[Literal["warn", "skip", "rollback"]] = key(
        None,
        "Treatment of an update of the actor or the critic that is a spike: its gradient norm is above `spike_factor` x the median of the applied updates before it. warn: apply it, with a notice. skip: leave the weights unchanged, as after a gradient norm that is not finite, with a notice. rollback: skip it, and if there are `spikes_before_rollback` of them in the last `save_every` steps, go back to the weights of the newest checkpoint before them and leave out the batches since then. Needs `save_every`, and `keep_checkpoints` of at least 2. Not set: norms are not compared. docs/faults.md has examples, docs/recovery.md describes rollbacks.",
    )
    spikes_before_rollback: int = key(
        3,
        "With `on_spike: rollback`: number of spikes of actor and critic in the last `save_every` steps that cause a rollback. Fewer are skipped.",
        at_least=1,
    )
    rollbacks: int = key(
        3,
        "With `on_spike: rollback`: at most this many rollbacks to one checkpoint. The next one ends the run instead.",
        at_least=1,
    )
    spike_factor: float = key(
        10.0,
        "With `on_spike`: an update is a spike if its gradient norm is above this multiple of the median.",
        above=1,
    )
    spike_window: int = key(
        64,
        "With `on_spike`: number of newest applied updates in the median, separate for actor and critic. Updates are judged once 16 norms are there. Norms of 0 are left out. Checkpoints contain the norms, so a resumed run finds the same spikes.",
        at_least=16,
        at_most=10_000,
    )
    resume: str = key(
        "never",
        "`never`, `auto` (the newest complete checkpoint of the run's directory, if any; damaged ones are skipped with a warning; with `train.journal` also the steps after it) or a checkpoint's path. The layout may differ from the checkpoint's.",
    )
    restarts: int = key(
        0,
        "Start the run again from its newest checkpoint after one of its processes, the controller included, has died, hung or lost a connection, or a trainer or engine has raised an error: at most this many times without a new checkpoint (with `train.journal`: a new step) in between. The second restart in a row waits 10 s, each further one twice as long, up to 300 s. Errors of the controller, such as a full disk, end the run. Needs `train.save_every`; under torchrun use its --max-restarts. 0: the first failure ends the run.",
        at_least=0,
    )
    trainer_restarts: int = key(
        0,
        "Start the trainers again from the newest checkpoint after one of them has died, hung or raised an error, while the engines go on sampling: at most this many times without a new step in between. The batches since that checkpoint are kept in the run's `batches/`, and are trained again without sampling. Needs Ray and `train.save_every`. If a trainer dies during an update of the weights, the engines restart too, which needs `rollout.min_engines`. 0: such a failure ends the run (`train.restarts` starts all of it again).",
        at_least=0,
    )
    journal: bool = key(
        False,
        "Keep the controller's state after the newest steps in the run's `journal/`, and the batches since the newest checkpoint in `batches/`. A resume (`train.resume: auto`, `train.restarts`) then trains these batches again without sampling, and goes on after the last step. Costs disk space for the batches, and a write per step. Needs `train.save_every`. false: a resume goes on after the newest checkpoint, and samples the steps since then again.",
    )
    keep_workers: float = key(
        0.0,
        "Seconds for which trainers and engines outlive a controller that has died, while `train.restarts` starts another one. It takes the trainers that hold the weights after the last step of the journal, and with `rollout.at_update: drain` the engines, and goes on without loading anything; otherwise the trainers load the newest checkpoint, or all processes start again. Set it above the time from the death to the notice of the new controller. Needs Ray, `train.restarts`, `train.journal` and `cluster.placement: disaggregated`. 0: all processes end with the controller.",
        at_least=0,
    )
    replay: Optional[str] = key(
        None,
        "Directory of a run to repeat. Requests, updates of the weights and batches follow that run's `tape/`, so a run with `rollout.at_update` finish, refresh or keep gives the same numbers again, bitwise equal on a CPU in float32. `megarl replay` starts it. Not set: no replay.",
    )


@dataclass
class ClusterConfig:
    """Machines and processes."""

    device: DeviceName = key("auto", f"Accelerator. auto: {', else '.join(kind.name for kind in KINDS)}.")
    transport: Literal["auto", "ray", "torchrun"] = key(
        "auto", "Launcher of the worker processes. auto: torchrun if megarl was started by it, else Ray."
    )
    trainers: int = key(
        1, "Trainer processes, one per device. Under torchrun: --nproc-per-node.", at_least=1, at_most=MOST_PROCESSES
    )
    device_peak_tflops: Optional[float] = key(
        None,
        "Dense bf16 peak of a trainer's device in TFLOP/s, the reference of `perf/mfu`. Unset: looked up by the device's name; an unknown device has no MFU.",
        above=0,
    )
    placement: Literal["colocated", "disaggregated"] = key(
        "colocated",
        "colocated: engines and trainers time-share the same devices. disaggregated: engines have separate devices.",
    )
    ray_address: Optional[str] = key(
        None,
        "Ray cluster to join (`auto` or host:port). Unset: RAY_ADDRESS if set, else a private cluster on this machine.",
    )
    threads: int = key(1, "CPU threads per process (OMP_NUM_THREADS).", at_least=1)
    timeout: float = key(1800.0, "Seconds without progress after which a collective of the trainers fails.", above=0)
    stall: float = key(
        600.0,
        "Seconds after which a call to the trainers ends the run if no rank makes progress: no stack changes, no collective starts, no file is read or written, no compiler runs. The error names the ranks that the others wait for, and the lines that they execute. 0: never.",
        at_least=0,
    )
    elastic: bool = key(
        False,
        "A run that goes on (`train.restarts`, `train.resume`) and finds fewer devices than this recipe needs takes fewer data-parallel replicas and fewer engines, at least `rollout.min_engines`. Batch and loss stay the same. The next start with all devices has this recipe's layout again. Needs Ray. false: such a start is refused. docs/recovery.md has an example.",
    )
    elastic_wait: float = key(
        60.0,
        "With `elastic`: seconds for which a start waits for the devices of this recipe before it takes fewer. Machines may join meanwhile, and a run that has just ended gives its devices back. With launch/multinode.sh, MEGARL_JOIN_TIMEOUT comes before.",
        at_least=10,
    )
    environment: EnvironmentConfig = key(EnvironmentConfig, "")


@dataclass
class Recipe:
    """A complete recipe. A YAML file contains the differences from these defaults; `base:` names parents."""

    name: str = key("run", "Name of the run; its directory is `runs_dir`/`name`.")
    runs_dir: str = key("runs", "Parent directory of run directories.")
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
    weight_sync: WeightSyncConfig = key(WeightSyncConfig, "")
    observe: ObserveConfig = key(ObserveConfig, "")

    @property
    def asks_judge(self) -> bool:
        """True if the judge's engines run. A replay adds the recorded verdicts without them."""
        return self.reward.uses_judge and self.train.replay is None
