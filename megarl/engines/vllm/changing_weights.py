"""Rules for engines of the policy, which receive changing weights from the trainers: caches on the device alone, and drafts of
speculative decoding with the weights of a checkpoint.

A draft proposes the next tokens, and the policy accepts or replaces them, so that samples have the policy's distribution
whatever the draft's weights (arXiv 2211.17192). Updates bring the policy alone: a draft keeps its weights, except for the
embedding and the output layer, which a layer for multi-token prediction shares with the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.engines import package_folder
from megarl.engines.base import EngineLimits, EngineSpec
from megarl.errors import RecipeError
from megarl.hf.families import has_tower
from megarl.recipe.library_fields import fields_of
from megarl.registry import nearest

_OUTSIDE_CACHES = ("kv_transfer_config", "kv_offloading_size")
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that guess from the tokens so far (vllm/config/speculative.py, `SpeculativeMethod`)."""
_PREDICTION = (
    "mtp"  # the only method whose draft vLLM loads by `draft_load_config`, and not with the policy's dummy weights
)
_METHODS = (_PREDICTION, *_WITHOUT_WEIGHTS)
_LAYERS_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # DeepSeek-V3, ERNIE 4.5 and GLM; Qwen3.5
_KEY = "speculative_config"


def check(engine_args: Mapping[str, Any], section: str) -> None:
    """Raise RecipeError for an argument that would make samples of engines of the policy differ from the trainers' policy."""
    for name in _OUTSIDE_CACHES:
        if engine_args.get(name):
            cause = "KV caches outside the device would survive updates of the weights, and be reused"
            raise RecipeError(f"{section}.engine_args.{name}", cause, "leave it out", value=engine_args[name])
    if engine_args.get(_KEY) is not None:
        _check_speculation(engine_args[_KEY], f"{section}.engine_args.{_KEY}")


def _check_speculation(speculation: Any, key: str) -> None:
    if not isinstance(speculation, Mapping):
        remedy = "write {method: mtp, num_speculative_tokens: 1}, or leave it out"
        raise RecipeError(key, "it must be a mapping", remedy, value=speculation)
    method, tokens = speculation.get("method"), speculation.get("num_speculative_tokens")
    if method not in _METHODS:
        cause = (
            "its draft would keep random weights, since trainers send the policy's alone, or megarl has not tested it"
        )
        raise RecipeError(f"{key}.method", cause, f"choose one of {', '.join(_METHODS)}", value=method)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        cause = "it must be the number of tokens that a draft proposes"
        raise RecipeError(f"{key}.num_speculative_tokens", cause, "set it to 1 or more", value=tokens)
    if speculation.get("rejection_sample_method", "standard") != "standard":
        cause = "samples would not have the policy's distribution, or it is not tested"
        value = speculation["rejection_sample_method"]
        raise RecipeError(f"{key}.rejection_sample_method", cause, "leave it out", value=value)
    if method == _PREDICTION and "model" in speculation:
        cause = "the layers for multi-token prediction are in model.path"
        raise RecipeError(f"{key}.model", cause, "leave it out", value=speculation["model"])
    folder = package_folder("vllm")
    file = folder / "config" / "speculative.py" if folder is not None else None
    names = fields_of(file, "SpeculativeConfig") if file is not None and file.is_file() else {}
    for name in [name for name in speculation if names and name not in names]:
        near = nearest(name, names)
        remedy = f"did you mean {near}?" if near else "leave it out"
        raise RecipeError(
            f"{key}.{name}", "vLLM's SpeculativeConfig has no such field", remedy, value=speculation[name]
        )
    if "draft_load_config" in speculation:
        cause = "megarl sets it, so that a draft has the weights of its checkpoint"
        raise RecipeError(f"{key}.draft_load_config", cause, "leave it out", value=speculation["draft_load_config"])


def check_drafts(spec: EngineSpec, device: str, config: Mapping[str, Any], limits: EngineLimits) -> None:
    """Raise RecipeError if an engine of `spec` on `device` cannot decode speculatively.

    `config`: the model's config.json. `limits`: of the engine.
    """
    speculation = spec.engine_args.get(_KEY)
    if not speculation:
        return
    key = f"{spec.recipe_section}.engine_args.{_KEY}"
    if speculation["method"] == _PREDICTION and not prediction_layers(config):
        cause = f"{spec.model_path} has no layers for multi-token prediction: its config.json sets no {' or '.join(_LAYERS_FIELDS)}"
        remedy = f"choose another method ({', '.join(_WITHOUT_WEIGHTS)}), or leave {_KEY} out"
        raise RecipeError(f"{key}.method", cause, remedy, value=_PREDICTION)
    problem = next((problem for problem, holds in _problems(spec, device, config).items() if holds), None)
    if problem is not None:
        raise RecipeError(key, problem, "leave it out", value=dict(speculation))
    if spec.seeded and speculation["method"] == "suffix":
        cause = "it proposes what other samples continued with, so that samples would not depend on their seeds alone"
        raise RecipeError(f"{key}.method", cause, "set rollout.seeded: false, or choose ngram", value="suffix")
    tokens = limits.sequences * (1 + speculation["num_speculative_tokens"])
    if spec.seeded and tokens > limits.tokens:
        cause = (
            f"{limits.sequences} sequences with {speculation['num_speculative_tokens']} proposed tokens each need {tokens} "
            f"tokens per step, and max_num_batched_tokens is {limits.tokens}: proposals would be cut, and samples would depend "
            "on the other requests of a step, not on their seeds alone"
        )
        name = f"{spec.recipe_section}.engine_args.max_num_seqs"
        remedy = f"set it to {limits.tokens // (1 + speculation['num_speculative_tokens'])} or less"
        raise RecipeError(name, cause, remedy, value=limits.sequences)


def _problems(spec: EngineSpec, device: str, config: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "vllm-ascend has its own checks of drafts, which were not compared with vLLM's": device == "npu",
        "vLLM's routed experts were not tested with it (megatron.routing_replay=rollout)": spec.return_routed_experts,
        "it was not tested with adapters (lora)": spec.adapters is not None,
        "it was not tested with rollout.quantization": spec.quantization is not None,
        "it was not tested with groups of engines (rollout.data_parallel)": spec.data_parallel > 1,
        "it was not tested with images": has_tower(dict(config)),
        "this version of vLLM gives the draft random weights, as it has no draft_load_config": not _loads_drafts(),
    }


def prediction_layers(config: Mapping[str, Any]) -> int:
    """Return the layers for multi-token prediction of a checkpoint with this config.json."""
    fields = {**config, **(config.get("text_config") or {})}
    return next((int(fields[name]) for name in _LAYERS_FIELDS if fields.get(name)), 0)


def _loads_drafts() -> bool:
    """Return whether vLLM loads the weights of a draft for a policy with dummy weights. Without vLLM here, the engine's start
    checks it."""
    folder = package_folder("vllm")
    if folder is None:
        return True
    readers = [folder / "config" / "speculative.py", folder / "v1" / "spec_decode" / "llm_base_proposer.py"]
    return all(file.is_file() and "draft_load_config" in file.read_text(encoding="utf-8") for file in readers)


def has_draft_weights(engine_args: Mapping[str, Any]) -> bool:
    """Return whether an engine with these arguments has a draft with weights, which no update brings."""
    return (engine_args.get(_KEY) or {}).get("method") == _PREDICTION


def speculation(spec: EngineSpec) -> dict[str, Any]:
    """Return vLLM's `speculative_config` of an engine of `spec`, as an argument; {} without one."""
    if not spec.engine_args.get(_KEY):
        return {}
    config = dict(spec.engine_args[_KEY])
    if has_draft_weights(spec.engine_args) and not spec.load_weights:
        config["draft_load_config"] = {"load_format": "auto"}
    return {_KEY: config}
