"""Model families that the trainer supports (`PROVEN`), what a new one needs, and refused settings of config.json. Pure functions.

A new family needs:

- its `model_type` in `PROVEN`, and a check here for each setting that Megatron or mbridge would ignore;
- its sizes in `hf/shape.py`, and its linears in `hf/linears.py`;
- layout rules, if it has any, in `megatron/layout.py`;
- fixes of its mbridge bridge in upstream_fixes.py, or in a separate file like qwen2_5_vl.py;
- for adapters: `FAMILIES` in `megatron/lora/targets.py`;
- engine arguments in `engines/vllm/args.py`, if vLLM's defaults do not fit;
- a tiny model in `commands/data/tiny_model.py` and `tiny_weights.py`;
- in the tests: a model in `tests/support/megatron_models.py`, and layouts in `tests/support/megatron_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.hf.config import text_fields

PROVEN = ("deepseek_v3", "glm4_moe", "llama", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe")
"""`model_type` of models for which tests compare log-probs and gradients with transformers."""

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_QUANTIZATION = ("quantization_config", "compression_config")


def check_model(hf_config: dict[str, Any]) -> None:
    """Refuse a model that Megatron or mbridge would compute differently from the engine, or not at all.

    `hf_config` is the model's config.json. Raises ValueError that names the unsupported field, the first of `model_faults`.
    """
    for fault in model_faults(hf_config):
        raise ValueError(fault)


def model_faults(hf_config: dict[str, Any]) -> Iterator[str]:
    """Yield every reason for which the trainer refuses a model. `hf_config`: the model's config.json."""
    kind, config = hf_config.get("model_type"), text_fields(hf_config)
    if kind is None:
        yield "The model's config.json has no model_type: transformers did not write it."
    elif kind not in PROVEN:
        yield (
            f"model.path holds a {kind!r} model. megarl trains {', '.join(PROVEN)} models, which are tested against "
            "transformers; mbridge may map others too, but no test shows that they are computed correctly."
        )
    yield from _weight_faults(config)
    if kind not in PROVEN:
        return
    yield from _rotary_faults(config)
    unsupported = _unsupported(kind, config)
    if kind in _MIXTURES:
        # With one expert per token, Megatron does not normalize its weight.
        unsupported.append((config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"))
        unsupported += _MIXTURES[kind](config)
    for present, setting in unsupported:
        if present:
            yield (
                f"The model's config.json asks for {setting}, which the trainer cannot do for {kind}: it would compute "
                "another model than the engine. Use a model without it."
            )


def rotary_scaling(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary scaling in config.json: `rope_parameters` since transformers 5, `rope_scaling` before."""
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    return {**scaling, "rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}


def yarn_fields(scaling: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's fields for YaRN.

    Without `mscale` and `mscale_all_dim`, transformers scales cosines and sines by the full factor's mscale and does not
    scale logits: 1 and 0 in Megatron's fields.
    """
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "mscale": scaling.get("mscale") or 1.0,
        "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
    }


def check_sizes(hf_config: dict[str, Any]) -> None:
    """Refuse a config.json without the sizes that every model has; later readers assume them. Raises ValueError."""
    for fault in size_faults(hf_config):
        raise ValueError(fault)


def size_faults(hf_config: dict[str, Any]) -> Iterator[str]:
    """Yield a reason for each size that every model has and config.json lacks."""
    config = text_fields(hf_config)
    for name in _SIZES:
        size = config.get(name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            state = "has no" if size is None else f"has {size!r} as its"
            yield f"The model's config.json {state} {name}, which must be a positive integer."


def _weight_faults(config: dict[str, Any]) -> Iterator[str]:
    for name in _QUANTIZATION:
        if method := config.get(name):
            how = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
            blocks = how == "fp8" and method.get("weight_block_size")
            remedy = (
                "Convert them first: python -m megarl convert-weights FOLDER --out FOLDER-BF16, and name that in the recipe"
                if blocks
                else f"Take the unquantized model, or convert it to bfloat16 and remove {name} from config.json"
            )
            yield (
                f"The model's weights are quantized ({name} in config.json: {how}); the trainer would read the numbers "
                f"without their scales. {remedy}."
            )


def _rotary_faults(config: dict[str, Any]) -> Iterator[str]:
    kind, model = rotary_scaling(config)["rope_type"], config["model_type"]
    supported = {"deepseek_v3": ("default", "yarn"), "qwen2_5_vl": ("default", "mrope")}.get(model, ("default",))
    if kind not in supported:
        yield (
            f"The model's config.json asks for rotary scaling {kind!r}, which mbridge does not carry over for "
            f"{model}: the trainer would compute other positions than the engine. Remove it (rope_parameters or "
            "rope_scaling) from config.json if the context length allows it."
        )


def _unsupported(kind: str, config: dict[str, Any]) -> list[tuple[bool, str]]:
    """Return (whether config.json has it, setting) for each setting that mbridge ignores for a model of `kind`.

    Absent fields have the defaults of transformers.
    """
    activation = config.get("hidden_act") or "silu"
    tied = kind in ("deepseek_v3", "glm4_moe") and config.get("tie_word_embeddings")
    biased = kind in ("deepseek_v3", "llama", "qwen3", "qwen3_moe") and config.get("attention_bias")
    return [
        (activation not in ("silu", "swish"), f"hidden_act: {activation}"),
        (bool(config.get("use_sliding_window")), "use_sliding_window: true"),
        (bool(config.get("attention_dropout")), "attention_dropout, which engines do not apply"),
        (bool(biased), "attention_bias: true"),
        (kind == "llama" and bool(config.get("mlp_bias")), "mlp_bias: true"),
        (bool(tied), "tie_word_embeddings: true"),
    ]


def _unsupported_qwen3_moe(config: dict[str, Any]) -> list[tuple[bool, str]]:
    return [
        (bool(config.get("mlp_only_layers")), "some dense layers (mlp_only_layers)"),
        (config.get("decoder_sparse_step", 1) != 1, "some dense layers (decoder_sparse_step)"),
    ]


def _unsupported_deepseek(config: dict[str, Any]) -> list[tuple[bool, str]]:
    """Return unsupported settings of DeepSeek-V3.

    `rms_norm_eps` other than 1e-6 is supported: transformers ignores it in the norms of the latents, but engines and
    Megatron apply it there.
    """
    scaling = rotary_scaling(config)
    chosen, groups = config.get("num_experts_per_tok") or 8, config.get("topk_group") or 1
    return [
        (not config.get("norm_topk_prob", True), "norm_topk_prob: false"),
        (not config.get("n_shared_experts", 1), "no shared experts (n_shared_experts)"),
        (
            (config.get("n_group") or 1) > 1 and chosen // groups != 2,
            "groups of experts chosen by the best two scores in each, where Megatron takes the best "
            f"num_experts_per_tok / topk_group = {chosen} / {groups} = {chosen / groups:g}",
        ),
        (not config.get("rope_interleave", True), "rope_interleave: false"),
        (scaling.get("attention_factor") is not None, "a rotary attention_factor"),
        (not scaling.get("truncate", True), "rotary scaling with truncate: false"),
        (bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")), "only one of mscale and mscale_all_dim"),
    ]


def _unsupported_glm(config: dict[str, Any]) -> list[tuple[bool, str]]:
    """Return settings that differ from the published GLM-4.5, the only form that mbridge maps."""
    rotated = [place.get("partial_rotary_factor", 0.5) for place in (config, rotary_scaling(config))]
    return [
        (not config.get("norm_topk_prob", True), "norm_topk_prob: false"),
        (not config.get("attention_bias", False), "attention_bias: false"),
        (config.get("n_shared_experts", 1) != 1, f"n_shared_experts: {config.get('n_shared_experts')}"),
        ((config.get("n_group") or 1) > 1, "groups of experts (n_group)"),
        (rotated != [0.5, 0.5], "a partial_rotary_factor other than 0.5"),
    ]


_MIXTURES = {
    "qwen3_moe": _unsupported_qwen3_moe,
    "deepseek_v3": _unsupported_deepseek,
    "glm4_moe": _unsupported_glm,
}
