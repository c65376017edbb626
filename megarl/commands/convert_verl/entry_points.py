"""Training modules of verl and of its recipes: names, ways of sampling, and defaults of their configuration files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["synchronous", "one_step_off", "fully_async", "partial_rollout", "async_flow", "distillation", "sft"]
"""verl's trainers: engines on the trainers' devices; engines one step ahead; engines that sample without pause; engines on the
trainers' devices that sample ahead; recipe/async_flow; recipe/gkd; supervised."""

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class EntryPoint:
    """A training module.

    module: its name; with dots, the end of its dotted name or of its path. defaults: values of its configuration file where
    verl's main_ppo has others. settings: of the recipe, which its trainer fixes. notes: differences of the recipe from it.
    """

    module: str
    kind: Kind = "synchronous"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


ENTRY_POINTS = [
    EntryPoint("one_step_off_policy.main_ppo", "one_step_off", {
        "algorithm.rollout_correction.bypass_mode": True, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 8,
    }),
    EntryPoint("partial_rollout.main_ppo", "partial_rollout"),
    EntryPoint("main_ppo"),
    EntryPoint("main_ppo_sync"),
    EntryPoint("main_ppo_split", notes=(
        "verl updates actor and critic at the same time, each on half of the devices; here one after the other, on all of them",
    )),
    EntryPoint("main_dapo"),
    EntryPoint("main_dynamo", defaults={f"{_R}.name": "dynamo"}, notes=(
        "Dynamo routes requests to vLLM by their cached prefixes; here a group goes to the engine with the fewest groups",
    )),
    EntryPoint("gvpo_main_ppo", defaults={"algorithm.adv_estimator": "grpo", f"{_A}.gvpo_beta": 0.1}),
    EntryPoint("main_sppo", defaults={
        f"{_A}.optim.lr_warmup_steps": 15, f"{_A}.sppo_eta": 1.0, "algorithm.sppo_eta": 1.0, f"{_R}.name": "sglang",
        f"{_R}.val_kwargs.n": 2,
    }, settings={"algorithm.advantage": "soft_mean", "algorithm.loss": "sppo"}),
    EntryPoint("main_entropy", defaults={
        "custom_reward_function.path": "pkg://recipe.entropy.reward_score",
        "custom_reward_function.name": "_default_compute_score",
    }),
    EntryPoint("main_rep_exp", defaults={
        f"{_R}.val_kwargs.temperature": 1.0, f"{_R}.val_kwargs.n": 128, f"{_R}.val_kwargs.do_sample": True,
        "reward_model.elliptical.enable": True,
    }),
    EntryPoint("spo_main_ppo", defaults={
        f"{_R}.agent.agent_loop_config_path": "recipe/spo/config/spo_agent.yaml", "sampling_params.stop": "</code>",
    }, notes=("its loops sample until </code>, here in pieces of 256 tokens, of which those behind </code> are left out",)),
    EntryPoint("fully_async_main", "fully_async"),
    EntryPoint("reward_queue.main", "fully_async", {"data.train_batch_size": 0}),
    EntryPoint("main_gkd", "distillation"),
    EntryPoint("grpo_main", "async_flow", notes=(
        "old log-probs are of the weights before the step's updates; in verl's async_flow of the newest weights that its forward "
        "workers had when a sample arrived",
    )),
    EntryPoint("fsdp_sft_trainer", "sft"),
    EntryPoint("sft_trainer", "sft"),
    EntryPoint("sft_trainer_ray", "sft"),
]  # fmt: skip


def _pattern(module: str) -> str:
    return r"(?:^|[./])" + module.replace(".", "[./]") + r"(?:\.py)?$"


def entry_point_of(word: str) -> EntryPoint | None:
    """Return the entry point that a word of a command names, as a dotted module or a path; None for any other word."""
    return next((entry for entry in ENTRY_POINTS if re.search(_pattern(entry.module), word)), None)


NAMES = ", ".join(entry.module for entry in ENTRY_POINTS if "." not in entry.module)
"""Names of modules for messages."""
