"""FP8 weights in vLLM (`rollout.quantization: fp8`): arguments, and checks before the start. Does not import vLLM.

vLLM quantizes a layer when all of its weights are there, at its start and in each reload: the layer gets parameters in
checkpoint format, is filled, quantized, and copied into the live FP8 weights and scales. So weight sync moves the trainers'
weights, and verifies them before they are quantized. vLLM's per-tensor FP8 is not used: with tensor parallelism its
quantization communicates, and ranks complete the layers of a sharded update in different orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.engines import package_folder
from megarl.errors import RecipeError
from megarl.hf.config import layer_kinds, leading_dense_layers, number_of_experts, shared_experts, text_fields

BLOCK = 128  # rows and columns that share a scale
_SCHEME = "fp8_per_block"  # vLLM's name (vllm/config/quantization.py)
_LISTED = ("model_executor", "layers", "quantization", "__init__.py")  # vLLM's file with the names of its schemes
_UNQUANTIZED = r"re:.*\.(gate|router)$"  # routers: vLLM quantizes those of some models, and a rounded router sends tokens elsewhere
_KEY, _REMEDY = "rollout.quantization", "leave it out"


def arguments() -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs. Raises RecipeError if the installed vLLM does not know the scheme."""
    _check_installed()
    return {"quantization": _SCHEME, "quantization_config": {"ignore": [_UNQUANTIZED]}}


def check(device: str) -> None:
    """Raise RecipeError if vLLM on `device` does not support FP8 weights, or the installed vLLM does not."""
    if device == "npu":
        problem = "vllm-ascend has no FP8 scheme that quantizes weights as they are loaded"
        raise RecipeError(_KEY, problem, _REMEDY, value="fp8")
    if device == "cpu":
        problem = "vLLM's FP8 kernels for CPUs need AMX, and are not tested with megarl"
        raise RecipeError(_KEY, problem, f"{_REMEDY} on CPUs", value="fp8")
    _check_installed()


def _check_installed() -> None:
    folder = package_folder("vllm")
    file = folder.joinpath(*_LISTED) if folder else None
    if file is not None and f'"{_SCHEME}"' not in (file.read_text(encoding="utf-8") if file.is_file() else ""):
        problem = f"this version of vLLM has no quantization {_SCHEME}"
        raise RecipeError(_KEY, problem, f"install vLLM 0.32, or {_REMEDY}", value="fp8")


def check_model(config: Mapping[str, Any], tensor_parallel: int, *, spread: bool) -> None:
    """Raise RecipeError if vLLM cannot hold the model's layers in FP8, or if updates of such a model are untested.

    `config`: config.json. `spread`: each device has whole experts. The inputs of every product must divide into blocks on each
    device: kernels quantize the inputs of `BLOCK` columns together, and vLLM would pad experts, which updates do not fill.
    """
    text = text_fields(dict(config))
    if reason := _unsupported(config, text):
        raise RecipeError(_KEY, reason, _REMEDY, value="fp8")
    for name, width, parts in _inputs(text, tensor_parallel, spread):
        if width % (parts * BLOCK):
            part = f" / {parts} = {width / parts:g} columns on each of the engine's devices" if parts > 1 else ""
            remedy = _remedy(width, parts, is_expert=name == "moe_intermediate_size")
            problem = f"the model's {name} = {width}{part} is not a multiple of the {BLOCK} columns that share a scale"
            raise RecipeError(_KEY, problem, remedy, value="fp8")


def _unsupported(config: Mapping[str, Any], text: dict[str, Any]) -> str | None:
    reasons = {
        "it is not tested with models that read images": "vision_config" in config,
        "it is not tested with sparse attention": bool(text.get("index_topk")),
        "it is not tested with linear attention": "linear_attention" in layer_kinds(text),
        "it is not tested with gpt-oss: vLLM's loader writes the experts directly": text.get("model_type") == "gpt_oss",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _inputs(text: dict[str, Any], tensor_parallel: int, spread: bool) -> list[tuple[str, int, int]]:
    """Return (name, columns, devices that share them) of the inputs of the model's products. columns: 0 if the model has no such input."""
    heads = text["num_attention_heads"]
    head = text.get("v_head_dim") or text.get("head_dim") or text["hidden_size"] // heads
    experts = number_of_experts(text)
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = shared_experts(text) * width or text.get("shared_expert_intermediate_size") or 0
    return [
        ("hidden_size", text["hidden_size"], 1),
        ("q_lora_rank", text.get("q_lora_rank") or 0, 1),
        ("kv_lora_rank", text.get("kv_lora_rank") or 0, 1),
        ("num_attention_heads x head size", heads * head, tensor_parallel),
        ("intermediate_size", 0 if experts and not _has_dense(text) else text["intermediate_size"], tensor_parallel),
        ("moe_intermediate_size", width if experts else 0, 1 if spread else tensor_parallel),
        ("width of the shared experts", shared if experts else 0, tensor_parallel),
    ]


def _has_dense(text: dict[str, Any]) -> bool:
    """Return True if a mixture of experts also has dense layers."""
    sparse_step = text.get("decoder_sparse_step") or 1
    return bool(leading_dense_layers(text) or text.get("mlp_only_layers") or sparse_step > 1)


def _remedy(width: int, parts: int, *, is_expert: bool) -> str:
    fitting = [size for size in range(parts - 1, 0, -1) if parts % size == 0 and width % (size * BLOCK) == 0]
    whole = ["rollout.expert_parallel=true"] if is_expert and parts > 1 else []
    sizes = [f"rollout.tensor_parallel={fitting[0]}"] if fitting else []
    options = [*whole, *sizes]
    return f"set {' or '.join(options)}, or {_REMEDY}" if options else _REMEDY
