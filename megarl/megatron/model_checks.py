"""Whether the trainer can compute the model that a config.json describes. Pure."""

from __future__ import annotations

from typing import Any

from megarl.hf.config import text_fields

PROVEN = ("deepseek_v3", "glm4_moe", "llama", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe")
"""`model_type` of the models whose log-probs and gradients tests hold to transformers'."""

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_QUANTIZATION = ("quantization_config", "compression_config")


def check_model(hf_config: dict[str, Any]) -> None:
    """Refuse a model that Megatron or mbridge would compute in another way than its engine, or not at all.

    `hf_config` is the model's config.json. Raises ValueError with the field that stands in the way.
    """
    kind = hf_config.get("model_type")
    if kind is None:
        raise ValueError("The model's config.json has no model_type: it is not one that transformers wrote.")
    if kind not in PROVEN:
        raise ValueError(
            f"model.path holds a {kind!r} model. megarl trains {', '.join(PROVEN)} models, which are tested against "
            "transformers; mbridge may map others too, but nothing proves that they are computed rightly."
        )
    config = text_fields(hf_config)
    _check_weights(config)
    _check_rotary_scaling(config)
    for asked, what in [*_left_out(kind, config), *(_left_out_of_experts(kind, config) if kind in _MIXTURES else [])]:
        if asked:
            raise ValueError(
                f"The model's config.json asks for {what}, which the trainer cannot do for {kind}: it would compute "
                "another model than the engine. Use a model without it."
            )


def rotary_scaling(hf_config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of it: in `rope_parameters` since transformers 5, in `rope_scaling` before."""
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    return {**scaling, "rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}


def yarn_fields(scaling: dict[str, Any]) -> dict[str, Any]:
    """Megatron's fields for YaRN. With `mscale` and `mscale_all_dim` absent, transformers scales cosines and sines by
    the whole factor's and logits by nothing, which is 1 and 0 in Megatron's terms."""
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
    """Refuse a config.json without the sizes that every model has: whatever reads it further takes them for granted."""
    config = text_fields(hf_config)
    for name in _SIZES:
        size = config.get(name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            found = "has no" if size is None else f"says {size!r} for its"
            raise ValueError(f"The model's config.json {found} {name}, which is a whole number of every model's.")


def _check_weights(config: dict[str, Any]) -> None:
    for name in _QUANTIZATION:
        if method := config.get(name):
            how = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
            blocks = how == "fp8" and method.get("weight_block_size")
            remedy = (
                "Convert them first: python -m megarl convert-weights FOLDER --out FOLDER-BF16, and name that in the recipe"
                if blocks
                else f"Take the unquantised model, or convert it to bfloat16 and remove {name} from config.json"
            )
            raise ValueError(
                f"The model's weights are quantised ({name} in config.json: {how}); the trainer would read the numbers "
                f"without their scales. {remedy}."
            )


def _check_rotary_scaling(config: dict[str, Any]) -> None:
    kind, model = rotary_scaling(config)["rope_type"], config["model_type"]
    known = {"deepseek_v3": ("default", "yarn"), "qwen2_5_vl": ("default", "mrope")}.get(model, ("default",))
    if kind not in known:
        raise ValueError(
            f"The model's config.json asks for rotary scaling {kind!r}, which mbridge does not carry over for "
            f"{model}: the trainer would compute other positions than the engine. Remove it (rope_parameters or "
            "rope_scaling) from config.json where the context length allows it."
        )


def _left_out(kind: str, config: dict[str, Any]) -> list[tuple[bool, str]]:
    """Of what any model may ask for: (whether config.json asks for it, what it is) of everything that mbridge leaves
    out for a model of `kind`. Absent fields mean what they mean in transformers."""
    activation = config.get("hidden_act") or "silu"
    tied = kind in ("deepseek_v3", "glm4_moe") and config.get("tie_word_embeddings")
    biased = kind in ("deepseek_v3", "llama", "qwen3", "qwen3_moe") and config.get("attention_bias")
    return [
        (activation not in ("silu", "swish"), f"hidden_act: {activation}"),
        (bool(config.get("use_sliding_window")), "use_sliding_window: true"),
        (bool(config.get("attention_dropout")), "attention_dropout, which engines have none of"),
        (bool(biased), "attention_bias: true"),
        (kind == "llama" and bool(config.get("mlp_bias")), "mlp_bias: true"),
        (bool(tied), "tie_word_embeddings: true"),
    ]


def _left_out_of_experts(kind: str, config: dict[str, Any]) -> list[tuple[bool, str]]:
    """The same of what a mixture of experts may ask for; Megatron computes most of it in one way."""
    return [
        # Megatron normalises the chosen experts' weights only where there are several.
        (config.get("num_experts_per_tok") == 1, "num_experts_per_tok: 1"),
        *_MIXTURES[kind](config),
    ]


def _of_qwen3_moe(config: dict[str, Any]) -> list[tuple[bool, str]]:
    return [
        (bool(config.get("mlp_only_layers")), "some dense layers (mlp_only_layers)"),
        (config.get("decoder_sparse_step", 1) != 1, "some dense layers (decoder_sparse_step)"),
    ]


def _of_deepseek(config: dict[str, Any]) -> list[tuple[bool, str]]:
    """`rms_norm_eps` other than 1e-6 is none of these: transformers leaves it out of the norms of the latents, but
    engines take it for them, as Megatron does."""
    scaling = rotary_scaling(config)
    chosen, groups = config["num_experts_per_tok"], config.get("topk_group") or 1
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


def _of_glm(config: dict[str, Any]) -> list[tuple[bool, str]]:
    """mbridge knows GLM-4.5 as it was published."""
    rotated = [place.get("partial_rotary_factor", 0.5) for place in (config, rotary_scaling(config))]
    return [
        (not config.get("norm_topk_prob", True), "norm_topk_prob: false"),
        (not config.get("attention_bias", False), "attention_bias: false"),
        (config.get("n_shared_experts", 1) != 1, f"n_shared_experts: {config.get('n_shared_experts')}"),
        ((config.get("n_group") or 1) > 1, "groups of experts (n_group)"),
        (rotated != [0.5, 0.5], "a partial_rotary_factor other than 0.5"),
    ]


_MIXTURES = {"qwen3_moe": _of_qwen3_moe, "deepseek_v3": _of_deepseek, "glm4_moe": _of_glm}
