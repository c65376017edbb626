"""Reduce the settings that depend on size or machine to two CPU cores. All other settings are kept."""

from __future__ import annotations

import copy
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.algorithms.objective import runs_old_log_prob_pass
from megarl.commands.rehearse.changes import Changes, leaf_settings
from megarl.commands.rehearse.layout import processes_for, shrink_layout
from megarl.megatron.extra_settings import fields_of_megatron
from megarl.platform.kinds import kind_of
from megarl.recipe.observe import ObserveConfig, OtlpConfig
from megarl.recipe.schema import Recipe
from megarl.recipe.trainers import ActorConfig, CriticConfig, MegatronConfig

STEPS = 2
PROMPT, PROMPT_WITH_TOOLS, RESPONSE, DEMONSTRATION = 64, 256, 16, 192  # tokens
PROMPTS, SAMPLES = 4, 4
_ROWS = 4  # rows of an evaluation
_SEQUENCES = 16  # concurrent sequences of an engine
_BUFFER = 8  # tokens of the overlong penalty
_TURNS, _ANSWER = 3, 16  # turns with tools, and tokens of a tool's answer
_TIMEOUT = 600.0  # seconds
_KV_CACHE = 64 << 20
_ENGINE = "vllm"

_LR = 1e-3

_SIZE = "size"
_ROWS_FIT = "the generated rows fit"
_MOVES = "two steps must change the engines' weights"
_CORES = "processes"
_MACHINE = "this machine"
# Engine arguments that an engine on CPU does not have.
_ENGINE_ON_DEVICES = {
    "gpu_memory_utilization": "an engine on CPU uses kv_cache_memory_bytes",
    "additional_config": "settings of another build of the engine",
    "compilation_config": "it compiles kernels of the device",
    "cudagraph_capture_sizes": "a CPU has no graphs",
}
# Fields of Megatron's configuration that need kernels of a device.
_TE_KERNELS = "needs Transformer Engine's kernels"
_FUSED = {
    "moe_permute_fusion": "needs kernels of Transformer Engine or the platform",
    "moe_router_fusion": _TE_KERNELS,
    "apply_rope_fusion": _TE_KERNELS,
}


def shrink_settings(recipe: Recipe, processes: int | None, changes: Changes) -> Recipe:
    """Return a small copy of `recipe`. The paths of model and data are unchanged.

    processes: the largest number of trainers; None: chosen by the layout.
    """
    small = copy.deepcopy(recipe)
    _cluster(small, processes, changes)
    _lengths(small, changes)
    _batch(small, changes)
    _run(small, changes)
    for section in ("rollout", "teacher", "judge"):
        _engines(small, section, changes)
    return small


def note_kept(recipe: Recipe, small: Recipe, changes: Changes) -> None:
    """Record every setting of the recipe that the small copy has unchanged."""
    copied = dict(leaf_settings(small))
    recorded = {change.key for change in changes.items}
    for key, value in leaf_settings(recipe):
        if key in copied and copied[key] == value and key not in recorded:
            changes.kept(key, value)


def _cluster(small: Recipe, processes: int | None, changes: Changes) -> None:
    most = processes or processes_for(small.megatron)
    megatron, trainers = shrink_layout(small.megatron, small.cluster.trainers, most)
    _lay_out(small, "megatron", megatron, changes)
    changes.set(small.cluster, "cluster.trainers", trainers, _CORES)
    if uses_critic(small.algorithm):
        megatron, trainers = shrink_layout(small.critic.megatron, small.critic.trainers, most)
        _lay_out(small.critic, "critic.megatron", megatron, changes)
        changes.set(small.critic, "critic.trainers", trainers, _CORES)
    for key, value in (("device", "cpu"), ("threads", 1), ("ray_address", None), ("timeout", min(small.cluster.timeout, _TIMEOUT))):  # fmt: skip
        changes.set(small.cluster, f"cluster.{key}", value, _MACHINE)
    if small.cluster.transport == "torchrun":
        changes.set(small.cluster, "cluster.transport", "ray", "a rehearsal starts its processes itself")
    for key, offload in (("megatron.offload", small.megatron), ("critic.megatron.offload", small.critic.megatron)):
        if offload.offload:
            changes.left_out(key, True, "a CPU has no device memory to free")


def _lay_out(owner: Any, key: str, small: MegatronConfig, changes: Changes) -> None:
    megatron = owner.megatron
    for name, value in vars(small).items():
        changes.set(megatron, f"{key}.{name}", value, _CORES)
    supported = fields_of_megatron()
    for name in list(megatron.extra):
        unsupported = supported is not None and name not in supported
        reason = _FUSED.get(name) or ("the installed Megatron has no such field" if unsupported else "")
        if reason:
            changes.left_out(f"{key}.extra.{name}", megatron.extra.pop(name), reason)


def _lengths(small: Recipe, changes: Changes) -> None:
    data, rollout, agent = small.data, small.rollout, small.agent
    prompt = min(data.max_prompt_length, PROMPT_WITH_TOOLS if agent.uses_tools or agent.loop else PROMPT)
    changes.set(data, "data.max_prompt_length", prompt, _SIZE)
    turns = min(agent.max_turns, _TURNS) if agent.is_used else 1
    response = min(rollout.max_response_length, RESPONSE if turns == 1 else turns * (RESPONSE + _ANSWER))
    if small.train.source != "rollout":
        response = DEMONSTRATION
    changes.set(
        rollout, "rollout.max_response_length", response, _SIZE if small.train.source == "rollout" else _ROWS_FIT
    )
    if turns > 1:
        changes.set(agent, "agent.max_turns", turns, _SIZE)
        changes.set(agent, "agent.max_answer_tokens", min(agent.max_answer_tokens, _ANSWER), _SIZE)
    overlong = small.algorithm.overlong
    buffer = min(overlong.penalty_buffer, _BUFFER)
    changes.set(overlong, "algorithm.overlong.penalty_buffer", buffer, _SIZE)
    longest = prompt + response
    for key, owner in _learners(small):
        tokens = max(longest, min(owner.max_tokens_per_micro_batch, 2 * longest))
        changes.set(owner, f"{key}.max_tokens_per_micro_batch", tokens, _SIZE)


def _learners(small: Recipe) -> list[tuple[str, ActorConfig | CriticConfig]]:
    return [("actor", small.actor), *([("critic", small.critic)] if uses_critic(small.algorithm) else [])]


def _batch(small: Recipe, changes: Changes) -> None:
    for key, owner in _learners(small):
        changes.set(owner, f"{key}.mini_batches", min(owner.mini_batches, 2), _SIZE)
        # bfloat16 would round a smaller step away, and the engines' weights would not change.
        changes.set(owner.optimizer, f"{key}.optimizer.lr", max(owner.optimizer.lr, _LR), _MOVES)
        changes.set(owner.optimizer, f"{key}.optimizer.warmup_steps", 0, _MOVES)
    prompts = min(small.data.prompts_per_step, PROMPTS)
    changes.set(small.data, "data.prompts_per_step", prompts - (prompts == 3), _SIZE)  # mini batches divide it
    changes.set(small.data, "data.workers", None, _MACHINE)
    changes.set(small.data, "data.cache", None, "the rows are generated")
    if small.train.source == "rollout":
        changes.set(small.rollout, "rollout.min_engines", None, "a rehearsal reports the first failure")
        changes.set(small.rollout, "rollout.samples_per_prompt", min(small.rollout.samples_per_prompt, SAMPLES), _SIZE)
        if small.rollout.max_staleness:  # a share of a batch is at least a prompt
            staleness = max(small.rollout.max_staleness, 1 / small.data.prompts_per_step)
            changes.set(small.rollout, "rollout.max_staleness", staleness, _SIZE)


def _run(small: Recipe, changes: Changes) -> None:
    train, evaluation, observe = small.train, small.evaluation, small.observe
    changes.set(train, "train.steps", STEPS, _SIZE)
    changes.set(train, "train.epochs", None, _SIZE)
    changes.set(small.lora, "lora.path", None, _SIZE)
    changes.set(train, "train.save_every", 1, "the run must be resumable")
    for name in ("restarts", "trainer_restarts", "keep_workers"):
        changes.set(train, f"train.{name}", 0, "a rehearsal reports the first failure")
    changes.set(train, "train.keep_every", 0, _SIZE)
    changes.set(train, "train.resume", "never", "a new run")
    if small.critic.warmup_steps:
        changes.set(small.critic, "critic.warmup_steps", 1, _SIZE)
    changes.set(evaluation, "evaluation.every", min(evaluation.every, 1), _SIZE)
    if evaluation.every or evaluation.at_start or evaluation.at_end:
        changes.set(evaluation, "evaluation.limit", min(evaluation.limit or _ROWS, _ROWS), _SIZE)
    changes.set(evaluation, "evaluation.samples", min(evaluation.samples, 2), _SIZE)
    ks = sorted({min(k, evaluation.samples) for k in evaluation.ks})
    changes.set(evaluation, "evaluation.ks", ks, _SIZE)
    if observe.trackers:
        changes.left_out("observe.trackers", list(observe.trackers), "a rehearsal is not reported to trackers")
        observe.trackers = []
    if observe.alerts.url is not None:
        changes.left_out("observe.alerts.url", observe.alerts.url, "a rehearsal sends no alerts")
        observe.alerts.url = None
    if observe.otlp.url is not None:
        changes.left_out("observe.otlp.url", observe.otlp.url, "a rehearsal sends no spans")
        observe.otlp = OtlpConfig()
    changes.set(observe, "observe.console", "plain", _MACHINE)
    if observe.profile_steps:
        changes.set(observe, "observe.profile_steps", [STEPS], _SIZE)
        changes.set(observe, "observe.profile_ranks", observe.profile_ranks and [0], _CORES)
        changes.set(observe, "observe.profile_engines", observe.profile_engines and [0], _CORES)
    _plain_traces(small.observe, changes)


def _plain_traces(observe: ObserveConfig, changes: Changes) -> None:
    """Remove profiler settings that a CPU does not support."""
    can = kind_of("cpu").tracing
    contents = [content for content in observe.profile_contents if content in can.contents]
    changes.set(observe, "observe.profile_contents", contents, _MACHINE)
    for name in ("profile_level", "profile_metrics", "profile_export"):
        changes.set(observe, f"observe.{name}", "", _MACHINE)
    changes.set(observe, "observe.profile_mstx", False, _MACHINE)
    changes.set(observe, "observe.profile_analysis", True, _MACHINE)


def _engines(small: Recipe, section: str, changes: Changes) -> None:
    owner = getattr(small, section)
    group = min(2, getattr(owner, "data_parallel", 1))  # keep an engine group, with two engines
    changes.set(owner, f"{section}.engines", group, _CORES)
    if section == "rollout":
        changes.set(owner, f"{section}.data_parallel", group, _CORES)
        _routing_replay(small, changes)
        if small.rollout.quantization is not None:
            changes.left_out("rollout.quantization", small.rollout.quantization, "vLLM has its kernels for GPUs")
            small.rollout.quantization = None
    for source, teacher in getattr(owner, "by_source", {}).items():
        changes.set(teacher, f"teacher.by_source.{source}.engines", 1, _CORES)
    changes.set(owner, f"{section}.tensor_parallel", 1, _CORES)
    arguments = owner.engine_args
    if owner.engine != _ENGINE:
        for name in list(arguments):
            changes.left_out(f"{section}.engine_args.{name}", arguments.pop(name), f"an argument of {owner.engine}")
        changes.set(owner, f"{section}.engine", _ENGINE, "the engine in megarl's CPU packages")
    for name in [name for name in arguments if name in _ENGINE_ON_DEVICES]:
        changes.left_out(f"{section}.engine_args.{name}", arguments.pop(name), _ENGINE_ON_DEVICES[name])
    if arguments.get("enforce_eager") is False:
        changes.left_out(f"{section}.engine_args.enforce_eager", arguments.pop("enforce_eager"), "a CPU has no graphs")
    for name, most in (("max_num_seqs", _SEQUENCES), ("max_num_batched_tokens", 2 * (small.data.max_prompt_length + small.rollout.max_response_length)), ("kv_cache_memory_bytes", _KV_CACHE)):  # fmt: skip
        if name in arguments and arguments[name] > most:
            before, arguments[name] = arguments[name], most
            changes.note("reduced", f"{section}.engine_args.{name}", before, most, _SIZE)
    if small.train.source == "rollout" and section == "rollout":
        arguments.setdefault("kv_cache_memory_bytes", _KV_CACHE)
        arguments.setdefault("max_num_seqs", _SEQUENCES)


def _routing_replay(small: Recipe, changes: Changes) -> None:
    """Replay the trainers' choices of experts in place of the engine's, if the recipe has a pass that records them."""
    if small.megatron.routing_replay == "rollout":
        replay = "old_log_probs" if runs_old_log_prob_pass(small.algorithm) else "none"
        changes.set(
            small.megatron, "megatron.routing_replay", replay, "an engine on CPU does not return the experts of a token"
        )
