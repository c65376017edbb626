"""MindSpeed's settings in a recipe: check their names and values, and compute the arguments that MindSpeed receives.

MindSpeed accepts any name: a typo becomes a field that no code reads. It rejects wrong values only when the model is built,
after all devices have been allocated. megarl therefore checks names and values against a table before a run starts, even on
machines without MindSpeed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.platform.mindspeed.source_keys import TABLES, Table, read_source
from megarl.platform.version_sets import version_of
from megarl.registry import nearest

# Names that scripts use but no MindSpeed version has, and the intended names.
_CORRECTIONS = {"fused_permute_unpermute": "moe_permute_fusion"}
_LOOP = "MindSpeed reads it only in Megatron's training loop, which megarl does not use"
_SEQUENTIAL = "MindSpeed reads it only with moe_token_dispatcher_type alltoall_seq, which megarl does not support"
# Existing settings without effect: the reason and the remedy.
_NO_EFFECT = {
    "npu_deterministic": (_LOOP, "set train.deterministic"),
    "profile": (_LOOP, "set observe.profile_steps"),
    "smart_swap": (_LOOP, "leave it out"),
    "auto_settings": (_LOOP, "leave it out"),
    "moe_tp_extend_ep": (_SEQUENTIAL, "leave it out, and set megatron.expert_parallel"),
    "moe_permutation_async_comm": (_SEQUENTIAL, "leave it out"),
    "use_fused_swiglu": ("MindSpeed does not read it: SwiGLU is always fused", "leave it out"),
}
_KINDS = {"flag": (bool,), "int": (int,), "float": (float, int), "text": (str,)}


@cache
def table() -> Table:
    """Settings of the installed MindSpeed, read from its sources: branches for different Megatrons share a version.

    Without MindSpeed: the recorded table for the installed Megatron, or the newest one.
    """
    spec = importlib.util.find_spec("mindspeed")
    if spec is not None and spec.origin is not None:
        return read_source(Path(spec.origin).parent.parent)
    tables = [Table(**json.loads(path.read_text())) for path in TABLES.glob("*.json")]
    tables.sort(key=lambda candidate: _numbers(candidate.version))
    return next(
        (table for table in tables if _numbers(table.version) == _numbers(version_of("megatron-core") or "")),
        tables[-1],
    )


def _numbers(version: str) -> list[int]:
    """Major and minor number of a Megatron release or of the MindSpeed for it: 0.16.1 and 0.16.0 are equal."""
    return [int(number) for number in version.split(".")[:2] if number.isdigit()]


def names() -> frozenset[str]:
    """Names that MindSpeed reads in addition to Megatron's fields."""
    return frozenset([*table().options, *table().switches])


def label() -> str:
    """Name and version of the MindSpeed of `table`, for messages."""
    return f"MindSpeed {table().version}".strip()


def problem(name: str, value: Any) -> tuple[str, str] | None:
    """Problem and remedy of a MindSpeed setting; None if it is valid."""
    if name in _CORRECTIONS:
        return f"{label()} has no setting of that name", f"write {_CORRECTIONS[name]}"
    if name in _NO_EFFECT:
        return None if value in (False, None) else _NO_EFFECT[name]
    kind = table().options.get(name)
    if isinstance(kind, list) and value not in kind:
        near = nearest(str(value), map(str, kind))
        choices = ", ".join(map(str, kind))
        return f"{label()} supports {choices}", f"write {near}" if near else "write one of these"
    if isinstance(kind, str) and value is not None:
        if isinstance(value, bool) == (kind == "flag") and isinstance(value, _KINDS[kind]):
            return None
        expected = "true or false" if kind == "flag" else f"a value of type {kind}"
        return f"{label()} expects {expected}, but does not check it", f"write {expected}"
    return None


def latent_attention_problem(mscale: float, mscale_all_dim: float) -> tuple[str, str] | None:
    """Problem and remedy of latent attention with these YaRN fields under MindSpeed; None if MindSpeed supports them.

    Its replacement of Megatron's `MLASelfAttention.__init__` scales logits by `mscale` squared (core_r0.16.0,
    mindspeed/core/transformer/multi_head_latent_attention/adaptor.py:59); Megatron (multi_latent_attention.py:125),
    transformers and engines use `mscale_all_dim`. Equal values give the same model.
    """
    if mscale == mscale_all_dim:
        return None
    return (
        f"rope_scaling in its config.json has mscale {mscale:g} and mscale_all_dim {mscale_all_dim:g} (absent values count as "
        f"1 and 0). {label()} scales the logits of latent attention by mscale, engines by mscale_all_dim: trainer and "
        "engines would compute different models",
        "use a model with equal mscale and mscale_all_dim, such as DeepSeek-V3, or train with cluster.device: cuda; editing "
        "the fields would change the model",
    )


def zero_centered_norm_problem() -> tuple[str, str]:
    """Problem and remedy of norms that add 1 to their weight (Qwen3-Next, Qwen3.5) under MindSpeed.

    Its RMSNorm, which replaces Megatron's, multiplies by the weight itself (core_r0.16.0, mindspeed/core/fusions/
    fused_rms_norm.py).
    """
    return (
        f"the model's norms add 1 to their weights, and {label()}'s RMSNorm does not: trainer and engines would compute "
        "different models",
        "train with cluster.device: cuda",
    )


def sparse_attention_problem() -> tuple[str, str]:
    """Problem and remedy of sparse attention (DeepSeek-V3.2, GLM-5) under MindSpeed.

    megarl's layer was not compared with its replacement of Megatron's latent attention.
    """
    return (
        f"the model has sparse attention, and megarl's layer has not been compared with {label()}'s latent attention",
        "train with cluster.device: cuda",
    )


def biased_softmax_problem() -> tuple[str, str]:
    """Problem and remedy of experts that are chosen by a softmax and a bias (ERNIE 4.5) under MindSpeed.

    megarl's router, and rotary pairs that are neighbours in a head, were not compared with its replacements.
    """
    return (
        f"the model's experts are chosen by a softmax and a bias, and megarl's router has not been compared with {label()}'s",
        "train with cluster.device: cuda",
    )


def sinks_problem() -> tuple[str, str]:
    """Problem and remedy of attention sinks and sliding windows (gpt-oss) under MindSpeed.

    MindSpeed's attention passes no sinks to npu_fusion_attention, and asserts that there is no window (core_r0.16.0,
    mindspeed/core/transformer/dot_product_attention.py and mindspeed/te/pytorch/attention/dot_product_attention).
    """
    return (
        f"the model has attention sinks and sliding windows, and {label()}'s attention has neither",
        "train with cluster.device: cuda",
    )


def arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of MindSpeed's `repatch`, from a model's settings under Megatron's names.

    Flash attention is on by default, because MindSpeed's other attention needs masks, which packed sequences do not have.
    """
    return {"use_flash_attn": True, **settings}
