"""Defects in mbridge; see `upstream_defects`."""

from __future__ import annotations

from typing import Any

from tests.support.upstream_registry import defect, raises


def places(**sizes: int) -> Any:
    from mbridge.core.parallel_states import ParallelStates

    return ParallelStates(**{"vpp_size": None, **sizes})


@defect
def rope_theta_is_read_where_transformers_4_had_it() -> None:
    import transformers
    from mbridge.models.qwen3 import Qwen3Bridge

    hf_config = transformers.Qwen3Config(num_hidden_layers=2)
    bridge = Qwen3Bridge(hf_config, parallel_states=places())
    raises(AttributeError, "rope_theta", bridge._get_gptmodel_args)
