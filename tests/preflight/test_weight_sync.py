"""Errors in the recipe's section `weight_sync`."""

from __future__ import annotations

import pytest

from megarl.errors import RecipeError
from megarl.preflight.load import load_recipe


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weight_sync.route": "sharded", "lora.rank": 4}, "weight_sync.route.*merged weights"),
        (
            {"weight_sync.route": "sharded", "rollout.engine": "sglang"},
            "rollout.engine=sglang accepts only whole tensors",
        ),
        (
            {"weight_sync.route": "sharded", "weight_sync.transport": "files"},
            "weight_sync.route.*files contain whole tensors",
        ),
        (
            {"weight_sync.route": "sharded", "rollout.engine_args.enable_eplb": "true"},
            "enable_eplb=True: experts that move",
        ),
        ({"weight_sync.transport": "device"}, "weight_sync.transport.*weight_sync.route=auto may send whole tensors"),
        (
            {"weight_sync.transport": "device", "weight_sync.route": "sharded"},
            "weight_sync.transport.*cannot connect two processes.*weight_sync.transport=ipc",
        ),
        ({"weight_sync.transport": "ipc"}, "weight_sync.transport.*weight_sync.route=auto may send whole tensors"),
        ({"weight_sync.directory": "x"}, "weight_sync.directory.*transport=auto writes no files"),
        (
            {"weight_sync.route": "full", "weight_sync.check_every": 5},
            "weight_sync.check_every.*no sharded update to compare",
        ),
        (
            {"weight_sync.route": "full", "weight_sync.silence": 20, "weight_sync.timeout": 10},
            "weight_sync.silence.*the wait ends after .* = 10 s",
        ),
        (
            {"weight_sync.transport": "files", "weight_sync.silence": 20, "weight_sync.timeout": 20},
            "weight_sync.silence.*the wait ends after .* = 20 s",
        ),
        (
            {"weight_sync.transport": "device", "lora.rank": 4},
            "weight_sync.transport.*adapters are sent whole.*do +set weight_sync.transport=auto",
        ),
        ({"weight_sync.timeout": ".inf"}, "weight_sync.timeout.*give a finite number"),
        ({"weight_sync.timeout": 5}, "weight_sync.timeout = 5.*the wait would end before .*weight_sync.silence = 30 s"),
        ({"weight_sync.silence": 20, "weight_sync.timeout": 20}, "weight_sync.silence.*the wait ends after .* = 20 s"),
        ({"weight_sync.silence": 2}, "weight_sync.silence.*at least 3"),
    ],
)
def test_unsupported_weight_sync_settings_are_refused(settings, words):
    overrides = [f"{name}={value}" for name, value in settings.items()]
    with pytest.raises(RecipeError, match=f"(?s){words}"):
        load_recipe("recipes/quickstart.yaml", overrides)
    load_recipe(
        "recipes/quickstart.yaml", ["weight_sync.route=sharded", "weight_sync.check_every=5", "weight_sync.silence=60"]
    )
    load_recipe("recipes/quickstart.yaml", ["weight_sync.route=full", "weight_sync.timeout=5"])
    load_recipe("recipes/quickstart.yaml", ["weight_sync.route=full", "weight_sync.silence=20"])
