"""What the rest of megarl knows of a kind of device, in plain values: nothing here imports torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.platform.tracing import Tracing
from megarl.platform.version_sets import BuiltAgainst, Displaced, VersionSet

if TYPE_CHECKING:
    from megarl.platform.base import Platform


@dataclass(frozen=True)
class PortRange:
    """Ports that a collective library listens on: the variable that sets them, and what megarl sets it to."""

    variable: str
    default: str
    on_host: bool  # ports of the machine, of which each process needs one; else of the devices' own network


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device. Sentences in it are parts of messages: they begin small and end without a point."""

    name: str  # the value of cluster.device, which is also what vLLM calls it
    plural: str  # in texts
    implementation: str  # "module:class" of its Platform
    sets: tuple[VersionSet, ...]  # of packages that go together, the default first
    collective: str  # the library of its process groups
    ray_resource: str | None = None  # what Ray counts; None where processes need no device
    visible: str = ""  # the variable that restricts a process to some devices; "" where there is none
    ddp: Mapping[str, Any] = field(default_factory=dict)  # defaults of `megatron.ddp`
    tracing: Tracing = field(default_factory=Tracing)  # what its profiler can record
    no_host_optimizer: tuple[str, str] | None = (
        None  # why Megatron's optimizer_cpu_offload is not for it, and what to do
    )
    cheap_seeds: bool = False  # a random generator for each request costs an engine nothing that counts
    files: str = ""  # pattern of its devices in /dev

    # How it is found: where `package` is installed, or else where `torch.<torch_api>` says that it is available.
    package: str = ""
    distribution: str = ""  # that `package` comes in
    torch_api: str = ""  # torch's module for it
    present: str = ""  # said where it was found
    absent: str = ""  # said where it was not
    install: str = ""  # what to do then

    # What the doctor looks at, and says.
    checks: str = ""  # the module whose CHECKS concern it alone, imported by the doctor
    built_against: tuple[BuiltAgainst, ...] = ()
    displaced: tuple[Displaced, ...] = ()
    interface_variables: dict[str, bool] = field(default_factory=dict)  # -> whether it takes whole names alone
    port_ranges: tuple[PortRange, ...] = ()
    port_error: str = ""  # the library's code for a port that is taken
    buffer_variable: str = ""  # environment variable of a communicator's buffer in MiB, which takes twice as much
    sleep_keeps_weights: bool = (
        False  # engines that sleep copy their weights to the host (engines/vllm/engine.py: level 1)
    )
    many_files: bool = False  # it opens so many files that the usual limit is low
    status_command: str = ""  # shows devices and who holds them
    status_commands: tuple[tuple[str, ...], ...] = ()  # what `megarl accept` keeps the output of
    device_commands: tuple[tuple[str, ...], ...] = ()  # the same, run for each device: "{device}" is its number
    logs: tuple[str, ...] = ()  # patterns of the logs that runtime and driver write, ~ for the home directory
    environment: tuple[str, ...] = ()  # prefixes of variables that a report may show
    pass_in: str = ""  # how a container is given the devices
    import_remedy: str = "install torch again, from the index for this machine"  # where `import torch` fails

    def is_here(self) -> bool:
        """Whether processes of this Python can use one."""
        if self.package:
            return importlib.util.find_spec(self.package) is not None
        if not self.torch_api:
            return True
        if importlib.util.find_spec("torch") is None:
            return False
        import torch

        return bool(getattr(torch, self.torch_api).is_available())

    def platform(self) -> Platform:
        """Its Platform. Imports torch, and whatever the devices need."""
        module, name = self.implementation.split(":")
        return getattr(importlib.import_module(module), name)()
