"""DeviceKind: facts about a device kind in plain values, without an import of torch."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.platform.tracing import Tracing
from megarl.platform.version_sets import BuiltAgainst, Displaced, VersionSet

if TYPE_CHECKING:
    from megarl.platform.base import Platform


@dataclass(frozen=True)
class PortRange:
    """Ports that a collective library listens on: the variable that sets them, and megarl's value."""

    variable: str
    default: str
    on_host: bool  # ports of the machine, one per process; False: ports of the device network


@dataclass(frozen=True)
class DeviceKind:
    """One device kind. Texts are parts of messages: they begin in lower case and end without a period."""

    name: str  # value of cluster.device, also vLLM's name of the device type
    plural: str  # in messages
    implementation: str  # "module:class" of its Platform
    sets: tuple[VersionSet, ...]  # compatible package versions, the default set first
    collective: str  # library of its process groups
    accelerator: bool = True  # has its own memory, which offloading frees; False: computes in host memory
    flight_recorder: str = ""  # function that returns its library's collectives as JSON; gloo's needs no entry
    ray_resource: str | None = None  # Ray resource of the device; None if processes need no device
    visible: str = ""  # environment variable with the visible devices; "" if there is none
    ddp: Mapping[str, Any] = field(default_factory=dict)  # defaults of `megatron.ddp`
    tracing: Tracing = field(default_factory=Tracing)  # settings of its profiler
    no_host_optimizer: tuple[str, str] | None = None  # why it lacks Megatron's optimizer_cpu_offload, and the remedy
    # Cost of seeds per request in engines; "" if next to none.
    seeds_cost: str = "a Python loop over requests in every decode step"
    deterministic_cumsum: bool = True  # torch.cumsum of floats has a kernel with a fixed order of summation
    files: str = ""  # glob pattern of its devices in /dev

    # Detection: `package` is installed or, without a package, `torch.<torch_api>.is_available()`.
    package: str = ""
    distribution: str = ""  # distribution of `package`
    torch_api: str = ""  # torch's module for the device
    present: str = ""  # text if it is available
    absent: str = ""  # text if it is not available
    install: str = ""  # remedy if it is not available
    install_sglang: str = "install SGLang 0.5.23 or later"
    install_memory_saver: str = "pip install torch-memory-saver"  # with which SGLang's engines sleep
    installation_notices: Callable[[], list[str]] = list  # missing packages and untested versions, with their cost

    # Fields for `megarl doctor` and `megarl accept`.
    checks: str = ""  # module with the CHECKS of this kind, imported by the doctor
    built_against: tuple[BuiltAgainst, ...] = ()
    displaced: tuple[Displaced, ...] = ()
    interface_variables: dict[str, bool] = field(default_factory=dict)  # variable -> needs complete interface names
    port_ranges: tuple[PortRange, ...] = ()
    port_error: str = ""  # the library's error code for a port in use
    buffer_variable: str = ""  # environment variable of a communicator's buffer size in MiB; twice that is allocated
    sleep_keeps_weights: bool = (
        False  # sleeping engines copy their weights to the host (engines/vllm/engine.py: level 1)
    )
    many_files: bool = False  # opens more files than the usual limit
    status_command: str = ""  # shows devices and their processes
    status_commands: tuple[tuple[str, ...], ...] = ()  # commands with output that `megarl accept` saves
    device_commands: tuple[tuple[str, ...], ...] = ()  # the same per device: "{device}" is its number
    logs: tuple[str, ...] = ()  # patterns of log files of runtime and driver, ~ for the home directory
    environment: tuple[str, ...] = ()  # prefixes of variables that a report may show
    pass_in: str = ""  # how to pass the devices into a container
    import_remedy: str = "install torch again, from the index for this machine"  # if `import torch` fails

    def is_here(self) -> bool:
        """Return True if processes of this Python can use such a device."""
        if self.package:
            return importlib.util.find_spec(self.package) is not None
        if not self.torch_api:
            return True
        spec = importlib.util.find_spec("torch")
        if spec is None or ("torch" not in sys.modules and self.torch_api == "cuda" and _lacks_cuda(spec.origin or "")):
            return False
        import torch

        return bool(getattr(torch, self.torch_api).is_available())

    def platform(self) -> Platform:
        """Create its Platform. Imports the packages of the device, and torch except on a CPU."""
        module, name = self.implementation.split(":")
        return getattr(importlib.import_module(module), name)()


def _lacks_cuda(torch_file: str) -> bool:
    """Return True if torch in the package of this file was built for neither CUDA nor ROCm, without importing it."""
    version = Path(torch_file).with_name("version.py")
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    return all(re.search(rf"^{name}\b.*= None$", text, re.MULTILINE) for name in ("cuda", "hip"))
