"""Supervised training: schedules, sizes and defaults of verl's engines."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarl.commands.convert_verl.command import convert
from megarl.errors import InputError
from tests.commands.convert_verl.test_whole_scripts import value

OPTIONS = "data.train_files=a.parquet model.path=/models/m trainer.total_training_steps=100"
SFT = f"torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer {OPTIONS}"
RAY = f"python3 -m verl.trainer.sft_trainer_ray {OPTIONS}"

CARRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "devices of Ray": (f"{RAY} trainer.nnodes=2 trainer.n_gpus_per_node=4", {"cluster.trainers": 8}),
    "a decay to a rate": (
        f"{SFT} engine=megatron optim=megatron optim.lr=1e-4 optim.min_lr=1e-5 optim.lr_decay_style=linear optim.lr_decay_steps=80",
        {"actor.optimizer.decay": "linear", "actor.optimizer.decay_steps": 80, "actor.optimizer.min_lr_ratio": 0.1},
    ),
    "the defaults of automodel": (
        f"{SFT} engine=automodel optim=automodel optim.lr_warmup_steps=5",
        {
            "actor.optimizer.lr": 1e-5, "actor.optimizer.init_lr_ratio": 0.1, "actor.optimizer.min_lr_ratio": 0.01,
            "actor.optimizer.decay": "cosine",
        },
    ),
    "the rate before a warm-up": (
        f"{SFT} optim.lr=1e-4 optim.lr_warmup_init=2e-5 optim.lr_warmup_steps=5",
        {"actor.optimizer.init_lr_ratio": 0.2},
    ),
    "sizes of Automodel": (
        f"{SFT} engine=automodel engine.tp_size=2 engine.ep_size=4",
        {"megatron.tensor_parallel": 2, "megatron.expert_parallel": 4, "megatron.expert_tensor_parallel": 2},
    ),
    "sizes of Megatron": (
        f"{SFT} engine=megatron engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2",
        {"megatron.tensor_parallel": 2, "megatron.pipeline_parallel": 2},
    ),
    "rows of the evaluation": (
        f"{SFT} data.val_files=b.parquet data.val_max_samples=50 trainer.test_freq=10", {"evaluation.limit": 50},
    ),
}  # fmt: skip

REFUSED = {
    "multi-token prediction": (f"{SFT} model.mtp.enable=True", "--accept model.mtp.enable"),
    "some of the rows": (f"{SFT} data.train_max_samples=10", "every row is used"),
    "another optimizer": (f"{SFT} optim.optimizer=Muon", "AdamW is the only optimizer"),
    "another decay": (f"{SFT} engine=megatron optim.lr_decay_style=wsd", "this value has no counterpart"),
    "a dataset class": (f"{SFT} data.custom_cls.path=rows.py", "--accept data.custom_cls.path"),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_run_is_carried_over(name: str) -> None:
    command, expected = CARRIED[name]
    content = yaml.safe_load(convert(command).text)
    assert {key: value(content, key) for key in expected} == expected
    assert content["algorithm"] == {"loss": "sft", "advantage": "none"} and content["train"]["steps"] == 100


@pytest.mark.parametrize("name", REFUSED)
def test_a_difference_is_refused(name: str) -> None:
    command, words = REFUSED[name]
    with pytest.raises(InputError) as caught:
        convert(command)
    assert words in str(caught.value)
