"""Options of recipe/gkd: distillation from a teacher behind a server, with engines one or two steps ahead.

Source: recipe/gkd/megatron/ of verl-recipe.
"""

from __future__ import annotations

from typing import Any

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.option import Option, no_counterpart
from megarl.recipe.load import OPEN

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_LOSS, _SERVER = f"{_A}.distill_loss.name", "teacher.server_ip"
_UNREAD = "verl's gkd does not read it"
_SERVERS_TOP_K, _SERVERS_MEMORY = 256, 0.7  # of teacher/start_server.sh and teacher/vllm_engine.py

GKD = [
    Option("trainer.scheduler", "rollout.max_staleness", "one_step_off is 1, two_step_off is 2", derived=True),
    Option(_LOSS, "algorithm.loss", "kl is gkd with distill_rest=false", derived=True),
    Option(f"{_A}.micro_batch_size", "actor.max_tokens_per_micro_batch", "x (data.max_prompt_length + data.max_response_length)", derived=True),
    Option(f"{_A}.max_token_len", "actor.max_tokens_per_micro_batch", "with use_dynamic_bsz", derived=True),
    *(Option(f"{prefix}teacher.{name}", "teacher.path", "the teacher's engines start with the run", derived=True) for prefix in ("", "actor_rollout_ref.") for name in ("server_ip", "server_port")),
    *no_counterpart("teacher.engines is the number of engines", "teacher.*", "actor_rollout_ref.teacher.*"),
    *no_counterpart(_UNREAD, f"{_A}.ppo_*", f"{_A}.use_kl_loss", f"{_A}.entropy_coeff", f"{_A}.kl_loss_*", "algorithm.*", "trainer.test_freq", "trainer.val_before_train", "data.val_files"),
]  # fmt: skip
"""Options that precede the tables of other RL runs."""

GKD_DEFAULTS: dict[str, Any] = {
    "data.prompt_key": "question", f"{_A}.strategy": "megatron", f"{_A}.micro_batch_size": 2, f"{_A}.max_token_len": 1024,
    f"{_A}.optim.lr": 1e-6, _LOSS: "kl", f"{_R}.tensor_model_parallel_size": 1, f"{_R}.max_num_seqs": 1024,
    f"{_R}.temperature": 1.0, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 4, "trainer.n_gpus_per_node": 4,
    "trainer.scheduler": "one_step_off", "trainer.val_before_train": False,
}  # fmt: skip
"""Defaults of config/on_policy_distill_trainer.yaml."""


def translate_gkd(conversion: Conversion) -> None:
    """Set loss, teacher, micro batches and updates. Losses other than kl, and another temperature than 1, are refused."""
    settings, get = conversion.settings, conversion.get
    if get(_LOSS) != "kl":
        conversion.leave_out(_LOSS, "megarl has verl's kl", to="algorithm.distill_beta", changes=True)
    if get(f"{_R}.temperature") != 1:
        reason = "verl distills the distribution at temperature 1"
        conversion.leave_out(f"{_R}.temperature", reason, to="rollout.temperature", changes=True)
    conversion.drop("algorithm.")
    settings |= {
        "algorithm.advantage": "none",
        "algorithm.loss": "gkd",
        "algorithm.reference": "teacher",
        "algorithm.distill_top_k": _SERVERS_TOP_K,
        "algorithm.distill_rest": False,
        "algorithm.aggregation": "token_mean",
        "reward.function": "unscored",
        "actor.mini_batches": 1,
        "teacher.path": OPEN,
        "teacher.engine_args.gpu_memory_utilization": _SERVERS_MEMORY,
    }
    context_parallel = int(settings.get("megatron.context_parallel", 1))
    longest = settings["data.max_prompt_length"] + settings["rollout.max_response_length"]
    tokens = -(-conversion.number(f"{_A}.micro_batch_size") * longest // context_parallel)
    dynamic = conversion.is_on(f"{_A}.use_dynamic_bsz")
    settings["actor.max_tokens_per_micro_batch"] = conversion.number(f"{_A}.max_token_len") if dynamic else tokens
    conversion.open[_SERVER] = "the model that the teacher's server loads"
    conversion.origins["teacher.path"] = _SERVER
    conversion.notes += [
        f"algorithm.distill_top_k={_SERVERS_TOP_K}: the default of the teacher's server (--n-logprobs); teacher.engines=1, of one "
        "device, as teacher/start_server.sh starts",
        "the loss is the mean over the tokens of a step; verl's gkd averages over the tokens of each micro batch, and also "
        "distills the token after the last one. Its gradient takes the probability of the teacher's top tokens as 1 in total",
    ]
