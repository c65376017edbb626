"""Imports of trainer processes, including imports within functions, for the processes of `tests.support.forks`."""

from __future__ import annotations

import importlib

MODULES = (
    "mbridge",
    "megatron.core.optimizer",
    "megarl.megatron.lora.attach",
    "megarl.megatron.model.upstream_fixes",
    "megarl.megatron.moe.routing_replay",
    "megarl.megatron.trainer",
    "megarl.trainer.actor",
    "tests.support.megatron_models",
)


def import_trainer() -> None:
    """Call after the platform has been prepared."""
    for name in MODULES:
        importlib.import_module(name)
