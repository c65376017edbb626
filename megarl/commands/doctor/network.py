"""Checks of ports, network interfaces and the launcher's view of this machine."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.platform_detection import platform_of
from megarl.commands.launch.topology import DEFAULT_PORT, read_topology
from megarl.errors import spans_of
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
_RESERVED = "/proc/sys/net/ipv4/ip_local_reserved_ports"


@check("launch", "node rank and number of nodes in the launcher's variables are valid")
def launch(machine: Machine, needs: Needs) -> Iterator[Finding]:
    try:
        topology = read_topology(machine.environ)
    except ValueError as error:
        yield fail(str(error), "correct these variables on this node: see the comments in launch/multinode.sh")
        return
    if topology.nodes > 1:
        yield ok(f"node rank {topology.node_rank} of {topology.nodes}, Ray's head at {topology.ray_address}")


@check("ray", "the Ray cluster that the run would join (cluster.ray_address, RAY_ADDRESS) answers")
def ray_address(machine: Machine, needs: Needs) -> Iterator[Finding]:
    host, _, port = needs.ray_address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        remedy = "start it (launch/multinode.sh does), correct the address, or unset RAY_ADDRESS for a private one"
        yield fail(f"nothing answers at {needs.ray_address}: {error.strerror or error}", remedy)
        return
    yield ok(f"{needs.ray_address} answers")


_WITH_RANGES = " and ".join(f"{kind.collective}'s range" for kind in KINDS if kind.port_ranges)


@check(
    "ports",
    f"Ray's ports are free (unless the run joins a cluster); {_WITH_RANGES} has a free port for every process",
)
def ports(machine: Machine, needs: Needs) -> Iterator[Finding]:
    parts: list[str] = []
    if not needs.ray_address and needs.ray:
        first = _ray_port(machine)
        in_use = [f"{port} ({why})" for port in range(first, first + 3) if (why := machine.cannot_bind(port))]
        text = f"cannot listen on Ray's ports {', '.join(in_use)}"
        remedy = "set MASTER_PORT to another port on every node"
        if in_use and needs.nodes > 1:
            yield fail(text, remedy)
        elif in_use:
            yield warning(f"{text} (a single machine does not use them)", f"for launch/multinode.sh {remedy}")
        else:
            parts.append(f"{first} to {first + 2} (Ray) are free")
    kind = platform_of(machine, needs).kind
    if kind.port_ranges:
        problems = list(_ranges(machine, kind))
        yield from problems
        parts += [] if problems else [f"{kind.collective}'s ranges are free"]
    if parts:
        yield ok(", ".join(parts))


def _ray_port(machine: Machine) -> int:
    try:
        return read_topology(machine.environ).port
    except ValueError:  # the check `launch` reports it
        return DEFAULT_PORT


def _ranges(machine: Machine, kind: DeviceKind) -> Iterator[Finding]:
    """Check the collective library's port ranges: trainer and engine of a colocated device need one port each."""
    for ports in kind.port_ranges:
        variable = ports.variable
        value = machine.environ.get(variable, ports.default)
        if value == "auto":
            continue
        numbers = _ports(value)
        if numbers is None:
            yield fail(
                f"{variable}={value} is not a range of ports",
                f"write e.g. {ports.default}, or unset it (megarl sets this default)",
            )
            continue
        in_use = [port for port in numbers if machine.cannot_bind(port)]
        left, processes = len(numbers) - len(in_use), 2 * len(machine.glob(kind.files))
        if not ports.on_host:
            continue  # these ports are on the device's network interface: the host cannot test them
        if left < processes:
            text = f"{variable}={value}: {left} of {len(numbers)} ports are free, {processes} processes need one each ({kind.port_error})"
            yield fail(text, "end the processes that listen there (ss -ltnp), or set another range on every node")
        elif in_use:
            text = f"{variable}={value}: {len(in_use)} ports are in use, the first is {in_use[0]}"
            yield warning(text, "ss -ltnp shows the processes")
        if overlap := _ephemeral(machine, numbers):
            text = f"{variable}={value}: {overlap} of these ports are in the ephemeral range ({_EPHEMERAL})"
            spans = spans_of(sorted({*_reserved(machine), *numbers}))  # sysctl replaces the ports reserved so far
            ports_to_reserve = ",".join("-".join(map(str, span)) for span in spans)
            yield warning(
                text,
                f"sysctl -w net.ipv4.ip_local_reserved_ports={ports_to_reserve}, on each host, outside the container. It replaces the "
                "host's list: where another host reserves other ports, keep those",
            )


def _ports(value: str) -> list[int] | None:
    """Parse "60000-60050", or several such ranges separated by commas. Return None for anything else."""
    numbers: list[int] = []
    for part in value.replace(" ", "").split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[1]) > int(match[2] or match[1]) or int(match[2] or match[1]) > 65535:
            return None
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return numbers


def _ephemeral(machine: Machine, numbers: list[int]) -> int:
    """Return the number of these ports that the system may assign to an outgoing connection."""
    ephemeral = (machine.read(_EPHEMERAL) or "").split()
    if len(ephemeral) != 2:
        return 0
    reserved = _reserved(machine)
    return sum(int(ephemeral[0]) <= port <= int(ephemeral[1]) and port not in reserved for port in numbers)


def _reserved(machine: Machine) -> set[int]:
    """Return the ports that the system assigns to no outgoing connection."""
    return set(_ports((machine.read(_RESERVED) or "").strip()) or [])


@check("interfaces", "*_SOCKET_IFNAME name interfaces that exist and are up; with several nodes, the variables are set")
def interfaces(machine: Machine, needs: Needs) -> Iterator[Finding]:
    kind, up = platform_of(machine, needs).kind, interfaces_up(machine)
    whole = {"GLOO_SOCKET_IFNAME": True, **kind.interface_variables}  # -> True: takes whole names, not prefixes
    variables = list(whole)
    good = True
    for variable in variables:
        value = machine.environ.get(variable)
        if value is None:
            continue
        if problem := _unusable(value, up, whole=whole[variable]):
            good = False
            available = ", ".join(name for name, is_up in up.items() if is_up) or "none"
            yield fail(
                f"{variable}={value}: {problem}",
                f"name an interface of this node that is up ({available}); nodes may differ",
            )
    outer = [name for name, is_up in up.items() if is_up and name != "lo"]
    unset = [variable for variable in variables if variable not in machine.environ]
    if good and needs.nodes > 1 and len(outer) > 1 and unset:
        names = ", ".join(outer[:6])
        text = f"{', '.join(unset)} not set, and {len(outer)} interfaces are up ({names}): the library has to guess"
        remedy = "set INTERFACE, which launch/*.sh copy to these variables, to the interface that reaches the other nodes (ip -br addr)"
        yield warning(text, f"{remedy}; if nodes differ, set it on each of them")
    elif good:
        set_by_user = "" if len(unset) == len(variables) else ", as the variables name them"
        yield ok(f"{', '.join(outer) or 'only lo'} up{set_by_user}")


def interfaces_up(machine: Machine) -> Mapping[str, bool]:
    """Map each network interface to True if it is up: IFF_UP is set and operstate is not "down"."""
    up = {}
    for folder in machine.glob("/sys/class/net/*"):
        flags = int((machine.read(f"{folder}/flags") or "0").strip(), 16)
        up[folder.rsplit("/", 1)[1]] = bool(flags & 1) and (machine.read(f"{folder}/operstate") or "").strip() != "down"
    return up


def _unusable(value: str, up: Mapping[str, bool], *, whole: bool) -> str:
    """Return the problem with a list of interfaces, or "".

    `whole`: the list has whole names, as gloo expects them. Otherwise it has prefixes; "=name" is a whole name and
    "^name" excludes a prefix.
    """
    exact = whole or value.startswith("=")
    excluded = value.startswith("^")
    for name in filter(None, value.lstrip("=^").split(",")):
        matches = [interface for interface in up if (interface == name if exact else interface.startswith(name))]
        if excluded:
            continue
        if not matches:
            return f"there is no interface {name}"
        if not any(up[interface] for interface in matches):
            return f"{name} is down"
    return "" if value.strip("=^,") else "it names no interface"
