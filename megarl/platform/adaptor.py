"""What adapts Megatron to a device, as far as a recipe is concerned: the settings that it reads beside Megatron's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.platform import mindspeed, mindspeed_rules

Problem = tuple[str, str]  # what is wrong, what to change


@dataclass(frozen=True)
class Adaptor:
    """On a device that Megatron needs no adapting to: one without settings, who knows which are another device's."""

    device: str
    label: str = ""  # with its version; "": none
    settings: frozenset[str] = frozenset()

    def problem(self, name: str, value: Any) -> Problem | None:
        """What is wrong with a name in `megatron.extra` that is no field of Megatron's, or with its value."""
        if self.label:
            return mindspeed.problem(name, value)
        if name in mindspeed.names():
            said = (
                f"{mindspeed.label()} reads it, which adapts Megatron to Ascend devices: on {self.device} nothing does"
            )
            return said, "leave it out, or set cluster.device: npu"
        return None

    def contradiction(self, settings: Mapping[str, Any]) -> tuple[str, Problem] | None:
        """The first of `settings` (a model's, under Megatron's names) that others exclude; and why."""
        rule = mindspeed_rules.contradiction(mindspeed.arguments(settings)) if self.label else None
        if rule is None:
            return None
        return rule.name, (f"{rule.problem} (MindSpeed's {rule.file})", rule.remedy)

    def latent_attention_problem(self, mscale: float, mscale_all_dim: float) -> Problem | None:
        """Why the device's latent attention cannot have these fields of YaRN, and what to change; None if it can."""
        return mindspeed.latent_attention_problem(mscale, mscale_all_dim) if self.label else None


def adaptor(device: str) -> Adaptor:
    """`device`: "cpu", "cuda" or "npu"."""
    return Adaptor(device, mindspeed.label(), mindspeed.names()) if device == "npu" else Adaptor(device)
