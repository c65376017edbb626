"""The recipe's settings that depend on size or machine, as two CPU cores can have them. All others stay as they are."""

from __future__ import annotations

import copy
from typing import Any

from megarl.algorithms.advantages import uses_critic
from megarl.commands.rehearse.changes import Changes, settings_of
from megarl.commands.rehearse.layout import processes_for, shrink_layout
from megarl.megatron.config_fields import fields_of_megatron
from megarl.platform.kinds import kind_of
from megarl.recipe.schema import Recipe
from megarl.recipe.training import ActorConfig, CriticConfig, MegatronConfig

STEPS = 2
PROMPT, PROMPT_WITH_TOOLS, RESPONSE, DEMONSTRATION = 64, 256, 16, 192  # tokens
PROMPTS, SAMPLES = 4, 4
_ROWS = 4  # that an evaluation reads
_SEQUENCES = 16  # that an engine computes at a time
_BUFFER = 8  # of the punishment for length
_TURNS, _ANSWER = 3, 16
_PATIENCE = 600.0  # seconds
_KV_CACHE = 64 << 20
_ENGINE = "vllm"

_LR = 1e-3

_SIZE = "size"
_ROWS_FIT = "the generated rows fit"
_MOVES = "so that two steps change the weights that engines are given"
_CORES = "processes"
_MACHINE = "this machine"
# Of an engine's arguments, those that a CPU's does not have.
_ENGINE_ON_DEVICES = {
    "gpu_memory_utilization": "a CPU's engine has kv_cache_memory_bytes",
    "additional_config": "settings of another build of the engine",
    "compilation_config": "kernels of the device are compiled there",
    "cudagraph_capture_sizes": "a CPU has no graphs",
}
# Fields of Megatron's configuration that want kernels of the device's own.
_FUSED = {"moe_permute_fusion": "Transformer Engine's, or the platform's own, kernels do it", "moe_router_fusion": "Transformer Engine's kernels do it", "apply_rope_fusion": "Transformer Engine's kernels do it"}  # fmt: skip


def shrink_settings(recipe: Recipe, processes: int | None, changes: Changes) -> Recipe:
    """The twin of `recipe`, but for its model's and data's paths. processes: trainers at most; None: as the layout needs."""
    twin = copy.deepcopy(recipe)
    _cluster(twin, processes, changes)
    _lengths(twin, changes)
    _batch(twin, changes)
    _run(twin, changes)
    for section in ("rollout", "teacher", "judge"):
        _engines(twin, section, changes)
    return twin


def note_kept(recipe: Recipe, twin: Recipe, changes: Changes) -> None:
    """Note every setting of the recipe that the twin has as well."""
    now = dict(settings_of(twin))
    named = {change.key for change in changes.found}
    for key, value in settings_of(recipe):
        if key in now and now[key] == value and key not in named:
            changes.kept(key, value)


def _cluster(twin: Recipe, processes: int | None, changes: Changes) -> None:
    most = processes or processes_for(twin.megatron)
    megatron, trainers = shrink_layout(twin.megatron, twin.cluster.trainers, most)
    _lay_out(twin, "megatron", megatron, changes)
    changes.set(twin.cluster, "cluster.trainers", trainers, _CORES)
    if uses_critic(twin.algorithm):
        megatron, trainers = shrink_layout(twin.critic.megatron, twin.critic.trainers, most)
        _lay_out(twin.critic, "critic.megatron", megatron, changes)
        changes.set(twin.critic, "critic.trainers", trainers, _CORES)
    for key, value in (("device", "cpu"), ("threads", 1), ("ray_address", None), ("timeout", min(twin.cluster.timeout, _PATIENCE))):  # fmt: skip
        changes.set(twin.cluster, f"cluster.{key}", value, _MACHINE)
    if twin.cluster.transport == "torchrun":
        changes.set(twin.cluster, "cluster.transport", "ray", "a rehearsal starts its processes itself")
    for key, offload in (("megatron.offload", twin.megatron), ("critic.megatron.offload", twin.critic.megatron)):
        if offload.offload:
            changes.left_out(key, True, "asked for, but a CPU has no memory of its own that it would free")


def _lay_out(owner: Any, key: str, small: MegatronConfig, changes: Changes) -> None:
    given = owner.megatron
    for name, value in vars(small).items():
        changes.set(given, f"{key}.{name}", value, _CORES)
    known = fields_of_megatron()
    for name in list(given.extra):
        foreign = known is not None and name not in known
        why = _FUSED.get(name) or ("the installed Megatron has no such field" if foreign else "")
        if why:
            changes.left_out(f"{key}.extra.{name}", given.extra.pop(name), why)


def _lengths(twin: Recipe, changes: Changes) -> None:
    data, rollout, agent = twin.data, twin.rollout, twin.agent
    tools = bool(agent.tools or agent.mcp)
    prompt = min(data.max_prompt_length, PROMPT_WITH_TOOLS if tools else PROMPT)
    changes.set(data, "data.max_prompt_length", prompt, _SIZE)
    turns = min(agent.max_turns, _TURNS) if tools else 1
    response = min(rollout.max_response_length, RESPONSE if turns == 1 else turns * (RESPONSE + _ANSWER))
    if twin.train.source != "rollout":
        response = DEMONSTRATION
    changes.set(
        rollout, "rollout.max_response_length", response, _SIZE if twin.train.source == "rollout" else _ROWS_FIT
    )
    if turns > 1:
        changes.set(agent, "agent.max_turns", turns, _SIZE)
        changes.set(agent, "agent.max_answer_tokens", min(agent.max_answer_tokens, _ANSWER), _SIZE)
    overlong = twin.algorithm.overlong
    buffer = min(overlong.penalty_buffer, _BUFFER)
    changes.set(overlong, "algorithm.overlong.penalty_buffer", buffer, _SIZE)
    longest = prompt + response
    for key, owner in _learners(twin):
        tokens = max(longest, min(owner.max_tokens_per_micro_batch, 2 * longest))
        changes.set(owner, f"{key}.max_tokens_per_micro_batch", tokens, _SIZE)


def _learners(twin: Recipe) -> list[tuple[str, ActorConfig | CriticConfig]]:
    return [("actor", twin.actor), *([("critic", twin.critic)] if uses_critic(twin.algorithm) else [])]


def _batch(twin: Recipe, changes: Changes) -> None:
    for key, owner in _learners(twin):
        changes.set(owner, f"{key}.mini_batches", min(owner.mini_batches, 2), _SIZE)
        # bfloat16 rounds a smaller step away, and engines would be given the weights that they have.
        changes.set(owner.optimizer, f"{key}.optimizer.lr", max(owner.optimizer.lr, _LR), _MOVES)
        changes.set(owner.optimizer, f"{key}.optimizer.warmup_steps", 0, _MOVES)
    prompts = min(twin.data.prompts_per_step, PROMPTS)
    changes.set(twin.data, "data.prompts_per_step", prompts - (prompts == 3), _SIZE)  # mini batches divide it
    changes.set(twin.data, "data.workers", None, _MACHINE)
    changes.set(twin.data, "data.cache", None, "the rows are made anew")
    if twin.train.source == "rollout":
        changes.set(twin.rollout, "rollout.samples_per_prompt", min(twin.rollout.samples_per_prompt, SAMPLES), _SIZE)


def _run(twin: Recipe, changes: Changes) -> None:
    train, evaluation, observe = twin.train, twin.evaluation, twin.observe
    changes.set(train, "train.steps", STEPS, _SIZE)
    changes.set(train, "train.save_every", 1, "so that the run can be resumed")
    changes.set(train, "train.keep_every", 0, _SIZE)
    changes.set(train, "train.resume", "never", "a new run")
    if twin.critic.warmup_steps:
        changes.set(twin.critic, "critic.warmup_steps", 1, _SIZE)
    changes.set(evaluation, "evaluation.every", min(evaluation.every, 1), _SIZE)
    if evaluation.every or evaluation.at_start or evaluation.at_end:
        changes.set(evaluation, "evaluation.limit", min(evaluation.limit or _ROWS, _ROWS), _SIZE)
    changes.set(evaluation, "evaluation.samples", min(evaluation.samples, 2), _SIZE)
    ks = sorted({min(k, evaluation.samples) for k in evaluation.ks})
    changes.set(evaluation, "evaluation.ks", ks, _SIZE)
    if observe.trackers:
        changes.left_out("observe.trackers", list(observe.trackers), "nobody wants to find this run there")
        observe.trackers = []
    changes.set(observe, "observe.console", "plain", _MACHINE)
    if observe.profile_steps:
        changes.set(observe, "observe.profile_steps", [STEPS], _SIZE)
        changes.set(observe, "observe.profile_ranks", observe.profile_ranks and [0], _CORES)
        changes.set(observe, "observe.profile_engines", observe.profile_engines and [0], _CORES)
    _plain_traces(twin, changes)


def _plain_traces(twin: Recipe, changes: Changes) -> None:
    """Leave out what a CPU's profiler does not record."""
    observe, can = twin.observe, kind_of("cpu").tracing
    contents = [content for content in observe.profile_contents if content in can.contents]
    changes.set(observe, "observe.profile_contents", contents, _MACHINE)
    for name in ("profile_level", "profile_metrics", "profile_export"):
        changes.set(observe, f"observe.{name}", "", _MACHINE)
    changes.set(observe, "observe.profile_mstx", False, _MACHINE)
    changes.set(observe, "observe.profile_analysis", True, _MACHINE)


def _engines(twin: Recipe, section: str, changes: Changes) -> None:
    owner = getattr(twin, section)
    together = min(2, getattr(owner, "data_parallel", 1))  # a group of two is one still
    changes.set(owner, f"{section}.engines", together, _CORES)
    if section == "rollout":
        changes.set(owner, f"{section}.data_parallel", together, _CORES)
    changes.set(owner, f"{section}.tensor_parallel", 1, _CORES)
    arguments = owner.engine_args
    if owner.engine != _ENGINE:
        for name in list(arguments):
            changes.left_out(f"{section}.engine_args.{name}", arguments.pop(name), f"an argument of {owner.engine}")
        changes.set(owner, f"{section}.engine", _ENGINE, "the engine that megarl's set of packages for CPUs has")
    for name in [name for name in arguments if name in _ENGINE_ON_DEVICES]:
        changes.left_out(f"{section}.engine_args.{name}", arguments.pop(name), _ENGINE_ON_DEVICES[name])
    for name, most in (("max_num_seqs", _SEQUENCES), ("max_num_batched_tokens", 2 * (twin.data.max_prompt_length + twin.rollout.max_response_length)), ("kv_cache_memory_bytes", _KV_CACHE)):  # fmt: skip
        if name in arguments and arguments[name] > most:
            given, arguments[name] = arguments[name], most
            changes.note("reduced", f"{section}.engine_args.{name}", given, most, _SIZE)
    if twin.train.source == "rollout" and section == "rollout":
        arguments.setdefault("kv_cache_memory_bytes", _KV_CACHE)
        arguments.setdefault("max_num_seqs", _SEQUENCES)
