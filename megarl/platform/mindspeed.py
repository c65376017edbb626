"""MindSpeed, which adapts Megatron to Ascend devices: the settings that it knows, and what it must be told.

MindSpeed takes whatever it is given: a slip of the pen becomes a field that nothing reads, and what it does refuse it
refuses when the model is built, on every device that was booked. So names and values are held to a table before anything
starts, also on machines without MindSpeed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.platform.mindspeed_keys import TABLES, Table, read_source
from megarl.registry import nearest

# Names that scripts use and no MindSpeed has, and what they mean.
_MEANT = {"fused_permute_unpermute": "moe_permute_fusion"}
_LOOP = "MindSpeed acts on it in Megatron's own training loop, which does not run here"
# Settings that are there and change nothing: why, and what to do.
_NO_EFFECT = {
    "npu_deterministic": (_LOOP, "set train.deterministic"),
    "profile": (_LOOP, "set observe.profile_steps"),
    "smart_swap": (_LOOP, "leave it out"),
    "auto_settings": (_LOOP, "leave it out"),
    "use_fused_swiglu": ("no part of MindSpeed reads it: SwiGLU is fused without it", "leave it out"),
}
_KINDS = {"flag": (bool,), "int": (int,), "float": (float, int), "text": (str,)}


@cache
def table() -> Table:
    """The settings of the MindSpeed that is installed; elsewhere of the one for the Megatron that is installed, or the
    newest. Where it is installed its sources are read, since branches for different Megatrons share a version."""
    found = importlib.util.find_spec("mindspeed")
    if found is not None and found.origin is not None:
        return read_source(Path(found.origin).parent.parent)
    known = [Table(**json.loads(path.read_text())) for path in TABLES.glob("*.json")]
    known.sort(key=lambda one: _numbers(one.version))
    return next((one for one in known if _numbers(one.version) == _numbers(_megatron())), known[-1])


def _megatron() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    """Of the release of Megatron that a MindSpeed is for: 0.16.1 and 0.16.0 are one."""
    return [int(number) for number in version.split(".")[:2] if number.isdigit()]


def names() -> frozenset[str]:
    """The names that MindSpeed reads beside Megatron's fields."""
    return frozenset([*table().options, *table().switches])


def label() -> str:
    """The MindSpeed that `table` is of, for messages."""
    return f"MindSpeed {table().version}".strip()


def problem(name: str, value: Any) -> tuple[str, str] | None:
    """What is wrong with a setting of MindSpeed's, and what to change; None: nothing."""
    if name in _MEANT:
        return f"no {label()} has a setting of that name", f"write {_MEANT[name]}"
    if name in _NO_EFFECT:
        return _NO_EFFECT[name]
    kind = table().options.get(name)
    if isinstance(kind, list) and value not in kind:
        near = nearest(str(value), map(str, kind))
        known = ", ".join(map(str, kind))
        return f"{label()} knows {known}", f"write {near}" if near else "write one of these"
    if isinstance(kind, str) and value is not None and not _is_of(value, kind):
        wanted = "true or false" if kind == "flag" else f"a value of the kind {kind}"
        return f"{label()} expects {wanted}, and would take this without a word", f"give {wanted}"
    return None


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and (kind == "flag" or not isinstance(value, bool))


def latent_attention_problem(mscale: float, mscale_all_dim: float) -> tuple[str, str] | None:
    """Explain why MindSpeed cannot train latent attention with these fields of YaRN, and what to do; None if it can.

    Its replacement for Megatron's `MLASelfAttention.__init__` scales logits by `mscale` squared (core_r0.16.0,
    mindspeed/core/transformer/multi_head_latent_attention/adaptor.py:59); Megatron (multi_latent_attention.py:125),
    transformers and engines use `mscale_all_dim`. Equal values give the same model.
    """
    if mscale == mscale_all_dim:
        return None
    return (
        f"rope_scaling in its config.json has mscale {mscale:g} and mscale_all_dim {mscale_all_dim:g} (absent values count as "
        f"1 and 0). {label()} scales the logits of latent attention by mscale, engines by mscale_all_dim: the trainer "
        "would compute another model than the engine",
        "use a model whose mscale equals mscale_all_dim, as DeepSeek-V3's, or train with cluster.device: cuda; editing the "
        "fields would change the model",
    )


def arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `repatch` is called with, of a model's settings under Megatron's names.

    Its other attention needs masks that packed sequences do not have, so flash attention is on unless switched off."""
    return {"use_flash_attn": True, **settings}
