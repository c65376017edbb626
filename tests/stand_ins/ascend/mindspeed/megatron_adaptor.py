"""MindSpeed's entry: importing it patches and reads the command line; `repatch` is what changes arguments afterwards."""

import sys

from torch_npu import called

called.append(f"import mindspeed.megatron_adaptor with {len(sys.argv) - 1} arguments")
repatched: list[dict] = []


def _ask_every_module():
    """Ask each module for each patched name, as mindspeed/patch_utils.py does."""
    return [hasattr(module, "forward") for module in list(sys.modules.values())]


_ask_every_module()


def repatch(args):
    _ask_every_module()
    assert "initialize_model_parallel" not in called, "the patch of it would come too late"
    if "needs" in args:
        raise ModuleNotFoundError("No module named 'megatron.training'", name="megatron.training")
    repatched.append(args)
