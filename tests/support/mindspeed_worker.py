"""MindSpeed's code on a CPU with models' settings: `mindspeed_worker SOURCE`, with cases as JSON on stdin.

Its imports other than Megatron (torch_npu, triton, ...) are stand-ins with names only: its features register, patch the
installed Megatron and check a configuration; kernels are never called. Prints a JSON object: `options`, the names of its
argument parser with their choices, and `errors`, each case's exception or null. With `{"build": [settings]}` instead of
cases it prints the result of `build`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from tests.support import mindspeed_source


def options() -> dict[str, list[Any] | None]:
    from mindspeed.features_manager import MindSpeedFeaturesManager

    parser = argparse.ArgumentParser(allow_abbrev=False)
    MindSpeedFeaturesManager.register_features_args(parser)
    return {
        action.dest: None if action.choices is None else sorted(action.choices, key=str)
        for action in parser._actions
        if action.dest != "help"
    }


def attempt(settings: dict[str, Any], latent: bool) -> str | None:
    """Apply `settings` to MindSpeed and build Megatron's configuration as mbridge does; returns the error, or None."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from megarl.platform.npu import NPUPlatform

    kind = MLATransformerConfig if latent else TransformerConfig
    fields = {name: value for name, value in settings.items() if name in kind.__dataclass_fields__}
    model = {
        "num_layers": 8 * settings["pipeline_model_parallel_size"],
        "hidden_size": 8 * settings["num_attention_heads"],
        "pipeline_dtype": torch.bfloat16 if settings["bf16"] else torch.float32,
        "num_moe_experts": settings.get("num_experts"),
        "add_bias_linear": False,
    }
    try:
        NPUPlatform().adapt(settings)
        kind(**model | fields)
    except Exception as error:  # noqa: BLE001 - whatever it is, is the answer
        return f"{type(error).__name__}: {error}"
    return None


def apart(settings: dict[str, Any], latent: bool) -> str | None:
    """Run `attempt` in a forked process, because MindSpeed's patches cannot be undone."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.write(writer, json.dumps(attempt(settings, latent))[:60000].encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        status = answer.read()
    os.waitpid(child, 0)
    return json.loads(status) if status else "it died"


def build(options: list[str]) -> dict[str, Any]:
    """Build the tiny recipe's model as a trainer on NPUs does. `compared`: number of tensors compared with the files."""
    import torch

    from megarl import load_recipe
    from megarl.megatron.model.build import build as build_model
    from megarl.platform.cpu import CPUPlatform
    from megarl.platform.npu import NPUPlatform

    class Devices(CPUPlatform):
        name, uses_native_layers, adapt = "npu", False, NPUPlatform.adapt  # type: ignore[assignment]

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    recipe = load_recipe(
        f"{root}/recipes/tiny/sft.yaml", ["megatron.expert_parallel=1", *options, "cluster.device=npu"]
    )
    model = build_model(recipe, Devices())
    modules = [module for chunk in model.chunks for module in chunk.modules()]
    mindspeeds = {type(module).__name__ for module in modules if type(module).__module__.startswith("mindspeed.")}
    differ, compared = [], 0
    files = model.bridge.safetensor_io
    for name, tensor in model.bridge.export_weights(model.chunks):
        compared += 1
        if not torch.equal(files.load_one_hf_weight(name).to(tensor.dtype), tensor):
            differ.append(name)
    return {"mindspeeds": sorted(mindspeeds), "differ": differ, "compared": compared}


def main() -> None:
    source, cases = sys.argv.pop(1), json.load(sys.stdin)
    mindspeed_source.make_importable(source)
    from megarl.platform.npu import NPUPlatform

    answer, sys.stdout = sys.stdout, sys.stderr
    if cases:
        NPUPlatform().prepare()
    if isinstance(cases, dict):
        print(json.dumps(build(cases["build"])), file=answer)
        return
    errors = [apart(case["settings"], case["latent"]) for case in cases]
    print(json.dumps({"options": options(), "errors": errors}), file=answer)


if __name__ == "__main__":
    main()
