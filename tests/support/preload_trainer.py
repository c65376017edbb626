"""Imports of the trainer processes on a CPU, those within functions included; see `tests.support.forks`."""

from megarl.platform import select

select("cpu").prepare()

import mbridge  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402
import torch  # noqa: E402

import megarl.megatron.lora.attach  # noqa: E402
import megarl.megatron.model.upstream_fixes  # noqa: E402
import megarl.megatron.moe.routing_replay  # noqa: E402
import megarl.megatron.native_layers.spec_provider  # noqa: E402
import megarl.megatron.trainer  # noqa: E402
import megarl.trainer.actor  # noqa: E402, F401
from tests.support import megatron_models, vl_model  # noqa: E402, F401

torch.set_num_threads(1)
