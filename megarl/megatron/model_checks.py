"""Whether the trainer can compute the model that a config.json describes. Pure."""

from __future__ import annotations

from typing import Any

from megarl.megatron.layout import text_fields

KNOWN = [
    "deepseek_v3",
    "gemma3",
    "glm4_moe",
    "glm4v",
    "glm4v_moe",
    "internvl_chat",
    "llama",
    "mimo",
    "mixtral",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
]
"""`model_type` of the models that mbridge maps."""


def check_model(hf_config: dict[str, Any]) -> None:
    """Refuse a model that Megatron or mbridge would compute in another way than its engine, or not at all.

    `hf_config` is the model's config.json. Raises ValueError with the field that stands in the way.
    """
    kind = hf_config.get("model_type")
    if kind not in KNOWN:
        raise ValueError(f"model.path holds a {kind!r} model, which mbridge does not know; it knows {KNOWN}.")
    if hf_config.get("vision_config") is not None and kind != "qwen2_5_vl":
        raise ValueError(f"model.path holds a {kind!r} model, which reads images; of those megarl trains qwen2_5_vl.")
    hf_config = text_fields(hf_config)
    _check_rotary_scaling(hf_config)
    if kind == "qwen3_moe" and (hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1):
        raise ValueError(
            "The model's config.json makes some layers dense (mlp_only_layers, decoder_sparse_step), which mbridge "
            "cannot map for qwen3_moe. Use a model whose layers are all mixtures of experts."
        )
    if kind == "deepseek_v3":
        _check_deepseek(hf_config)


def rotary_scaling(hf_config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of it: in `rope_parameters` since transformers 5, in `rope_scaling` before."""
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    return {**scaling, "rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}


def _check_rotary_scaling(hf_config: dict[str, Any]) -> None:
    kind, model = rotary_scaling(hf_config)["rope_type"], hf_config["model_type"]
    known = {"deepseek_v3": ("default", "yarn"), "qwen2_5_vl": ("default", "mrope")}.get(model, ("default",))
    if kind not in known:
        raise ValueError(
            f"The model's config.json asks for rotary scaling {kind!r}, which mbridge does not carry over for "
            f"{model}: the trainer would compute other positions than the engine. Remove it (rope_parameters or "
            "rope_scaling) from config.json where the context length allows it."
        )


def _check_deepseek(hf_config: dict[str, Any]) -> None:
    """Megatron computes each of these in one way."""
    scaling = rotary_scaling(hf_config)
    chosen, groups = hf_config["num_experts_per_tok"], hf_config.get("topk_group") or 1
    for wrong, what in (
        (not hf_config.get("norm_topk_prob", True), "norm_topk_prob: false"),
        (
            (hf_config.get("n_group") or 1) > 1 and chosen // groups != 2,
            "groups of experts chosen by the best two scores in each, where Megatron takes the best "
            f"num_experts_per_tok / topk_group = {chosen} / {groups} = {chosen / groups:g}",
        ),
        (not hf_config.get("rope_interleave", True), "rope_interleave: false"),
        (scaling.get("attention_factor") is not None, "a rotary attention_factor"),
        (not scaling.get("truncate", True), "rotary scaling with truncate: false"),
        (bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")), "only one of mscale and mscale_all_dim"),
    ):
        if wrong:
            raise ValueError(
                f"The model's config.json asks for {what}, which Megatron cannot do for deepseek_v3: the trainer "
                "would compute another model than the engine. Use a model without it."
            )
